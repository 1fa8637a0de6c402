"""Pictures of masks."""

import os
import textwrap

import numpy as np

from jax_kernels.extras import require

require("matplotlib", "plot")

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

_KINDS = {"dead": "#f4f4f2", "partial": "#f2a541", "full": "#2b6cb0"}


def plot_blocks(path: str | os.PathLike[str], alive, full, *, title: str, block: tuple[int, int]) -> None:
    """Writes a picture of a mask's dead, partial and full blocks to `path`, with the share of each kind in its legend.

    alive, full: bool [blocks of queries, blocks of keys], whether each block keeps some pair, and all pairs. block:
    (queries, keys) of a block, for the labels. It does without pyplot, so it needs no display.
    """
    alive, full = np.asarray(alive), np.asarray(full)
    kinds = alive.astype(np.int8) + full
    figure = Figure(figsize=(6, 6.6), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(kinds, cmap=ListedColormap(list(_KINDS.values())), vmin=0, vmax=2, interpolation="nearest")
    axes.set_xlabel(f"blocks of {block[1]} keys")
    axes.set_ylabel(f"blocks of {block[0]} queries")
    axes.set_title(textwrap.shorten(title, 70), fontsize=9)
    labels = [f"{name} {(kinds == kind).mean():.1%}" for kind, name in enumerate(_KINDS)]
    patches = [
        Patch(facecolor=color, edgecolor="gray", label=label)
        for color, label in zip(_KINDS.values(), labels, strict=True)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3)
    figure.savefig(path)
