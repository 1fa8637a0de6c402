"""Draws the README's picture from checked-in results: attention, block-sparse masks, and several GPUs, with peers.

    PYTHONPATH=. python benchmarks/picture.py

Each panel compares contenders of one run. Where a peer has several forms, the fastest is drawn.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

RESULTS = pathlib.Path(__file__).parent / "results"
# The name and the colour of each contender in the picture, by its names in results.
OURS, FA4, CUDNN, FLEX, TORCH = "this library", "FlashAttention-4", "cuDNN", "FlexAttention", "PyTorch context_parallel"
COLOURS = {OURS: "#1b6ca8", FA4: "#e07b39", CUDNN: "#7aa95c", FLEX: "#b05fa3", TORCH: "#b05fa3"}
ATTENTION = {"ours": OURS, "fa4": FA4, "torch-cudnn": CUDNN}
CASES = ("64 causal", "128 causal", "192/128 causal", "256 causal")
SPARSE = {"prepared-mask": OURS, "torch-flex": FLEX, "torch-flex-flash": FLEX}
RING = {"ring": OURS, "torch allgather": TORCH, "torch alltoall": TORCH}

type Bars = dict[str, dict[str, float]]  # the height of each bar, by group and name


@dataclasses.dataclass(frozen=True)
class Panel:
    """A panel of the picture. groups: the label of the x axis, which names the groups of bars. unit: of the heights."""

    title: str
    groups: str
    unit: str
    bars: Bars


def bars(
    rows: Iterable[dict[str, Any]],
    names: dict[str, str],
    group: Callable[[dict[str, Any]], str | None],
    height: str,
) -> Bars:
    """The bars of a panel: the largest `height` of the rows of a group and a name. group: of a row, None to drop it."""
    found: Bars = {}
    for row in rows:
        label = group(row)
        if label is None or row["contender"] not in names or row["status"] != "ok":
            continue
        of_group = found.setdefault(label, {})
        name = names[row["contender"]]
        of_group[name] = max(row[height], of_group.get(name, 0.0))
    return found


def attention_bars(results: dict[str, Any], mode: str) -> Bars:
    """TFLOP/s of causal attention, by head_dim, or head_dim/value head_dim. mode: "fwd" or "bwd"."""
    found: Bars = {}
    for case in CASES:
        (row,) = (row for row in results["rows"] if row["name"] == f"{case} {mode}")
        rates = {ATTENTION[name]: timed["tflops"] for name, timed in row["contenders"].items() if "tflops" in timed}
        found[case.removesuffix(" causal")] = rates
    return found


def sparse_bars(results: dict[str, Any]) -> Bars:
    """Speed of the forward under random blocks of 128 over the dense forward, by the share of live blocks."""
    is_wanted = lambda row: row["pattern"] == "block" and row["mode"] == "fwd"
    label = lambda row: f"{100 * (1 - row['sparsity']):.0f} %" if is_wanted(row) else None
    return bars(results["rows"], SPARSE, label, "faster_than_dense_by")


def ring_bars(results: dict[str, Any], tokens: int = 65536) -> Bars:
    """TFLOP/s a GPU of causal ring attention, forward and backward, by the number of GPUs."""
    is_wanted = lambda row: (row["tokens"], row["causal"], row["mode"]) == (tokens, True, "fwdbwd")
    label = lambda row: str(row["devices"]) if is_wanted(row) else None
    return bars(sorted(results["rows"], key=lambda row: row["devices"]), RING, label, "tflops")


def draw(panels: Sequence[Panel], path: pathlib.Path) -> None:
    """Draws the panels side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(1, len(panels), figsize=(4.4 * len(panels), 4.6))
    for axes, panel in zip(all_axes, panels, strict=True):
        heights = panel.bars
        names = [name for name in COLOURS if any(name in of_group for of_group in heights.values())]
        width = 0.84 / len(names)
        for i, name in enumerate(names):
            given = [(at, of_group[name]) for at, of_group in enumerate(heights.values()) if name in of_group]
            places = [at + (i - (len(names) - 1) / 2) * width for at, _ in given]
            drawn = axes.bar(places, [height for _, height in given], width, label=name, color=COLOURS[name])
            labels = [f"{height:.0f}" if height >= 20 else f"{height:.1f}" for _, height in given]
            axes.bar_label(drawn, labels, fontsize=7.5, padding=1)
        axes.set_xticks(range(len(heights)), list(heights), fontsize=11)
        axes.set_xlabel(panel.groups, fontsize=11)
        axes.set_title(panel.title, fontsize=12)
        axes.set_ylabel(panel.unit, fontsize=11)
        axes.set_ylim(0, 1.32 * max(max(of_group.values()) for of_group in heights.values()))
        axes.legend(fontsize=9.5, loc="upper left", ncols=2 if len(names) > 2 else 1, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def panels(attention: pathlib.Path, sparse: pathlib.Path, ring: pathlib.Path) -> list[Panel]:
    """The panels from files of results; each title names the GPU of its file."""
    read = [json.loads(path.read_text()) for path in (attention, sparse, ring)]
    gpus = [results["environment"]["device"].removeprefix("NVIDIA ").split(" ")[0] for results in read]
    return [
        Panel(f"Causal forward, {gpus[0]}", "head_dim/value's", "TFLOP/s", attention_bars(read[0], "fwd")),
        Panel(f"Causal backward, {gpus[0]}", "head_dim/value's", "TFLOP/s", attention_bars(read[0], "bwd")),
        Panel(f"Sparse forward, {gpus[1]}", "share of live blocks", "speed over dense", sparse_bars(read[1])),
        Panel(f"Causal ring, both passes, {gpus[2]}", "GPUs", "TFLOP/s a GPU", ring_bars(read[2])),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", type=pathlib.Path, default=RESULTS / "attention-table-h200.json")
    parser.add_argument("--sparse", type=pathlib.Path, default=RESULTS / "sparse-h200.json")
    parser.add_argument("--ring", type=pathlib.Path, default=RESULTS / "ring-h100-x4.json")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS / "readme.png")
    args = parser.parse_args(argv)
    draw(panels(args.attention, args.sparse, args.ring), args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
