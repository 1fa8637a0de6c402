"""`jax-kernels train`: trains a byte-level Transformer on text, on the devices of a mesh, on one host or several."""

import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from jax_kernels.cli.paths import path_of
from jax_kernels.spelling import did_you_mean

__all__ = ["parse_mesh", "train"]

MOST = 2**31 - 1  # of a number that JAX takes as 32 bits
Positive = typer.Option(min=1)
# The axes of jax_kernels.models, which imports Flax.
MESH_AXES = ("pipeline", "data", "fsdp", "expert", "sequence", "tensor")
CHOICES = {
    "--attention": ("dense", "dilated"),
    "--documents": ("none", "files"),
    "--dtype": ("bfloat16", "float16", "float32"),
    "--remat": ("none", "all", "attention", "products"),
    "--sequence-strategy": ("auto", "ring", "halo", "all_to_all", "all_gather"),
}


def parse_mesh(text: str) -> dict[str, int]:
    """The number of devices along each axis, from "data=2,sequence=2": {"data": 2, "sequence": 2}.

    Raises typer.BadParameter for another form, an unknown axis, or a number other than -1 that is below 1.
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not re.fullmatch(r"-?\d+", size) or not name.strip() or name.strip() in axes:
            raise typer.BadParameter(f"got {text!r}, want axes such as data=2,sequence=2", param_hint="--mesh")
        axes[name.strip()] = int(size)
    for name, count in axes.items():
        if name not in MESH_AXES:
            want = f"want axes of {', '.join(MESH_AXES)}{did_you_mean(name, MESH_AXES)}"
            raise typer.BadParameter(f"got {text!r}, {want}", param_hint="--mesh")
        if count < 1 and count != -1:
            want = "want a positive number of devices for each axis, or -1 for one axis"
            raise typer.BadParameter(f"got {text!r}, {want}", param_hint="--mesh")
    return axes


def check_choice(option: str, value: str) -> None:
    """Raises typer.BadParameter unless `value` is one of the option's values in CHOICES."""
    if value not in CHOICES[option]:
        *others, last = CHOICES[option]
        want = f"want {', '.join(others)} or {last}{did_you_mean(value, CHOICES[option])}"
        raise typer.BadParameter(f"got {value!r}, {want}", param_hint=option)


def check_sizes(width: int, heads: int, kv_heads: int | None) -> None:
    """Raises typer.BadParameter for heads that do not fit the width, or kv_heads that do not fit the heads."""
    if width % heads or width // heads % 2 or width // heads > 256:
        want = "want a divisor of the width that gives heads of an even size, up to 256"
        raise typer.BadParameter(f"got {heads} with --width {width}, {want}", param_hint="--heads")
    if kv_heads is not None and heads % kv_heads:
        raise typer.BadParameter(f"got {kv_heads}, want a divisor of --heads {heads}", param_hint="--kv-heads")


