"""The jax-kernels command. Its own packages (the cli extra), PyTorch and Flax load when a command needs them."""

import importlib
import io
import os
import re
import sys
from collections.abc import Collection
from typing import Annotated, Any, NoReturn

from jax_kernels.cli.machine_errors import in_one_line
from jax_kernels.extras import EXTRAS, is_installed

__all__ = ["UserError", "WriteError", "main"]


class UserError(Exception):
    """An error of the user's input. The command prints it as one line, and exits with 2."""


class WriteError(Exception):
    """A file cannot be written, as on a full disk. The command prints this as one line, and exits with 1."""


# The commands whose modules import the ops, which takes a second, with the first line of their help.
COMMANDS = {
    "info": "Show the device, the versions, and which implementations of each op can run.",
    "check": "Compare the ops and their gradients with float64, for every implementation that can run here.",
    "explain": "Show which implementation a call would use, with which blocks, and why. Without an op: attention.",
    "bench": "Time the ops' standard sizes on this machine, by each implementation that serves them.",
    "tune": "Time the implementations and blocks of calls on this machine, and keep the fastest for later calls.",
    "profile": "Run a script, and show the ops that it ran: how often, their FLOPs, bytes, bounds, and advice.",
}

# The commands that need the flax extra: (module, function, the first words of its line of help). They are imported when
# they run.
FLAX_COMMANDS = {
    "demo": ("demo", "demo", "Train a small transformer on real text"),
    "train": ("train", "train", "Train a transformer on text, on the devices of a mesh, on one host or several"),
    "generate": ("trained.generate", "generate", "Continue a text with a model that train trained"),
    "eval": ("trained.evaluate", "evaluate", "Measure the loss and the perplexity of a trained model on a text"),
}
_HELP = {"help_option_names": ["-h", "--help"]}
# Shells set it while they complete a command line; click reads it.
_COMPLETE = "_JAX_KERNELS_COMPLETE"
# The begin of an error of the library about an environment variable, which any command may meet.
_OF_ENVIRONMENT = re.compile(r"JAX_KERNELS_[A-Z_]+: got ")


def _load(app: Any, name: str) -> None:
    """Imports the module of a command and adds the command to the app. name: a key of COMMANDS, and the module's name.

    "explain" and "tune" are groups with a command for each op.
    """
    import typer

    module = importlib.import_module(f"jax_kernels.cli.{name}")
    if name not in ("explain", "tune"):
        app.command()(getattr(module, name))
        return
    group = typer.Typer(cls=module.OpGroup, help=COMMANDS[name], no_args_is_help=True)
    if name == "tune":
        group.callback(invoke_without_command=True)(module.tune)
    for op, command in module.COMMANDS.items():
        group.command(op)(command)
    app.add_typer(group, name=name)


def _app(loaded: Collection[str] = tuple(COMMANDS)) -> Any:
    """The typer app with all commands.

    loaded: the commands of COMMANDS whose modules are imported. Each other command of COMMANDS gets its line of help
    and does nothing when it runs. The modules of FLAX_COMMANDS are imported when these commands run.
    """
    import typer
    from typer.core import TyperCommand

    class OtherCommand(TyperCommand):
        """A command that leaves all its words, also --, to the command that it imports when it runs."""

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            ctx.args = list(args)
            return ctx.args

    app = typer.Typer(
        name="jax-kernels",
        help="Attention and matmul kernels in JAX Pallas: show the kernels that this machine can run, and check them.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings=_HELP,
    )

    def show_version(is_asked: bool) -> None:
        if is_asked:
            from jax_kernels import __version__

            print(f"jax-kernels {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        pass

    for name, text in COMMANDS.items():
        if name in loaded:
            _load(app, name)
        else:
            app.command(name, help=text)(lambda: None)

    def later(name: str, module: str, function: str, text: str) -> None:
        """Adds a command of FLAX_COMMANDS, whose module is imported only when the command runs."""
        target = lambda: getattr(importlib.import_module(f"jax_kernels.cli.{module}"), function)
        if _COMPLETE in os.environ and name in loaded:
            app.command(name)(target())
            return

        @app.command(name, cls=OtherCommand, help=f"{text} (needs the flax extra); --help shows its options.")
        def run(context: typer.Context) -> Any:
            command = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=_HELP)
            command.command()(target())
            return command(context.args, prog_name=f"jax-kernels {name}", standalone_mode=False)

    for name, entry in FLAX_COMMANDS.items():
        later(name, *entry)
    return app


