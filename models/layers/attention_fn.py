"""attention_fn: this library's attention inside Flax's own multi-head attention modules."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.attention.flash_attention import flash_attention

__all__ = ["attention_fn"]


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    input_positions: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The argument `attention_fn` of `flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention`.

    For example::

        nnx.MultiHeadAttention(num_heads=8, in_features=512, attention_fn=attention_fn, decode=False, rngs=rngs)

    It computes Flax's `dot_product_attention` with this library's flash_attention. There is one difference: a query
    without any key to attend to gives 0, while Flax gives the mean of all values.
    `functools.partial(attention_fn, implementation="xla")` forces an implementation.

    Args:
      query: [batch..., T, H, D], with any number of batch axes, including zero.
      key: [batch..., S, Hkv, D]; Hkv divides H.
      value: [batch..., S, Hkv, Dv].
      bias: broadcastable to [batch..., H, T, S], floats, added to the scores. It has a gradient.
      mask: broadcastable to [batch..., H, T, S]; bool, or float32 zeros and ones, as from Flax's make_causal_mask and
        combine_masks.
      deterministic, dropout_rate: dropout is off if deterministic is True or the rate is 0; then dropout_rng and
        broadcast_dropout have no effect, as in Flax.
      dtype: dtype of the computation; default: the promoted dtype of query, key and value.
      precision: a jax.lax.Precision or its name. All are satisfied, because float32 matmuls are always exact.
      is_causal: attend to keys j <= i only (top-left aligned), on top of the mask.
      force_fp32_for_softmax: the softmax is always in float32.
      implementation: as in flash_attention.

    Returns:
      [batch..., T, H, Dv] in dtype.

    Raises:
      NotImplementedError: the call asks for dropout, sown attention weights (module), the caller's einsum,
        input_positions, or a precision that is not a jax.lax.Precision.
      ValueError, TypeError: as flash_attention.
    """
    if not deterministic and dropout_rate > 0:
        raise NotImplementedError(
            f"dropout_rate: got {dropout_rate} with deterministic=False, want 0: attention_fn has no dropout"
        )
    refused = {
        "module": (module, "attention weights to sow: they are never stored"),
        "qk_attn_weights_einsum": (qk_attn_weights_einsum, "matmuls by the caller's einsum"),
        "attn_weights_value_einsum": (attn_weights_value_einsum, "matmuls by the caller's einsum"),
        "input_positions": (input_positions, "positions: it applies no rotary embedding"),
    }
    for name, (argument, meaning) in refused.items():
        if argument is not None:
            raise NotImplementedError(
                f"{name}: got a {type(argument).__name__}, want None: attention_fn has no {meaning}"
            )
    try:
        jax.lax.Precision(precision)
    except ValueError:
        raise NotImplementedError(f"precision: got {precision!r}, want a jax.lax.Precision or None") from None
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 3:
            raise ValueError(f"{name}: got shape {x.shape}, want [batch..., length, heads, head_dim]")
        if x.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name}: got batch axes {x.shape[:-3]}, want query's {query.shape[:-3]}")

    batch = query.shape[:-3]
    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (x.astype(dtype).reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value))
    scores = query.shape[2], query.shape[1], key.shape[1]
    if mask is not None:
        # With NumPy a mask that is known while jit traces stays known, so that flash_attention can check its values.
        mask = _joined("mask", mask, batch, scores, jnp if isinstance(mask, jax.core.Tracer) else np)
    if bias is not None:
        bias = _joined("bias", bias, batch, scores, jnp)
        if bias.dtype not in (query.dtype, jnp.float32):
            bias = bias.astype(jnp.result_type(bias, query))
    options: dict[str, Any] = {"is_causal": is_causal, "implementation": implementation}
    out = flash_attention(query, key, value, bias=bias, mask=mask, **options)
    return out.reshape(*batch, *out.shape[1:])


def _joined(name: str, x: Any, batch: tuple[int, ...], scores: tuple[int, int, int], xp: Any) -> Any:
    """A mask or bias as [B, H or 1, T or 1, S or 1], with all batch axes joined to one axis of length B or 1.

    x: broadcastable to [batch..., H, T, S]; ValueError, naming the argument, otherwise. batch: the lengths of the batch
    axes. scores: (H, T, S). xp: jax.numpy or numpy, for the array functions.
    """
    want = (*batch, *scores)
    shape = (1,) * (len(want) - x.ndim) + tuple(x.shape)
    if len(shape) > len(want) or any(got not in (1, full) for got, full in zip(shape, want, strict=True)):
        raise ValueError(f"{name}: got shape {x.shape}, want one broadcastable to [batch..., H, T, S] = {want}")
    x = xp.asarray(x).reshape(shape)
    if math.prod(shape[:-3]) > 1:
        x = xp.broadcast_to(x, (*batch, *shape[-3:]))
    return x.reshape(math.prod(x.shape[:-3]), *shape[-3:])
