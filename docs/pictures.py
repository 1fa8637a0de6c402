"""Draws the pictures of the guides: a mask's blocks, the tokens that see each other in dilated attention, Hilbert
order.

    PYTHONPATH=. python docs/pictures.py            # into guides/
    PYTHONPATH=. python docs/pictures.py some/folder

The patterns come from the library: `seen` runs dilated_attention. The same versions of JAX, NumPy and matplotlib write
the same bytes.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jax_kernels import dilated_attention, hilbert_order, masks

# The colors of a mask's dead and full blocks, and darker colors for tokens that several branches see.
COLORS = ("#f4f4f2", "#a9c7e8", "#2b6cb0", "#12325c")
LINE = "#9a9a96"
TOKENS = 32
# All modes have these branches, so the pictures are comparable; a partition cuts the sequence by its lengths.
BRANCHES = {"segment_lengths": (8, 16, 32), "dilation_rates": (1, 2, 4)}
PARTS = {"segment_lengths": (8, 8, 16), "dilation_rates": (1, 2, 4)}
# Name of the file: the number of heads, and the arguments of dilated_attention.
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "dilated-all": (4, BRANCHES),
    "dilated-groups": (3, BRANCHES | {"heads": "groups"}),
    "dilated-partition": (1, PARTS | {"layout": "partition"}),
    "dilated-causal": (4, BRANCHES | {"is_causal": True}),
    "dilated-hilbert": (4, BRANCHES | {"order": "hilbert"}),
}
GRID = 64


def seen(tokens: int, num_heads: int, **arguments: Any) -> np.ndarray:
    """int [H, T, T]: the number of branches in which a token (second axis) sees another token (third axis).

    With scores of 0 the log-sum-exp is the log of the number of (branch, token) pairs that a token sees, and with unit
    vectors as values the output is each token's fraction of them.
    """
    zeros = jnp.zeros((1, tokens, num_heads, 8))
    values = jnp.broadcast_to(jnp.eye(tokens)[None, :, None], (1, tokens, num_heads, tokens))
    out, lse = dilated_attention(zeros, zeros, values, return_lse=True, implementation="xla", **arguments)
    counts = np.asarray(out[0].swapaxes(0, 1) * jnp.exp(lse[0])[..., None])
    np.testing.assert_allclose(counts, counts.round(), atol=1e-3)
    return counts.round().astype(int)


def draw_dilated(path: Path, num_heads: int, arguments: dict[str, Any]) -> None:
    counts = seen(TOKENS, num_heads, **arguments)
    most = counts.max()
    figure = Figure(figsize=(max(2.2 * num_heads, 2.8), 2.9), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, num_heads, sharey=True))
    for head, (axes, count) in enumerate(zip(panels, counts, strict=True)):
        axes.imshow(count, cmap=ListedColormap(COLORS[: most + 1]), vmin=0, vmax=most, interpolation="none")
        axes.set_xticks(range(0, TOKENS, 8))
        axes.set_yticks(range(0, TOKENS, 8))
        axes.tick_params(labelsize=7)
        axes.set_title(f"head {head}" if num_heads > 1 else "every head", fontsize=9)
        axes.set_xlabel("token that is seen", fontsize=8)
    panels[0].set_ylabel("token that attends", fontsize=8)
    labels = ["not seen", *(f"seen in {n} branch{'es' * (n > 1)}" for n in range(1, most + 1))]
    if most == 1:
        labels[1] = "seen"
    patches = [
        Patch(facecolor=color, edgecolor="gray", label=label) for color, label in zip(COLORS, labels, strict=False)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
    figure.savefig(path)


def draw_hilbert(path: Path) -> None:
    """Draws the two orders of one segment's tokens, and marks the tokens of head 0 at rate 4."""
    side = int(GRID**0.5)
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    panels[0].set_ylabel(f"token // {side}", fontsize=8)
    for axes, order in zip(panels, (None, "hilbert"), strict=True):
        visited = np.arange(GRID) if order is None else hilbert_order(GRID)
        row, column = np.divmod(visited, side)
        axes.plot(column, row, color=LINE, linewidth=1.5)
        taken = seen(GRID, 4, segment_lengths=(GRID,), dilation_rates=(4,), order=order)[0].any(axis=0)
        for color, which in (("white", ~taken[visited]), (COLORS[2], taken[visited])):
            axes.plot(column[which], row[which], "o", markersize=9, markerfacecolor=color, markeredgecolor=LINE)
        axes.set_xlim(-0.6, side - 0.4)
        axes.set_ylim(side - 0.4, -0.6)
        axes.set_aspect("equal")
        axes.tick_params(labelsize=7)
        axes.set_xlabel(f"token modulo {side}", fontsize=8)
        axes.set_title(f"order={order!r}", fontsize=9)
    label = f"of a segment of {GRID} tokens, those that head 0 of 4 has at rate 4"
    figure.legend(handles=[Patch(facecolor=COLORS[2], label=label)], loc="outside lower center", fontsize=8)
    figure.savefig(path)


def draw_all(folder: Path) -> list[Path]:
    """Writes every picture, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    mask = masks.preset("longformer", window=1024, n=64)
    mask.plot(folder / "mask.svg", 4096, 4096, 128)
    for name, (num_heads, arguments) in MODES.items():
        draw_dilated(folder / f"{name}.svg", num_heads, arguments)
    draw_hilbert(folder / "hilbert-order.svg")
    return [folder / f"{name}.svg" for name in ("mask", *MODES, "hilbert-order")]


def main(argv: Sequence[str]) -> None:
    os.environ["SOURCE_DATE_EPOCH"] = "0"  # matplotlib writes this date into an SVG
    jax.config.update("jax_platforms", "cpu")
    with matplotlib.rc_context({"svg.hashsalt": "jax_kernels"}):
        for path in draw_all(Path(argv[0]) if argv else Path(__file__).parent / "guides"):
            print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
