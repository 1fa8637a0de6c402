"""The decoding kernel on Hopper: a TMA producer with a deep pipeline, and one or two warpgroups of wgmma.

A CTA processes items of (sequence, split of its keys, key head, tile of 64 rows); the memory warpgroup runs ahead into
the next item. A row is a query of a head (see decode_contract.py). Two compute warpgroups process the blocks of keys in
turns. Each warpgroup has its own pipeline and its own softmax, and writes its own part of the result.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.sm90.decode.compute import Compute
from jax_kernels.pallas.attention.sm90.decode.load import Loader
from jax_kernels.pallas.attention.sm90.decode.state import Arrays, Scratch, Traits
from jax_kernels.pallas.mosaic.launch import launch


def run(arrays: Arrays, traits: Traits, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel, and returns a result per part of the keys.

    (out [B, Hkv, parts, rows, Dv] in traits.out_dtype, lse [B, Hkv, parts, rows] float32, natural log). out may have
    fewer rows than lse: the last ones are not queries.
    """
    leaves, tree = jax.tree.flatten(arrays)
    compute_wgs = traits.config.compute_warpgroups

    def entry(*refs):
        *given, out_gmem, lse_gmem = refs
        given = jax.tree.unflatten(tree, given)

        def body(scratch: Scratch) -> None:
            wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
            loader = Loader(traits=traits, arrays=given, scratch=scratch, cta=cta)

            def compute(w: int) -> None:
                Compute(
                    traits=traits, arrays=given, scratch=scratch, cta=cta, out_gmem=out_gmem, lse_gmem=lse_gmem, w=w
                ).run()

            of_w = [functools.partial(compute, w) for w in range(compute_wgs)]
            lax.switch(wg, [*of_w, loader.run])

        pl.run_scoped(body, Scratch.of(traits), collective_axes="wg")

    out_rows = traits.rows if traits.tiles > 1 else traits.stored_rows
    kernel = launch(
        entry,
        "attention_decode_sm90",
        out_type=(
            jax.ShapeDtypeStruct(
                (traits.batch, traits.kv_heads, traits.parts, out_rows, traits.v_head_dim), traits.out_dtype
            ),
            jax.ShapeDtypeStruct((traits.batch, traits.kv_heads, traits.parts, traits.rows), jnp.float32),
        ),
        ctas=traits.ctas,
        warpgroups=compute_wgs + 1,
        semantics=plgpu.LoweringSemantics.Lane,
        interpret=interpret,
    )
    return kernel(*leaves)