def _words_to_complete() -> list[str]:
    """The words of the command line that a shell completes; bash and zsh put them into different variables."""
    return (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")).split()


def _fail(message: str, code: int = 2) -> NoReturn:
    if message:  # without arguments, the help was shown instead
        print(f"jax-kernels: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _hint(message: str, words: list[str]) -> str:
    """The end of an error of typer: how to go on. words: of the command line."""
    command = words[0] if words and words[0] in COMMANDS | FLAX_COMMANDS else None
    if command == "profile" and message.startswith("No such option"):
        return "; options of the script come after --, as in jax-kernels profile train.py -- --steps 2"
    if command is not None and message.startswith(("Got unexpected extra argument", "Missing ", "No such option")):
        if command in ("explain", "tune") and len(words) > 1 and not words[1].startswith("-"):
            command = f"{command} {words[1]}"  # an op
        elif command == "explain":
            command = "explain attention"  # without an op
        return f"; jax-kernels {command} --help lists the options"
    return "; jax-kernels --help lists the commands" if message.startswith("No such command") else ""


def _given(parameter: Any, arguments: list[str]) -> str | None:
    """The value that the command line gives to an option that typer refuses; None if there is no value.

    It is for the text of an error, since typer's own errors may lack the value. parameter: typer's object for the
    option, or None. arguments: the words of the command line.
    """
    for option in getattr(parameter, "opts", ()):
        for name, value in zip(arguments, [*arguments[1:], None], strict=True):
            if name == option:
                return value
            if name.startswith(f"{option}="):
                return name.removeprefix(f"{option}=")
    return None


def _leave_output() -> None:
    """Points stdout at the null device, if it cannot be written. Python would report the rest of its buffer."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Opens the null device for each standard stream that is closed, as by >&-.

    Otherwise Python's stream is None, and the next file that the process opens gets the stream's descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _run(words: list[str]) -> NoReturn:
    """Runs the command of these words, and exits with its status once its output is written."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without UTF-8 shows a ? for a character that it lacks
        sys.stdout.reconfigure(errors="replace")
    app = _app(_words_to_complete() if _COMPLETE in os.environ else words)
    try:
        status = app(words, prog_name="jax-kernels", standalone_mode=False)
    finally:
        sys.stdout.flush()
    sys.exit(status)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line and exits.

    The exit code is 0 for success, 1 for a check that failed or an error of the machine, such as a file that cannot be
    written, 2 for bad input or a missing package, 130 for Ctrl-C.
    """
    _open_closed_streams()
    if os.environ.get("COLUMNS", "").strip("0") == "":  # rich prints nothing in a terminal without columns
        os.environ.pop("COLUMNS", None)
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        _run(words)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        _leave_output()
        sys.exit(1)
    except UserError as error:
        _fail(str(error))
    except WriteError as error:
        _fail(str(error), 1)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or is_installed(package):
            raise
        _fail(f"this needs the package {package}: pip install 'jax-kernels[{EXTRAS[package]}]'")
    except ValueError as error:
        if not _OF_ENVIRONMENT.match(str(error)):
            raise
        _fail(str(error))
    except Exception as error:
        line = in_one_line(error, words[0] if words else None)
        if line is not None:
            _leave_output()
            _fail(line, 1)
        if not hasattr(error, "format_message"):  # a bug, not an error of typer's: show its traceback
            raise
        message = error.format_message()
        value = _given(getattr(error, "param", None), words)
        text = message if value is None or value in message else f"{message}, got {value!r}"
        _fail(text.removesuffix(".") + hint if (hint := _hint(message, words)) else text)
