"""Runs the demo: settings from the options, training with a progress bar, the checks, the files."""

import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import jax_kernels
from jax_kernels.cli.demo import compare as demo_compare
from jax_kernels.cli.demo import report as demo_report
from jax_kernels.cli.demo.data import Corpus, CorpusError, read_corpus, unigram_entropy
from jax_kernels.cli.demo.training import Checkpoints, Settings, Trainer, bits_per_byte, sample
from jax_kernels.models import LongNetConfig, TransformerConfig, make_mesh
from jax_kernels.models.training.checkpoints import NotWritten, file_in_the_way, newest_in_words, nonfinite, reason
from jax_kernels.models.training.preemption import INTERRUPTED
from jax_kernels.spelling import did_you_mean

__all__ = ["OptionError", "run"]

# Held-out bits per byte must end below this part of the unigram entropy.
LEARNED = 0.8
SAVE_SECONDS = 60
# Upper limits. Prompt and sample fit in the trained context; the model knows no positions beyond it.
PROMPT_BYTES, SAMPLE_BYTES = 48, 512


class OptionError(ValueError):
    """Raised for a wrong value of the option `option`; `message` says why."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option
        self.message = message


@dataclasses.dataclass(frozen=True)
class Preset:
    """The default values of the options, for one kind of device, and the learning rate, which has no option.

    model: the config, to which --attention, --implementation and --precision are applied. learning_rate: the peak.
    """

    model: TransformerConfig
    seq_len: int
    batch_size: int
    learning_rate: float
    steps: int


def preset(device: jax_kernels.DeviceInfo) -> Preset:
    """The Preset for a device: a small model for a CPU, a larger one for a GPU."""
    if device.compute_capability is None:
        # 0.9 million parameters: about a minute of steps on two cores.
        model = TransformerConfig(vocab_size=256, model_dim=128, num_layers=4, num_heads=4)
        return Preset(model, seq_len=256, batch_size=8, learning_rate=4e-3, steps=400)
    # 85 million parameters. float16 would need its losses scaled, so a GPU without bfloat16 trains in float32.
    dtype = "bfloat16" if device.supports_bf16 else "float32"
    model = TransformerConfig(vocab_size=256, model_dim=768, num_layers=12, num_heads=6, dtype=dtype)
    # A sequence takes about 1.3 GB of activations in bfloat16.
    large = (device.total_memory_bytes or 0) > 60e9
    return Preset(model, seq_len=2048, batch_size=32 if large else 4, learning_rate=6e-4, steps=400 if large else 800)


def run(
    *, text: Path | None, steps: int | None, out: Path, resume: bool, mesh: dict[str, int] | None = None, **given: Any
) -> bool:
    """Runs `jax-kernels demo`. Returns whether every check passed; raises OptionError for errors of the user's input.

    text: a file or folder; None for Python's standard library, or with `resume` for the run's own text. steps: in
    total, with the steps before; None for the device's default, or with `resume` for the end of the learning rate's
    schedule. out: the folder to write. resume: whether to go on from the checkpoint in `out`. mesh: the number of
    devices along each axis; None for one device. given: further options by name, None if left out: seq_len, batch_size,
    decay_steps, seed, attention, implementation and precision.
    """
    console = Console(highlight=False)
    device = jax_kernels.device_info()
    defaults = preset(device)
    folder = out / "checkpoint"
    if (found := file_in_the_way(out)) is not None:
        raise OptionError("--out", f"{found} is not a folder")
    history: dict[str, Any] = {"losses": [], "held_out": []}

    with contextlib.ExitStack() as stack:
        if resume:
            if not folder.is_dir():
                raise OptionError("--resume", f"there is no checkpoint in {folder}")
            checkpoints = stack.enter_context(contextlib.closing(Checkpoints(folder, replace=False)))
            check_own(checkpoints, out)
            settings, corpus, history = resumed(checkpoints, folder, steps, text, given)
            steps = max(settings.decay_steps, checkpoints.latest or 0) if steps is None else steps
        else:
            steps = defaults.steps if steps is None else steps
            settings, corpus = fresh(defaults, text, steps, given)
        check_products(settings.model, device)
        plan = attention_plan(settings)
        try:
            trainer = Trainer(settings, None if mesh is None else make_mesh(mesh))
        except ValueError as error:
            raise OptionError("--mesh", str(error).removeprefix("axes: ")) from error
        if resume:
            checkpoints.load_state(trainer)
        else:
            checkpoints = stack.enter_context(contextlib.closing(Checkpoints(folder, replace=True)))
            check_own(checkpoints, out)
        unigram = unigram_entropy(corpus.held_out)
        demo_report.introduce(console, device, trainer, corpus, plan, unigram)
        try:
            timing = train(console, trainer, corpus, steps, checkpoints, history)
        except KeyboardInterrupt:
            end_interrupted(checkpoints, out)
        check_finite(trainer)
        return finish(console, out, device, trainer, corpus, plan, unigram, history, timing)


def finish(
    console: Console, out: Path, device: jax_kernels.DeviceInfo, trainer: Trainer, corpus: Corpus,
    plan: jax_kernels.Plan, unigram: float, history: dict[str, Any], timing: dict[str, Any],
) -> bool:  # fmt: skip
    """After training: evaluates, prints a sample, compares with PyTorch, and writes loss.png and run.json into `out`.

    Returns whether the held-out loss is low enough and PyTorch agrees. plan: of the model's attention, for run.json.
    unigram: the entropy of the held-out text's frequencies of bytes, in bits per byte. history: the losses, for
    run.json. timing: the numbers that `train` returned, by name. Raises NotWritten if `out` cannot be written.
    """
    settings = trainer.settings
    held_out = trainer.evaluate(corpus.held_out_batches(settings.batch_size, 16))
    learned = held_out < LEARNED * unigram
    verdict = "" if learned else ", [red]not below it[/]: the model did not learn enough; train longer (--steps)"
    console.print(
        f"[bold]Held out[/] {held_out:.3f} bits per byte; {LEARNED} of the unigram entropy {unigram:.3f} is "
        f"{LEARNED * unigram:.3f}{verdict}",
        soft_wrap=True,
    )

    prompt = corpus.held_out[0, : min(PROMPT_BYTES, max(1, settings.seq_len // 4))]
    sampled = sample(trainer, prompt, min(SAMPLE_BYTES, settings.seq_len - len(prompt)), settings.seed)
    demo_report.print_sample(console, prompt.tobytes(), sampled)
    comparison = demo_compare.compare(trainer, corpus.held_out_batches(2, 1)[0])
    console.print(comparison.text, soft_wrap=True)

    passed = learned and comparison.passed
    results = {
        "passed": passed,
        "final_held_out_bits_per_byte": held_out,
        "unigram_entropy_bits_per_byte": unigram,
        **timing,
        "torch": comparison.numbers,
        "sample": sampled.decode(errors="replace"),
    }
    try:
        demo_report.plot(out / "loss.png", settings, history, unigram)
        demo_report.write_record(out / "run.json", device, trainer, corpus, plan, history, results)
    except OSError as error:
        raise NotWritten(f"folder: {out} cannot be written ({reason(error)})") from error
    wrote = f"Wrote {out / 'loss.png'}, {out / 'run.json'} and {out / 'checkpoint'}"
    console.print(wrote, soft_wrap=True, markup=False)
    return passed


def check_finite(trainer: Trainer) -> None:
    """Ends the process with the status 1 if a parameter is not finite, so that the state is not saved."""
    if names := nonfinite(trainer.params, trainer.mesh):
        sys.exit(
            f"jax-kernels: step {trainer.step}: got parameters that are not finite, such as {names[0]}, want finite "
            "values; they are not saved"
        )


def end_interrupted(checkpoints: Checkpoints, out: Path) -> NoReturn:
    """Ends the process with the status INTERRUPTED, and says which checkpoint is the newest."""
    way = "" if checkpoints.latest is None else f"; jax-kernels demo --resume --out {out} goes on from there"
    print(f"jax-kernels: Ctrl-C: {newest_in_words(checkpoints.latest)}{way}", file=sys.stderr)
    sys.exit(INTERRUPTED)


def fresh(defaults: Preset, text: Path | None, steps: int, given: dict[str, Any]) -> tuple[Settings, Corpus]:
    """(settings, the Corpus of the text) of a new run, from the options `given` and the device's defaults.

    text: a file or folder; None for Python's standard library. steps: in total. given: further options by name, None if
    left out. Raises OptionError for a wrong option or a text that cannot be trained on.
    """
    pick = lambda name, default: default if given[name] is None else given[name]
    seq_len, batch_size = pick("seq_len", defaults.seq_len), pick("batch_size", defaults.batch_size)
    if seq_len * batch_size >= 2**31:
        raise OptionError(
            "--batch-size", f"got {batch_size} sequences of {seq_len} bytes, want fewer than 2**31 bytes in a step"
        )
    corpus = corpus_of(text, seq_len)
    settings = Settings(
        model=model_of(defaults.model, seq_len, given),
        seq_len=seq_len,
        batch_size=batch_size,
        learning_rate=defaults.learning_rate,
        decay_steps=pick("decay_steps", steps),
        seed=pick("seed", 0),
        text=None if text is None else str(text),
        sha256=corpus.sha256,
    )
    return settings, corpus


def model_of(config: TransformerConfig, seq_len: int, given: dict[str, Any]) -> TransformerConfig:
    """The device's default `config`, changed by the options attention, implementation and precision in `given`.

    The result is a LongNetConfig if the attention is "dilated". Its segments then depend on seq_len. Raises OptionError
    for an unknown attention or precision; the implementation is not checked.
    """
    if given["precision"] not in (None, "fp8"):
        raise OptionError("--precision", f"got {given['precision']!r}, want fp8, or no --precision")
    config = dataclasses.replace(config, implementation=given["implementation"], precision=given["precision"])
    if given["attention"] in (None, "dense"):
        return config
    if given["attention"] != "dilated":
        hint = did_you_mean(given["attention"], ("dense", "dilated"))
        raise OptionError("--attention", f"got {given['attention']!r}, want dense or dilated{hint}")
    # Each segment has a quarter of the context's tokens; a very short context has room only for rate 1.
    branches = [(max(1, seq_len * rate // 4), rate) for rate in (1, 2, 4)]
    lengths, rates = zip(*((length, rate) for length, rate in branches if rate <= length), strict=True)
    return LongNetConfig(**dataclasses.asdict(config), segment_lengths=lengths, dilation_rates=rates)


def check_own(checkpoints: Checkpoints, out: Path) -> None:
    """Raises OptionError if another program, such as `jax-kernels train`, wrote the checkpoints in the folder `out`."""
    if checkpoints.latest is None:
        return
    try:
        is_own = "settings" in checkpoints.load_run()
    except (KeyError, TypeError, ValueError, FileNotFoundError):  # there is no `run`, or it is no JSON object
        is_own = False
    if not is_own:
        raise OptionError("--out", f"another program wrote the checkpoint in {out}; give another folder")


def resumed(
    checkpoints: Checkpoints, folder: Path, steps: int | None, text: Path | None, given: dict[str, Any]
) -> tuple[Settings, Corpus, dict[str, Any]]:
    """(settings, the Corpus of its text, history) of the checkpoint in `folder`, which `checkpoints` reads.

    steps: in total, or None. text: where the text is now; None for the path in the settings. given: further options by
    name, None if left out. Raises OptionError without a checkpoint, for steps before the checkpoint's, for another
    text, and for an option that differs from the settings.
    """
    if checkpoints.latest is None:
        raise OptionError("--resume", f"there is no checkpoint in {folder}")
    if steps is not None and steps < checkpoints.latest:
        raise OptionError("--steps", f"got {steps}, but the checkpoint is at step {checkpoints.latest} already")
    history = checkpoints.load_run()
    settings = Settings.from_json(history.pop("settings"))
    saved = dataclasses.asdict(settings) | {
        "implementation": settings.model.implementation,
        "precision": settings.model.precision,
        "attention": "dilated" if isinstance(settings.model, LongNetConfig) else "dense",
    }
    for name, value in given.items():
        if value is not None and value != saved[name]:
            option = "--" + name.replace("_", "-")
            raise OptionError(option, f"got {value}, but the checkpoint was trained with {saved[name]}")
    if text is None and settings.text is not None:
        text = Path(settings.text)
    corpus = corpus_of(text, settings.seq_len)
    if corpus.sha256 != settings.sha256:
        raise OptionError("--text", f"{corpus.source} does not have the bytes that the checkpoint was trained on")
    return settings, corpus, history


def corpus_of(text: Path | None, seq_len: int) -> Corpus:
    try:
        return read_corpus(text, seq_len)
    except CorpusError as error:
        raise OptionError("--text", str(error)) from error


def check_products(model: TransformerConfig, device: jax_kernels.DeviceInfo) -> None:
    """Raises OptionError if the model has 8-bit matmuls and the GPU does not support them."""
    if model.precision == "fp8" and device.compute_capability is not None and not device.supports_fp8:
        raise OptionError(
            "--precision",
            f"got fp8 on {device.name}, which has no 8-bit matmuls, want an Ada (L4, L40S, RTX 40), Hopper (H100, "
            "H200) or Blackwell GPU",
        )


def attention_plan(settings: Settings) -> jax_kernels.Plan:
    """The Plan of the model's attention on this device. Raises OptionError if the implementation cannot serve it."""
    model = settings.model
    heads = lambda count: jax.ShapeDtypeStruct(
        (settings.batch_size, settings.seq_len, count, model.head_dim), model.dtype
    )
    query, key = heads(model.num_heads), heads(model.num_kv_heads)
    op: Any = jax_kernels.flash_attention
    pattern: dict[str, Any] = {}
    if isinstance(model, LongNetConfig):
        op = jax_kernels.dilated_attention
        pattern = {"segment_lengths": model.segment_lengths, "dilation_rates": model.dilation_rates}
    try:
        return jax_kernels.explain(op, query, key, key, is_causal=True, implementation=model.implementation, **pattern)
    except (ValueError, NotImplementedError) as error:
        raise OptionError("--implementation", str(error).removeprefix("implementation: ")) from error


