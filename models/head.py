"""The head of a Transformer whose embeddings are not tied: its logits, and its matrix for the loss."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_kernels.models.layers.linear import computes_its_kernel
from jax_kernels.models.layers.quantized import QuantizedLinear
from jax_kernels.ops.matmul.matmul import matmul
from jax_kernels.quantization import dequantize

__all__ = ["head_kernel", "head_logits"]


def head_logits(head: Any, x: jax.Array) -> jax.Array:
    """The logits, float32 [B, T, vocab_size], without a softcap. x: the final norm's result [B, T, model_dim].

    A head that is more than a matmul with its kernel is called.
    """
    if not _computes_its_kernel(head):
        return head(x).astype(jnp.float32)
    if isinstance(head, QuantizedLinear):
        return matmul(x, head.kernel, out_dtype=jnp.float32, implementation=head.implementation)
    return jnp.matmul(x, head.kernel[...].astype(x.dtype), preferred_element_type=jnp.float32)


def head_kernel(head: Any, dtype: Any) -> jax.Array:
    """The head's matrix [model_dim, vocab_size]. A low-bit matrix is dequantised to dtype; others keep their dtype.

    Raises NotImplementedError for a head that is more than a matmul with its kernel, such as an nnx.LoRA.
    """
    if not _computes_its_kernel(head):
        got = f"a {type(head).__name__} with a bias, an activation, a precision or a call of its own"
        want = "an nnx.Linear or QuantizedLinear without them: the loss reads only the kernel"
        raise NotImplementedError(f"head: got {got}, want {want}")
    return dequantize(head.kernel, dtype) if isinstance(head, QuantizedLinear) else head.kernel[...]


def _computes_its_kernel(head: Any) -> bool:
    """Whether a call of the head is only a matmul with head.kernel, in the dtype of x."""
    if type(head).__call__ is nnx.Linear.__call__:
        return head.bias is None
    if type(head).__call__ is QuantizedLinear.__call__:
        return head.bias is None and head.activation is None
    return computes_its_kernel(head) and head.precision is None
