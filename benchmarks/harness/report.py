"""The record of a run: its environment, its rows, the table, the JSON file and the plot."""

import collections
import importlib.metadata
import json
import math
import os
import pathlib
import shutil
import subprocess
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from harness.cases import Case
from harness.timing import Contender, speed_ratio, spread

SCHEMA = 1
CONTROLS = ("jax-cudnn", "torch-cudnn")
ROOT = pathlib.Path(__file__).resolve().parents[2]
_PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "torch", "triton", "nvidia-cudnn-cu13", "nvidia-cuda-cupti",
    "nvidia-cuda-nvcc", "tokamax", "flash-attn", "flash-attn-4",
)  # fmt: skip


def _command(*words: str) -> str | None:
    """The output of a program, or None if the program is missing or fails."""
    if shutil.which(words[0]) is None:
        return None
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment(commit: str | None = None, with_torch: bool = False) -> dict[str, Any]:
    """The device, the versions and the state of git. Unknown facts are None. commit: for a tree without .git."""
    status = _command("git", "status", "--porcelain")
    result = {
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "driver": _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "versions": {package: _version(package) for package in _PACKAGES},
        "commit": commit or _command("git", "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    if with_torch:
        import torch

        result["torch_cuda"] = torch.version.cuda
        result["torch_cudnn"] = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return result


def rows(
    case: Case, contenders: Sequence[Contender], ceilings: dict[str, float | None], method: dict[str, str]
) -> list[dict[str, Any]]:
    """One JSON row for each contender. ceilings: TFLOP/s of the matmul, by framework."""
    times = {c.name: c.times for c in contenders if c.status == "ok" and c.times}
    result = []
    for contender in contenders:
        row: dict[str, Any] = {
            "contender": contender.name,
            "framework": contender.framework,
            "batch": case.batch,
            "seq": case.seq,
            "heads": case.heads,
            "kv_heads": case.kv_heads,
            "head_dim": case.head_dim,
            "value_head_dim": case.value_head_dim,
            "dtype": case.dtype,
            "causal": case.causal,
            "mode": case.mode,
            "status": contender.status,
            "reason": contender.reason,
            "note": contender.note,
            "plan": contender.plan,
            "error": contender.error,
            "method": method.get(contender.framework),
        }
        if contender.name in times:
            statistics = spread(contender.times)
            tflops = case.tflops(statistics["median"])
            ceiling = ceilings.get(contender.framework)
            reading = contender.reading
            row |= {
                "times_ms": contender.times,
                "median_ms": statistics["median"],
                "min_ms": statistics["min"],
                "max_ms": statistics["max"],
                "iqr_ms": statistics["iqr"],
                "tflops": tflops,
                "ceiling_share": tflops / ceiling if ceiling else None,
                "ratios": {c: speed_ratio(contender.times, times[c]) for c in CONTROLS if c in times},
                "calls_per_turn": contender.calls,
                "launches_per_call": reading.launches if reading else None,
                "kernels_ms": reading.kernels if reading else {},
            }
        result.append(row)
    return result


def exit_status(statuses: Iterable[str]) -> int:
    """The exit status of a script: 0 if each contender was timed or cannot run on this machine, else 1."""
    return 0 if all(status in ("ok", "unavailable") for status in statuses) else 1


def header(commit: str | None, with_torch: bool = False, **facts: Any) -> dict[str, Any]:
    """The beginning of a run's results. commit, with_torch: of environment. facts: further entries, by name."""
    return {"schema": SCHEMA, "environment": environment(commit, with_torch), **facts}


def write_json(path: pathlib.Path | None, results: dict[str, Any]) -> None:
    """Replaces the file atomically: a killed run leaves the last complete file. NaN is written as null.

    Threads may write at once: each thread has its own draft. path: None writes nothing.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{threading.get_ident()}.part")
    draft.write_text(json.dumps(_in_json(results), indent=1, allow_nan=False) + "\n")
    draft.replace(path)


def _in_json(x: Any) -> Any:
    """x with None for each number that is not finite, because JSON has no such numbers."""
    if isinstance(x, dict):
        return {key: _in_json(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_in_json(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x


def figure(x: float) -> str:
    """A rate as text: an integer from 100 on, three digits below, so a slow machine does not read 0."""
    return f"{x:.0f}" if x >= 100 else f"{x:.3g}"


def table(results: dict[str, Any]) -> Table:
    """The table of the contenders, one section for each case. A ratio above 1 means faster than the control."""
    made = Table(title=f"{results['environment']['device']}, timer: {results['timer']}")
    for column in (
        "case",
        "contender",
        "ms",
        "min-max",
        "TFLOP/s",
        "of matmul",
        *CONTROLS,
        "error",
        "plan, or why not",
    ):
        made.add_column(column, overflow="fold", justify="right" if column in ("ms", "TFLOP/s") else "left")
    last = None
    for row in results["rows"]:
        if row["status"] == "unavailable":
            continue
        label = label_of(row)
        if last not in (None, label):
            made.add_section()
        made.add_row("" if label == last else label, *_cells(row))
        last = label
    return made


def absent(results: dict[str, Any]) -> list[str]:
    """One line for each unavailable contender and reason, with the number of cases."""
    reasons = collections.Counter(
        (row["contender"], row["reason"]) for row in results["rows"] if row["status"] == "unavailable"
    )
    return [f"{name}: unavailable in {count} cases: {reason}" for (name, reason), count in reasons.items()]


def label_of(row: dict[str, Any]) -> str:
    fields = ("batch", "seq", "heads", "head_dim", "kv_heads", "value_head_dim", "dtype", "causal", "mode")
    return Case(**{field: row[field] for field in fields}).label


def _cells(row: dict[str, Any]) -> list[str]:
    error = "" if row["error"] is None else f"{row['error']:.1e}"
    if "median_ms" not in row:
        status = row["status"].upper() if row["status"] == "wrong" else row["status"]
        return [row["contender"], "", "", "", "", "", "", error, f"{status}: {row['reason']}"]
    share = "" if row["ceiling_share"] is None else f"{row['ceiling_share']:.0%}"
    ratios = [f"{row['ratios'][c]:.3f}" if c in row["ratios"] else "" for c in CONTROLS]
    range_ = f"{row['min_ms']:.3f}-{row['max_ms']:.3f}"
    notes = [row["plan"], row["note"], row["reason"] and f"{row['status']}: {row['reason']}"]
    told = "; ".join(note for note in notes if note)
    return [row["contender"], f"{row['median_ms']:.4f}", range_, figure(row["tflops"]), share, *ratios, error, told]


def print_table(results: dict[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table(results))
    for line in absent(results):
        console.print(line, markup=False)
    for framework, ceiling in results["ceilings"].items():
        if ceiling["tflops"] is not None:
            console.print(f"matmul ceiling, {framework}: {figure(ceiling['tflops'])} TFLOP/s ({ceiling['what']})")
    for framework, method in results["method"].items():
        console.print(f"{framework} timed by {method}")
    console.file.flush()


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
    """Draws bars of TFLOP/s, one group for each case, and the matmul ceilings as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [row for row in results["rows"] if "median_ms" in row]
    labels = list(dict.fromkeys(label_of(row) for row in timed))
    names = list(dict.fromkeys(row["contender"] for row in timed))
    figure, axes = plt.subplots(figsize=(max(6, 1.2 + 0.22 * len(names) * len(labels) + 0.8 * len(labels)), 5))
    width = 0.8 / max(len(names), 1)
    for index, name in enumerate(names):
        bars = {label_of(row): row["tflops"] for row in timed if row["contender"] == name}
        places = [position + (index - (len(names) - 1) / 2) * width for position in range(len(labels))]
        axes.bar(places, [bars.get(label, 0) for label in labels], width, label=name)
    for framework, ceiling in results["ceilings"].items():
        if ceiling["tflops"] is not None:
            style = "--" if framework == "jax" else ":"
            axes.axhline(ceiling["tflops"], linestyle=style, color="grey", label=f"matmul, {framework}")
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{results['environment']['device']}, timer: {results['timer']}")
    axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
