"""Dilated attention as nnx modules, and LongNet, a decoder with dilated attention."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_kernels.models.config import TransformerConfig
from jax_kernels.models.layers.attention import KVCache, MultiHeadAttention
from jax_kernels.models.parallel.sharding import ShardingRules, sequence_devices, share_sequence
from jax_kernels.models.transformer import Block, Transformer
from jax_kernels.ops.checks import check_flags, check_names
from jax_kernels.ops.dilated.checks import check_pattern
from jax_kernels.ops.dilated.dilated_attention import dilated_attention
from jax_kernels.ops.dilated.sequence_parallel import sequence_parallel_dilated_attention
from jax_kernels.plain_numbers import plain_arguments
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["DilatedAttention", "LongNet", "LongNetConfig", "MultiHeadDilatedAttention"]


class DilatedAttention(nnx.Module):
    """dilated_attention with a fixed pattern, as a module without parameters.

    Args:
      segment_lengths, dilation_rates: of each branch, in which every rate-th token of a segment takes part.
      is_causal: whether a token attends only to itself and to earlier tokens.
      heads: "all": every head runs every branch; "groups": each branch serves one group of the heads.
      combine: "lse" weights the branches' outputs by the softmax of their log-sum-exps; "mean" averages them.
      layout: "overlap": each branch cuts the whole sequence into segments of its length. "partition": segments of these
        lengths follow one another.
      order: None, or "hilbert": positions in a segment follow a Hilbert curve.
      stop_gradient_weights: whether the branches' weights pass no gradient.
      implementation: as in dilated_attention, which has the details of all arguments.

    Raises:
      ValueError, TypeError: as dilated_attention, for its pattern.
    """

    @plain_arguments
    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        is_causal: bool = False,
        heads: str = "all",
        combine: str = "lse",
        layout: str = "overlap",
        order: str | None = None,
        stop_gradient_weights: bool = False,
        implementation: str | None = None,
    ) -> None:
        check_flags(is_causal=is_causal)
        check_names(implementation=implementation)
        check_pattern(
            segment_lengths, dilation_rates, heads, combine, layout, order, stop_gradient_weights=stop_gradient_weights
        )
        self.segment_lengths = tuple(segment_lengths)
        self.dilation_rates = tuple(dilation_rates)
        self.is_causal = is_causal
        self.heads = heads
        self.combine = combine
        self.layout = layout
        self.order = order
        self.stop_gradient_weights = stop_gradient_weights
        self.implementation = implementation

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Attention of query [B, T, H, D] to key and value [B, T, Hkv, D]: returns [B, T, H, D]. segment_ids: int32 [B,
        T].
        """
        return dilated_attention(
            query,
            key,
            value,
            segment_ids=segment_ids,
            segment_lengths=self.segment_lengths,
            dilation_rates=self.dilation_rates,
            is_causal=self.is_causal,
            heads=self.heads,
            combine=self.combine,
            layout=self.layout,
            order=self.order,
            stop_gradient_weights=self.stop_gradient_weights,
            implementation=self.implementation,
        )


