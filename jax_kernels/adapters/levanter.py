"""Attention for Levanter: a dot_product_attention of named arrays by flash_attention.

Before Levanter builds its model::

    import levanter.models.attention
    from jax_kernels.adapters import levanter as fast

    fast.replace_attention(levanter.models.attention)  # in newer versions levanter.layers.attention
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.ops.attention.flash_attention import flash_attention

__all__ = ["dot_product_attention", "replace_attention"]


def dot_product_attention(
    QPos: Any,
    KPos: Any,
    Key: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    bias: Any = None,
    attention_dtype: Any = None,
    precision: Any = None,
    use_flash: Any = None,
    attn_backend: Any = None,
    flash_block_size: Any = None,
    dropout: float = 0.0,
    *,
    logits_soft_cap: float | None = None,
    scaling_factor: float | None = None,
    inference: bool = True,
    prng: Any = None,
    implementation: str | None = None,
) -> Any:
    """levanter's dot_product_attention of haliax's NamedArrays, by flash_attention.

    Axes of query, key and value may be in any order. Axes that all three have are batches and heads; axes of query
    alone are its heads of a key head (grouped-query attention).

    Args:
      QPos, KPos, Key: the axes of the queries, of the keys, and of head_dim, or their names. QPos and KPos differ.
      query, key, value: NamedArrays. value has one axis of its own, or several, or Key.
      mask: None; a bool NamedArray, True where a query may attend; or Levanter's AttentionMask: is_causal,
        explicit_mask, and if it has them sliding_window (tokens that a token sees, with itself) and segment_ids (of
        packed documents: one NamedArray, or one of the queries and one of the keys).
      bias: a NamedArray that is added to the scores, or None. It gets a gradient.
      attention_dtype, precision, use_flash, attn_backend, flash_block_size: accepted and not used: scores are in
        float32, by the kernels that this library chooses.
      logits_soft_cap, scaling_factor: softcap and scale of flash_attention.
      dropout, inference, prng: dropout other than 0 in training raises NotImplementedError.
      implementation: as in flash_attention.

    Returns:
      A NamedArray with the axes of query, in order, in which the axes of value replace Key, at the end.

    Raises:
      ValueError: QPos and KPos are equal, or an axis is missing or has another size.
      NotImplementedError: dropout in training, or a mask of another kind. Also the errors of flash_attention.
    """
    if dropout and not inference:
        raise NotImplementedError(f"dropout: got {dropout}, want 0: attention weights are never stored")
    layout = _Layout(_axis("QPos", query, QPos), _axis("KPos", key, KPos), _axis("Key", query, Key), query, key, value)
    options, array = _options_of(mask, layout)
    if bias is not None:
        options["bias"] = layout.of_scores("bias", bias)
    out = flash_attention(
        *layout.arrays(query, key, value),
        mask=array,
        softcap=logits_soft_cap,
        scale=scaling_factor,
        implementation=implementation,
        **options,
    )
    return layout.named(out, type(query))


def _axis(name: str, array: Any, axis: Any) -> Any:
    """The Axis of a NamedArray, by an Axis or its name."""
    wanted = axis if isinstance(axis, str) else getattr(axis, "name", axis)
    for own in array.axes:
        if own.name == wanted:
            return own
    raise ValueError(f"{name}: got {wanted!r}, want one of the axes {', '.join(own.name for own in array.axes)}")


class _Layout:
    """The axes of a call, and the arrays in flash_attention's order.

    batch: the shared axes except the last; head: a tuple of the last one. group: axes of query alone.
    """

    def __init__(self, q_pos: Any, k_pos: Any, head_dim: Any, query: Any, key: Any, value: Any) -> None:
        if q_pos.name == k_pos.name:
            raise ValueError(f"KPos: got {k_pos.name!r}, which is QPos, want another axis: rename the axis of key")
        self.q_pos, self.k_pos, self.head_dim = q_pos, k_pos, head_dim
        names = {x.name for x in key.axes} & {x.name for x in value.axes}
        special = {q_pos.name, k_pos.name, head_dim.name}
        shared = [x for x in query.axes if x.name in names - special]
        self.group = tuple(x for x in query.axes if x.name not in names | special)
        self.batch, self.head = tuple(shared[:-1]), tuple(shared[-1:])
        of_shared = {x.name for x in shared}
        self.value_axes = tuple(x for x in value.axes if x.name not in of_shared | {k_pos.name})
        self.query_axes = tuple(query.axes)

    def _flat(self, name: str, x: Any, *parts: Sequence[Any]) -> jax.Array:
        """The array with one axis for each of the parts, whose axes are merged."""
        axes = [axis for part in parts for axis in part]
        if {(own.name, own.size) for own in x.axes} != {(axis.name, axis.size) for axis in axes}:
            want = ", ".join(f"{axis.name}: {axis.size}" for axis in axes)
            raise ValueError(f"{name}: got axes {', '.join(f'{a.name}: {a.size}' for a in x.axes)}, want {want}")
        order = [[own.name for own in x.axes].index(axis.name) for axis in axes]
        return x.array.transpose(order).reshape([math.prod(axis.size for axis in part) for part in parts])

    def arrays(self, query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """query [B, T, H, D], key [B, S, Hkv, D], value [B, S, Hkv, Dv]."""
        return (
            self._flat("query", query, self.batch, (self.q_pos,), (*self.head, *self.group), (self.head_dim,)),
            self._flat("key", key, self.batch, (self.k_pos,), self.head, (self.head_dim,)),
            self._flat("value", value, self.batch, (self.k_pos,), self.head, self.value_axes),
        )

    def _aligned(self, name: str, x: Any, *parts: Sequence[Any]) -> jax.Array:
        """The array with one axis for each of the parts. A part without an axis of x has size 1."""
        known = [axis for part in parts for axis in part]
        own = {axis.name: i for i, axis in enumerate(x.axes)}
        for axis in x.axes:
            if not any(axis.name == other.name and axis.size == other.size for other in known):
                want = ", ".join(f"{other.name}: {other.size}" for other in known)
                raise ValueError(f"{name}: got an axis {axis.name}: {axis.size}, want axes of {want}")
        array = x.array.transpose([own[axis.name] for axis in known if axis.name in own])
        array = array.reshape([axis.size if axis.name in own else 1 for axis in known])
        shape, whole = [], []
        for part in parts:
            is_there = any(axis.name in own for axis in part)
            whole += [axis.size if is_there else 1 for axis in part]
            shape.append(math.prod(axis.size for axis in part) if is_there else 1)
        return jnp.broadcast_to(array, whole).reshape(shape)

    def of_scores(self, name: str, x: Any) -> jax.Array:
        """A NamedArray as an array that is broadcastable to [B, H, T, S]."""
        return self._aligned(name, x, self.batch, (*self.head, *self.group), (self.q_pos,), (self.k_pos,))

    def of_tokens(self, name: str, x: Any, pos: Any) -> jax.Array:
        """A NamedArray of the tokens along `pos` as an array [B, T]."""
        array = self._aligned(name, x, self.batch, (pos,))
        return jnp.broadcast_to(array, (math.prod(axis.size for axis in self.batch), pos.size))

    def named(self, out: jax.Array, kind: Callable[..., Any]) -> Any:
        """The NamedArray of flash_attention's result."""
        axes = (*self.batch, self.q_pos, *self.head, *self.group, *self.value_axes)
        rest = [x for x in self.query_axes if x.name != self.head_dim.name]
        wanted = (*rest, *self.value_axes)
        names = [x.name for x in axes]
        array = out.reshape([x.size for x in axes]).transpose([names.index(x.name) for x in wanted])
        return kind(array, wanted)


