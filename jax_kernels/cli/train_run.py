"""The run of `jax-kernels train`: the processes, the mesh, the text, the Trainer, and train.json."""

import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from jax_kernels.cli import UserError
from jax_kernels.cli.demo.data import standard_library_files
from jax_kernels.cli.demo.training import make_optimizer
from jax_kernels.cli.train_processes import check_agreement
from jax_kernels.cli.train_progress import Report, plot_losses, progress
from jax_kernels.files import write_whole
from jax_kernels.models import LongNetConfig, TokenBatches, Trainer, TransformerConfig, make_mesh, read_documents
from jax_kernels.models.parallel.distributed import initialize_distributed
from jax_kernels.models.training.checkpoints import NotWritten, newest_in_words, reason
from jax_kernels.models.training.folder_lock import FolderLock
from jax_kernels.models.training.preemption import INTERRUPTED, stop_asked

__all__ = ["as_user_error", "in_options", "run"]


def as_user_error(error: Exception, **arguments: str) -> Exception:
    """The library's error as a UserError: its message, with the command's options instead of the library's arguments.

    arguments: as in in_options.
    """
    return UserError(in_options(str(error), **arguments))


def in_options(text: str, **arguments: str) -> str:
    """The text of a library's error, with the command's options instead of the library's arguments.

    Arguments are replaced at the start of the text, and in each "argument=value" within it. arguments: options of the
    command by the library's argument, where they differ from the options of `jax-kernels train`.
    """
    text = _with_attention(re.sub(r"\b(TransformerConfig|LongNetConfig)\.", "", text))
    text = re.sub(r"; restore\(step=(\d+)\) takes an older one", r"; the checkpoint of step \1 is older", text)
    known, names = _ARGUMENTS | arguments, re.match(r"\w+(, \w+)*(?=: )", text)
    if names is not None and {*names[0].split(", ")} <= known.keys():
        text = f"{', '.join(known[name] for name in names[0].split(', '))}{text[names.end() :]}"
    elif " strategy='" in text:
        text = f"--sequence-strategy: {text}"
    fields = "|".join((*_OPTIONS, "accumulate", "seq_len", "implementation", "num_processes", "process_id"))
    option = lambda found: f"--{_OPTIONS.get(found[1], found[1]).replace('_', '-')} "
    return re.sub(rf"\b({fields})=", option, text)


def _with_attention(text: str) -> str:
    """The text of the error about a checkpoint's other model, with --attention or --seq-len instead of the fields of
    LongNetConfig that these options set.
    """
    fields = (
        r"\b(?:combine|dilation_rates|heads|layer_norm|layout|order|segment_lengths)=(\[[^]]*\]|'[^']*'|\w+)(?:, )?"
    )
    values = re.findall(fields, text)
    if not values or "differs from the checkpoint's" not in text:
        return text
    option = "another --seq-len" if "combine=" not in text else "--attention dilated"
    option = "--attention dense" if "combine=None" in text else option
    rest = re.sub(fields, "", text)
    return f"{rest}{'' if rest.endswith(('which has ', ', ')) else ', '}{option}"


