"""Predicts the time of each strategy of ring_attention, from FLOPs, sent bytes, and the costs of the block specs."""

import dataclasses

from jax_kernels.ops.ring.layouts import DOCUMENTS, Layout
from jax_kernels.ops.ring.traffic import pairs_of_devices
from jax_kernels.pallas.block_specs.ring_specs import RingCosts

__all__ = ["Prediction", "Sizes", "predicted"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted seconds of a strategy: `forward` without gradients, `differentiated` with the backward.

    reason: the reason, in words, why strategy="auto" does not take the strategy; None if it may.
    """

    strategy: str
    forward: float
    differentiated: float
    reason: str | None = None

    def __str__(self) -> str:
        found = f"{self.strategy} {self.forward * 1e3:.3g}, {self.differentiated * 1e3:.3g}"
        return found if self.reason is None else f"{found} (not taken: {self.reason})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The facts of a call that its time depends on. Sizes are of one device.

    steps: the number of steps of a ring. has_ids: whether documents that are unknown while tracing leave fewer pairs.
    has_mask: whether a mask leaves fewer pairs. is_merged_by_xla: whether XLA merges the results of a ring's steps.
    """

    layout: Layout
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int
    steps: int
    has_ids: bool = False
    has_mask: bool = False
    is_merged_by_xla: bool = False

    @property
    def is_windowed(self) -> bool:
        return self.layout.limits["window"] is not None

    @property
    def query_bytes(self) -> float:
        return float(self.batch * self.layout.length * self.heads * self.head_dim * self.itemsize)

    @property
    def key_bytes(self) -> float:
        """The bytes of keys and values."""
        width = self.kv_heads * (self.head_dim + self.v_head_dim)
        return float(self.batch * self.layout.length * width * self.itemsize)

    def flops(self, strategy: str, costs: RingCosts) -> tuple[float, float]:
        """(forward, backward): the FLOPs of the busiest device."""
        pairs = max(pairs_of_devices(self.layout, strategy)) * self.batch * self.heads
        if self.has_mask or self.has_ids:
            pairs *= costs.live
        if self.has_ids and strategy != "all_to_all" and self.layout.name != DOCUMENTS:
            pairs *= costs.uneven
        return 2 * (self.head_dim + self.v_head_dim) * pairs, 2 * (3 * self.head_dim + 2 * self.v_head_dim) * pairs


def predicted(sizes: Sizes, costs: RingCosts) -> dict[str, tuple[float, float]]:
    """For each strategy, (the seconds of a forward, of its backward). A strategy need not support the call."""
    return {
        "ring": _ring(sizes, costs),
        "halo": _halo(sizes, costs),
        "all_to_all": _all_to_all(sizes, costs),
        "all_gather": _all_gather(sizes, costs),
    }


def _ring(sizes: Sizes, costs: RingCosts) -> tuple[float, float]:
    """Kernels of all steps, launches, passes over queries, and the time that a send takes longer than a step."""
    flops, steps, layout = sizes.flops("ring", costs), sizes.steps, sizes.layout
    rates = costs.forward_flops, costs.ring_backward_flops
    if sizes.is_windowed:
        rates = costs.halo_forward_flops, costs.halo_backward_flops
    kernels = flops[0] / rates[0], flops[1] / rates[1]
    send, shared = sizes.key_bytes / costs.link, layout.shared / layout.length
    sends = send if layout.sends_all else shared * send, shared * send * (1 + 4 / sizes.itemsize)  # float32 gradients
    waits = [max(0.0, x - kernel / steps) * (steps - 1) for x, kernel in zip(sends, kernels, strict=True)]
    forward = costs.ring_start + steps * costs.ring_step
    backward = costs.ring_start + steps * (costs.ring_backward_step + sizes.query_bytes / costs.ring_copies)
    if sizes.is_merged_by_xla:
        forward += steps * sizes.query_bytes / costs.merged_copies
        backward += steps * sizes.query_bytes / costs.merged_backward_copies
    if sizes.has_mask:
        forward += steps * sizes.layout.length * costs.mask_token
        backward += steps * sizes.layout.length * costs.mask_backward_token
    return forward + kernels[0] + waits[0], backward + kernels[1] + waits[1]


def _halo(sizes: Sizes, costs: RingCosts) -> tuple[float, float]:
    flops, chunks = sizes.flops("halo", costs), sizes.layout.chunks
    return (
        costs.halo_start + chunks * costs.halo_chunk + flops[0] / costs.halo_forward_flops,
        costs.halo_backward_start + chunks * costs.halo_backward_chunk + flops[1] / costs.halo_backward_flops,
    )


def _all_to_all(sizes: Sizes, costs: RingCosts) -> tuple[float, float]:
    """The exchanges before and after the kernels, which hide no send; the same bytes in both directions."""
    flops, devices = sizes.flops("all_to_all", costs), sizes.layout.devices
    of_queries = sizes.query_bytes * (1 + sizes.v_head_dim / sizes.head_dim)  # queries and results
    sends = (of_queries + sizes.key_bytes) * (devices - 1) / devices / costs.link
    forward = costs.all_to_all_start + flops[0] / costs.forward_flops + sends
    backward = costs.all_to_all_backward + flops[1] / costs.backward_flops + sends
    if sizes.has_mask:
        tokens = devices * sizes.layout.length
        forward += costs.mask_start + tokens * costs.mask_token / 4
        backward += tokens * costs.mask_backward_token / 2
    return forward, backward


def _all_gather(sizes: Sizes, costs: RingCosts) -> tuple[float, float]:
    """The all-gather, and in the backward the sum of all devices' float32 gradients. Nothing hides them."""
    flops, devices = sizes.flops("all_gather", costs), sizes.layout.devices
    gather = sizes.key_bytes * (devices - 1) / costs.link
    rate = costs.halo_forward_flops if sizes.is_windowed else costs.all_gather_forward_flops
    forward = costs.all_gather_start + flops[0] / rate + gather
    return forward, costs.all_gather_backward + flops[1] / costs.all_gather_backward_flops + 3 * gather
