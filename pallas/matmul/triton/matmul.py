"""The Triton matmul with its epilogue: out = activation(x @ w + bias) * (x @ w_up) + residual.

A program owns a work tile, whose sums stay in registers while the program loops over the inner dimension. Per step it
does 2 * block_m * block_n * block_k FLOPs on (block_m + block_n) * block_k values: with blocks of 128 x 256 and 16
bits, 85 FLOPs per byte from the L2 cache.

If there are few work tiles, as with the few rows of decoding, several programs split a tile: each sums a part of the
inner dimension. Their float32 sums go through device memory to a second launch, which adds them in order and computes
the epilogue.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions, MatmulResult
from jax_kernels.pallas.block_specs.matmul_specs import MatmulTriton
from jax_kernels.pallas.kernel_types import Index
from jax_kernels.pallas.matmul.refs import MatmulInputRefs, MatmulResultRefs
from jax_kernels.pallas.matmul.triton.state import EpilogueTraits, Span, Sums, Tile, Traits
from jax_kernels.pallas.triton import backend
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.tensors import fit
from jax_kernels.pallas.varying import result_types

# Rows, columns and warps of a program that adds the sums of splits.
JOINED_ROWS, JOINED_COLUMNS, JOINING_WARPS = 16, 64, 4
MOST_UNROLLED = 8
# Columns of a part of a work tile in the epilogue.
EPILOGUE_COLUMNS = 64


def matmul(
    inputs: MatmulInputs, options: MatmulOptions, *, config: MatmulTriton, core_count: int, interpret: bool
) -> MatmulResult:
    """Computes activation(x @ w + bias) * (x @ w_up) + residual in Triton, without the terms that the call lacks.

    With inputs.preactivation it computes the derivative of such a call instead, and x @ w is the cotangent. M, N and K
    are not 0. core_count: the number of SMs. interpret: runs the kernels in Pallas's interpreter.
    """
    traits = Traits.of(inputs, options, config, core_count)
    return launched(traits, inputs, kernels=(_kernel, _split_kernel), name="matmul", interpret=interpret)


def launched(
    traits: Traits, inputs: MatmulInputs, *, kernels: tuple[Callable[..., None], ...], name: str, interpret: bool
) -> MatmulResult:
    """Launches a matmul's kernels and returns its results.

    kernels: (the kernel of a whole work tile, the kernel that stores the sums of a split). If several programs split a
    tile's inner dimension, the second one is launched, and then the kernel that adds the sums and runs the epilogue.
    name: the prefix of the kernels' names.
    """
    results, splits = _results(traits, inputs), traits.splits
    launch = functools.partial(
        _launch, traits=traits, warps=traits.config.num_warps, stages=traits.config.num_stages, interpret=interpret
    )
    if splits == 1:
        return launch(kernels[0], inputs, results, name=f"{name}_triton", grid=(traits.tiles,))
    sums = jax.ShapeDtypeStruct((splits, traits.m, traits.n), jnp.float32)
    found = launch(
        kernels[1],
        inputs._replace(bias=None, residual=None, preactivation=None, up=None),
        Sums(product=sums, up=sums if inputs.is_gated else None),
        name=f"{name}_split_triton",
        grid=(traits.tiles, splits),
    )
    return joined(traits, inputs, found, stages=traits.config.num_stages, interpret=interpret)


def joined(
    traits: EpilogueTraits, inputs: MatmulInputs, sums: Sums, *, stages: int = 1, interpret: bool
) -> MatmulResult:
    """Launches the kernel that adds the splits' sums and runs the epilogue, and returns the matmul's results.

    traits: m, n, splits and options of the launch that computed the sums. inputs: the inputs of the matmul. sums: x @ w
    and x @ w_up of each split, float32 [splits, m, n]; if traits.transposes_sums, [splits, n, m or more]. Without
    Pallas-Triton, XLA does the same.
    """
    if not backend.AVAILABLE:
        return _joined_by_xla(traits, inputs, sums)
    rest = inputs._replace(x=None, w=None, x_up=None, w_up=None, w_scale=None, w_up_scale=None)  # type: ignore[arg-type]
    return _launch(
        _join_kernel,
        (rest, sums),
        _results(traits, inputs),
        traits=traits,
        name="matmul_join_triton",
        grid=(pl.cdiv(traits.m, fit(JOINED_ROWS, traits.m)), pl.cdiv(traits.n, fit(JOINED_COLUMNS, traits.n))),
        warps=JOINING_WARPS,
        stages=stages,
        interpret=interpret,
    )


def _joined_by_xla(traits: EpilogueTraits, inputs: MatmulInputs, sums: Sums) -> MatmulResult:
    """The results of `joined`, in plain JAX."""
    options, dtype = traits.options, jnp.dtype(traits.options.out_dtype)

    def total(x: jax.Array) -> jax.Array:
        whole = x.sum(axis=0)
        return whole.T[: traits.m] if traits.transposes_sums else whole

    z, up = (None if x is None else total(x) for x in sums)
    assert z is not None
    if inputs.preactivation is not None:
        load_up = None if inputs.up is None else functools.partial(inputs.up.astype, jnp.float32)
        found = options.gradients(z, inputs.preactivation.astype(jnp.float32), load_up)
        return MatmulResult(**{name: y.astype(dtype) for name, y in found})
    z = z if inputs.bias is None else z + inputs.bias.astype(jnp.float32)
    out = z if options.activation is None else options.activation(z)
    out = out if up is None else out * up
    out = out if inputs.residual is None else out + inputs.residual.astype(jnp.float32)
    saved = [y.astype(dtype) if options.saves_preactivation and y is not None else None for y in (z, up)]
    return MatmulResult(out.astype(dtype), *saved)


def _results(traits: EpilogueTraits, inputs: MatmulInputs) -> MatmulResult:
    """The shapes and dtypes of the arrays that a call writes, as a MatmulResult whose other fields are None."""
    out: Any = jax.ShapeDtypeStruct((traits.m, traits.n), traits.options.out_dtype)
    saves = traits.options.saves_preactivation
    if inputs.preactivation is not None:
        return MatmulResult(out=out, up=None if inputs.up is None else out, activated=out)
    return MatmulResult(out=out, preactivation=out if saves else None, up=out if saves and inputs.is_gated else None)


def _launch[Written: (MatmulResult, Sums)](
    kernel: Callable[..., None],
    given: Any,
    written: Written,
    *,
    traits: EpilogueTraits,
    name: str,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    interpret: bool,
) -> Written:
    """Launches kernel(traits, given, written) by pallas_call, and returns the written arrays in the tree `written`.

    given: a tree of arrays. written: a tree of the results' shapes and dtypes. The kernel gets both as trees of refs in
    device memory.
    """
    arrays, tree = jax.tree.flatten(given)
    types, types_tree = jax.tree.flatten(written)

    def body(*refs):
        ins, outs = refs[: len(arrays)], refs[len(arrays) :]
        kernel(traits, jax.tree.unflatten(tree, ins), jax.tree.unflatten(types_tree, outs))

    found = pl.pallas_call(
        body,
        grid=grid,
        out_shape=result_types(types, *arrays),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*arrays)
    return jax.tree.unflatten(types_tree, found)


def _kernel(traits: Traits, inputs: MatmulInputRefs, results: MatmulResultRefs) -> None:
    """Runs one program: computes a work tile over the whole inner dimension, with the epilogue, and stores it."""
    tile = traits.tile(pl.program_id(0))
    epilogue(traits, tile, _sums(traits, inputs, tile, 0, traits.k_steps), inputs, results)


def _split_kernel(traits: Traits, inputs: MatmulInputRefs, results: Sums) -> None:
    """Runs one program: stores the sums of a work tile over the program's part of the inner dimension (its split)."""
    store_split(traits, functools.partial(_sums, traits, inputs), results)