class MultiHeadDilatedAttention(MultiHeadAttention):
    """MultiHeadAttention by dilated_attention, with MAGNETO's LayerNorm and initialisation.

    Parameters: as in MultiHeadAttention; with layer_norm also out_norm.scale and out_norm.bias [num_heads * head_dim].

    Args:
      model_dim, num_heads, num_kv_heads, head_dim, use_rotary, rope_theta, qk_norm_eps, dtype, param_dtype, precision,
        scaling, fp8_scaling, amax_history_length, projection_implementation, rngs: as in MultiHeadAttention.
      segment_lengths, dilation_rates, is_causal, heads, combine, layout, order, stop_gradient_weights,
        implementation: the pattern of the branches, as in DilatedAttention.
      sequence_axis: a mesh axis that shards the tokens, if the mesh of jax.set_mesh or of a jax.shard_map around the
        call has it. The attention is then sequence_parallel_dilated_attention. The tokens keep their order: each device
        has a contiguous shard. rules: the mesh axes that shard the batch; None for ShardingRules().
      layer_norm: whether there is a LayerNorm over all heads before out_proj; layer_norm_eps: its epsilon.
      gamma: None for LeCun normal kernels. A number for MAGNETO's Xavier normal kernels; gamma multiplies the kernels
        of v_proj and out_proj. MAGNETO uses sqrt(log(2 * layers)) for a decoder.

    Raises:
      ValueError, TypeError: an argument is wrong; the error names it.

    Source: Wang et al., "Foundation Transformers" (2022), arXiv:2210.06423.
    """

    @plain_arguments
    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        *,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        use_rotary: bool = True,
        rope_theta: float = 10000.0,
        qk_norm_eps: float | None = None,
        is_causal: bool = True,
        heads: str = "all",
        combine: str = "lse",
        layout: str = "overlap",
        order: str | None = None,
        stop_gradient_weights: bool = False,
        layer_norm: bool = False,
        layer_norm_eps: float = 1e-5,
        gamma: float | None = None,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        implementation: str | None = None,
        projection_implementation: str | None = None,
        precision: str | None = None,
        scaling: str | None = None,
        fp8_scaling: str = "dynamic",
        amax_history_length: int | None = None,
        sequence_axis: str | None = None,
        rules: ShardingRules | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        _check_magneto("", layer_norm, gamma)
        self.attention = DilatedAttention(
            segment_lengths,
            dilation_rates,
            is_causal=is_causal,
            heads=heads,
            combine=combine,
            layout=layout,
            order=order,
            stop_gradient_weights=stop_gradient_weights,
            implementation=implementation,
        )
        super().__init__(
            model_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            use_rotary=use_rotary,
            rope_theta=rope_theta,
            qk_norm_eps=qk_norm_eps,
            is_causal=is_causal,
            dtype=dtype,
            param_dtype=param_dtype,
            implementation=implementation,
            projection_implementation=projection_implementation,
            precision=precision,
            scaling=scaling,
            fp8_scaling=fp8_scaling,
            amax_history_length=amax_history_length,
            sequence_axis=sequence_axis,
            sequence_layout="contiguous",
            rules=rules,
            rngs=rngs,
        )
        if heads == "groups" and len(self.attention.segment_lengths) > num_heads:
            raise ValueError(
                f"num_heads={num_heads} must be at least the number of segment_lengths with heads='groups'"
            )
        norm = {"epsilon": layer_norm_eps, "dtype": self.dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.out_norm = nnx.LayerNorm(self.num_heads * self.head_dim, **norm) if layer_norm else None
        if gamma is not None:
            gains = ((self.q_proj, 1.0), (self.k_proj, 1.0), (self.v_proj, gamma), (self.out_proj, gamma))
            for projection, gain in gains:
                kernel = projection.kernel
                initialize = nnx.initializers.variance_scaling(gain**2, "fan_avg", "normal")
                kernel[...] = initialize(rngs.params(), kernel.shape, kernel.dtype)

    def init_cache(self, batch: int, max_length: int, dtype: Any = None) -> KVCache:
        raise NotImplementedError("init_cache: dilated attention has no cache; run the whole sequence")

    @under_defaults
    def __call__(  # type: ignore[override]
        self, x: jax.Array, *, segment_ids: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """The attention of x to itself: [B, T, model_dim] in the module's dtype.

        Args:
          x: [B, T, model_dim].
          segment_ids: int32 [B, T]: the ids of packed sequences. A token attends only to tokens with its id. The
            pattern of the branches goes by the indices in x.
          positions: integers [T] or [B, T], for the rotary embedding only; None for the tokens' indices.

        Returns:
          [B, T, model_dim] in dtype.

        Raises:
          ValueError: x or positions have the wrong shape.
          TypeError: x has no floats, or positions are not integers.
        """
        arrays = self._heads(x, 0, positions)
        if sequence_devices(self.sequence_axis) == 1:
            return self._project(self.attention(*arrays, segment_ids=segment_ids))
        assert self.sequence_axis is not None
        # A head's offset within a branch depends on the head's index. If the heads were sharded, each device would need
        # its own program, with the ring's sends in a conditional in which devices take different branches. So every
        # device has all heads.
        out = share_sequence(
            self._dilated_ring, *arrays, segment_ids, axis=self.sequence_axis, rules=self.rules, heads_alike=False
        )
        return self._project(out)

    def _dilated_ring(
        self, query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """sequence_parallel_dilated_attention with the module's pattern, for one device's tokens inside shard_map."""
        of = self.attention
        assert self.sequence_axis is not None
        return sequence_parallel_dilated_attention(
            query,
            key,
            value,
            axis_name=self.sequence_axis,
            segment_lengths=of.segment_lengths,
            dilation_rates=of.dilation_rates,
            is_causal=of.is_causal,
            heads=of.heads,
            combine=of.combine,
            layout=of.layout,
            order=of.order,
            stop_gradient_weights=of.stop_gradient_weights,
            segment_ids=segment_ids,
            implementation=of.implementation,
        )

    def _project(self, out: jax.Array) -> jax.Array:
        if self.out_norm is not None:
            out = self.out_norm(out.reshape(*out.shape[:2], self.num_heads * self.head_dim))
        return super()._project(out)


def _check_magneto(prefix: str, layer_norm: Any, gamma: Any) -> None:
    """Raises TypeError or ValueError for a wrong layer_norm or gamma. prefix: comes before its name in an error."""
    if not isinstance(layer_norm, bool):
        raise TypeError(f"{prefix}layer_norm={layer_norm!r} must be a bool")
    if gamma is None:
        return
    if isinstance(gamma, bool) or not isinstance(gamma, numbers.Real | jax.Array):
        raise TypeError(f"{prefix}gamma={gamma!r} must be a number, or None")
    if not 0 < float(gamma) < math.inf:
        raise ValueError(f"{prefix}gamma={gamma} must be positive and finite, or None")


@dataclasses.dataclass(frozen=True)
class LongNetConfig(TransformerConfig):
    """The shape of a LongNet: a TransformerConfig, and the pattern of its dilated attention.

    segment_lengths, dilation_rates, heads, combine, layout, order: the branches, as in DilatedAttention. layer_norm:
    whether there is a LayerNorm before each out_proj. gamma: a factor of the kernels of v_proj and out_proj, whose
    initialisation is then Xavier normal; None for LeCun normal kernels. sequence_strategy: "auto". sequence_layout:
    "contiguous", or None for the same.

    A bad field raises ValueError or TypeError, which names it.
    """

    segment_lengths: Sequence[int] = (2048, 4096, 8192, 16384, 32768)
    dilation_rates: Sequence[int] = (1, 2, 4, 6, 12)
    heads: str = "all"
    combine: str = "lse"
    layout: str = "overlap"
    order: str | None = None
    layer_norm: bool = False
    gamma: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_pattern(self.segment_lengths, self.dilation_rates, self.heads, self.combine, self.layout, self.order)
        if self.heads == "groups" and len(self.segment_lengths) > self.num_heads:
            raise ValueError(
                f"LongNetConfig.segment_lengths={self.segment_lengths} must be at most num_heads={self.num_heads} "
                "with heads='groups'"
            )
        _check_magneto("LongNetConfig.", self.layer_norm, self.gamma)
        if self.sequence_strategy != "auto":
            raise ValueError(f"LongNetConfig.sequence_strategy={self.sequence_strategy!r} must be 'auto'")
        if self.sequence_layout not in (None, "contiguous"):
            raise ValueError(f"LongNetConfig.sequence_layout={self.sequence_layout!r} must be 'contiguous' or None")
        object.__setattr__(self, "segment_lengths", tuple(self.segment_lengths))
        object.__setattr__(self, "dilation_rates", tuple(self.dilation_rates))


class LongNetBlock(Block):
    """A Block whose attention is MultiHeadDilatedAttention."""

    def _attention(self, config: Any, rules: ShardingRules, rngs: nnx.Rngs) -> MultiHeadAttention:
        return MultiHeadDilatedAttention(
            config.model_dim,
            config.num_heads,
            segment_lengths=config.segment_lengths,
            dilation_rates=config.dilation_rates,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            heads=config.heads,
            combine=config.combine,
            layout=config.layout,
            order=config.order,
            layer_norm=config.layer_norm,
            gamma=config.gamma,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            implementation=config.implementation,
            projection_implementation=config.projection_implementation,
            precision=config.precision,
            scaling=config.scaling,
            fp8_scaling=config.fp8_scaling,
            amax_history_length=config.amax_history_length,
            sequence_axis=config.sequence_axis,
            rules=rules,
            rngs=rngs,
        )


class LongNet(Transformer):
    """A Transformer whose blocks have dilated attention.

    Its parameters are the same as Transformer's; with config.layer_norm also layers.N.attention.out_norm.scale and
    .bias. It has no cache: init_cache raises, and generate runs the whole sequence again for each token.

    With order="hilbert", a segment that the end of the sequence cuts has another grid. Therefore generate pads the
    sequence to whole segments: its logits equal the logits of a call on whole segments, for any max_new_tokens. It
    raises ValueError if prompts and max_new_tokens together are shorter than a segment with a dilation rate above 1.

    Args:
      config: a LongNetConfig.
      rules, rngs: as in Transformer.

    Source: Ding et al., "LongNet: Scaling Transformers to 1,000,000,000 Tokens" (2023), arXiv:2307.02486.
    """

    block_type = LongNetBlock
    config_type = LongNetConfig

    def next_logits(self, tokens: jax.Array, lengths: jax.Array, more: int) -> tuple[Any, Any]:
        """((logits, tokens) after the prompts, advance): the interface for `generate` of a model without a cache.

        tokens: int32 [B, P], the prompts. lengths: int32 [B], their lengths. more: the largest number of tokens after
        the prompts. advance(token [B], index of the token after the prompt, from 0, tokens so far) returns (logits of
        the next token, tokens with the new one). Logits are float32 [B, vocab_size].

        The tokens so far, padded at the end, replace a cache, and the model runs on all of them for each new token.
        Causal attention ignores padding at the end.
        """
        devices, length = sequence_devices(self.config.sequence_axis), _in_whole_segments(self.config, tokens, more)
        whole = -(-length // devices) * devices
        tokens = jnp.pad(tokens, ((0, 0), (0, whole - tokens.shape[1])))

        def logits(tokens: jax.Array, last: jax.Array) -> jax.Array:
            x, order, _ = self._hidden(tokens, None)
            x = x if order is None else x[:, np.argsort(order)]
            return self._logits(jnp.take_along_axis(x, last[:, None, None], axis=1))[:, 0]

        def advance(token: jax.Array, index: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            place = lengths + index
            tokens = tokens.at[jnp.arange(len(token)), place].set(token)
            return logits(tokens, place), tokens

        return (logits(tokens, lengths - 1), tokens), advance


def _in_whole_segments(config: Any, tokens: jax.Array, more: int) -> int:
    """The length to which prompts and new tokens are padded, so that further padding has no effect on their logits.

    tokens: the prompts [B, P]. more: the largest number of new tokens. Without order="hilbert" they need no padding: P
    + more. With it, no segment of a branch with a rate above 1 may be cut, because the Hilbert curve over fewer tokens
    differs.

    Raises ValueError for a segment longer than prompts and new tokens together: they cannot fill it.
    """
    length = tokens.shape[1] + more
    if config.order is None:
        return length
    is_partition = config.layout == "partition"
    padded, start = length, 0
    for size, rate in zip(config.segment_lengths, config.dilation_rates, strict=True):
        if rate > 1 and start < length:  # at rate 1 the order changes nothing
            if size > length:
                raise ValueError(
                    f"order: got {config.order!r} with a segment of {size} tokens, longer than the {length} tokens of "
                    "prompts and max_new_tokens, want them to fill it: a cut segment has another grid"
                )
            padded = max(padded, start + size if is_partition else -(-length // size) * size)
        start += size if is_partition else 0
    return padded
