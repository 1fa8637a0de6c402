"""Multi-head attention as an nnx module, with rotary embedding and a key-value cache of static shape."""

import functools
from typing import Any, overload

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jax_kernels import masks
from jax_kernels.masks.arrays import named_dense
from jax_kernels.masks.checks import is_array
from jax_kernels.models.config import (
    DTYPES,
    check_fp8_scaling,
    check_heads,
    check_kind,
    check_precision,
    check_sequence,
    dtype_name,
    positive_number,
)
from jax_kernels.models.layers.inputs import check_floats
from jax_kernels.models.layers.kv_cache import KVCache, append, check_length
from jax_kernels.models.layers.linear import Linear, shared_projections
from jax_kernels.models.parallel.sharding import (
    ShardingRules,
    sequence_devices,
    share_sequence,
    shares_sequence,
    token_order,
    whole_length,
)
from jax_kernels.models.training.packing import DealtDocuments
from jax_kernels.models.training.remat import PROJECTION
from jax_kernels.ops.attention.decode_attention import MOST_QUERIES, decode_attention
from jax_kernels.ops.attention.flash_attention import flash_attention
from jax_kernels.ops.checks import check_flags, check_names
from jax_kernels.ops.ring.ring_attention import ring_attention
from jax_kernels.plain_numbers import plain_arguments
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["KVCache", "MultiHeadAttention", "rotary_embedding"]


