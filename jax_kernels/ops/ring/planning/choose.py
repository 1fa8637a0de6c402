"""The strategy of a call of ring_attention: strategy="auto" takes the strategy with the least predicted time."""

from typing import Any

from jax import export

from jax_kernels.masks import Mask
from jax_kernels.ops.ring import halo
from jax_kernels.ops.ring.layouts import DOCUMENTS, Layout
from jax_kernels.ops.ring.partial_results import WIDEST_JOINED
from jax_kernels.ops.ring.planning.costs import Prediction, Sizes, predicted
from jax_kernels.ops.ring.ring_call import RingArrays
from jax_kernels.pallas.block_specs.ring_specs import RingCosts

__all__ = ["chosen", "predictions"]

MOST_GATHERED = 2**28  # bytes of all keys and values, above which "auto" does not gather them


def chosen(strategy: str, layout: Layout, arrays: RingArrays, found: tuple[Prediction, ...]) -> tuple[str, str]:
    """(strategy of a call, strategy of the call under differentiation): "auto" is replaced by a strategy.

    strategy: the argument of ring_attention. found: from `predictions`.

    Raises:
      ValueError: the strategy is "halo", and it does not support the call.
    """
    if strategy == "halo" and (reason := _against_halo(layout, arrays)) is not None:
        raise ValueError(reason)
    if strategy != "auto":
        return strategy, strategy
    usable = [x for x in found if x.reason is None]
    forward, differentiated = (
        min(usable, key=lambda x: x.forward),
        min(usable, key=lambda x: x.differentiated),
    )
    return forward.strategy, differentiated.strategy


def predictions(
    layout: Layout, arrays: RingArrays, steps: int, costs: RingCosts, *, is_free: bool
) -> tuple[Prediction, ...]:
    """The predicted time of each strategy, the ring first. steps: the number of a ring's steps with work.

    A symbolic batch of jax.export counts as 1, and "auto" does not gather its keys, whose memory has no limit.

    is_free: whether the caller gave no sends_ahead, so that "auto" may take another strategy than "ring".
    """
    batch, _, heads, head_dim = arrays.query.shape
    has_scores = arrays.bias is not None or arrays.score_mod is not None
    needs_merges = layout.name == "zigzag" and (layout.left is not None or layout.right not in (None, 0))
    sizes = Sizes(
        layout=layout,
        batch=1 if export.is_symbolic_dim(batch) else batch,
        heads=heads,
        kv_heads=arrays.key.shape[2],
        head_dim=head_dim,
        v_head_dim=arrays.value.shape[3],
        itemsize=arrays.query.dtype.itemsize,
        steps=steps,
        has_ids=arrays.segment_ids is not None,
        has_mask=arrays.mask is not None,
        is_merged_by_xla=has_scores or (needs_merges and arrays.mask is None) or arrays.value.shape[3] > WIDEST_JOINED,
    )
    reasons: dict[str, str | None] = {
        "ring": None,
        "halo": _against_halo(layout, arrays),
        "all_to_all": _against_heads(layout, arrays),
        "all_gather": _against_gather(sizes, arrays),
    }
    if layout.devices == 1:
        reasons |= dict.fromkeys(("halo", "all_to_all", "all_gather"), "one device")
    elif layout.name == DOCUMENTS:
        reasons |= dict.fromkeys(("halo", "all_to_all", "all_gather"), "layout")
    elif not is_free:
        reasons |= dict.fromkeys(("halo", "all_to_all", "all_gather"), "sends_ahead")
    return tuple(
        Prediction(
            strategy=name,
            forward=forward,
            differentiated=forward + backward,
            reason=None if reasons[name] is None else reasons[name].split(":")[0],  # type: ignore[union-attr]
        )
        for name, (forward, backward) in predicted(sizes, costs).items()
    )


def _against_halo(layout: Layout, arrays: RingArrays) -> str | None:
    """The reason, in words for the user, why strategy="halo" does not support a call; None if it does."""
    for name in ("mask", "score_mod", "bias"):
        if getattr(arrays, name) is not None:
            return f"{name}: got one with strategy='halo', want None, or another strategy"
    return halo.reason_against(layout)


def _against_heads(layout: Layout, arrays: RingArrays) -> str | None:
    """The argument that keeps "auto" from an exchange of heads; None if "auto" may exchange heads.

    A mask does if it cannot be restricted to some heads. So does a mask that is evaluated pair by pair: a ring
    evaluates fewer of its pairs.
    """
    for name in ("query", "key"):
        if getattr(arrays, name).shape[2] % layout.devices:
            return f"heads of {name}"
    if arrays.bias is not None:
        return "bias"
    return None if arrays.mask is None or _has_heads(arrays.mask) else "mask"


def _has_heads(mask: Mask) -> bool:
    try:
        return not mask.is_evaluated and mask.of_heads(0, 1) is not None
    except NotImplementedError:
        return False


def _against_gather(sizes: Sizes, arrays: RingArrays) -> str | None:
    """The argument, or the words, that keep "auto" from gathering all keys; None if it may."""
    given: dict[str, Any] = {name: getattr(arrays, name) for name in ("mask", "score_mod", "bias")}
    if sizes.layout.name == "striped":
        return "layout"
    if export.is_symbolic_dim(arrays.query.shape[0]):
        return "symbolic batch"
    if sizes.layout.devices * sizes.key_bytes > MOST_GATHERED:
        return "memory"
    return next((name for name, value in given.items() if value is not None), None)