def run(
    axes: dict[str, int], text: Path | None, out: Path, *, attention: str, settings: dict[str, Any],
    model: dict[str, Any], processes: dict[str, Any],
) -> None:  # fmt: skip
    """Runs `jax-kernels train`: starts the processes, trains, and writes the checkpoints and train.json.

    axes: the devices along each mesh axis. text: a file or folder, None for Python's standard library. out: the folder
    to write. attention: "dense" or "dilated". settings: of the training. model: fields of TransformerConfig. processes:
    arguments of initialize_distributed.

    Raises ValueError, TypeError or FileNotFoundError for errors of the user's input, NotWritten if `out` cannot be
    written. Ends the process with the status STOPPED or INTERRUPTED if SIGTERM or Ctrl-C ended the run, and with 1 if a
    loss or a parameter is not finite.
    """
    initialize_distributed(**processes)
    options = {_OPTIONS.get(name, name): value for name, value in (settings | model).items()}
    options |= {"mesh": axes, "attention": attention, "out": str(out)}
    check_agreement({f"--{name.replace('_', '-')}": value for name, value in options.items()})
    folder = out / "checkpoint"
    FolderLock(folder).check_free()  # first, because the text and the model may take minutes
    is_first = jax.process_index() == 0
    say = print if is_first else lambda *words, **options: None
    mesh = make_mesh(axes)
    length = settings["seq_len"]
    config = TransformerConfig(vocab_size=256, **model)
    if attention == "dilated":
        pattern: dict[str, Any] = {"segment_lengths": (length // 4, length // 2, length), "dilation_rates": (1, 2, 4)}
        config = LongNetConfig(vocab_size=256, **model, **pattern)
    check_parameters_fit(config)
    batches, digest = batches_of(text, settings, mesh)
    kept = settings | {"text": digest, "dtype": config.dtype}
    trainer = Trainer(
        config,
        make_optimizer(settings["steps"], settings["learning_rate"]),
        mesh=mesh,
        seed=settings["seed"],
        accumulate=settings["accumulate"],
        folder=folder,
    )
    try:
        trainer.lock_folder()
        losses = losses_before(trainer, kept)
        begun = trainer.step
        if begun and begun < settings["steps"]:
            say(f"goes on from step {begun}", flush=True)
        of_devices = f"{mesh.size} device{'s' if mesh.size > 1 else ''}"
        of_processes = f"{jax.process_count()} process{'es' if jax.process_count() > 1 else ''}"
        say(f"{of_devices}, {of_processes}, mesh {dict(mesh.shape)}", flush=True)
        with stop_asked(tell_interrupt) as asked:
            tokens = settings["batch_size"] * settings["seq_len"]
            with progress(begun, settings["steps"], tokens, is_shown=is_first) as report:
                status = train(trainer, batches, losses, kept, report, asked)
        if status:
            which = "Ctrl-C" if status == INTERRUPTED else "SIGTERM"
            say(f"{which}: saved step {trainer.step} in {folder}; the same command goes on from there", flush=True)
            sys.exit(status)
        if begun == settings["steps"]:
            say(f"nothing to train: the run in {out} has had its {begun} steps", flush=True)
        skipped = sum(loss is None for loss in losses)
        if skipped:
            say(f"skipped {skipped} of {len(losses)} steps, whose gradients were not finite in float16", flush=True)
        record = {"settings": kept, "mesh": dict(mesh.shape), "processes": jax.process_count(), "losses": losses}
        if is_first and (begun < settings["steps"] or not has_record(out / "train.json", losses)):
            write_record(out / "train.json", record, trainer)
            files = f"{out / 'train.json'}, {out / 'loss.png'}"
            say(f"wrote {files}, and the checkpoint of step {trainer.step} to {folder}", flush=True)
        elif is_first:
            say(f"{out / 'train.json'} has its losses, {folder} the checkpoint of step {trainer.step}", flush=True)
    except KeyboardInterrupt:
        if is_first:
            way = "" if trainer.latest is None else "; the same command goes on from there"
            print(f"jax-kernels: Ctrl-C: {newest_in_words(trainer.latest)}{way}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        trainer.close()


def parameter_count(config: TransformerConfig) -> int:
    """The number of parameters of a model that the command can train."""
    kv_heads, head_dim, mlp_dim = config.num_kv_heads or 0, config.head_dim or 0, config.mlp_dim or 0
    of_block = 2 * (config.num_heads + kv_heads) * head_dim + 3 * mlp_dim + 2  # norms
    return config.model_dim * (config.num_layers * of_block + config.vocab_size + 1)


def check_parameters_fit(config: TransformerConfig) -> None:
    """Raises UserError if the float32 parameters of this model do not fit in the memory of one device.

    Trainer makes them on one device before it shards them.
    """
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if memory is None else memory
    size = 4 * parameter_count(config)
    if size > memory:
        raise UserError(
            f"--layers, --width: got {config.num_layers} layers of width {config.model_dim}, whose parameters need "
            f"{size / 1e9:,.0f} GB, want at most the {memory / 1e9:,.0f} GB of memory"
        )


def tell_interrupt() -> None:
    """Says that a Ctrl-C ends the run after its step. print may not run in a signal's handler."""
    os.write(2, b"\njax-kernels: Ctrl-C: the run ends after this step, with a checkpoint; again ends it at once\n")


def losses_before(trainer: Trainer, kept: dict[str, Any]) -> list[float | None]:
    """Restores the trainer's newest checkpoint, and returns the losses of the steps before it, one for each step.

    Without a checkpoint, it returns [] and the trainer is unchanged. kept: the settings of this run. Raises ValueError
    if the checkpoint has no losses, or is of a run with other settings.
    """
    if trainer.latest is None:
        return []
    before = trainer.restore()
    if "losses" not in before:
        raise ValueError("--out: another program wrote the checkpoint there, without losses; give another folder")
    losses = before.pop("losses")
    check_settings(before, kept)
    return losses


def has_record(path: Path, losses: list[float | None]) -> bool:
    """Whether the train.json at `path` can be read and has these losses, and loss.png is in its folder."""
    try:
        return json.loads(path.read_text())["losses"] == losses and path.with_name("loss.png").is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_record(path: Path, record: dict[str, Any], trainer: Trainer) -> None:
    """Writes a plot of the losses in `record` to loss.png, then `record` as JSON to `path`, train.json, in its folder.

    Raises NotWritten, which names the newest checkpoint.
    """
    try:
        # The plot is first: without the new train.json, has_record is False, and the next run writes both.
        plot_losses(path.with_name("loss.png"), record["losses"])
        write_whole(path, json.dumps(record, indent=1))
    except OSError as error:
        newest = newest_in_words(trainer.latest)
        raise NotWritten(f"folder: {path} cannot be written ({reason(error)}); {newest}") from error


def batches_of(text: Path | None, settings: dict[str, Any], mesh: Mesh) -> tuple[TokenBatches, str]:
    """(the batches of a text, the SHA-256 of its tokens and documents).

    text: a file or folder; None for Python's standard library. settings: of the command; only seed, seq_len, batch_size
    and documents ("files" makes each file a document) are read. mesh: over which batches are sharded.

    Raises ValueError or FileNotFoundError, on each process, if one process cannot read the text or has another text.
    """
    options: dict[str, Any] = {"seed": settings["seed"], "mesh": mesh}
    failure: Exception | None = None
    try:
        data, starts = read_documents(standard_library_files() if text is None else text)
        options |= {"documents": starts} if settings.get("documents") == "files" else {}
        batches = TokenBatches(data, settings["seq_len"], settings["batch_size"], **options)
        digest = batches.sha256
        found = f"a text of SHA-256 {digest[:16]}"
    except (ValueError, OSError) as error:
        found = str(error)
        if not found.startswith("batch: "):
            found = f"--text: {found.removeprefix('paths: ').removeprefix('tokens: ')}"
        failure = (FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError)(found)
    check_agreement({"--text": found})  # also in a process that failed: the other processes wait for it
    if failure is not None:
        raise failure
    return batches, digest


# The options for the arguments that the library's errors name.
_ARGUMENTS = {
    "axes": "--mesh",
    "config": "--out",  # a model that differs from the model of the checkpoint
    "optimizer": "--out",
    "batch": "--batch-size",
    "tokens": "--seq-len",
    "folder": "--out",
    "num_layers": "--layers",
    "process_id": "--process-id",
    "num_processes": "--num-processes",
    **{name: f"--{name}" for name in ("mesh", "seed", "coordinator", "timeout", "accumulate", "implementation")},
}
# The options whose values have other names in the config.
_OPTIONS = {"num_layers": "layers", "model_dim": "width", "num_heads": "heads", "num_kv_heads": "kv_heads"}


def train(
    trainer: Trainer, batches: TokenBatches, losses: list[float | None], kept: dict[str, Any], report: Report,
    asked: Callable[[int], int],
) -> int:  # fmt: skip
    """Runs the remaining steps and saves. Returns 0 if all steps ran, else the exit status with which `asked` ended it.

    losses: the losses so far, to which each step's is added; None for a step that float16 skipped. kept: the settings,
    for the checkpoint. report(step, loss): called after each step. asked(step): the exit status if the run is to end
    after this step, once it is saved, else 0.
    """
    steps = kept["steps"]
    while trainer.step < steps:
        batch = batches[trainer.step]
        found = trainer.train(batch)
        is_skipped, loss = bool(found.get("is_skipped", False)), float(found["loss"])
        losses.append(None if is_skipped else loss)
        if not is_skipped:
            check_finite(trainer, loss, float(found["gradient_norm"]))
        report(trainer.step, loss)
        is_last = trainer.step == steps
        status = 0 if is_last else asked(trainer.step)
        if trainer.step % kept["save_every"] == 0 or is_last or status:
            check_parameters(trainer, batch)
            trainer.save(kept | {"losses": losses})
        if status:
            return status
    return 0


def check_finite(trainer: Trainer, loss: float, gradient_norm: float) -> None:
    """Ends the process with the status 1, without a checkpoint, if a step's loss or gradient norm is not finite.

    The parameters after such a step are useless.
    """
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        end_unsaved(trainer, f"a loss of {loss} and a gradient norm of {gradient_norm}, want finite values")


def check_parameters(trainer: Trainer, batch: Any) -> None:
    """Ends the process with the status 1, without a checkpoint, unless the parameters and their loss on `batch` are
    finite, and with float16 some loss scale gives finite gradients.
    """
    try:
        trainer.check_finite()
    except FloatingPointError as error:
        if "loss scale" in str(error):
            end_unsaved(trainer, "no finite gradient in float16 at any loss scale, want one")
        end_unsaved(trainer, "parameters that are not finite, or too large to be squared, want finite values")
    loss = trainer.evaluate(batch)
    if not math.isfinite(loss):
        end_unsaved(trainer, f"parameters whose loss is {loss}, want a finite loss")


def end_unsaved(trainer: Trainer, got: str) -> NoReturn:
    """Ends the process with the status 1 and a message with `got`, the bad value, and the newest checkpoint."""
    newest = newest_in_words(trainer.latest)
    sys.exit(f"jax-kernels: step {trainer.step}: got {got}, as with a smaller --learning-rate; {newest}")


def check_settings(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises ValueError if a checkpoint's settings, `before`, differ from this run's, `now`, except in save_every."""
    changed = [name for name, x in before.items() if name != "save_every" and now.get(name) != x]
    if changed:
        different = ["another --text" if x == "text" else f"--{x.replace('_', '-')} {before[x]}" for x in changed]
        why = ": --steps sets the schedule of the learning rate" if "steps" in changed else ""
        want = f"give another folder{why}"
        raise ValueError(f"--out: the checkpoint there was trained with {', '.join(different)}; {want}")
