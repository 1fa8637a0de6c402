"""The jax-kernels command. Its own packages (the cli extra), PyTorch and Flax load when a command needs them."""

import importlib.util
import sys
from typing import Any, NoReturn

__all__ = ["UserError", "main"]

# Optional package -> the extra of this library that installs it.
EXTRAS = {
    "flax": "flax",
    "grain": "flax",
    "matplotlib": "cli",
    "optax": "flax",
    "orbax": "flax",
    "platformdirs": "cli",
    "rich": "cli",
    "torch": "torch",
    "transformers": "hf",
    "typer": "cli",
}


class UserError(Exception):
    """An error of the user's input. It is shown as one line, and the exit code is 2."""


def _app() -> Any:
    import typer

    from jax_kernels.cli.check import check
    from jax_kernels.cli.explain import COMMANDS, OpGroup
    from jax_kernels.cli.info import info

    app = typer.Typer(
        name="jax-kernels",
        help="Attention and matmul kernels in JAX Pallas: what this machine can run, and whether it is right.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command()(info)
    app.command()(check)
    explain = typer.Typer(
        cls=OpGroup,
        help="Show which implementation a call would use, with which blocks, and why. Without an op: attention.",
        no_args_is_help=True,
    )
    for name, command in COMMANDS.items():
        explain.command(name)(command)
    app.add_typer(explain, name="explain")

    @app.command(
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        help="Train a small transformer on real text (needs the flax extra); --help shows its options.",
    )
    def demo(context: typer.Context) -> Any:
        from jax_kernels.cli.demo import demo

        command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        command.command()(demo)
        return command(context.args, prog_name="jax-kernels demo", standalone_mode=False)

    return app


def _fail(message: str) -> NoReturn:
    if message:  # without arguments, the help was shown instead
        print(f"jax-kernels: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Runs the command line and exits.

    The exit code is 0 for success, 1 for a check that failed, 2 for bad input or a missing package.
    """
    try:
        sys.exit(_app()(arguments, prog_name="jax-kernels", standalone_mode=False))
    except UserError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS or importlib.util.find_spec(package) is not None:
            raise
        _fail(f"this needs the package {package}: pip install 'jax-kernels[{EXTRAS[package]}]'")
    except Exception as error:
        if not hasattr(error, "format_message"):  # not typer's own but a bug: its traceback is wanted
            raise
        _fail(error.format_message())
