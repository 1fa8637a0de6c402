"""jax-kernels tune: times the candidates of an op's calls, or of the calls that a script makes, and keeps the fastest.

Each op of `TUNABLE` is a command, with the options of `jax-kernels explain`.
"""

import contextlib
import inspect
import json
import os
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer.core import TyperGroup

from jax_kernels.cli import UserError, WriteError
from jax_kernels.cli import explain_options as options
from jax_kernels.cli.explain import with_option
from jax_kernels.cli.ops import OPS
from jax_kernels.cli.outputs import json_text
from jax_kernels.cli.paths import path_of
from jax_kernels.spelling import did_you_mean
from jax_kernels.tuned import cache
from jax_kernels.tuning import session
from jax_kernels.tuning.session import TunedCall

__all__ = ["COMMANDS", "OpGroup", "tune"]

# Ops whose backward makes further matmul calls.
_OF_MATMULS = ("matmul", "gated_matmul", "mlp")
_OF_ATTENTION = ("flash_attention", "flash_attention_fp8", "decode_attention")
_GROUPED = ("grouped_matmul", "grouped_gated_matmul")
_OPS = (*_OF_ATTENTION, *_OF_MATMULS, *_GROUPED, "layer_norm", "rms_norm", "linear_cross_entropy")
# By the command's name, the op.
TUNABLE = {"attention": "flash_attention", **{op: op for op in _OPS}}

GRADIENTS = Annotated[bool, typer.Option(help="time the backward too, and choose by the sum")]
SECONDS = Annotated[float, typer.Option(help="the duration of one reading")]
PRUNE = Annotated[bool, typer.Option(help="leave out candidates that are predicted to be too slow")]
SHAPES = "several have blanks between them, in quotes"


class _Bar:
    """A progress bar of the candidates of a call, with an estimate of the time that is left."""

    def __init__(self, progress: Progress):
        self.progress, self.task = progress, progress.add_task("planning", total=None)

    def begin(self, text: str, steps: int) -> None:
        self.progress.reset(self.task, total=steps, description=text)
        self.text = text

    def step(self, text: str) -> None:
        self.progress.update(self.task, description=f"{self.text}: {text.partition(' ')[0]}", advance=1)

    def end(self, result: TunedCall) -> None:
        self.progress.update(self.task, total=1, completed=1)


class _Lines(session.Silent):
    """A line on stderr for each call that begins, where no bar shows that the command is at work."""

    def begin(self, text: str, steps: int) -> None:
        print(f"{text}: timing at most {steps} candidates of a call", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _tuning(gradients: bool, seconds: float, prune: bool) -> Iterator[None]:
    """Tunes the calls made inside, with a progress bar in a terminal, and then prints their results.

    Raises UserError if there was no call, or for wrong seconds.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    try:
        with (
            Progress(
                *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
            ) as progress,
            session.tune(
                gradients=gradients,
                seconds=seconds,
                prune=prune,
                progress=_Bar(progress) if console.is_terminal else _Lines(),
            ) as results,
        ):
            yield
    except ValueError as error:
        if not str(error).startswith("seconds: "):
            raise
        raise UserError(f"--{error}") from None
    if not results:
        raise UserError("tune: got no call of an op that tuning can time: was its function traced before?")
    _show(results)


def _show(results: list[TunedCall]) -> None:
    """Prints a line for each call, and for each candidate that did not run."""
    for result in results:
        print(result)
        for text, reason in result.failed.items():
            print(f"  not {text}: {reason}")


def _command(op: str) -> Callable[..., None]:
    """The typer command `jax-kernels tune OP`, a function whose signature has the op's options."""
    parameters = options.parameters_of(op)
    shape = options.SIZES["shape" if "query" in options.arguments_of(op) else "rows.shape"]
    keyword = lambda name, default, kind: inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
    )
    texts = Annotated[str, typer.Option("--shapes", help=f"{shape.help}; {SHAPES}")]
    parameters = {"shapes": keyword("shapes", inspect.Parameter.empty, texts)} | parameters
    del parameters["shape"]
    parameters["gradients"] = keyword("gradients", True, GRADIENTS)
    parameters["seconds"] = keyword("seconds", 0.05, SECONDS)
    parameters["prune"] = keyword("prune", True, PRUNE)

    def command(shapes: str, gradients: bool, seconds: float, prune: bool, **values: Any) -> None:
        try:
            if not shapes.split():
                raise UserError(f"--shapes: got {shapes!r}, want a shape or several")
            calls = [options.given(op, values | {"shape": text}) for text in shapes.split()]
            with _tuning(gradients, seconds, prune):
                for call in calls:
                    _trace(op, call, differentiates=gradients and op in _OF_MATMULS)
        except UserError as error:
            raise UserError(str(error).replace("--shape:", "--shapes:", 1)) from None

    command.__doc__ = f"Tune {op} for these shapes, with random arrays."
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: x.annotation for name, x in parameters.items()}
    return command