def store_split(traits: Traits, sum_steps: Callable[..., Sums], results: Sums) -> None:
    """Computes and stores the sums of the program's split: its part of a work tile's inner dimension.

    sum_steps(tile, first, last) returns the sums over the steps from `first` up to, not including, `last`. results:
    refs [splits, m, n] in device memory.
    """
    tile, split = traits.tile(pl.program_id(0)), pl.program_id(1)
    first = split * traits.steps_of_split
    last = jnp.minimum(first + traits.steps_of_split, traits.k_steps)
    for sums, ref in zip(sum_steps(tile, first, last), results, strict=True):
        if ref is not None:
            tile.store(ref, sums, split)


def _join_kernel(traits: EpilogueTraits, given: tuple[MatmulInputRefs, Sums], results: MatmulResultRefs) -> None:
    """Runs one program: adds the splits' sums of JOINED_ROWS x JOINED_COLUMNS values, and stores their epilogue.

    given: (the inputs of the epilogue, the splits' sums), in device memory.
    """
    inputs, sums = given
    rows, columns = fit(JOINED_ROWS, traits.m), fit(JOINED_COLUMNS, traits.n)
    tile = Tile(
        rows=Span(start=pl.program_id(0) * rows, size=rows, length=traits.m),
        columns=Span(start=pl.program_id(1) * columns, size=columns, length=traits.n),
    )
    zero = jnp.zeros(tile.shape, jnp.float32)
    transposed = tile._replace(rows=tile.columns, columns=tile.rows)
    load = lambda ref, i: transposed.load(ref, i).T if traits.transposes_sums else tile.load(ref, i)
    more = lambda ref: lambda i, found: found + load(ref, i)
    if traits.splits <= MOST_UNROLLED:  # issues all loads at once
        total = lambda ref: functools.reduce(lambda x, i: more(ref)(jnp.int32(i), x), range(traits.splits), zero)
    else:
        total = lambda ref: lax.fori_loop(0, traits.splits, more(ref), zero)
    epilogue(traits, tile, Sums(*(None if ref is None else total(ref) for ref in sums)), inputs, results)


