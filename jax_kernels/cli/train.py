"""`jax-kernels train`: trains a byte-level Transformer on text, on the devices of a mesh, on one host or several."""

import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["parse_mesh", "train"]

Positive = typer.Option(min=1)


def parse_mesh(text: str) -> dict[str, int]:
    """The axes of "data=2,sequence=2". Raises typer.BadParameter."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not re.fullmatch(r"-?\d+", size) or not name.strip() or name.strip() in axes:
            raise typer.BadParameter(f"got {text!r}, want axes such as data=2,sequence=2", param_hint="--mesh")
        axes[name.strip()] = int(size)
    return axes


def train(
    mesh: Annotated[
        str, typer.Option(help="Devices along each axis, such as data=2,sequence=2; -1 for all that are left.")
    ] = "data=-1",
    text: Annotated[Path | None, typer.Option(help="File or folder.", show_default="Python's standard library")] = None,
    documents: Annotated[
        str, typer.Option(help="none: all text is one; files: each file is one, of which none sees another.")
    ] = "none",
    steps: Annotated[int, typer.Option(min=1, help="Steps in all, those before a restart too.")] = 100,
    seq_len: Annotated[int, typer.Option(min=2, help="Bytes of context.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a step, over all devices.")] = 8,
    accumulate: Annotated[int, typer.Option(min=1, help="Parts of a batch, one after the other.")] = 1,
    layers: Annotated[int, Positive] = 12,
    width: Annotated[int, Positive] = 768,
    heads: Annotated[int, Positive] = 6,
    kv_heads: Annotated[int | None, typer.Option(min=1, show_default="as many as heads")] = None,
    attention: Annotated[str, typer.Option(help="dense; or dilated, for a LongNet.")] = "dense",
    dtype: Annotated[str, typer.Option(help="Of the products: bfloat16 or float32.")] = "bfloat16",
    remat: Annotated[
        str, typer.Option(help="What the backward computes again: none, all, or all but attention or products.")
    ] = "products",
    sequence_strategy: Annotated[
        str, typer.Option(help="Of attention along the sequence axis: auto, ring, halo, all_to_all or all_gather.")
    ] = "auto",
    learning_rate: Annotated[float, typer.Option(min=0.0, help="The peak.")] = 6e-4,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the checkpoints and of train.json.")] = Path("runs/train"),
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    implementation: Annotated[str | None, typer.Option(help="Of the attention.", show_default="the fastest")] = None,
    coordinator: Annotated[str | None, typer.Option(help="host:port of process 0, for several processes.")] = None,
    num_processes: Annotated[int | None, typer.Option(min=1)] = None,
    process_id: Annotated[int | None, typer.Option(min=0)] = None,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds in which all processes have to be there.")] = 300,
    collective_timeout: Annotated[int, typer.Option(min=1, help="Seconds that a collective may take.")] = 600,
) -> None:
    """Train a byte-level Transformer on text, on the devices of a mesh.

    A run goes on from the newest checkpoint in --out, also on another mesh.
    Processes that Slurm, Open MPI or Kubernetes started find each other;
    others need --coordinator, --num-processes and --process-id.

    Ends with exit code 1, and without another checkpoint, once a loss or a
    gradient is not finite; 2 for a wrong option.
    """
    from jax_kernels.cli import train_run
    from jax_kernels.models.checkpoints import file_in_the_way

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
    if attention not in ("dense", "dilated"):
        raise typer.BadParameter(f"got {attention!r}, want dense or dilated", param_hint="--attention")
    if documents not in ("none", "files"):
        raise typer.BadParameter(f"got {documents!r}, want none or files", param_hint="--documents")
    if attention == "dilated" and seq_len < 4:
        raise typer.BadParameter(f"got {seq_len} with --attention dilated, want 4 or more", param_hint="--seq-len")
    if not math.isfinite(learning_rate):
        raise typer.BadParameter(f"got {learning_rate}, want a finite number", param_hint="--learning-rate")
    if (found := file_in_the_way(out)) is not None:
        raise typer.BadParameter(f"{found} is not a folder", param_hint="--out")
    try:
        train_run.run(axes, text, out, attention=attention, settings=settings, model=model, processes=processes)
    except (ValueError, TypeError, FileNotFoundError, NotImplementedError) as error:
        raise train_run.as_user_error(error) from error