def _trace(op: str, given: dict[str, Any], *, differentiates: bool) -> None:
    """Traces a call, so that it is tuned. given: the op's arguments by name, with arrays as jax.ShapeDtypeStructs.

    differentiates: whether the gradients of the arrays are traced too. Raises UserError if the op refuses the call.
    """
    leaves, structure = jax.tree.flatten(given)
    is_array = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
    arrays = [x for x, is_one in zip(leaves, is_array, strict=True) if is_one]

    def call(*arrays: Any) -> Any:
        rest = iter(arrays)
        filled = [next(rest) if is_one else x for x, is_one in zip(leaves, is_array, strict=True)]
        return OPS[op].function(**jax.tree.unflatten(structure, filled))

    def gradients(*arrays: Any) -> Any:
        out, vjp = jax.vjp(call, *arrays)
        return vjp(jax.tree.map(jnp.ones_like, out))

    try:
        jax.eval_shape(gradients if differentiates else call, *arrays)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UserError(with_option(op, str(error))) from None


COMMANDS: dict[str, Callable[..., None]] = {name: _command(op) for name, op in TUNABLE.items()}


class OpGroup(TyperGroup):
    """The typer group whose commands are the ops that can be tuned."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS and ctx.params.get("script") is not None:
            text = shlex.join(args)
            raise UserError(f"--from: got the arguments {text!r} behind it, want --arguments {shlex.quote(text)}")
        if name not in COMMANDS:
            raise UserError(f"op: got {name!r}, want one of {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}")
        return super().resolve_command(ctx, args)


def tune(
    context: typer.Context,
    script: Annotated[
        Path | None,
        typer.Option("--from", parser=path_of("--from"), help="run this script, and tune the calls it makes"),
    ] = None,
    arguments: Annotated[str, typer.Option(help="the script's arguments, as one text")] = "",
    gradients: GRADIENTS = True,
    seconds: SECONDS = 0.05,
    prune: PRUNE = True,
    shows: Annotated[bool, typer.Option("--list", help="show your winners, and the ones of the library")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --list: print JSON")] = False,
    clears: Annotated[bool, typer.Option("--clear", help="remove all winners from the cache folder")] = False,
) -> None:
    """Time the implementations and blocks of calls on this machine, and keep the fastest for later calls."""
    if context.invoked_subcommand is not None:
        if script is not None or shows or clears:
            raise UserError(f"op: got {context.invoked_subcommand} with --from, --list or --clear, want one of them")
        return
    asked = [
        name for name, is_given in (("--from", script is not None), ("--list", shows), ("--clear", clears)) if is_given
    ]
    if len(asked) != 1:
        got = " and ".join(asked) or "no op and none of --from, --list and --clear"
        raise UserError(f"tune: got {got}, want one of them")
    if as_json and not shows:
        raise UserError("--json: got it without --list, want both")
    if arguments and script is None:
        raise UserError(f"--arguments: got {arguments!r} without --from, want both")
    if clears:
        _clear()
    elif shows:
        _list(as_json)
    elif script is not None:
        _run(script, _words(arguments), gradients, seconds, prune)


def _words(arguments: str) -> list[str]:
    """The words of the option --arguments, split as by a shell. Raises UserError for a quote without its end."""
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise UserError(f"--arguments: got {arguments!r} ({error}), want words as in a shell") from None


def _run(script: Path, arguments: list[str], gradients: bool, seconds: float, prune: bool) -> None:
    """Runs a script as the main program, and tunes the calls that it makes. Its exit with status 0 is its end."""
    if not os.path.isfile(script):  # Path.is_file would raise for a name that is too long
        raise UserError(f"--from: got {str(script)!r}, want a Python script")
    before = list(sys.argv), list(sys.path)
    sys.argv[:], sys.path[:] = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        with _tuning(gradients, seconds, prune):
            try:
                runpy.run_path(str(script), run_name="__main__")
            except SystemExit as ended:
                if ended.code not in (None, 0):
                    raise
    finally:
        sys.argv[:], sys.path[:] = before


def _list(as_json: bool) -> None:
    own, shipped = cache.listed(), cache.listed_shipped()
    found = {device: [*own.get(device, {}).items(), *shipped.get(device, {}).items()] for device in own | shipped}
    if as_json:
        winners = {
            device: [
                {"request": json.loads(key), "shipped": winner.is_shipped, **winner.as_json()} for key, winner in of
            ]
            for device, of in found.items()
        }
        print(json_text(winners))
        return
    if not own:
        print(f"no winners in {cache.folder()}")
    for device, of in found.items():
        print(device)
        for key, winner in of:
            request = json.loads(key)
            op = request.pop("op")
            print(f"  {op}({', '.join(f'{name}={value}' for name, value in request.items())}): {winner}")


def _clear() -> None:
    try:
        removed = cache.clear()
    except OSError as error:
        raise WriteError(f"--clear: {cache.folder()} cannot be written ({error})") from None
    for path in removed:
        print(f"removed {path}")
    if not removed:
        print(f"no winners in {cache.folder()}")
