"""The rows of GPU calls whose forward returns an lse_lo: their shapes follow from the tensors of the call."""

import jax
import jax.numpy as jnp
import pytest
import torch

from jax_kernels import dispatch
from jax_kernels.bridge.ops.attention import flash_attention_operator
from jax_kernels.bridge.ops.attention.flash_attention_operator import Options, Tensors
from jax_kernels.device import device_info

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 4, 200, 64
OPTIONS = Options(
    is_causal=False, window_left=-1, window_right=-1, q_offset=0, scale=None, softcap=None, return_lse=True,
    deterministic=None, precision=None, implementation=None,
)  # fmt: skip
GIVEN = {
    "nothing": {},
    "mask of keys": {"mask": (BATCH, 1, 1, LENGTH)},
    "mask": {"mask": (BATCH, 1, LENGTH, LENGTH)},
    "bias": {"bias": (1, HEADS, LENGTH, LENGTH)},
    "mask of keys and bias": {"mask": (BATCH, 1, 1, LENGTH), "bias": (1, HEADS, LENGTH, LENGTH)},
}


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("case", GIVEN)
def test_backward_reads_the_forward_lse(case, gpu):
    array = jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, HEAD_DIM), jnp.bfloat16)
    empty = dict.fromkeys(Tensors._fields)
    dtypes = {"mask": jnp.bool_, "bias": jnp.bfloat16}
    given = {name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in GIVEN[case].items()}
    tensors = Tensors(**empty | dict.fromkeys(("query", "key", "value"), array) | given)
    differentiated = [x for x in tensors.differentiated if x is not None]
    wanted = flash_attention_operator.gradient_bits([x is not None for x in tensors.differentiated])
    device = torch.device("cpu")
    # Not the functions that are kept for a device: these are planned for a GPU.
    forward = flash_attention_operator._forward.__wrapped__(device, OPTIONS)
    backward = flash_attention_operator._backward.__wrapped__(device, OPTIONS, wanted)
    with dispatch.on_device(device_info(gpu)):
        out, rows = jax.eval_shape(forward, *tensors)
        gradients = jax.eval_shape(backward, *tensors, out, rows, out, rows)
    assert rows.shape == ((BATCH, 2, HEADS, LENGTH) if "bias" in given else (BATCH, HEADS, LENGTH))
    assert [x.shape for x in gradients] == [x.shape for x in differentiated]
