"""Pipeline parallelism: the blocks of a model in stages along a mesh axis, with GPipe's schedule."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_kernels.models.config import positive
from jax_kernels.plain_numbers import plain

__all__ = ["pipelined"]


def pipelined(
    block: Callable[..., jax.Array],
    params: Any,
    x: jax.Array,
    *,
    axis: str,
    microbatches: int,
    batch: tuple[str, ...] = (),
    tokens: str | None = None,
    beside: Any = None,
) -> jax.Array:
    """The result x of L blocks, run one after the other in stages. Each device along a mesh axis runs its own blocks.

    Equivalent to the following JAX code, on the mesh of jax.set_mesh::

        for i in range(L):
            x = block(tree.map(lambda p: p[i], params), x)

    A device has L / stages neighbouring blocks. The batch is cut into microbatches. In tick t, stage s works on
    microbatch t - s. Each stage is idle in stages - 1 of the microbatches + stages - 1 ticks. The backward, which JAX
    derives, runs the same schedule in reverse. The gradients of params are summed over the devices that shard the batch
    or the tokens.

    Args:
      block: block(params of one block, x) -> x of the same shape and dtype; inside jax.shard_map, over all mesh axes.
      params: a tree of arrays [L, ...].
      x: [B, T, D].
      axis: the mesh axis of the stages. The number of stages divides L.
      microbatches: the number of parts of the batch. It divides the rows of a device.
      batch, tokens: the mesh axes that shard B and T; x is replicated along other mesh axes.
      beside: a tree of arrays [B, T] with the rows of x, for block(params, x, beside); None for block(params, x).

    Raises:
      ValueError: the mesh lacks the axis, the stages do not divide the blocks, or microbatches does not divide the rows
        of a device.
      TypeError: microbatches is not an int.

    Source: Huang et al., "GPipe" (2018), arXiv:1811.06965.
    """
    microbatches = plain(microbatches)
    positive("microbatches", microbatches)
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.shape:
        known = ", ".join(map(repr, mesh.shape)) or "none"
        raise ValueError(f"axis: got {axis!r}, want an axis of jax.set_mesh's mesh: {known}")
    stages = mesh.shape[axis]
    blocks = {p.shape[0] for p in jax.tree.leaves(params)}
    if any(count % stages for count in blocks):
        raise ValueError(f"num_layers: got {max(blocks)} for {stages} stages along {axis!r}, want a multiple")

    def local(params: Any, x: jax.Array, beside: Any) -> jax.Array:
        if x.shape[0] % microbatches:
            raise ValueError(
                f"batch: got {x.shape[0]} rows on a device, want a multiple of {microbatches} microbatches"
            )
        stage = lax.axis_index(axis)
        in_parts = lambda x: x.reshape(microbatches, -1, *x.shape[1:])
        parts, beside = in_parts(x), jax.tree.map(in_parts, beside)
        onward = [(i, (i + 1) % stages) for i in range(stages)]

        def tick(arriving: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            # After the last part the first stage repeats it; these results leave the last stage after the last tick.
            x = jnp.where(stage == 0, parts[jnp.minimum(t, microbatches - 1)], arriving)
            mine = jax.tree.map(lambda x: x[jnp.clip(t - stage, 0, microbatches - 1)], beside)
            more = () if beside is None else (mine,)
            x, _ = lax.scan(lambda x, p: (block(p, x, *more), None), x, params)
            return lax.ppermute(x, axis, onward), x

        _, done = lax.scan(tick, jnp.zeros_like(parts[0]), jnp.arange(microbatches + stages - 1))
        out = jnp.where(stage == stages - 1, done[stages - 1 :], 0)
        return lax.psum(out, axis).reshape(x.shape)

    rows = P(batch or None, tokens, None)
    specs = P(axis), rows, P(batch or None, tokens)
    return jax.shard_map(local, in_specs=specs, out_specs=rows, check_vma=False)(params, x, beside)
