"""jax-kernels bench: times the ops' standard sizes on this machine, by each implementation."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jax_kernels.cli import UserError
from jax_kernels.cli.bench.page import HEADINGS, by_op, cells, html_page, reasons, timed, title
from jax_kernels.cli.bench.rows import Roofs, Row, density_rows, measure_roofs, rows_of
from jax_kernels.cli.bench.sizes import STANDARD
from jax_kernels.cli.info import find_device, versions
from jax_kernels.cli.ops import SHORT_NAMES
from jax_kernels.cli.outputs import check_output, json_text, print_table, write_output
from jax_kernels.cli.paths import path_of
from jax_kernels.spelling import did_you_mean

__all__ = ["bench"]


def bench(
    ops: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(STANDARD)}; default: all")] = None,
    gradients: Annotated[bool, typer.Option("--gradients", help="time the forward and backward together")] = False,
    with_peers: Annotated[
        bool, typer.Option("--peers", help="also time PyTorch, FlexAttention and jax.nn, where they are installed")
    ] = False,
    density: Annotated[
        bool, typer.Option("--density", help="also time attention under masks that keep fewer and fewer blocks")
    ] = False,
    seconds: Annotated[float, typer.Option(help="the time of each implementation of a call")] = 0.2,
    json_path: Annotated[
        Path | None, typer.Option("--json", parser=path_of("--json"), help="also write the results to this file")
    ] = None,
    html_path: Annotated[
        Path | None,
        typer.Option("--html", parser=path_of("--html"), help="also write a report with plots to this file"),
    ] = None,
) -> None:
    """Time the ops' standard sizes on this machine, by each implementation that serves them.

    On a GPU the times are device times. On a CPU the sizes are small, and the times are the host's. The page of --html
    has a roofline, and with --density a plot of the speed over the density of the mask.
    """
    ops = [SHORT_NAMES.get(name, name) for name in ops or ()]
    for name in ops:
        if name not in STANDARD:
            raise UserError(f"op: got {name!r}, want one of {', '.join(STANDARD)}{did_you_mean(name, STANDARD)}")
    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds: got {seconds}, want a finite number above 0")
    check_output("--json", json_path)
    check_output("--html", html_path)
    if json_path is not None and html_path is not None and json_path.resolve() == html_path.resolve():
        raise UserError(f"--html: got {str(html_path)!r}, the file of --json, want another file")
    device = find_device(None)
    is_gpu = device.compute_capability is not None
    calls = [(op, call) for op in ops or STANDARD for call in STANDARD[op][0 if is_gpu else 1]]
    found: list[Row] = []
    interrupted: KeyboardInterrupt | None = None
    try:
        for rows in _rows(calls, device.name, gradients, seconds, with_peers):
            found += rows
        found += density_rows(is_gpu, seconds, with_peers) if density else []
    except KeyboardInterrupt as error:  # the rows so far are kept
        interrupted = error
    shown = found if Console(stderr=True).is_terminal else [row for row in found if row.density is not None]
    _show(device.name, shown)
    packages = versions()
    report: dict[str, Any] = {"device": dataclasses.asdict(device), "versions": packages}
    roofs: Roofs | None = None
    if html_path is not None and not interrupted and any(row.intensity is not None for row in found):
        roofs = measure_roofs(is_gpu, seconds)
        report["roofs"] = dataclasses.asdict(roofs)
    report["complete"] = interrupted is None
    report["results"] = [dataclasses.asdict(row) for row in found]
    if json_path is not None:
        write_output("--json", json_path, json_text(report) + "\n")
        print(f"wrote {json_path}")
    if html_path is not None:
        write_output("--html", html_path, html_page(device.name, packages, found, roofs))
        print(f"wrote {html_path}")
    if interrupted:
        raise interrupted


def _rows(calls: Sequence[tuple[str, Any]], device: str, *options: Any) -> Iterator[list[Row]]:
    """The rows of each call. Without a terminal they are printed at once, which shows that the command is at work."""
    progress = Console(stderr=True)
    is_silent = not progress.is_terminal
    for op, call in track(calls, f"timing on {device}", console=progress, transient=True, disable=is_silent):
        rows = rows_of(op, call, *options)
        if is_silent:
            _show(device, rows)
        yield rows


def _show(device: str, rows: Sequence[Row]) -> None:
    console = Console()
    for op, of_op in by_op(rows).items():
        table = Table(*HEADINGS, title=f"{title(op, of_op)}, {device}")
        for row in timed(of_op):
            table.add_row(*cells(row))
        print_table(table)
        for line in reasons(of_op):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()
