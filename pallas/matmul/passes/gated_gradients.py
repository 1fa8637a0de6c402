"""The derivative of activation(z) * up and the largest magnitudes of its results, in one pass.

In Triton. For each 16-bit value 10 bytes pass through device memory: 0.217 ms for 16384 x 5632 at 4.25 TB/s; found in a
training step: 0.226. XLA does the same in one pass or in two, as its cost model decides.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32

from jax_kernels.inputs.matmul import MatmulOptions
from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.pallas.triton.rounding import magnitude_bits
from jax_kernels.pallas.triton.tensors import iota
from jax_kernels.pallas.varying import result_types

__all__ = ["GatedGradients", "gated_gradients"]

CHUNK = 2048  # values of a program


class GatedGradients(NamedTuple):
    """Cotangents, and the largest magnitudes of both, float32 []; NaN if a value is NaN.

    z: of the preactivation, up: of up, both in the cotangent's shape and dtype.
    """

    z: Float[Array, "*M N"]
    up: Float[Array, "*M N"]
    largest_z: Float32[Array, ""]
    largest_up: Float32[Array, ""]


def gated_gradients(
    g: Float[Array, "*M N"],
    z: Float[Array, "*M N"],
    up: Float[Array, "*M N"],
    options: MatmulOptions,
    *,
    interpret: bool = False,
) -> GatedGradients:
    """The cotangents of z and of up from g, the cotangent of activation(z) * up.

    g, z, up: not empty, of one shape and dtype. options: has activation and its derivative, which Triton can compute,
    and the dtype out_dtype. interpret: runs the kernel in Pallas's interpreter.
    """
    size = g.size
    programs = pl.cdiv(size, CHUNK)
    like, numbers = jax.ShapeDtypeStruct((size,), g.dtype), jax.ShapeDtypeStruct((programs,), jnp.int32)

    def kernel(g_ref, z_ref, up_ref, dz_ref, dup_ref, largest_z, largest_up):
        program = pl.program_id(0)
        mask = None if size % CHUNK == 0 else program * CHUNK + iota(CHUNK) < size
        at = lambda ref: ref.at[pl.ds(program * CHUNK, CHUNK)]
        load = lambda ref: plgpu.load(at(ref), mask=mask, other=None if mask is None else 0).astype(jnp.float32)
        found = dict(options.gradients(load(g_ref), load(z_ref), lambda: load(up_ref)))
        for name, out, largest in (("out", dz_ref, largest_z), ("up", dup_ref, largest_up)):
            bits = magnitude_bits(found[name])
            plgpu.store(at(out), found[name].astype(out.dtype), mask=mask)
            plgpu.store(largest.at[program], (bits if mask is None else jnp.where(mask, bits, 0)).max(axis=0))

    dz, dup, *largest = pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=result_types([like, like, numbers, numbers], g, z, up),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="matmul_gated_gradients_triton",
    )(g.reshape(size), z.reshape(size), up.reshape(size))
    of_all = (jax.lax.bitcast_convert_type(bits.max(), jnp.float32) for bits in largest)
    return GatedGradients(dz.reshape(g.shape), dup.reshape(g.shape), *of_all)
