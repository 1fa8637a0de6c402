"""jax-kernels check: compares every implementation that this machine can run with float64."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jax_kernels.cli import UserError
from jax_kernels.cli.info import find_device, versions
from jax_kernels.ops.attention.table import IMPLEMENTATIONS
from jax_kernels.testing import (
    ATTENTION_CASES,
    GPU_ATTENTION_CASES,
    AttentionCase,
    AttentionResults,
    attention_float64,
    attention_inputs,
    rms_error,
    run_attention,
    tolerance,
    why_not,
)

QUICK = (
    "full", "causal", "odd_causal", "gqa", "head_dim_128", "offset_negative", "kv_lengths", "fp16", "fp32", "tf32",
    "window", "segments_causal", "softcap", "sinks", "bias_heads",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """One case by one implementation.

    errors, bounds: of each result, by name. skipped: why it was not run. raised: the exception that it raised.
    """

    implementation: str
    case: str
    errors: dict[str, float]
    bounds: dict[str, float]
    skipped: str | None = None
    raised: str | None = None

    @property
    def passed(self) -> bool:
        return self.raised is None and all(error <= self.bounds[name] for name, error in self.errors.items())


def run_case(case: AttentionCase, implementation: str) -> Result:
    reason = why_not(case, implementation)
    if reason is not None:
        return Result(implementation, case.name, {}, {}, skipped=reason)
    arrays = attention_inputs(case)
    try:
        got = run_attention(case, arrays, implementation)
    except Exception as error:  # a kernel that does not compile or run is a result too
        return Result(implementation, case.name, {}, {}, raised=f"{type(error).__name__}: {error}")
    want = attention_float64(case, *(arrays if "lse" in got else arrays[:-1]))
    errors = {name: rms_error(x, getattr(want, name)) for name, x in got.items()}
    return Result(implementation, case.name, errors, tolerance(case))


def _implementations(asked: list[str] | None) -> list[str]:
    available = {name: why_not(AttentionCase("probe"), name) for name in IMPLEMENTATIONS}
    if not asked:
        return [name for name, reason in available.items() if reason is None]
    for name in asked:
        if name not in available:
            raise UserError(f"--implementation: got {name!r}, want one of {', '.join(available)}")
        if available[name] is not None:
            raise UserError(str(available[name]))
    return asked


def _show(console: Console, results: list[Result]) -> None:
    table = Table(title="root mean square error against float64", box=box.SIMPLE_HEAD, padding=0)
    for heading in ("implementation", "case", *AttentionResults._fields, "of bound", ""):
        table.add_column(heading, no_wrap=True)
    for result in results:
        if result.skipped is not None:
            continue
        cells = [f"{result.errors[x]:.1e}" if x in result.errors else "" for x in AttentionResults._fields]
        ratios = [error / result.bounds[name] for name, error in result.errors.items()]
        worst = f"{max(ratios):.2f}" if ratios else ""
        table.add_row(result.implementation, result.case, *cells, worst, "pass" if result.passed else "[red]FAIL")
    console.print(table)
    for result in results:
        if result.raised is not None:
            console.print(f"{result.implementation}, {result.case}: {result.raised}", markup=False)


def check(
    implementation: Annotated[
        list[str] | None, typer.Option(help="only this one (repeatable); default: every one that can run here")
    ] = None,
    full: Annotated[bool, typer.Option("--full/--quick", help="every case of the test suite, or some")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write the results to this file")] = None,
) -> None:
    """Compare attention and its gradients with float64, for every implementation that can run here.

    JAX_KERNELS_INTERPRET=1 adds the GPU kernels, interpreted. Exits with 1 where an error is above its bound.
    """
    names = _implementations(implementation)
    device = find_device(None)
    cases = [case for case in ATTENTION_CASES if full or case.name in QUICK]
    if full and device.compute_capability is not None:
        cases += GPU_ATTENTION_CASES
    if json_path is not None and not json_path.parent.is_dir():
        raise UserError(f"--json: got {str(json_path)!r}, want a file in a folder that exists")

    pairs = [(case, name) for case in cases for name in names]
    progress = Console(stderr=True)
    tracked = track(pairs, f"{', '.join(names)} on {device.name}", console=progress, transient=True)
    results = sorted(
        (run_case(case, name) for case, name in tracked), key=lambda result: names.index(result.implementation)
    )
    failed = sum(not result.passed for result in results)
    skipped = sum(result.skipped is not None for result in results)

    console = Console()
    console.width = max(console.width, 110)  # a table is not cut off, in a file or in a narrow window
    _show(console, results)
    console.print(f"{device.name}: {len(results) - failed - skipped} passed, {failed} failed, {skipped} not served")
    if json_path is not None:
        report: dict[str, Any] = {"device": dataclasses.asdict(device), "versions": versions(), "failed": failed}
        report["results"] = [dataclasses.asdict(result) | {"passed": result.passed} for result in results]
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    if failed:
        raise typer.Exit(1)