@under_defaults
def rotary_embedding(x: jax.Array, positions: jax.Array, theta: float = 10000.0) -> jax.Array:
    """Rotary position embedding, in the rotate_half convention (as GPT-NeoX and Llama in Hugging Face).

    Equivalent to the following JAX code::

        angles = positions[..., None] / theta ** (arange(0, D, 2) / D)
        cos, sin = (concatenate([f(angles)] * 2, axis=-1)[..., None, :] for f in (cos, sin))
        out = x * cos + concatenate([-x[..., D // 2 :], x[..., : D // 2]], axis=-1) * sin

    Args:
      x: [..., T, H, D] with D even.
      positions: [T] or [..., T], the positions of the tokens.
      theta: base of the frequencies, above 0.

    Returns:
      [..., T, H, D] in x's dtype; computed in float32.

    Raises:
      ValueError: D is odd, positions have another shape, or theta is 0 or less.
      TypeError: x is no array of floats, positions are no array of numbers, or theta is no number.

    Source: Su et al., "RoFormer" (2021), arXiv:2104.09864.
    """
    check_floats("x", x)
    _check_rotary_positions(positions, x.shape)
    theta = theta if isinstance(theta, jax.core.Tracer) else positive_number("theta", theta)
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"x: got head_dim {head_dim}, want an even number: rotary embedding rotates pairs")
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = (positions.astype(jnp.float32)[..., None] * frequencies)[..., None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class MultiHeadAttention(nnx.Module):
    """Self-attention over [B, T, model_dim] by this library's flash_attention, with grouped key and value heads.

    Parameters, all without bias: q_proj.kernel [model_dim, num_heads * head_dim], k_proj.kernel and v_proj.kernel
    [model_dim, num_kv_heads * head_dim], out_proj.kernel [num_heads * head_dim, model_dim]. With qk_norm_eps also
    q_norm.scale and k_norm.scale [head_dim].

    Args:
      model_dim: width of input and output.
      num_heads: number of query heads. num_kv_heads: number of key and value heads, which divides num_heads (None:
        num_heads).
      head_dim: per head, up to 256 (None: model_dim / num_heads).
      use_rotary, rope_theta: rotate queries and keys by their positions (see rotary_embedding).
      qk_norm_eps: the epsilon of an RMSNorm of each query and each key before the rotation, as in Qwen3; None for no
        norms.
      is_causal: a token attends to itself and to earlier tokens only.
      mask: a masks.Mask for all calls, combined with is_causal and with the mask of a call. If prepare_mask made it
        with this is_causal, calls without a mask and without a cache use its lists.
      dtype: dtype of the computation and of the output, bfloat16, float16 or float32. param_dtype: of the parameters,
        one of these dtypes, or float64 if jax_enable_x64 is set.
      implementation: of the attention, as in flash_attention. projection_implementation: of the projections, as in
        matmul; None without "fp8" is nnx.Linear's matmul.
      precision: "fp8" for 8-bit matmuls in the projections, as in matmul; None for matmuls in dtype. scaling: with
        "fp8", as in matmul. fp8_scaling, amax_history_length: with "fp8", as in Linear.
      sequence_axis: a mesh axis that shards the tokens, if the mesh of jax.set_mesh or of a jax.shard_map around the
        call has it. The attention is then ring_attention. The tokens of x must be in the order of sequence_layout, as
        shard_sequence arranges them; the rotary positions follow that order. Without such a mesh, and with a cache, the
        axis has no effect.
      sequence_strategy: as ring_attention's strategy.
      sequence_layout: as ring_attention's layout; None for "zigzag" if the module is causal and the strategy is not
        "all_to_all", which gives each device whole sequences of some heads; else for "contiguous".
      rules: the mesh axes that shard the batch and the heads; None for ShardingRules().
      rngs: initialises the kernels (LeCun normal), from its stream `params`.

    Raises:
      ValueError, TypeError: an argument is wrong; the error names it.
    """

    @plain_arguments
    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        use_rotary: bool = True,
        rope_theta: float = 10000.0,
        qk_norm_eps: float | None = None,
        is_causal: bool = True,
        mask: masks.Mask | None = None,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        implementation: str | None = None,
        projection_implementation: str | None = None,
        precision: str | None = None,
        scaling: str | None = None,
        fp8_scaling: str = "dynamic",
        amax_history_length: int | None = None,
        sequence_axis: str | None = None,
        sequence_strategy: str = "auto",
        sequence_layout: str | None = None,
        rules: ShardingRules | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        if mask is not None and not isinstance(mask, masks.Mask):
            raise TypeError(f"mask: got {type(mask).__name__}, want a masks.Mask or None; pass an array to a call")
        check_flags(use_rotary=use_rotary, is_causal=is_causal)
        check_names(implementation=implementation, projection_implementation=projection_implementation)
        check_precision("", precision, scaling)
        check_fp8_scaling("", fp8_scaling, amax_history_length, precision, scaling)
        check_sequence("", sequence_axis, sequence_strategy, sequence_layout)
        num_kv_heads, head_dim = check_heads("", model_dim, num_heads, num_kv_heads, head_dim)
        if use_rotary and head_dim % 2:
            raise ValueError(f"head_dim={head_dim} must be even: rotary embedding rotates pairs")
        self.model_dim = model_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.use_rotary = use_rotary
        self.rope_theta = positive_number("rope_theta", rope_theta)
        self.is_causal = is_causal
        self.mask = nnx.data(mask)
        self.dtype = jnp.dtype(dtype_name("dtype", dtype))
        param_dtype = jnp.dtype(dtype_name("param_dtype", param_dtype, _parameter_dtypes()))
        self.implementation = implementation
        self.sequence_axis = sequence_axis
        self.sequence_strategy = sequence_strategy
        is_balanced = not is_causal or sequence_strategy == "all_to_all"
        self.sequence_layout = sequence_layout or ("contiguous" if is_balanced else "zigzag")
        self.rules = ShardingRules() if rules is None else rules

        def linear(in_features: int, out_features: int) -> nnx.Linear:
            options = {"use_bias": False, "dtype": self.dtype, "param_dtype": param_dtype, "rngs": rngs}
            if precision is None and projection_implementation is None:
                return nnx.Linear(in_features, out_features, **options)
            options |= {"precision": precision, "scaling": scaling, "implementation": projection_implementation}
            options |= {"fp8_scaling": fp8_scaling, "amax_history_length": amax_history_length}
            return Linear(in_features, out_features, **options)

        self.q_proj = linear(model_dim, num_heads * head_dim)
        self.k_proj = linear(model_dim, num_kv_heads * head_dim)
        self.v_proj = linear(model_dim, num_kv_heads * head_dim)
        self.out_proj = linear(num_heads * head_dim, model_dim)
        if qk_norm_eps is not None:  # in plain JAX, which XLA fuses with the rotation
            options = {"epsilon": positive_number("qk_norm_eps", qk_norm_eps), "dtype": self.dtype}
            options |= {"param_dtype": param_dtype, "rngs": rngs}
            self.q_norm, self.k_norm = (nnx.RMSNorm(head_dim, **options) for _ in range(2))

    @plain_arguments
    def init_cache(self, batch: int, max_length: int, dtype: Any = None) -> KVCache:
        """An empty KVCache for `batch` sequences of up to `max_length` tokens.

        dtype: of keys and values, a floating dtype; default the module's.

        Raises ValueError or TypeError, naming the argument that is wrong.
        """
        for name, size in (("batch", batch), ("max_length", max_length)):
            if isinstance(size, bool) or not (isinstance(size, int | np.integer) or jax.export.is_symbolic_dim(size)):
                raise TypeError(f"{name}: got {size!r}, want an int")
            if size < 0:
                raise ValueError(f"{name}: got {size}, want 0 or more")
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"dtype: got {jnp.dtype(dtype).name}, want a floating dtype")
        shape = (batch, max_length, self.num_kv_heads, self.head_dim)
        dtype = self.dtype if dtype is None else dtype
        return KVCache(key=jnp.zeros(shape, dtype), value=jnp.zeros(shape, dtype), length=jnp.zeros((), jnp.int32))

    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | masks.Mask | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        cache: None = None,
    ) -> jax.Array: ...

    @overload
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | masks.Mask | None = None,
        segment_ids: None = None,
        positions: jax.Array | None = None,
        cache: KVCache,
    ) -> tuple[jax.Array, KVCache]: ...

    @under_defaults
    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | masks.Mask | None = None,
        segment_ids: jax.Array | DealtDocuments | None = None,
        positions: jax.Array | None = None,
        cache: KVCache | None = None,
    ) -> jax.Array | tuple[jax.Array, KVCache]:
        """Attends within x, or, with a cache, to the cached tokens and x.

        Args:
          x: [B, T, model_dim]. With a cache these are the next T tokens: a whole prompt, one token, or several.
          mask: bool, broadcastable to [B, num_heads, T, S], True = attend, or a masks.Mask, combined with is_causal.
            S is T, or the cache's max_length. A Mask takes the queries to be after the cached tokens. If the tokens are
            sharded, the mask is of the whole sequence in its original order.
          segment_ids: int32 [B, T], in the order of x, the ids of packed documents. A token attends to tokens with the
            same id. A token with an id below 0 attends to no token.
          positions: integers [T] or [B, T], in the order of x, for the rotary embedding only; None for the tokens'
            indices in the sequence. Masks and causality always use the indices.
          cache: from init_cache or from the previous call. Not changed. If its length is [B], the T tokens of each
            sequence follow that sequence's length. Up to 16 causal tokens use decode_attention, which has no gradient.
            Calls with an implementation other than None or "xla" use flash_attention.

        Returns:
          out [B, T, model_dim] in dtype; with a cache (out, the new cache).

        Raises:
          ValueError: an array has the wrong shape, the cache has no room for T tokens, or cache and segment_ids are
            both given. A traced length cannot be checked: under jit, a sequence past the cache's end gets NaN.
          TypeError: x has no floats, cache is no KVCache, or its length or positions are not integers.
          NotImplementedError: the tokens and the batch are sharded, and the mask has several batch entries.
        """
        self._check_input(x)
        start: int | jax.Array = 0
        if cache is not None:
            if segment_ids is not None:
                raise ValueError("segment_ids: got an array with a cache, want None: a cache holds one document")
            self._check_cache(cache, x)
            start = cache.length
        layout = None
        if isinstance(segment_ids, DealtDocuments):
            segment_ids, positions, layout = *segment_ids, "documents"
        query, key, value = self._heads(x, start, positions)
        if self.mask is not None:
            length = whole_length(self.sequence_axis, x.shape[1]) if cache is None else x.shape[1]
            lengths = (length, length if cache is None else cache.max_length)
            mask = self.mask if mask is None else self.mask & as_mask(mask, *lengths)
        if cache is None:
            attend = self._attend if sequence_devices(self.sequence_axis) == 1 else self._attend_over_devices
            arguments: dict[str, Any] = {} if segment_ids is None else {"segment_ids": segment_ids}
            if layout is not None:
                arguments["layout"] = layout
            return self._project(attend(query, key, value, mask, **arguments))

        cache = append(cache, key, value)
        key, value = cache.key.astype(self.dtype), cache.value.astype(self.dtype)
        if self._decodes(query, mask):
            out = decode_attention(
                query, key, value, kv_lengths=cache.lengths, mask=mask, implementation=self.implementation
            )
        else:
            out = self._attend(query, key, value, mask, q_offset=start, kv_lengths=cache.lengths)
        has_room = (cache.lengths <= cache.max_length)[:, None, None]
        out = jnp.where(has_room, self._project(out), jnp.nan)
        return out, cache

    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array, mask: Any, **arguments: Any) -> jax.Array:
        """The attention's result by flash_attention: [B, T, num_heads, head_dim].

        query: [B, T, num_heads, head_dim]. key, value: [B, S, num_kv_heads, head_dim]. arguments: further arguments of
        flash_attention: segment_ids, or q_offset and kv_lengths with a cache.
        """
        arguments |= {"is_causal": self.is_causal, "implementation": self.implementation}
        return flash_attention(query, key, value, mask=mask, **arguments)

    def _decodes(self, query: jax.Array, mask: Any) -> bool:
        """Whether a call with a cache uses decode_attention, which computes the same as flash_attention and is faster.

        Only calls of up to 16 causal queries use it, if the module's implementation is None or "xla". The kernels of
        decode_attention split the keys, and skip blocks of keys that the mask leaves out.
        """
        is_free = self.implementation in (None, "xla")
        return (
            self.is_causal and is_free and 0 < query.shape[1] <= MOST_QUERIES and _is_for_decoding(mask, query.shape[0])
        )

    def _attend_over_devices(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        mask: Any,
        segment_ids: jax.Array | None = None,
        layout: str | None = None,
    ) -> jax.Array:
        """The attention's result [B, T, num_heads, head_dim] by ring_attention, for tokens sharded along
        sequence_axis. layout: None for sequence_layout.
        """
        assert self.sequence_axis is not None
        length = whole_length(self.sequence_axis, query.shape[1])
        mask = None if mask is None else as_mask(mask, length, length).unprepared
        options: dict[str, Any] = {"axis": self.sequence_axis, "rules": self.rules, "mask": mask}
        ring = functools.partial(self._ring, layout=layout or self.sequence_layout)
        return share_sequence(ring, query, key, value, segment_ids, **options)

    def _ring(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segment_ids: jax.Array | None = None,
        mask: masks.Mask | None = None,
        *,
        layout: str,
    ) -> jax.Array:
        """ring_attention with the module's options, for one device's tokens inside shard_map: [B, T, num_heads,
        head_dim].
        """
        assert self.sequence_axis is not None
        return ring_attention(
            query,
            key,
            value,
            axis_name=self.sequence_axis,
            layout=layout,
            strategy=self.sequence_strategy,
            mask=mask,
            is_causal=self.is_causal,
            segment_ids=segment_ids,
            implementation=self.implementation,
        )

    @property
    def shares_tokens(self) -> bool:
        """Whether calls outside of shard_map shard the tokens: the mesh of jax.set_mesh has several devices along
        sequence_axis.
        """
        return shares_sequence(self.sequence_axis)

    def token_order(self, length: int, what: str = "x") -> Any:
        """For each token of x, its index in the sequence: int32 [length]; None if the tokens are not sharded.

        length: the number of x's tokens. Inside shard_map, x and the result are one device's shard. `what`: the name of
        x, for the ValueError that is raised if the layout does not divide the length.
        """
        if self.sequence_axis is None or sequence_devices(self.sequence_axis) == 1:
            return None
        return token_order(self.sequence_axis, self.sequence_layout, length, what)

    def _check_input(self, x: jax.Array) -> None:
        check_floats("x", x)
        if x.ndim != 3 or x.shape[-1] != self.model_dim:
            raise ValueError(f"x: got shape {x.shape}, want [batch, length, {self.model_dim}]")

    def _check_cache(self, cache: KVCache, x: jax.Array) -> None:
        """Raises ValueError or TypeError unless the cache has this module's shapes, x's batch, and room for x's
        tokens.
        """
        check_kind("cache", cache, KVCache, "a KVCache from init_cache or from a call")
        batch, length, _ = x.shape
        want = (batch, cache.max_length, self.num_kv_heads, self.head_dim)
        if cache.key.shape != want or cache.value.shape != want:
            raise ValueError(
                f"cache: got key {cache.key.shape} and value {cache.value.shape}, want [batch, max_length, "
                f"num_kv_heads, head_dim] = [{batch}, max_length, {self.num_kv_heads}, {self.head_dim}]"
            )
        check_length(cache, new_tokens=length)

    def _heads(
        self, x: jax.Array, start: int | jax.Array, positions: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(query [B, T, num_heads, head_dim], key, value [B, T, num_kv_heads, head_dim] each), projected and rotated.

        start: the position of the first token, a scalar or [B]. It is 0 if the tokens may be sharded.
        positions: integers [T] or [B, T], the position of each token for the rotation, instead of start; or None.
        """
        self._check_input(x)
        batch, length = x.shape[:2]
        projected = shared_projections((self.q_proj, self.k_proj, self.v_proj), x)
        query, key, value = (y.astype(self.dtype) for y in projected)  # an nnx.LoRA may have a wider dtype
        # The backward of a rotation does not read its input, so a policy keeps its result instead.
        kept = lambda y: checkpoint_name(y, PROJECTION)
        is_rotated = self.use_rotary and not hasattr(self, "q_norm")
        early, late = (lambda y: y, kept) if is_rotated else (kept, lambda y: y)
        query = early(query).reshape(batch, length, self.num_heads, self.head_dim)
        key = early(key).reshape(batch, length, self.num_kv_heads, self.head_dim)
        value = kept(value).reshape(batch, length, self.num_kv_heads, self.head_dim)
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        if positions is not None:
            _check_positions(positions, batch, length)
        if self.use_rotary:
            if positions is None:
                order = self.token_order(length) if isinstance(start, int) else None
                positions = jnp.asarray(start)[..., None] + (jnp.arange(length) if order is None else order)
            query = late(rotary_embedding(query, positions, self.rope_theta))
            key = late(rotary_embedding(key, positions, self.rope_theta))
        return query, key, value

    def _project(self, out: jax.Array) -> jax.Array:
        """The module's output [B, T, model_dim]: out_proj of the attention's result [B, T, num_heads, head_dim]."""
        out = self.out_proj(out.reshape(*out.shape[:2], self.num_heads * self.head_dim))
        return checkpoint_name(out.astype(self.dtype), PROJECTION)


def _parameter_dtypes() -> tuple[str, ...]:
    return (*DTYPES, "float64") if jax.config.jax_enable_x64 else DTYPES


def as_mask(mask: jax.Array | masks.Mask, q_length: int, kv_length: int) -> masks.Mask:
    """A call's mask, an array or a Mask, as a Mask. Raises TypeError or ValueError for an array of wrong dtype or
    shape.

    q_length, kv_length: of the call, to which the array must broadcast.
    """
    if isinstance(mask, masks.Mask):
        return mask
    dense = named_dense("mask", mask)
    if dense.array.shape[2] not in (1, q_length) or dense.array.shape[3] not in (1, kv_length):
        want = f"a shape broadcastable to [batch, heads, {q_length}, {kv_length}]"
        raise ValueError(f"mask: got shape {mask.shape}, want {want}")
    return dense


def _check_positions(positions: jax.Array, batch: int, length: int) -> None:
    is_array("positions", positions, "integers [length] or [batch, length]")
    if positions.shape not in ((length,), (batch, length)):
        raise ValueError(f"positions: got shape {positions.shape}, want [length] or [batch, length] = {batch, length}")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"positions: got dtype {positions.dtype}, want integers")


def _check_rotary_positions(positions: Any, shape: tuple[int, ...]) -> None:
    """Raises TypeError or ValueError unless positions are numbers [T] or [..., T], for an x [..., T, H, D] of `shape`.

    Axes before T may have length 1.
    """
    is_array("positions", positions, "an array of positions")
    if not (jnp.issubdtype(positions.dtype, jnp.integer) or jnp.issubdtype(positions.dtype, jnp.floating)):
        raise TypeError(f"positions: got dtype {positions.dtype}, want integers or floats")
    if len(shape) < 3:
        raise ValueError(f"x: got shape {shape}, want [..., length, heads, head_dim]")
    outer, found = shape[:-3], positions.shape
    fits = len(found) in range(1, len(outer) + 2) and found[-1] == shape[-3]
    own = outer[len(outer) - len(found) + 1 :]
    if not fits or any(got not in (1, want) for got, want in zip(found[:-1], own, strict=True)):
        raise ValueError(
            f"positions: got shape {found}, want [length] = {shape[-3:-2]} or [..., length] = {shape[:-2]}"
        )


def _is_for_decoding(mask: Any, batch: int) -> bool:
    """Whether decode_attention serves the mask: None, or a Mask or bool array whose batch has length 1 or `batch`."""
    if mask is None:
        return True
    if isinstance(mask, masks.Mask):
        return mask.batch in (1, batch)
    return getattr(mask, "dtype", None) == jnp.bool_ and (len(mask.shape) < 4 or mask.shape[0] in (1, batch))
