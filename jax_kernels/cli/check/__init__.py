"""jax-kernels check: compares every implementation that this machine can run with float64."""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jax_kernels.cli import UserError
from jax_kernels.cli.check.suites import QUICK, SUITES, Result, run_case
from jax_kernels.cli.info import find_device, versions
from jax_kernels.cli.ops import SHORT_NAMES
from jax_kernels.cli.outputs import check_output, json_text, print_table, write_output
from jax_kernels.cli.paths import path_of
from jax_kernels.spelling import did_you_mean
from jax_kernels.testing import AttentionResults

__all__ = ["check"]

# The number of cases that run together on one GPU: most of a case's time is compilation, in which JAX leaves other
# threads free. Programs over several GPUs would wait for each other, and the large cases of --full need the memory.
_AT_ONCE = min(8, os.cpu_count() or 1)


def _ops(asked: list[str] | None) -> list[str]:
    """The names of the ops to check: `asked`, or all. Raises UserError for an unknown name."""
    asked = [SHORT_NAMES.get(name, name) for name in asked or ()]
    for name in asked:
        if name not in SUITES:
            raise UserError(f"op: got {name!r}, want one of {', '.join(SUITES)}{did_you_mean(name, SUITES)}")
    return [name for name in SUITES if not asked or name in asked]


def _implementations(asked: list[str] | None, ops: list[str]) -> dict[str, list[str]]:
    """The names of the implementations to check, by op: the ones that can run here, and among these only `asked` if
    given.

    Raises UserError for a name that no op has, or that cannot run here.
    """
    reasons = {op: SUITES[op].reasons() for op in ops}
    for name in asked or ():
        found = [of_op[name] for of_op in reasons.values() if name in of_op]
        if not found:
            known = dict.fromkeys(name for of_op in reasons.values() for name in of_op)
            raise UserError(
                f"--implementation: got {name!r}, want one of {', '.join(known)}{did_you_mean(name, known)}"
            )
        if None not in found:
            raise UserError(f"--implementation: {found[0]}")
    wanted = lambda name, reason: reason is None and (not asked or name in asked)
    return {op: [name for name, reason in of_op.items() if wanted(name, reason)] for op, of_op in reasons.items()}


def _show(console: Console, op: str, results: list[Result]) -> None:
    """Prints a table of an op's results, and the exceptions."""
    names = list(dict.fromkeys(name for result in results for name in result.errors))
    if op == "flash_attention":  # in the order of AttentionResults, whichever results the first case has
        names = [name for name in AttentionResults._fields if name in names]
    table = Table(title=f"{op}: {SUITES[op].error} against float64", box=box.SIMPLE_HEAD, padding=0)
    for heading in ("implementation", "case", *names, "of bound", ""):
        table.add_column(heading, no_wrap=True)
    for result in results:
        if result.skipped is not None:
            continue
        cells = [f"{result.errors[x]:.1e}" if x in result.errors else "" for x in names]
        ratios = [error / result.bounds[name] for name, error in result.errors.items()]
        worst = f"{max(ratios):.2f}" if ratios else ""
        table.add_row(result.implementation, result.case, *cells, worst, "pass" if result.passed else "[red]FAIL")
    print_table(table)
    for result in results:
        if result.raised is not None:
            console.print(f"{op}, {result.implementation}, {result.case}: {result.raised}", markup=False)


def check(
    ops: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(SUITES)}; default: all")] = None,
    op: Annotated[list[str] | None, typer.Option(help="also this op (repeatable)")] = None,
    implementation: Annotated[
        list[str] | None, typer.Option(help="only this implementation (repeatable); default: all that can run here")
    ] = None,
    full: Annotated[bool, typer.Option("--full/--quick", help="every case of the test suite, or a selection")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", parser=path_of("--json"), help="also write the results to this file")
    ] = None,
) -> None:
    """Compare the ops and their gradients with float64, for every implementation that can run here.

    JAX_KERNELS_INTERPRET=1 adds the Triton kernels, interpreted. Exits with 1 if an error is above its bound.
    """
    implementations = _implementations(implementation, _ops([*(ops or ()), *(op or ())]))
    device = find_device(None)
    check_output("--json", json_path)
    has_gpu = device.compute_capability is not None
    calls = [
        (name, case_name, case, by)
        for name, of_op in implementations.items()
        for by in of_op
        for case_name, case in SUITES[name].chosen(None if full else QUICK[name], has_gpu).items()
    ]
    results: list[Result] = []
    interrupted: KeyboardInterrupt | None = None
    try:
        _run(calls, _AT_ONCE if has_gpu and not full and jax.device_count() == 1 else 1, device.name, results)
    except KeyboardInterrupt as error:  # the results so far are kept
        interrupted = error
    failed = sum(not result.passed for result in results)
    skipped = sum(result.skipped is not None for result in results)
    rest = f", {len(calls) - len(results)} not run" if interrupted else ""
    passed = len(results) - failed - skipped
    Console().print(f"{device.name}: {passed} passed, {failed} failed, {skipped} not served{rest}")
    if json_path is not None:
        report: dict[str, Any] = {"device": dataclasses.asdict(device), "versions": versions(), "failed": failed}
        report["complete"] = interrupted is None
        report["results"] = [dataclasses.asdict(result) | {"passed": result.passed} for result in results]
        write_output("--json", json_path, json_text(report) + "\n")
    if interrupted:
        raise interrupted
    if failed:
        raise typer.Exit(1)


def _run(calls: Sequence[tuple[str, str, Any, str]], at_once: int, device: str, results: list[Result]) -> None:
    """Runs the calls (op, case's name, case, implementation), appends their results, and prints the tables.

    at_once: the number of cases that run together. Without a terminal, an implementation's table is printed when its
    cases have run, which shows that the command is at work; in a terminal the bar does, and each op has one table.
    """
    progress, console = Console(stderr=True), Console()
    described = f"{', '.join(dict.fromkeys(op for op, *_ in calls))} on {device}"
    tracked = iter(track(_results(calls, at_once), described, len(calls), console=progress, transient=True))
    not_shown: list[Result] = []

    def show() -> None:
        for op, of_op in itertools.groupby(not_shown, key=lambda result: result.op):
            _show(console, op, list(of_op))
        not_shown.clear()

    try:
        for _, group in itertools.groupby(calls, key=lambda call: (call[0], call[3])):
            for result in itertools.islice(tracked, len(list(group))):
                results.append(result)
                not_shown.append(result)
            if not progress.is_terminal:
                show()
    finally:
        show()


def _results(calls: Sequence[tuple[str, str, Any, str]], at_once: int) -> Iterator[Result]:
    """The Result of each call, in order."""
    if at_once == 1:
        yield from itertools.starmap(run_case, calls)
        return
    with ThreadPoolExecutor(at_once) as pool:
        try:
            yield from (future.result() for future in [pool.submit(run_case, *call) for call in calls])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
