"""`jax-kernels demo`: trains a byte-level Transformer on real text with this library's attention."""

from pathlib import Path
from typing import Annotated

import typer

from jax_kernels.cli.paths import path_of
from jax_kernels.cli.train import MOST

__all__ = ["demo"]


def demo(
    text: Annotated[
        Path | None,
        typer.Option(
            parser=path_of("--text"), help="File or folder to train on.", show_default="Python's standard library"
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Total steps, with the steps before --resume.", show_default="by device"),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Bytes of context.", show_default="by device")] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Sequences in a step.", show_default="by device")
    ] = None,
    decay_steps: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST, help="Steps over which the learning rate decays.", show_default="the value of --steps"
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="Seed of the parameters and the batches.", show_default="0")
    ] = None,
    out: Annotated[
        Path, typer.Option(parser=path_of("--out"), help="Folder for loss.png, run.json and the checkpoint.")
    ] = Path("runs/demo"),
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the checkpoint in --out: same parameters, optimizer state and batches."
        ),
    ] = False,
    attention: Annotated[
        str | None,
        typer.Option(
            help="dense; or dilated: a LongNet with three branches, which see a quarter of the context, every second "
            "byte of half the context, and every fourth byte of the whole context.",
            show_default="dense",
        ),
    ] = None,
    implementation: Annotated[
        str | None,
        typer.Option(help="For attention: mosaic_gpu, triton, cudnn or xla.", show_default="the fastest here"),
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="Devices along each axis: data=2,sequence=2.", show_default="one device")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp8: the matmuls of the model's blocks in 8 bits; emulated on a CPU.", show_default="16 or 32 bits"
        ),
    ] = None,
) -> None:
    """Train a byte-level Transformer on real text with this library's attention.

    Writes loss.png, run.json and a checkpoint, prints a sample, and compares
    logits and input gradients with the PyTorch module on the same weights.

    One run at a time writes --out.

    Ends with exit code 1 if held-out bits per byte are not below 0.8 of
    the unigram entropy, if PyTorch disagrees, or if --out cannot be
    written; 2 for a wrong option, or an --out that another run writes.
    """
    from jax_kernels.cli import WriteError
    from jax_kernels.cli.demo import run as demo_run
    from jax_kernels.cli.train import parse_mesh
    from jax_kernels.models.training.checkpoints import NotWritten
    from jax_kernels.models.training.folder_lock import FolderInUse

    try:
        axes = None if mesh is None else parse_mesh(mesh)
        passed = demo_run.run(
            text=text, steps=steps, out=out, resume=resume, mesh=axes, seq_len=seq_len, batch_size=batch_size,
            decay_steps=decay_steps, seed=seed, attention=attention, implementation=implementation, precision=precision,
        )  # fmt: skip
    except demo_run.OptionError as error:
        raise typer.BadParameter(error.message, param_hint=error.option) from error
    except FolderInUse as error:
        raise typer.BadParameter(str(error).removeprefix("folder: "), param_hint="--out") from error
    except NotWritten as error:
        raise WriteError(f"--out: {str(error).removeprefix('folder: ')}") from error
    if not passed:
        raise typer.Exit(1)
