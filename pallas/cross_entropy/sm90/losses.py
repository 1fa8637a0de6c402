"""linear_cross_entropy on Hopper: the statistics of the tokens, and with three matmuls the gradients too.

The tokens of a call with gradients are cut into chunks. For a chunk one launch of exponentials.py makes the
exponentials of the logits, [C, V] in 16 bits, and the statistics from which the log-sum-exp follows. One elementwise
pass turns the exponentials into the cotangents of the logits, and two matmuls of XLA make the gradients of x and of w.
No logits are in memory, and no copy of w's gradient.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.inputs.linear_cross_entropy import LossGradients, LossInputs, LossOptions, Statistics, rounded
from jax_kernels.inputs.matmul import MatmulInputs
from jax_kernels.pallas.block_specs.matmul_specs import MatmulSm90
from jax_kernels.pallas.cross_entropy.passes.cotangents import RowTerms, cotangents
from jax_kernels.pallas.cross_entropy.sm90.exponentials import TileStatistics, tile_statistics
from jax_kernels.pallas.kernel_types import needed
from jax_kernels.quantization import QuantizedArray
from jax_kernels.tracing.manual_axes import as_varying, varying_axes

# Bytes of the exponentials in memory at once.
EXPONENTIAL_BYTES = 5 << 28
# With at most this number of chunks, w's gradient is summed in its own dtype: its rounding errors grow with the square
# root of half the number. With more chunks it is summed in float32.
MOST_ROUNDED = 4


def statistics(
    inputs: LossInputs, options: LossOptions, *, config: MatmulSm90, core_count: int, interpret: bool
) -> Statistics:
    """The Statistics of each token, [M]. x: [M, D]. No axis is empty. D and V are multiples of 64."""
    tokens = inputs.x.shape[0]
    padded = _padded(inputs, -tokens % config.block_m)
    tiles = tile_statistics(
        _operands(padded.x, _weights(inputs, options), options),
        padded.targets,
        options,
        dtype=inputs.x.dtype,
        config=config,
        core_count=core_count,
        interpret=interpret,
        with_exponentials=False,
    )
    return jax.tree.map(lambda y: y[:tokens], _merged(tiles, inputs.rows.shape[0]))


def gradients(
    inputs: LossInputs, options: LossOptions, lse: jax.Array, cotangent: jax.Array, **launch: Any
) -> tuple[jax.Array, jax.Array]:
    """The gradients of (x, rows), as in LossGradients. lse: not needed, since it is made again.

    cotangent: of the losses, float32 [M]; 0 for tokens that do not count.
    """
    found = losses_and_gradients(inputs, options, cotangent, **launch)
    return found.dx, found.drows


def losses_and_gradients(
    inputs: LossInputs,
    options: LossOptions,
    cotangent: jax.Array,
    *,
    config: MatmulSm90,
    core_count: int,
    interpret: bool,
) -> LossGradients:
    """The LossGradients for these cotangents of the losses, chunk by chunk of the tokens.

    Arguments are as in `statistics` and `gradients`.
    """
    tokens, vocabulary = inputs.x.shape[0], inputs.rows.shape[0]
    w, weights = _w(inputs, options), _weights(inputs, options)
    count, chunk = _chunks(tokens, vocabulary, config.block_m)
    padded = _padded(inputs, count * chunk - tokens)
    of_chunks = lambda y: y.reshape(count, chunk, *y.shape[1:])
    of_x, of_w = (jnp.float32 if y.dtype == jnp.float16 else y.dtype for y in inputs[:2])
    of_sum = of_w if count <= MOST_ROUNDED else jnp.float32
    by_w, by_x = ("mv,vd->md", "mv,md->vd") if options.transpose_w else ("mv,dv->md", "mv,md->dv")
    run = functools.partial(
        tile_statistics, dtype=inputs.x.dtype, config=config, core_count=core_count, interpret=interpret
    )

    def one(dw: jax.Array, of_chunk: Any) -> tuple[jax.Array, tuple[Statistics, jax.Array]]:
        x, targets, cotangent = of_chunk
        tiles = run(_operands(x, weights, options), targets, options, with_exponentials=True)
        found = _merged(tiles, vocabulary)
        terms = _row_terms(tiles, found, targets, cotangent, options)
        dlogits = cotangents(tiles.exponentials, terms, options, config.block_n, interpret=interpret)
        dlogits = lax.optimization_barrier(dlogits)  # one array for both matmuls
        dx = jnp.einsum(by_w, dlogits, w, preferred_element_type=of_x)
        return dw + jnp.einsum(by_x, dlogits, x, preferred_element_type=of_sum), (found, dx)

    start = as_varying(jnp.zeros(w.shape, of_sum), varying_axes(inputs, cotangent))
    given = padded.x, padded.targets, jnp.pad(cotangent, (0, count * chunk - tokens))
    dw, of_tokens = lax.scan(one, start, jax.tree.map(of_chunks, given))
    found, dx = jax.tree.map(lambda y: y.reshape(count * chunk, *y.shape[2:])[:tokens], of_tokens)
    drows = dw if options.transpose_w else dw.T
    return LossGradients(statistics=found, dx=dx, drows=drows.astype(of_w))


def _w(inputs: LossInputs, options: LossOptions) -> jax.Array:
    """The caller's w in x's dtype: inputs.rows [V, D] with transpose_w, else their transpose."""
    rows = inputs.rows.astype(inputs.x.dtype)
    return rows if options.transpose_w else rows.T


def _weights(inputs: LossInputs, options: LossOptions) -> jax.Array | QuantizedArray:
    """The weights as the matmul of the logits takes them: _w, or with 8 bits the rounded rows [V, D]."""
    if options.precision is None:
        return _w(inputs, options)
    # The barrier keeps XLA from rounding them in each step of the loop over the chunks.
    return lax.optimization_barrier(rounded(inputs.rows.astype(inputs.x.dtype), options))


def _operands(x: jax.Array, weights: jax.Array | QuantizedArray, options: LossOptions) -> MatmulInputs:
    """The operands of the matmul of the logits. x: [M, D]. weights: from _weights."""
    if not isinstance(weights, QuantizedArray):
        return MatmulInputs(x=x, w=weights)
    of_x = needed(rounded(x, options))
    return MatmulInputs(x=of_x.values, w=weights.values, x_scale=of_x.scale, w_scale=weights.scale)


def _padded(inputs: LossInputs, count: int) -> LossInputs:
    """The inputs with `count` more tokens, which do not count."""
    x, targets = jnp.pad(inputs.x, ((0, count), (0, 0))), jnp.pad(inputs.targets, (0, count), constant_values=-1)
    return inputs._replace(x=x, targets=targets)


def _chunks(tokens: int, vocabulary: int, block_m: int) -> tuple[int, int]:
    """(the number of chunks, tokens of a chunk). A chunk has whole work tiles, and the chunks equal numbers of them."""
    blocks = pl.cdiv(tokens, block_m)
    most = max(EXPONENTIAL_BYTES // (2 * vocabulary * block_m), 1)
    of_chunk = pl.cdiv(blocks, pl.cdiv(blocks, most))
    return pl.cdiv(blocks, of_chunk), of_chunk * block_m


def _merged(tiles: TileStatistics, vocabulary: int) -> Statistics:
    """The Statistics of each token, [M], from the statistics of its work tiles."""
    largest = tiles.largest.max(axis=0)
    total = (tiles.total * jnp.exp(tiles.largest - largest)).sum(axis=0)
    return Statistics(
        lse=largest + jnp.log(total),
        chosen=tiles.chosen.sum(axis=0),
        mean=None if tiles.summed is None else tiles.summed.sum(axis=0) / vocabulary,
    )


def _row_terms(
    tiles: TileStatistics, found: Statistics, targets: jax.Array, cotangent: jax.Array, options: LossOptions
) -> RowTerms:
    """The RowTerms of a chunk. cotangent: of the losses."""
    factor = jnp.exp(tiles.largest - found.lse) * cotangent
    factor = factor * (1 + 2 * options.z_loss * found.lse) if options.z_loss else factor
    return RowTerms(
        targets=targets,
        cotangent=cotangent,
        factor=factor.T,
        largest=None if options.softcap is None else tiles.largest.T,
    )