def _options_of(mask: Any, layout: _Layout) -> tuple[dict[str, Any], jax.Array | None]:
    """(the options of flash_attention for a mask, its array or None)."""
    if mask is None:
        return {}, None
    if hasattr(mask, "axes"):
        return {}, layout.of_scores("mask", mask)
    if not hasattr(mask, "is_causal"):
        raise NotImplementedError(f"mask: got {type(mask).__name__}, want a NamedArray or Levanter's AttentionMask")
    if getattr(mask, "causal_offset", None) is not None and not _is_zero(mask.causal_offset):
        raise NotImplementedError("mask: got an AttentionMask with a causal_offset, want one without")
    explicit = None if mask.explicit_mask is None else layout.of_scores("mask.explicit_mask", mask.explicit_mask)
    options: dict[str, Any] = {"is_causal": bool(mask.is_causal)}
    window = getattr(mask, "sliding_window", None)
    if window is not None:
        options["window"] = (int(window) - 1, 0 if mask.is_causal else -1)
    ids = getattr(mask, "segment_ids", None)
    if ids is not None:
        of_queries, of_keys = ids if isinstance(ids, tuple) else (ids, ids)
        options["segment_ids"] = tuple(
            layout.of_tokens("mask.segment_ids", _along(x, layout, pos), pos)
            for x, pos in ((of_queries, layout.q_pos), (of_keys, layout.k_pos))
        )
    return options, explicit


def _is_zero(x: Any) -> bool:
    return isinstance(x, int) and x == 0


def _along(ids: Any, layout: _Layout, pos: Any) -> Any:
    """Segment ids whose axis of tokens is `pos`: Levanter gives the ids of the keys along either axis."""
    other = layout.k_pos if pos is layout.q_pos else layout.q_pos
    names = {axis.name for axis in ids.axes}
    if pos.name in names or other.name not in names:
        return ids
    return type(ids)(ids.array, tuple(pos if axis.name == other.name else axis for axis in ids.axes))


def replace_attention(module: Any) -> Callable[[], None]:
    """Replaces `dot_product_attention` of one of Levanter's modules. Returns a function that undoes it.

    module: that defines the function, or imported it by name, such as levanter.models.llama: each such module needs a
    call. Raises TypeError if it has no such function.
    """
    original = getattr(module, "dot_product_attention", None)
    if original is None:
        raise TypeError(f"module: got {module!r}, want a module of Levanter with dot_product_attention")
    module.dot_product_attention = dot_product_attention
    return lambda: setattr(module, "dot_product_attention", original)
