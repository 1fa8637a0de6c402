"""`jax-kernels generate`: continues a text with a model that `jax-kernels train` trained."""

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from jax_kernels.cli.paths import path_of

__all__ = ["generate"]


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from the standard input.")],
    checkpoint: Annotated[
        Path, typer.Option(parser=path_of("--checkpoint"), help="Folder that train wrote: its --out.")
    ] = Path("runs/train"),
    step: Annotated[
        int | None, typer.Option(min=0, help="The step of the checkpoint.", show_default="the newest")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Bytes to generate.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest byte.")] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=256, help="Draw among the likeliest bytes.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the draws.")] = 0,
    implementation: Annotated[str | None, typer.Option(help="For attention.", show_default="the fastest")] = None,
) -> None:
    """Continue a text with a model that train trained.

    Prints the text and the bytes that follow it. Bytes that are no UTF-8
    are printed as replacement characters.
    """
    import jax
    import numpy as np

    from jax_kernels.cli.train_run import as_user_error
    from jax_kernels.cli.trained.checkpoint import trained_model

    given = sys.stdin.buffer.read() if prompt == "-" else prompt.encode(errors="surrogateescape")
    if not given:
        raise typer.BadParameter("got an empty text, want one byte or more", param_hint="PROMPT")
    if not math.isfinite(temperature):
        raise typer.BadParameter(f"got {temperature}, want a finite number", param_hint="--temperature")
    found = trained_model(checkpoint, step, implementation)
    ids = np.frombuffer(given, np.uint8).astype(np.int32)[None]
    try:
        drawn = found.trainer.model.generate(ids, tokens, temperature, top_k, key=jax.random.key(seed))
    except (ValueError, NotImplementedError) as error:
        raise as_user_error(error, tokens="PROMPT", max_new_tokens="--tokens", top_k="--top-k") from error
    after = np.asarray(drawn)[0]
    print((given + after[after >= 0].astype(np.uint8).tobytes()).decode(errors="replace"))