def train(
    console: Console, trainer: Trainer, corpus: Corpus, steps: int, checkpoints: Checkpoints, history: dict[str, Any]
) -> dict[str, Any]:
    """Trains until the state has had `steps` steps, and saves. Returns the timing, by name.

    history: gets the new losses, and [step, held-out bits per byte] pairs. The timing is compile_seconds, step_seconds
    and tokens_per_second, None if there was nothing to train. Compilation, evaluation and saving are not in the time of
    a step.
    """
    settings = trainer.settings
    if trainer.step == steps:
        console.print(f"The checkpoint is at step {steps} already: nothing left to train.")
        return dict.fromkeys(("compile_seconds", "step_seconds", "tokens_per_second"))
    start = time.perf_counter()
    trainer.compile()
    compile_seconds = time.perf_counter() - start

    first, tokens = trainer.step, settings.batch_size * settings.seq_len
    batches = corpus.held_out_batches(settings.batch_size, 4)
    evaluate_every = max(1, steps // 10)
    losses, points = history["losses"], history["held_out"]
    columns = [
        BarColumn(10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[speed]}"),
    ]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps, completed=first, loss="", speed="")
        elapsed, running, saved = 0.0, None, time.perf_counter()
        start = time.perf_counter()

        def record(nats: jax.Array) -> None:
            losses.append(float(nats))
            step_seconds = (elapsed + time.perf_counter() - start) / (len(losses) - first)
            loss = f"loss {losses[-1]:.3f}, {bits_per_byte(losses[-1]):.3f} bits/byte"
            speed = f"{tokens / step_seconds:,.0f} tokens/s, {step_seconds * 1e3:.0f} ms/step"
            progress.update(task, completed=len(losses), loss=loss, speed=speed)

        while trainer.step < steps:
            nats = trainer.train(corpus.batch(settings.batch_size, settings.seed, trainer.step))
            # The loss of the previous step is read while this step runs, so that the device never waits for the host.
            if running is not None:
                record(running)
            running = nats
            if trainer.step % evaluate_every and trainer.step != steps:
                continue
            record(running)
            running = None
            elapsed += time.perf_counter() - start
            points.append([trainer.step, trainer.evaluate(batches)])
            console.print(f"step {trainer.step}: held out {points[-1][1]:.3f} bits per byte")
            if trainer.step == steps or time.perf_counter() - saved > SAVE_SECONDS:
                check_finite(trainer)
                checkpoints.save(trainer, {"settings": dataclasses.asdict(settings), **history})
                saved = time.perf_counter()
            start = time.perf_counter()
    step_seconds = elapsed / (steps - first)
    console.print(
        f"[bold]Speed[/] {tokens / step_seconds:,.0f} tokens/s, {step_seconds * 1e3:.1f} ms a step, "
        f"after {compile_seconds:.1f} s of compilation"
    )
    return {
        "compile_seconds": compile_seconds,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens / step_seconds,
    }
