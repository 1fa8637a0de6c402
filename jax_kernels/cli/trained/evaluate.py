"""`jax-kernels eval`: the loss and the perplexity of a trained model on a text."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from jax_kernels.cli.outputs import json_text
from jax_kernels.cli.paths import path_of

__all__ = ["evaluate"]


def evaluate(
    text: Annotated[Path, typer.Argument(parser=path_of("TEXT"), help="File or folder of text.")],
    checkpoint: Annotated[
        Path, typer.Option(parser=path_of("--checkpoint"), help="Folder that train wrote: its --out.")
    ] = Path("runs/train"),
    step: Annotated[
        int | None, typer.Option(min=0, help="The step of the checkpoint.", show_default="the newest")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Bytes of context, at most the text's.", show_default="the training's")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Windows in a call.", show_default="the training's")
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(min=2, help="Read at most this many bytes of the text.", show_default="all")
    ] = None,
    implementation: Annotated[str | None, typer.Option(help="For attention.", show_default="the fastest")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the loss and the perplexity of a trained model on a text.

    The text is cut into windows. Each byte except the first is predicted
    once, from the bytes before it in its window.
    """
    from jax_kernels.cli.train_run import as_user_error
    from jax_kernels.cli.trained.checkpoint import trained_model
    from jax_kernels.models import read_text

    try:
        data = read_text(text)[:max_bytes]
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error).removeprefix("paths: "), param_hint="TEXT") from error
    if len(data) < 2:
        raise typer.BadParameter(f"got a text of {len(data)} byte, want 2 bytes or more", param_hint="TEXT")
    found = trained_model(checkpoint, step, implementation)
    length = min(seq_len or found.settings["seq_len"], len(data) - 1)
    rows = min(batch_size or found.settings["batch_size"], math.ceil((len(data) - 1) / length))
    total, count = 0.0, 0
    try:
        for tokens, targets in windows(data, length, rows):
            here = int((targets >= 0).sum())
            total += found.trainer.evaluate((tokens, targets)) * here
            count += here
    except (ValueError, NotImplementedError) as error:
        raise as_user_error(error) from error
    loss = total / count
    result: dict[str, Any] = {
        "loss": loss,
        "bits_per_byte": loss / math.log(2),
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "predicted_bytes": count,
        "seq_len": length,
        "step": found.step,
    }
    if as_json:
        print(json_text(result, indent=1))
        return
    print(
        f"{result['bits_per_byte']:.4f} bits a byte, loss {loss:.4f} nats, perplexity {result['perplexity']:.3f}: "
        f"{count:,} bytes of {text} in windows of {length}, checkpoint of step {found.step}"
    )


def windows(data: np.ndarray, length: int, rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (tokens, targets), int32 [rows, length] each, in which each byte of data except the first is a target
    once.

    Rows and ends of rows without text are -1. data: uint8 [bytes], 2 or more. length: of a window.
    """
    starts = range(0, len(data) - 1, length)
    for first in range(0, len(starts), rows):
        tokens, targets = np.full((2, rows, length), -1, np.int32)
        for row, start in enumerate(starts[first : first + rows]):
            window = data[start : start + length + 1]
            tokens[row, : len(window) - 1], targets[row, : len(window) - 1] = window[:-1], window[1:]
        yield tokens, targets