def _sums(traits: Traits, inputs: MatmulInputRefs, tile: Tile, first: Index, last: Index) -> Sums:
    """The float32 sums of a work tile, x @ w and x @ w_up, over the steps from `first` up to, not including, `last`.

    With an x_up, x_up @ w_up is added to x @ w instead.
    """
    options = traits.options
    weights = [inputs.w, inputs.w_up] if inputs.is_gated else [inputs.w]

    def products(x_ref, weights, sums):
        def step(i, sums):
            depth = traits.depth(i)
            x = (Tile(depth, tile.rows) if options.transpose_x else Tile(tile.rows, depth)).load(x_ref)
            of_w = Tile(tile.columns, depth) if options.transpose_w else Tile(depth, tile.columns)
            return [total + traits.dot(x, of_w.load(w)) for total, w in zip(sums, weights, strict=True)]

        return lax.fori_loop(first, last, step, sums)

    sums = products(inputs.x, weights, [jnp.zeros(tile.shape, jnp.float32) for _ in weights])
    if inputs.x_up is not None:
        sums = products(inputs.x_up, [inputs.w_up], sums)
    return Sums(*sums)


def epilogue(
    traits: EpilogueTraits, tile: Tile, sums: Sums, inputs: MatmulInputRefs, results: MatmulResultRefs
) -> None:
    """Computes the epilogue of a work tile in float32, and stores the results.

    sums: the tile's float32 [rows, columns]. inputs, results: refs in device memory. The epilogue runs in parts of
    EPILOGUE_COLUMNS columns, so that fewer values are live at once.
    """
    parts = tile.parts(EPILOGUE_COLUMNS)
    of_parts = [lax.split(x, [part.columns.size for part in parts], axis=1) for x in sums if x is not None]
    for part, *of_part in zip(parts, *of_parts, strict=True):
        _store_part(traits, part, Sums(*of_part), inputs, results)


def _store_part(
    traits: EpilogueTraits, part: Tile, sums: Sums, inputs: MatmulInputRefs, results: MatmulResultRefs
) -> None:
    """Computes the epilogue of a part of a work tile in float32, and stores the results."""
    z = sums.product
    if inputs.preactivation is not None:
        load = lambda ref: part.load(ref).astype(jnp.float32)
        load_up = None if inputs.up is None else lambda: load(inputs.up)
        for name, y in traits.options.gradients(z, load(inputs.preactivation), load_up):
            part.store(getattr(results, name), y)
        return
    if inputs.bias is not None:
        z = z + part.load_columns(inputs.bias)
    if results.preactivation is not None:
        part.store(results.preactivation, z)
    if results.up is not None:
        part.store(results.up, sums.up)
    out = z if traits.options.activation is None else traits.options.activation(z)
    if sums.up is not None:
        out = out * sums.up
    if inputs.residual is not None:
        out = out + part.load(inputs.residual).astype(jnp.float32)
    part.store(results.out, out)
