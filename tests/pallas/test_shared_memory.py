"""Pipelines that take as many stages as shared memory holds, and no more."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.inputs.grouped_matmul import GroupedInputs, GroupedOptions
from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions
from jax_kernels.pallas.block_specs.matmul_specs import GroupedSm90, MatmulSm90
from jax_kernels.pallas.grouped.sm90 import state as grouped
from jax_kernels.pallas.grouped.sm90 import weight_gradient
from jax_kernels.pallas.matmul.sm90 import state as matmul

MOST = 227 << 10  # bytes of shared memory that a CTA may have on Hopper
MANY = 40  # more stages than shared memory holds


def bytes_of(scratch):
    """The bytes of the arrays in a dataclass of scratch memory. Views of the same bytes count once."""
    if isinstance(scratch, matmul.Smem | grouped.Smem | weight_gradient.Smem):
        return sum(bytes_of(getattr(scratch, field.name)) for field in dataclasses.fields(scratch))
    if isinstance(scratch, plgpu.RefUnion):
        return max(sum(bytes_of(y) for y in jax.tree.leaves(group)) for group in scratch.refs)
    if scratch is None or isinstance(scratch, plgpu.Barrier | plgpu.ClusterBarrier):
        return 0
    return int(np.prod(scratch.shape)) * jnp.dtype(scratch.dtype).itemsize


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def of_matmul(block_n, dtype, out_dtype, is_gated=False, **config):
    w = array(512, 1024, dtype=dtype)
    inputs = MatmulInputs(x=array(1024, 512, dtype=dtype), w=w, w_up=w if is_gated else None)
    options = MatmulOptions(out_dtype=out_dtype, scaling="row" if dtype == "float8_e4m3fn" else None)
    if dtype == "float8_e4m3fn":
        options = dataclasses.replace(options, transpose_w=True)
        inputs = inputs._replace(w=array(1024, 512, dtype=dtype))
    return matmul, matmul.Traits.of(inputs, options, MatmulSm90(block_n=block_n, stages=MANY, row_group=8, **config))


def of_groups(block_n, dtype, out_dtype, is_gated=False):
    w = array(4, 512, 1024, dtype=dtype)
    inputs = GroupedInputs(
        x=array(1024, 512, dtype=dtype), w=w, w_up=w if is_gated else None, group_sizes=array(4, dtype="int32")
    )
    options = GroupedOptions(out_dtype=out_dtype)
    return grouped, grouped.Traits.of(inputs, options, GroupedSm90(block_n=block_n, stages=MANY, row_group=8))


def of_weight_gradient(block_n):
    config = GroupedSm90(block_n=block_n, stages=MANY, row_group=8)
    traits = weight_gradient.Traits(config=config, groups=4, m=512, n=1024, dtype=jnp.dtype("bfloat16"))
    return weight_gradient, traits


CASES = {
    "matmul 256": lambda: of_matmul(256, "bfloat16", "bfloat16"),
    "matmul 128": lambda: of_matmul(128, "bfloat16", "bfloat16"),
    "matmul 192 float32": lambda: of_matmul(192, "bfloat16", "float32", pingpong=True, wg_rows=128),
    "matmul gated": lambda: of_matmul(256, "bfloat16", "bfloat16", is_gated=True),
    "matmul 8 bits": lambda: of_matmul(256, "float8_e4m3fn", "bfloat16"),
    "matmul 8 bits float32": lambda: of_matmul(128, "float8_e4m3fn", "float32"),
    "groups 256": lambda: of_groups(256, "bfloat16", "bfloat16"),
    "groups 128 float32": lambda: of_groups(128, "bfloat16", "float32"),
    "groups gated": lambda: of_groups(256, "bfloat16", "bfloat16", is_gated=True),
    "groups gradient 256": lambda: of_weight_gradient(256),
    "groups gradient 64": lambda: of_weight_gradient(64),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_fill_shared_memory(name):
    module, traits = CASES[name]()
    found = bytes_of(module.Smem.scratch(traits))
    per_stage = (found - bytes_of(module.Smem.scratch(traits).out)) // traits.stages
    assert 1 < traits.stages < MANY
    assert found <= MOST - 2048 < found + per_stage