def train(
    mesh: Annotated[
        str, typer.Option(help="Devices along each axis, such as data=2,sequence=2; -1 for all other devices.")
    ] = "data=-1",
    text: Annotated[
        Path | None,
        typer.Option(parser=path_of("--text"), help="File or folder.", show_default="Python's standard library"),
    ] = None,
    documents: Annotated[
        str, typer.Option(help="none: all text is one document; files: one document per file, unseen by other files.")
    ] = "none",
    steps: Annotated[
        int,
        typer.Option(min=1, max=MOST, help="Total steps, with the steps before a restart; a restart has equally many."),
    ] = 100,
    seq_len: Annotated[int, typer.Option(min=2, help="Bytes of context.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a step, over all devices.")] = 8,
    accumulate: Annotated[int, typer.Option(min=1, help="Parts of a batch, one after the other.")] = 1,
    layers: Annotated[int, Positive] = 12,
    width: Annotated[int, Positive] = 768,
    heads: Annotated[int, Positive] = 6,
    kv_heads: Annotated[int | None, typer.Option(min=1, show_default="the value of --heads")] = None,
    attention: Annotated[str, typer.Option(help="dense; or dilated, for a LongNet.")] = "dense",
    dtype: Annotated[
        str, typer.Option(help="For matmuls: bfloat16, float16 or float32. float16 scales the loss.")
    ] = "bfloat16",
    remat: Annotated[
        str,
        typer.Option(
            help="Values that the backward rematerialises: none; all; or all except the results of attention "
            "(attention), or of attention, matmuls and norms (products)."
        ),
    ] = "products",
    sequence_strategy: Annotated[
        str, typer.Option(help="For attention along the sequence axis: auto, ring, halo, all_to_all or all_gather.")
    ] = "auto",
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 6e-4,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
    out: Annotated[
        Path, typer.Option(parser=path_of("--out"), help="Folder of the checkpoints, train.json and loss.png.")
    ] = Path("runs/train"),
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    implementation: Annotated[str | None, typer.Option(help="For attention.", show_default="the fastest")] = None,
    coordinator: Annotated[str | None, typer.Option(help="host:port of process 0, for several processes.")] = None,
    num_processes: Annotated[int | None, typer.Option(min=1, max=MOST)] = None,
    process_id: Annotated[int | None, typer.Option(min=0)] = None,
    timeout: Annotated[int, typer.Option(min=1, max=MOST, help="Seconds to wait for all processes.")] = 300,
    collective_timeout: Annotated[int, typer.Option(min=1, max=MOST, help="Seconds that a collective may take.")] = 600,
) -> None:
    """Train a byte-level Transformer on text, on the devices of a mesh.

    A run continues from the newest checkpoint in --out, also on another mesh.
    Processes that Slurm, Open MPI or Kubernetes started find each other;
    other processes need --coordinator, --num-processes and --process-id.

    One run at a time writes --out.

    SIGTERM and Ctrl-C save a checkpoint after the current step; a second
    Ctrl-C ends the run at once.

    Ends with exit code 1, and without another checkpoint, once a loss, a
    gradient or a parameter is not finite, or if --out cannot be written;
    2 for a wrong option, or an --out that another run writes.
    """
    from jax_kernels.cli import WriteError, train_run
    from jax_kernels.models.parallel.distributed import CoordinatorNotFound
    from jax_kernels.models.training.checkpoints import NotWritten, file_in_the_way

    settings: dict[str, Any] = {
        "documents": documents,
        "steps": steps,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "accumulate": accumulate,
        "learning_rate": learning_rate,
        "seed": seed,
        "save_every": save_every,
    }
    model: dict[str, Any] = {
        "num_layers": layers,
        "model_dim": width,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "dtype": dtype,
        "remat": {"none": False, "all": True}.get(remat, remat),
        "sequence_strategy": sequence_strategy,
        "implementation": implementation,
    }
    processes: dict[str, Any] = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
        "timeout": timeout,
        "collective_timeout": collective_timeout,
    }
    axes = parse_mesh(mesh)
    given = (attention, documents, dtype, remat, sequence_strategy)
    for option, value in zip(CHOICES, given, strict=True):
        check_choice(option, value)
    check_sizes(width, heads, kv_heads)
    if attention == "dilated" and sequence_strategy != "auto":
        raise typer.BadParameter(
            f"got {sequence_strategy!r} with --attention dilated, want auto", param_hint="--sequence-strategy"
        )
    if attention == "dilated" and seq_len < 4:
        raise typer.BadParameter(f"got {seq_len} with --attention dilated, want 4 or more", param_hint="--seq-len")
    if not math.isfinite(learning_rate):
        raise typer.BadParameter(f"got {learning_rate}, want a finite number", param_hint="--learning-rate")
    if (found := file_in_the_way(out)) is not None:
        raise typer.BadParameter(f"{found} is not a folder", param_hint="--out")
    try:
        train_run.run(axes, text, out, attention=attention, settings=settings, model=model, processes=processes)
    except NotWritten as error:
        raise WriteError(train_run.in_options(str(error))) from error
    except (ValueError, TypeError, FileNotFoundError, NotImplementedError, CoordinatorNotFound) as error:
        raise train_run.as_user_error(error) from error
