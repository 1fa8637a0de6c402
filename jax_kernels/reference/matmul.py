"""matmul in plain jnp: the implementation "xla", and the equations of the kernels."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_kernels.matmul_inputs import MatmulInputs, MatmulOptions, MatmulResult

__all__ = ["matmul"]

PRECISIONS = {None: None, "fp32": lax.Precision.HIGHEST, "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32}


def matmul(inputs: MatmulInputs, options: MatmulOptions) -> MatmulResult:
    """See MatmulOptions for the equation. Products are summed in float32."""
    product = _product(inputs.x, inputs.w, options)
    if inputs.bias is not None:
        product = product + inputs.bias.astype(jnp.float32)
    out = product if options.activation is None else options.activation(product)
    up = None if inputs.w_up is None else _product(inputs.x, inputs.w_up, options)
    if up is not None:
        out = out * up
    if inputs.residual is not None:
        out = out + inputs.residual.astype(jnp.float32)
    dtype = jnp.dtype(options.out_dtype)
    saved = [y.astype(dtype) if options.saves_preactivation and y is not None else None for y in (product, up)]
    return MatmulResult(out.astype(dtype), *saved)


def _product(x: Any, w: Any, options: MatmulOptions) -> Any:
    """x @ w in float32."""
    axes = ((0 if options.transpose_x else 1,), (1 if options.transpose_w else 0,))
    precision: Any = PRECISIONS[options.precision]
    if options.precision == "tf32" and jax.default_backend() != "gpu":
        precision = lax.Precision.HIGHEST  # XLA knows tf32 on GPUs alone
    return lax.dot_general(x, w, (axes, ((), ())), precision, preferred_element_type=jnp.float32)
