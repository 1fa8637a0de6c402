"""The result of an analysis: the uses of ops, the other matmuls, and the advice."""

import dataclasses
from typing import Any

from jax_kernels.analysis.costs import Cost
from jax_kernels.dispatch import Plan, Request

__all__ = ["Advice", "Analysis", "OpUse", "shape_text"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpUse:
    """Equal calls of an op in the analysed function.

    op: its name. shape: the call's sizes and limits in words. request: the call without its arrays. plan: the
    implementation, its blocks and the reasons. forward, backward: the runs of each in one call of the function; a
    rematerialized forward counts again. The backward of a matmul consists of further matmuls, each with its own OpUse.
    cost: the FLOPs and bytes of all runs; None for symbolic sizes. bound_ms: the least time of all runs by the rates of
    the device's data sheet; None if these are unknown. ms: the measured time of all runs; None without measure=True, or
    if a run failed. share: the part of the function's measured time, else of the sum of all bounds; None if unknown.
    sent_bytes: the bytes that a device sends to others in all runs of ring_attention; None for other ops.
    """

    op: str
    shape: str
    request: Request
    plan: Plan
    forward: int
    backward: int
    cost: Cost | None
    bound_ms: float | None
    ms: float | None = None
    share: float | None = None
    sent_bytes: float | None = None

    @property
    def roofline(self) -> float | None:
        """bound_ms over ms: 1 is as fast as the data sheet allows. None if either is unknown."""
        return None if self.bound_ms is None or not self.ms else self.bound_ms / self.ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """A change that may make the function faster.

    kind: "dtype", "mask", "bias", "head_dim" or "fallback". op, shape: of the OpUse. text: the change and its reason.
    saves_ms: an estimate for one call of the function, from the rates of the device's data sheet; None if they are
    unknown, or for a change without an estimate. before_ms, after_ms: the measured times of one run, forward and its
    backward if there is one; None without check=True, and for changes that cannot be timed.
    """

    kind: str
    op: str
    shape: str
    text: str
    saves_ms: float | None = None
    before_ms: float | None = None
    after_ms: float | None = None

    def __str__(self) -> str:
        text = f"{self.op} ({self.shape}): {self.text}"
        if self.saves_ms is not None:
            text += f"; saves about {self.saves_ms:.3g} ms by the data sheet's rates"
        if self.before_ms is not None and self.after_ms is not None:
            text += f"; measured: {self.before_ms:.4g} ms before, {self.after_ms:.4g} ms after"
        return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analysis:
    """The ops that a function runs. str(...) is a table and the advice.

    device: the device's name. uses: the longest first. others: the work of matmuls outside of this library's ops, by
    arithmetic; matmuls: their number; others_ms: their least time by the device's rates, or None. total_ms: the
    measured time of one call of the function; None without measure=True. timer: "cupti" or "host"; None without times.
    """

    device: str
    uses: tuple[OpUse, ...]
    others: tuple[Cost, ...]
    matmuls: int
    others_ms: float | None
    advice: tuple[Advice, ...]
    total_ms: float | None = None
    timer: str | None = None

    COLUMNS = "op", "shape", "runs", "implementation", "GFLOP", "MB", "bound ms", "ms", "roofline", "share"

    def rows(self) -> list[tuple[str, ...]]:
        """The table without its head: a row of texts for each use, and one for the other matmuls."""
        rows: list[tuple[str, ...]] = []
        for use in self.uses:
            runs = f"{use.forward} + {use.backward} backward" if use.backward else f"{use.forward}"
            rows.append(
                (
                    use.op,
                    use.shape,
                    runs,
                    use.plan.implementation,
                    *_work(use.cost),
                    _figure(use.bound_ms),
                    _figure(use.ms),
                    _percent(use.roofline),
                    _percent(use.share),
                )
            )
        if self.matmuls:
            work = f"{sum(x.flops for x in self.others) / 1e9:.4g}", f"{sum(x.bytes for x in self.others) / 1e6:.4g}"
            rows.append(("other matmuls", "", f"{self.matmuls}", "JAX", *work, _figure(self.others_ms), "", "", ""))
        return rows

    def head(self) -> str:
        """A line with the device, and the measured time of the function or the origin of the times in the table."""
        if self.total_ms is not None:
            return f"{self.device}; {self.total_ms:.4g} ms a call ({self.timer} timer)"
        if any(use.ms is not None for use in self.uses):
            return f"{self.device}; each call was timed by itself ({self.timer} timer)"
        if self.uses and all(use.bound_ms is None for use in self.uses):
            return f"{self.device}; no bounds, as its rates are not known"
        return f"{self.device}; times are bounds by the data sheet's rates"

    def __str__(self) -> str:
        table = [self.COLUMNS, *self.rows()]
        widths = [max(len(row[i]) for row in table) for i in range(len(self.COLUMNS))]
        lines = ["  ".join(x.ljust(width) for x, width in zip(row, widths, strict=True)).rstrip() for row in table]
        blocks = [f"{use.op} ({use.shape}): {use.plan.config}" for use in self.uses if use.plan.config is not None]
        parts = [self.head(), *(lines if len(table) > 1 else ["no op of this library ran, and no matmul"])]
        parts += ["", "blocks:", *(f"  {line}" for line in blocks)] if blocks else []
        devices = [_devices(use) for use in self.uses if use.sent_bytes is not None]
        parts += ["", "devices:", *(f"  {line}" for line in devices)] if devices else []
        parts += ["", "advice:", *(f"  {advice}" for advice in self.advice)] if self.advice else []
        return "\n".join(parts)


def _devices(use: OpUse) -> str:
    """The strategy of a ring_attention, each device's share of its work, and the bytes that a device sends."""
    plan: Any = use.plan
    strategy, work = plan.strategy, plan.work
    if use.backward:
        strategy, work = plan.differentiated, plan.differentiated_work
    shares = [f"{100 * x:.3g} %" for x in work]
    of_devices = f"{shares[0]} each" if len(set(shares)) == 1 else ", ".join(shares)
    sent = f"a device sends {use.sent_bytes / 1e6:.4g} MB" if use.sent_bytes else "nothing is sent"
    return f"{use.op} ({use.shape}): strategy {strategy}, layout {plan.layout}; work {of_devices}; {sent}"


def _work(cost: Cost | None) -> tuple[str, str]:
    if cost is None:
        return "", ""
    most = "<= " if cost.is_bound else ""
    return f"{most}{cost.flops / 1e9:.4g}", f"{cost.bytes / 1e6:.4g}"


def _figure(x: float | None) -> str:
    return "" if x is None else f"{x:.3g}"


def _percent(x: float | None) -> str:
    return "" if x is None else f"{100 * x:.0f} %"


def shape_text(request: Any) -> str:
    """The sizes and limits of a call in words, such as "2x4096x16x128 causal bfloat16"."""
    if hasattr(request, "q_length"):
        return _attention_text(request)
    if hasattr(request, "vocabulary"):
        return f"{request.tokens}x{request.depth} @ {request.depth}x{request.vocabulary} {request.dtype}"
    if hasattr(request, "columns"):
        return f"{request.rows}x{request.columns} {request.dtype}"
    groups = f"{request.groups} groups, " if hasattr(request, "groups") else ""
    return f"{groups}{request.m}x{request.k} @ {request.k}x{request.n} {request.dtype}"


def _attention_text(request: Any) -> str:
    heads = f"{request.heads}" if request.heads == request.kv_heads else f"{request.heads}/{request.kv_heads}"
    keys = "" if request.q_length == request.kv_length else f"({request.kv_length} keys)"
    words = [f"{request.batch}x{request.q_length}{keys}x{heads}x{request.head_dim}"]
    words += ["causal"] if getattr(request, "is_causal", False) else []
    window = getattr(request, "window", None)
    words += [] if window is None else [f"window {window[0]},{window[1]}"]
    words += ["mask"] if getattr(request, "has_mask", False) or getattr(request, "has_mask_object", False) else []
    words += [f"on {request.devices} devices"] if hasattr(request, "devices") else []
    words += ["bias"] if getattr(request, "bias_shape", None) is not None else []
    return " ".join([*words, getattr(request, "dtype", "float8_e4m3fn")])
