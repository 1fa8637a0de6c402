"""The demo's report of a run: its text, its plot and its record."""

import dataclasses
import io
import platform
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.text import Text

import jax_kernels
from jax_kernels.cli.demo.data import Corpus
from jax_kernels.cli.demo.training import Settings, Trainer, bits_per_byte
from jax_kernels.cli.info import versions
from jax_kernels.cli.outputs import json_text
from jax_kernels.files import write_whole

__all__ = ["introduce", "plot", "print_sample", "write_record"]

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "torch")


def _parameters(trainer: Trainer) -> int:
    return sum(x.size for x in jax.tree.leaves(trainer.params))


def introduce(
    console: Console,
    device: jax_kernels.DeviceInfo,
    trainer: Trainer,
    corpus: Corpus,
    plan: jax_kernels.Plan,
    unigram: float,
) -> None:
    """Prints the device, the text, the model and the plan of its attention. unigram: the text's entropy, in bits per
    byte.
    """
    settings, model = trainer.settings, trainer.settings.model
    products = ", 8-bit matmuls in its blocks" if model.precision == "fp8" else ""
    console.print(
        f"[bold]Device[/] {escape(device.name)}, jax {jax.__version__}\n"
        f"[bold]Text[/] {escape(corpus.source)}: {corpus.size:,} bytes, {corpus.held_out.size:,} of them held out, "
        f"unigram entropy {unigram:.3f} bits per byte\n"
        f"[bold]Model[/] {_parameters(trainer):,} parameters: {model.num_layers} layers of width {model.model_dim}, "
        f"{model.num_heads} heads of {model.head_dim}, {model.dtype}{products}; "
        f"{settings.batch_size} sequences of {settings.seq_len} bytes a step\n"
        f"[bold]Attention[/] {escape(str(plan))}",
        soft_wrap=True,
    )


def print_sample(console: Console, prompt: bytes, sampled: bytes) -> None:
    console.print("[bold]Sample[/], after a held-out beginning:")
    # Bytes need not be text: a replacement character is shown for invalid UTF-8, and for bytes that move the cursor.
    clean = lambda data: "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in data.decode(errors="replace"))
    console.print(Text.assemble((clean(prompt), "dim"), clean(sampled)))


def plot(path: Path, settings: Settings, history: dict[str, Any], unigram: float) -> None:
    """Writes a PNG to `path`: training and held-out bits per byte over the steps, and the unigram entropy as a line.

    history: {"losses": nats per byte of each step, "held_out": [[step, bits per byte], ...]}.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    losses = bits_per_byte(np.asarray(history["losses"]))
    axes.plot(np.arange(1, len(losses) + 1), losses, linewidth=0.8, alpha=0.6, label="train")
    held_out = np.asarray(history["held_out"]).reshape(-1, 2)
    axes.plot(held_out[:, 0], held_out[:, 1], "o-", label="held out")
    axes.axhline(unigram, color="gray", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.set_title(
        f"{settings.model.num_layers} layers of width {settings.model.model_dim}, context {settings.seq_len}"
    )
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    write_whole(path, image.getvalue())


def write_record(
    path: Path,
    device: jax_kernels.DeviceInfo,
    trainer: Trainer,
    corpus: Corpus,
    plan: jax_kernels.Plan,
    history: dict[str, Any],
    results: dict[str, Any],
) -> None:
    """Writes run.json to `path`: the settings, device, versions, losses and `results` of the run.

    plan: of the model's attention. history: {"losses": nats per byte of each step, "held_out": [[step, bits per byte],
    ...]}. results: further entries of the JSON, by name. Raises OSError if the file cannot be written.
    """
    record = {
        **results,
        "steps": trainer.step,
        "device": dataclasses.asdict(device) | {"platform": jax.default_backend(), "machine": platform.machine()},
        "versions": versions(PACKAGES) | {"jax_kernels": jax_kernels.__version__},
        "config": dataclasses.asdict(trainer.settings),
        "parameters": _parameters(trainer),
        "text": {"source": corpus.source, "bytes": corpus.size, "held_out_bytes": corpus.held_out.size},
        "attention_plan": {"implementation": plan.implementation, "config": str(plan.config), "text": str(plan)},
        "losses_nats_per_byte": history["losses"],
        "held_out_bits_per_byte": history["held_out"],
    }
    write_whole(path, json_text(record, indent=1) + "\n")
