"""Writes and reads the checkpoints in a Trainer's folder, and checks that the state read is the state saved."""

import contextlib
import functools
import gc
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

__all__ = [
    "NotWritten",
    "check_folder",
    "digests",
    "file_in_the_way",
    "manager",
    "newest",
    "newest_in_words",
    "nonfinite",
    "read_run",
    "read_state",
    "reason",
    "writing",
]


class NotWritten(OSError):
    """Raised if a checkpoint cannot be written, such as on a full disk. The text names the newest whole checkpoint."""


def file_in_the_way(folder: Path) -> Path | None:
    """The file at the path of a folder or of one of its parents, for which the folder cannot be made; None if there is
    none.
    """
    found = next((path for path in (folder, *folder.parents) if path.exists()), None)
    return None if found is None or found.is_dir() else found


def check_folder(folder: Path) -> None:
    """Raises ValueError if a file is at the path of the folder or of one of its parents."""
    if (found := file_in_the_way(folder)) is not None:
        raise ValueError(f"folder: got {folder}, want a folder: {found} is a file")


def manager(folder: Path, keep: int) -> Any:
    """An orbax CheckpointManager that keeps the newest `keep` checkpoints in a folder, with items `state` and `run`.

    Raises NotWritten if the folder does not exist and cannot be made.
    """
    import orbax.checkpoint as ocp  # the import takes a second

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotWritten(f"folder: {folder} cannot be made ({reason(error)})") from error
    return ocp.CheckpointManager(
        folder.resolve(),
        options=ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            # On the CPU an asynchronous save would read buffers that were donated to the next step.
            enable_async_checkpointing=jax.default_backend() != "cpu",
        ),
        item_handlers={"state": ocp.StandardCheckpointHandler(), "run": ocp.JsonCheckpointHandler()},
    )


def _raised_again(record: logging.LogRecord) -> bool:
    """A filter for the absl logger: False, which hides a record, if the record has the traceback of an orbax thread.

    It would be a repetition, since orbax raises the thread's error in the caller too.
    """
    return "run() raised an exception" not in record.getMessage()


@functools.cache
def _hide_late_writes() -> None:
    """From now on, hides the errors of writes that end after orbax has closed their event loop.

    Orbax closes the loop at the first error, which it raises in the caller. On a full disk, Python would print a
    traceback for each other array, since these errors are raised in threads. Threads of Python have other errors: their
    tracebacks begin with a function of theirs.
    """
    hook = sys.unraisablehook

    def shown(unraisable: Any) -> None:
        error, trace = unraisable.exc_value, unraisable.exc_traceback
        first = "" if trace is None else trace.tb_frame.f_code.co_name
        is_late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not (is_late and unraisable.object is None and first == "call_soon_threadsafe"):
            hook(unraisable)

    sys.unraisablehook = shown


@contextlib.contextmanager
def writing(checkpoints: Any, step: int | None = None) -> Iterator[None]:
    """A context manager for writing a checkpoint: it turns errors inside it into NotWritten.

    MemoryError and JaxRuntimeError are raised unchanged. NotWritten names the newest whole checkpoint, and the partly
    written files of the failed checkpoint are removed. checkpoints: an orbax CheckpointManager. step: of the
    checkpoint; None for one whose writing began earlier in the background.
    """
    logging.getLogger("absl").addFilter(_raised_again)
    _hide_late_writes()
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        folder = Path(checkpoints.directory)
        if jax.process_index() == 0:
            remove_unfinished(folder, step)
        which = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        text = f"folder: {which} in {folder} cannot be written ({reason(error)}); {newest(checkpoints)}"
        raise NotWritten(text) from error


def remove_unfinished(folder: Path, step: int | None = None) -> None:
    """Removes the partly written files of a checkpoint; None for all steps. Call it only with the folder's lock."""
    for path in folder.glob(f"{'*' if step is None else step}.orbax-checkpoint-tmp"):
        shutil.rmtree(path, ignore_errors=True)


def newest(checkpoints: Any) -> str:
    """A phrase for an error: "the newest checkpoint is of step 5", or "there is no earlier checkpoint"."""
    with contextlib.suppress(OSError):
        checkpoints.reload()
    return newest_in_words(checkpoints.latest_step(), kind="earlier checkpoint")


def newest_in_words(step: int | None, kind: str = "checkpoint") -> str:
    """A phrase for an error: "the newest checkpoint is of step 5"; for None, that there is no checkpoint.

    kind: the missing checkpoint in words.
    """
    return f"there is no {kind}" if step is None else f"the newest checkpoint is of step {step}"


def reason(error: BaseException) -> str:
    """The reason in words why a file could not be written: the operating system's text if there is one."""
    found = re.search(r"os_error_code='?(\d+)", str(error))
    if found:
        return os.strerror(int(found[1]))
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return _in_words(error)


def nonfinite(params: Any, mesh: Mesh) -> list[str]:
    """The names of a tree's arrays for which the sum of the squares of the values, in float32, is not finite.

    That is so for an array with a NaN or an infinity, and for an array whose values are too large. A norm squares its
    input. With such parameters a loss can be finite while its gradient is not. mesh: of the arrays.
    """
    with jax.set_mesh(mesh):
        found = {name: _is_finite(x) for name, x in _by_name(params).items()}
    return [name.removesuffix(".value") for name, is_finite in jax.device_get(found).items() if not is_finite]


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(jnp.square(x.astype(jnp.float32)).sum())


def digests(state: Any, mesh: Mesh) -> dict[str, int]:
    """A 32-bit checksum of each array's bits and their positions, by the array's name in the tree.

    It does not depend on the mesh over which the arrays are sharded.
    """
    with jax.set_mesh(mesh):
        found = {name: _digest(x) for name, x in _by_name(state).items()}
    return {name: int(x) for name, x in jax.device_get(found).items()}


