"""The text of `jax-kernels bench`: tables, and the HTML page with its plots."""

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

from jax_kernels.cli.bench.rows import Roofs, Row

__all__ = ["HEADINGS", "by_op", "cells", "html_page", "reasons", "timed", "title"]

HEADINGS = ("call", "implementation", "ms", "spread", "TFLOP/s", "")


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a row that has a time."""
    rate = "" if row.tflops is None else f"{row.tflops:.3g}"
    return (row.call, row.implementation, f"{row.ms:.4g}", f"{row.spread:.1%}", rate, "tuned" if row.tuned else "")


def title(op: str, rows: Sequence[Row]) -> str:
    timer = next((row.timer for row in rows if row.timer), "no")
    return f"{op}, {'forward and backward' if rows[0].gradients else 'forward'}, {timer} timer"


def by_op(rows: Sequence[Row]) -> dict[str, list[Row]]:
    name = lambda row: row.op if row.density is None else f"{row.op}, masks of blocks"
    return {op: [row for row in rows if name(row) == op] for op in dict.fromkeys(map(name, rows))}


def timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.ms is not None]


def reasons(rows: Sequence[Row]) -> list[str]:
    """A line for each implementation and reason why it was not timed; it lists the calls unless they are all calls."""
    calls: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.reason is not None:
            calls.setdefault((row.implementation, row.reason), []).append(row.call)
    every = len({row.call for row in rows})
    return [
        f"not {name}{'' if len(of) == every else f' ({", ".join(of)})'}: {reason}"
        for (name, reason), of in calls.items()
    ]


def html_page(device: str, packages: dict[str, str | None], rows: Sequence[Row], roofs: Roofs | None = None) -> str:
    """The report as one HTML page: a roofline, a plot of densities, and a plot and a table for each op.

    roofs: for the roofline; None for none. Rows without a density or an intensity are left out of these plots.
    """
    known = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
    parts = [f"<h1>jax_kernels on {html.escape(device)}</h1>\n<p>{html.escape(known)}</p>"]
    if roofs is not None:
        parts += ["<h2>Roofline</h2>", _image("roofline", roofline(rows, roofs))]
    if any(row.density is not None and row.ms is not None for row in rows):
        parts += ["<h2>Speed-up by the density of the mask</h2>", _image("densities", densities(rows))]
    for op, of_op in by_op(rows).items():
        parts.append(f"<h2>{html.escape(title(op, of_op))}</h2>")
        if timed(of_op):
            parts.append(_image(op, _picture(of_op)))
        lines = [_line("th", HEADINGS), *(_line("td", cells(row)) for row in timed(of_op))]
        parts.append(f"<table>\n{chr(10).join(lines)}\n</table>")
        parts += [f"<p>{html.escape(line)}</p>" for line in reasons(of_op)]
    style = "body{font:14px sans-serif;margin:2em}td,th{padding:2px 10px;text-align:left}img{max-width:100%}"
    head = f'<meta charset="utf-8"><title>jax_kernels</title><style>{style}</style>'
    return f"<!doctype html>\n<html><head>{head}</head><body>\n{chr(10).join(parts)}\n</body></html>\n"


def _line(cell: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{html.escape(text)}</{cell}>" for text in cells) + "</tr>"


def _image(name: str, png: str) -> str:
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{png}">'


def roofline(rows: Sequence[Row], roofs: Roofs) -> str:
    """A PNG in base64: the TFLOP/s of each row over its operations per byte, below the measured roofs."""
    shown = [row for row in timed(rows) if row.intensity is not None and row.tflops is not None]
    figure, axes = _axes()
    ridge = roofs.tflops / roofs.terabytes
    intensities = [row.intensity or ridge for row in shown]
    low, high = min([ridge / 4, *intensities]) / 2, max([ridge * 4, *intensities]) * 2
    roof = [min(x * roofs.terabytes, roofs.tflops) for x in (low, ridge, high)]
    label = f"roofs: {roofs.tflops:.3g} TFLOP/s, {roofs.terabytes:.3g} TB/s"
    axes.plot((low, ridge, high), roof, color="black", linewidth=1, label=label)
    for op, of_op in by_op(shown).items():
        for is_peer, marker in ((False, "o"), (True, "x")):
            of_kind = [row for row in of_op if row.is_peer == is_peer]
            if of_kind:
                name = f"{op}, other libraries" if is_peer else op
                axes.scatter([x.intensity for x in of_kind], [x.tflops for x in of_kind], marker=marker, label=name)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte of arguments and results", ylabel="TFLOP/s")
    axes.legend(fontsize=8)
    return _png(figure)


def speed_ups(rows: Sequence[Row]) -> dict[str, dict[float, float]]:
    """By implementation, the time under the densest mask over the time at each density."""
    found: dict[str, dict[float, float]] = {}
    for row in timed(rows):
        if row.density is not None:
            found.setdefault(row.implementation, {})[row.density] = float(row.ms or 0)
    return {name: {x: of[max(of)] / ms for x, ms in sorted(of.items())} for name, of in found.items()}


def densities(rows: Sequence[Row]) -> str:
    """A PNG in base64: the speed-up of each implementation over the part of the mask's blocks that are kept."""
    figure, axes = _axes()
    found = speed_ups(rows)
    for name, of in found.items():
        axes.plot(list(of), list(of.values()), marker="o", label=name)
    every = sorted({x for of in found.values() for x in of})
    axes.plot(every, [1 / x for x in every], color="gray", linestyle="--", label="proportional to the density")
    axes.set(
        xscale="log", yscale="log", xlabel="part of the blocks that are kept", ylabel="times the speed at all blocks"
    )
    axes.set_xticks(every, [f"{x:.3g}" for x in every])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    return _png(figure)


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    return figure, figure.subplots()


def _png(figure: Any) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return base64.b64encode(file.getvalue()).decode()


def _picture(rows: Sequence[Row]) -> str:
    """A PNG in base64: for each implementation, the TFLOP/s of each call, or the ms of an op without them."""
    from matplotlib.figure import Figure

    shown = timed(rows)
    is_rate = all(row.tflops is not None for row in shown)
    calls = list(dict.fromkeys(row.call for row in shown))
    names = list(dict.fromkeys(row.implementation for row in shown))
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        of_name = [row for row in shown if row.implementation == name]
        at = [calls.index(row.call) + (number - (len(names) - 1) / 2) * width for row in of_name]
        axes.bar(at, [float((row.tflops if is_rate else row.ms) or 0) for row in of_name], width, label=name)
    axes.set_xticks(range(len(calls)), calls, rotation=30, ha="right")
    axes.set_ylabel("TFLOP/s" if is_rate else "ms")
    axes.legend()
    return _png(figure)
