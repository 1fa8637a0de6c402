"""The types of the block spec rows of ring_attention. Each type checks its values, like the types in specs.py."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingCall:
    """The facts of a ring_attention call that determine its row.

    tokens: the number of tokens on one device. is_windowed: whether the call has a window.
    """

    tokens: int
    is_windowed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingCosts:
    """The costs from which ring_attention predicts the time of each strategy: see ops/ring/planning/costs.py.

    All rates and times are of one device. Bytes are of sent or copied arrays. A backward's time is the time of a
    differentiated call minus the time of its forward.

    forward_flops, backward_flops: FLOP/s of attention. ring_backward_flops: of a ring's backward, whose steps add to
      float32 arrays. halo_forward_flops, halo_backward_flops: of the calls of a halo; other strategies under a window
      have them too, except an exchange of heads. all_gather_forward_flops, all_gather_backward_flops: of the calls with
      all keys.
    link: bytes/s that a device sends.
    ring_start, ring_step: seconds of a forward, and of each of its steps. ring_backward_step: seconds of each step
      of a backward.
    ring_copies: bytes/s of the passes over queries in a backward's step. merged_copies, merged_backward_copies: of the
      passes where XLA merges the results of a step.
    all_to_all_start, all_to_all_backward: seconds of a forward and of a backward.
    halo_start, halo_chunk, halo_backward_start, halo_backward_chunk: seconds, and seconds for each chunk of a device.
    all_gather_start, all_gather_backward: seconds.
    mask_token, mask_backward_token: seconds for each query of a step for the block lists of a mask. mask_start: seconds
      of a mask without a ring.
    uneven: the pairs of the busiest device over the mean, if documents that are unknown while tracing are in a layout
      for one sequence. live: the fraction of pairs that such documents, or a mask, are assumed to leave.
    """

    forward_flops: float
    backward_flops: float
    ring_backward_flops: float
    halo_forward_flops: float
    halo_backward_flops: float
    all_gather_forward_flops: float
    all_gather_backward_flops: float
    link: float
    ring_start: float
    ring_step: float
    ring_backward_step: float
    ring_copies: float
    merged_copies: float
    merged_backward_copies: float
    all_to_all_start: float
    all_to_all_backward: float
    halo_start: float
    halo_chunk: float
    halo_backward_start: float
    halo_backward_chunk: float
    all_gather_start: float
    all_gather_backward: float
    mask_token: float
    mask_backward_token: float
    mask_start: float
    uneven: float
    live: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"RingCosts.{field.name}={getattr(self, field.name)} must be above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingRow:
    """The options of a ring_attention. The first row that matches a call is used.

    costs: with strategy="auto", the strategy with the least predicted time is used.
    sends_ahead: the number of steps by which a ring sends keys and values before the step that needs them.
    permutes_up_to: up to this many devices exchange heads by permutes, more devices by all-to-alls, in all strategies
      that exchange heads.
    max_tokens: matches calls with at most this number of tokens on a device; None matches any.
    is_windowed: True matches only calls with a window, False only calls without; None matches both.
    """

    costs: RingCosts
    sends_ahead: int = 1
    permutes_up_to: int = 4
    max_tokens: int | None = None
    is_windowed: bool | None = None

    def __post_init__(self) -> None:
        if self.sends_ahead < 1:
            raise ValueError(f"RingRow.sends_ahead={self.sends_ahead} must be 1 or more")
        if self.permutes_up_to < 0:
            raise ValueError(f"RingRow.permutes_up_to={self.permutes_up_to} must be 0 or more")

    def serves(self, call: RingCall) -> bool:
        is_short = self.max_tokens is None or call.tokens <= self.max_tokens
        return is_short and self.is_windowed in (None, call.is_windowed)