@jax.jit
def _digest(x: jax.Array) -> jax.Array:
    """A checksum of an array's bits and their positions: uint32 []. It is a sum over elements, so sharding has no
    effect.
    """
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits >= 8:
        kind = {8: jnp.uint8, 16: jnp.uint16}.get(jnp.finfo(x.dtype).bits, jnp.uint32)
        x = lax.bitcast_convert_type(x, kind)  # 64 bits become two words
    elif x.dtype.itemsize > 4:
        x = lax.bitcast_convert_type(x, jnp.uint32)
    words, place = x.astype(jnp.uint32), jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        place = place * jnp.uint32(x.shape[axis]) + lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    # The multipliers come from Fibonacci hashing and MurmurHash3.
    mixed = (words ^ (place * jnp.uint32(0x9E3779B9))) * jnp.uint32(0x85EBCA6B)
    return jnp.sum((mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE35), dtype=jnp.uint32)


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their dotted paths."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def read_run(checkpoints: Any, step: int) -> dict[str, Any]:
    """The `run` item of a checkpoint: {"config": the model's fields, "run": the caller's values, "digests": by array
    name}.

    Early checkpoints have no digests. Raises ValueError if the item cannot be read or was not written by Trainer.save.
    """
    import orbax.checkpoint as ocp

    try:
        kept = checkpoints.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
    except KeyError:
        kept = None
    except Exception as error:
        _raise_unreadable(checkpoints, step, _in_words(error))
    if not isinstance(kept, dict) or not {"config", "run"} <= kept.keys():
        raise ValueError(f"folder: got a checkpoint of step {step} without its `run`, want one that save wrote")
    return kept


def read_state(checkpoints: Any, step: int, like: Any, mesh: Mesh, wanted: Mapping[str, int] | None) -> Any:
    """The state of a checkpoint, with the shapes and shardings of the arrays of the tree `like`, which are on `mesh`.

    wanted: the digests of the saved state, by array name; None for a checkpoint without digests.

    Raises ValueError if the state cannot be read, differs from the saved state, or belongs to another optimizer.
    """
    with _without_tracebacks_of_other_reads():
        state, why = _read_or_told(checkpoints, step, like)
        if why:
            time.sleep(0.5)  # lets reads in other threads, whose event loop is gone, fail within this context
            gc.collect()
    if why:
        _raise_unreadable(checkpoints, step, why)
    if wanted is not None:
        found = digests(state, mesh)
        bad = sorted(name for name in found if found[name] != wanted.get(name))
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            _raise_unreadable(checkpoints, step, f"{bad[0]}{more} differ from the saved arrays")
    return state


def _read_or_told(checkpoints: Any, step: int, like: Any) -> tuple[Any, str]:
    """(the state, "") or (None, the reason in words why it cannot be read). Raises OtherOptimizer for another
    optimizer.
    """
    import orbax.checkpoint as ocp

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    items = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
    try:
        saved = _by_name(dict(checkpoints.item_metadata(step).state))
        _check_alike(step, saved, _by_name(shapes))
        return checkpoints.restore(step, args=items).state, ""
    except (MemoryError, jax.errors.JaxRuntimeError, OtherOptimizer):
        raise
    except Exception as error:  # orbax raises Exception itself if it cannot read an array
        if "structures do not match" in str(error):
            raise _other_optimizer(step) from error
        return None, _in_words(error)


@contextlib.contextmanager
def _without_tracebacks_of_other_reads() -> Iterator[None]:
    """A context manager that hides the errors of other reads that orbax started together with a failed read.

    Python would print them, since they are raised in threads.
    """
    hook, logger, nothing = sys.unraisablehook, logging.getLogger("asyncio"), lambda _: False
    sys.unraisablehook = lambda _: None
    logger.addFilter(nothing)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        logger.removeFilter(nothing)


class OtherOptimizer(ValueError):
    """Raised if the optimizer's state in a checkpoint has other arrays than the trainer's optimizer."""


def _other_optimizer(step: int, more: str = "") -> OtherOptimizer:
    """The error for a checkpoint of another optimizer. more: a clause about the difference."""
    return OtherOptimizer(
        f"optimizer: got one whose state differs from the state in the checkpoint of step {step}{more}, want the "
        "optimizer that the checkpoint was trained with"
    )


def _check_alike(step: int, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises OtherOptimizer if an optimizer array in a checkpoint has another shape or dtype than the trainer's.

    saved, wanted: arrays or their metadata, by name, of the checkpoint and of the trainer. Orbax would cast them.
    """
    kind = lambda x: f"{jnp.dtype(x.dtype).name} {tuple(x.shape)}"
    for name, x in wanted.items():
        if name.startswith("optimizer.") and name in saved and kind(saved[name]) != kind(x):
            raise _other_optimizer(step, f", where {name} is {kind(saved[name])} and not {kind(x)}")


def _in_words(error: BaseException) -> str:
    """The first line, up to 200 characters, of an error's cause, or of the error: orbax adds pages of text."""
    lines = (str(error.__cause__ or error) or type(error).__name__).splitlines()
    return lines[0] if len(lines[0]) < 200 else f"{lines[0][:200]} ..."


def _raise_unreadable(checkpoints: Any, step: int, why: str) -> NoReturn:
    """Raises ValueError for a checkpoint that cannot be read. It names an older checkpoint, if there is one."""
    older = [x for x in checkpoints.all_steps() if x < step]
    way = f"; restore(step={max(older)}) takes an older one" if older else ""
    raise ValueError(f"folder: the checkpoint of step {step} in {checkpoints.directory} cannot be read ({why}){way}")
