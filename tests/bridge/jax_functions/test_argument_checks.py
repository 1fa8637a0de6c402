"""Arguments that are no tensors: each op names the argument and wants a torch.Tensor."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_kernels import bridge
from jax_kernels.quantization import quantize

X = torch.ones(4, 8)
HEADS = torch.ones(1, 8, 2, 16)
EIGHT_BITS = HEADS.to(torch.float8_e4m3fn)
LENGTHS = torch.ones(1, dtype=torch.int32)
WEIGHTS = " or a bridge.QuantizedTensor"
# By name: the call with a wrong argument, the argument, and the error's text after "want a torch.Tensor".
CALLS = {
    "matmul x": (lambda y: bridge.matmul(y, X.T), "x", ""),
    "matmul w": (lambda y: bridge.matmul(X, y), "w", WEIGHTS),
    "matmul bias": (lambda y: bridge.matmul(X, X.T, bias=y), "bias", " or None"),
    "matmul residual": (lambda y: bridge.matmul(X, X.T, residual=y), "residual", " or None"),
    "matmul scale": (lambda y: bridge.matmul(X, X.T, w_scale=y), "w_scale", ", a number or None"),
    "linear": (lambda y: bridge.linear(X, y), "weight", WEIGHTS),
    "gated_matmul": (lambda y: bridge.gated_matmul(X, X.T, y), "w_up", WEIGHTS),
    "mlp": (lambda y: bridge.mlp(X, X.T, y), "w_down", ""),
    "mlp gate": (lambda y: bridge.mlp(X, X.T, X, w_gate=y), "w_gate", " or None"),
    "rms_norm": (lambda y: bridge.rms_norm(y), "x", ""),
    "rms_norm scale": (lambda y: bridge.rms_norm(X, y), "scale", " or None"),
    "rms_norm in 8 bits": (lambda y: bridge.rms_norm(y, quantize="e4m3"), "x", ""),
    "layer_norm": (lambda y: bridge.layer_norm(y), "x", ""),
    "layer_norm bias": (lambda y: bridge.layer_norm(X, None, y), "bias", " or None"),
    "quantize": (lambda y: bridge.quantize(y), "x", ""),
    "quantize to few bits": (lambda y: bridge.quantize(y, "int4"), "x", ""),
    "quantize_fp8": (lambda y: bridge.quantize_fp8(y), "x", ""),
    "flash_attention": (lambda y: bridge.flash_attention(HEADS, y, HEADS), "key", ""),
    "flash_attention_fp8": (lambda y: bridge.flash_attention_fp8(EIGHT_BITS, EIGHT_BITS, y), "value", ""),
    "decode_attention": (
        lambda y: bridge.decode_attention(HEADS, HEADS, HEADS, kv_lengths=LENGTHS, block_tables=y),
        *("block_tables", " or None"),
    ),
    "pooled_scores": (lambda y: bridge.masks.pooled_scores(HEADS, y, 4), "key", ""),
    "Linear": (lambda y: bridge.nn.Linear(8, 4)(y), "input", ""),
    "QuantizedLinear": (lambda y: bridge.nn.QuantizedLinear(8, 4)(y), "x", ""),
    "GatedMLP": (lambda y: bridge.nn.GatedMLP(8, 4)(y), "x", ""),
    "RMSNorm": (lambda y: bridge.nn.RMSNorm((4, 8))(y), "x", ""),
    "LayerNorm residual": (lambda y: bridge.nn.LayerNorm(8)(X, y), "residual", " or None"),
}
WRONG = {
    "numpy": (np.ones((4, 8), np.float32), "numpy.ndarray", "; torch.from_numpy makes one"),
    "jax": (jnp.ones((4, 8)), "jaxlib._jax.ArrayImpl", "; jax_kernels itself has the ops for JAX arrays"),
    "quantized": (quantize(jnp.ones((8, 4)), "int4"), "jax_kernels.quantization.arrays.QuantizedArray", ""),
    "list": ([1.0], "builtins.list", ""),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", WRONG)
def test_non_tensor_argument(name, kind):
    call, argument, more = CALLS[name]
    wrong, type_of, advice = WRONG[kind]
    text = f"{argument}: got {type_of}, want a torch.Tensor{more}{advice}"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        call(wrong)


@pytest.mark.parametrize("cls", [bridge.nn.Linear, bridge.nn.QuantizedLinear, bridge.nn.GatedMLP])
def test_constructors_check_their_options(cls):
    with pytest.raises(ValueError, match=r"activation: got 'swish', want (None or )?one of 'relu', 'gelu'"):
        cls(3, 2, activation="swish")
    with pytest.raises(TypeError, match="activation: got int, want a name, a function"):
        cls(3, 2, activation=3)
    with pytest.raises(ValueError, match="precision: got 'fp9', want 'fp32', 'tf32', 'bf16', 'fp16'"):
        cls(3, 2, precision="fp9")
    for activation in ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", torch.nn.functional.mish):
        assert cls(3, 2, activation=activation).activation == activation


@pytest.mark.parametrize("cls", [bridge.nn.Linear, bridge.nn.GatedMLP])
def test_constructors_check_their_scaling(cls):
    with pytest.raises(ValueError, match="scaling: got 'rows', want 'tensor', 'row' or 'block'"):
        cls(3, 2, precision="fp8", scaling="rows")
    with pytest.raises(ValueError, match="scaling: got 'row' with precision='tf32', want None, or precision='fp8'"):
        cls(3, 2, precision="tf32", scaling="row")
    assert cls(3, 2, precision="fp8", scaling="row")(torch.ones(4, 3)).isfinite().all()
