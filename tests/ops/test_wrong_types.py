"""An argument of a wrong type raises an error of this library that names it, in every op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kernels
from jax_kernels import masks
from tests.support.wrong_types import check_errors

ones = lambda *shape, dtype=jnp.float32: jnp.ones(shape, dtype)
ATTENTION = {"query": ones(2, 8, 2, 16), "key": ones(2, 8, 2, 16), "value": ones(2, 8, 2, 16)}
GROUPS = jnp.array([3, 0, 5], jnp.int32)
CALLS = {
    "flash_attention": ATTENTION,
    "flash_attention_fp8": {name: x.astype(jnp.float8_e4m3fn) for name, x in ATTENTION.items()},
    "block_sparse_attention": ATTENTION | {"block_mask": ones(2, 2, dtype=bool), "block_size": 4},
    "dynamic_mask_attention": ATTENTION | {"mask": ones(8, 8, dtype=bool), "bias": ones(8, 8)},
    "dilated_attention": ATTENTION | {"segment_lengths": (8,), "dilation_rates": (1,)},
    "decode_attention": ATTENTION | {"query": ones(2, 1, 2, 16)},
    "matmul": {"x": ones(8, 16), "w": ones(16, 8)},
    "gated_matmul": {"x": ones(8, 16), "w_gate": ones(16, 8), "w_up": ones(16, 8)},
    "mlp": {"x": ones(8, 16), "w_up": ones(16, 8), "w_down": ones(8, 16)},
    "layer_norm": {"x": ones(8, 16), "scale": ones(16)},
    "rms_norm": {"x": ones(8, 16), "scale": ones(16)},
    "grouped_matmul": {"x": ones(8, 16), "w": ones(3, 16, 8), "group_sizes": GROUPS},
    "grouped_gated_matmul": {
        "x": ones(8, 16),
        "w_gate": ones(3, 16, 8),
        "w_up": ones(3, 16, 8),
        "group_sizes": GROUPS,
    },
    "linear_cross_entropy": {"x": ones(8, 16), "w": ones(16, 7), "targets": jnp.zeros(8, jnp.int32)},
    "quantize": {"x": ones(8, 16)},
    "dequantize": {"x": jax_kernels.quantize(ones(8, 16))},
    "compile_attention": {"pattern": "causal", "seq_len": 16, "head_dim": 16},
    "hilbert_order": {"n": 16},
}
WRONG = {
    "list": [],
    "dict": {},
    "object": object(),
    "text": np.array("a"),
    "empty": np.zeros(0, np.float32),
    "three": np.ones(3, np.float32),
    "key": jax.random.key(0),
    "mask": masks.causal(),
    "shape": jax.ShapeDtypeStruct((2, 8, 2, 16), jnp.float32),
}


@pytest.mark.parametrize("op", CALLS)
def test_error_names_the_argument(op):
    check_errors(getattr(jax_kernels, op), CALLS[op], WRONG)


def test_unknown_pattern():
    with pytest.raises(ValueError, match=r"^pattern: got 'casual', want one of .*; did you mean 'causal'\?"):
        jax_kernels.compile_attention("casual", 16, 16)
