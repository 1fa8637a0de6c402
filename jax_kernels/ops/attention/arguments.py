"""The types of the arguments that an op passes on to flash_attention."""

from typing import TypedDict

from jaxtyping import Array, Float, Integer

from jax_kernels.score_mod.trace import ScoreMod, ScoreModFunction

__all__ = ["AttentionArguments", "BiasedAttentionArguments"]


class AttentionArguments(TypedDict, total=False):
    """The types of flash_attention's keyword arguments, except mask, bias and return_lse."""

    is_causal: bool
    window: int | tuple[int, int] | None
    segment_ids: Integer[Array, "B T"] | tuple[Integer[Array, "B T"], Integer[Array, "B S"]] | None
    kv_lengths: Integer[Array, " B"] | None
    q_offset: int | Integer[Array, ""] | Integer[Array, " B"]
    score_mod: ScoreModFunction | ScoreMod | None
    sinks: Float[Array, " H"] | None
    scale: float | Float[Array, ""] | None
    softcap: float | None
    deterministic: bool | None
    precision: str | None
    implementation: str | None


class BiasedAttentionArguments(AttentionArguments, total=False):
    """The types of flash_attention's keyword arguments, except mask and return_lse."""

    bias: Float[Array, "*#BHTS"] | None
