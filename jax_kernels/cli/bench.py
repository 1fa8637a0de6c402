"""jax-kernels bench: times the ops' standard sizes on this machine, by each implementation."""

import base64
import dataclasses
import html
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jax_kernels.cli import UserError, WriteError, bench_sizes
from jax_kernels.cli.bench_sizes import STANDARD, StandardCall
from jax_kernels.cli.info import find_device, versions
from jax_kernels.cli.ops import OPS
from jax_kernels.files import write_whole
from jax_kernels.spelling import did_you_mean
from jax_kernels.tuning.benchmark import ImplementationTime, benchmark_implementations

__all__ = ["bench"]

# Ops without a backward: --gradients times their forward.
_FORWARD_ONLY = ("flash_attention_fp8", "decode_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The time of a standard call by one implementation, or the reason why there is none.

    call: its name. options: of the call, as on the command line. gradients: whether the backward is included. tflops:
    10**12 floating-point operations of the matmuls per second; None without a time, and for ops that are bound by
    memory. blocks: the implementation's blocks as text. tuned: whether tuning chose them.
    """

    op: str
    call: str
    options: dict[str, Any]
    gradients: bool
    implementation: str
    ms: float | None
    spread: float | None
    timer: str | None
    tflops: float | None
    blocks: str | None
    tuned: bool
    reason: str | None


def _rows(op: str, call: StandardCall, gradients: bool, seconds: float) -> list[Row]:
    """The rows of a standard call, the fastest first."""
    gradients = gradients and op not in _FORWARD_ONLY
    given = bench_sizes.arrays(op, call)
    work = bench_sizes.flops(op, given, gradients)
    times = benchmark_implementations(OPS[op].function, gradients=gradients, seconds=seconds, **given)

    def row(x: ImplementationTime) -> Row:
        return Row(
            op=op,
            call=call.name,
            options=call.values,
            gradients=gradients,
            implementation=x.implementation,
            ms=x.ms,
            spread=x.spread,
            timer=x.timer,
            tflops=None if work is None or x.ms is None else work / x.ms / 1e9,
            blocks=None if x.plan is None or x.plan.config is None else str(x.plan.config),
            tuned=x.plan is not None and x.plan.tuned is not None,
            reason=x.reason,
        )

    return [row(x) for x in times]


def bench(
    ops: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(STANDARD)}; default: all")] = None,
    gradients: Annotated[bool, typer.Option("--gradients", help="time the forward and backward together")] = False,
    seconds: Annotated[float, typer.Option(help="the time of each implementation of a call")] = 0.2,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write the results to this file")] = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", help="also write a report with plots to this file")
    ] = None,
) -> None:
    """Time the ops' standard sizes on this machine, by each implementation that serves them.

    On a GPU the times are device times. On a CPU the sizes are small, and the times are the host's.
    """
    for name in ops or ():
        if name not in STANDARD:
            raise UserError(f"op: got {name!r}, want one of {', '.join(STANDARD)}{did_you_mean(name, STANDARD)}")
    if not seconds > 0:
        raise UserError(f"--seconds: got {seconds}, want a number above 0")
    for option, path in (("--json", json_path), ("--html", html_path)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise UserError(f"{option}: got {str(path)!r}, want a file in a folder that exists")
    device = find_device(None)
    is_gpu = device.compute_capability is not None
    calls = [(op, call) for op in ops or STANDARD for call in STANDARD[op][0 if is_gpu else 1]]
    found: list[Row] = []
    progress = Console(stderr=True)
    for op, call in track(calls, f"timing on {device.name}", console=progress, transient=True):
        found += _rows(op, call, gradients, seconds)
    _show(device.name, found)
    packages = versions()
    report: dict[str, Any] = {"device": dataclasses.asdict(device), "versions": packages}
    report["results"] = [dataclasses.asdict(row) for row in found]
    if json_path is not None:
        _write("--json", json_path, json.dumps(report, indent=2) + "\n")
    if html_path is not None:
        _write("--html", html_path, _page(device.name, packages, found))


def _write(option: str, path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise WriteError(f"{option}: {path} cannot be written ({error.strerror or error})") from error


_HEADINGS = ("call", "implementation", "ms", "spread", "TFLOP/s", "")


def _cells(row: Row) -> tuple[str, ...]:
    """The cells of a row that has a time."""
    rate = "" if row.tflops is None else f"{row.tflops:.3g}"
    return (row.call, row.implementation, f"{row.ms:.4g}", f"{row.spread:.1%}", rate, "tuned" if row.tuned else "")


def _title(op: str, rows: Sequence[Row]) -> str:
    timer = next((row.timer for row in rows if row.timer), "no")
    return f"{op}, {'forward and backward' if rows[0].gradients else 'forward'}, {timer} timer"


def _by_op(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {op: [row for row in rows if row.op == op] for op in dict.fromkeys(row.op for row in rows)}


def _timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.ms is not None]


def _reasons(rows: Sequence[Row]) -> list[str]:
    """A line for each implementation and reason against it, with the calls that it concerns if it is not all."""
    calls: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason is not None:
            calls.setdefault((row.implementation, row.reason), []).append(row.call)
    every = len({row.call for row in rows})
    return [
        f"not {name}{'' if len(of) == every else f' ({", ".join(of)})'}: {reason}"
        for (name, reason), of in calls.items()
    ]


def _show(device: str, rows: Sequence[Row]) -> None:
    console = Console()
    console.width = max(console.width, 110)  # a table is not cut off, in a file or in a narrow window
    for op, of_op in _by_op(rows).items():
        table = Table(*_HEADINGS, title=f"{_title(op, of_op)}, {device}")
        for row in _timed(of_op):
            table.add_row(*_cells(row))
        console.print(table)
        for line in _reasons(of_op):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()


def _page(device: str, packages: dict[str, str | None], rows: Sequence[Row]) -> str:
    """The report as one HTML page, with a picture and a table for each op."""
    known = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
    parts = [f"<h1>jax_kernels on {html.escape(device)}</h1>\n<p>{html.escape(known)}</p>"]
    for op, of_op in _by_op(rows).items():
        parts.append(f"<h2>{html.escape(_title(op, of_op))}</h2>")
        if _timed(of_op):
            parts.append(f'<img alt="{op}" src="data:image/png;base64,{_picture(of_op)}">')
        lines = [_line("th", _HEADINGS), *(_line("td", _cells(row)) for row in _timed(of_op))]
        parts.append(f"<table>\n{chr(10).join(lines)}\n</table>")
        parts += [f"<p>{html.escape(line)}</p>" for line in _reasons(of_op)]
    style = "body{font:14px sans-serif;margin:2em}td,th{padding:2px 10px;text-align:left}img{max-width:100%}"
    head = f'<meta charset="utf-8"><title>jax_kernels</title><style>{style}</style>'
    return f"<!doctype html>\n<html><head>{head}</head><body>\n{chr(10).join(parts)}\n</body></html>\n"


def _line(cell: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{html.escape(text)}</{cell}>" for text in cells) + "</tr>"


def _picture(rows: Sequence[Row]) -> str:
    """A PNG in base64: for each implementation, the TFLOP/s of each call, or the ms of an op without them."""
    from matplotlib.figure import Figure

    timed = _timed(rows)
    is_rate = all(row.tflops is not None for row in timed)
    calls = list(dict.fromkeys(row.call for row in timed))
    names = list(dict.fromkeys(row.implementation for row in timed))
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        of_name = [row for row in timed if row.implementation == name]
        at = [calls.index(row.call) + (number - (len(names) - 1) / 2) * width for row in of_name]
        axes.bar(at, [float((row.tflops if is_rate else row.ms) or 0) for row in of_name], width, label=name)
    axes.set_xticks(range(len(calls)), calls, rotation=30, ha="right")
    axes.set_ylabel("TFLOP/s" if is_rate else "ms")
    axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return base64.b64encode(file.getvalue()).decode()
