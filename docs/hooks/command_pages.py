"""The reference page of the command line: the --help of jax-kernels and of each of its commands."""

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

URI = "reference/cli.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page."""
    files.append(File.generated(config, URI, content=page()))
    return files


def page() -> str:
    """The page's text."""
    parts = ["# Command line\n\nThe text below is the commands' own `--help`.\n"]
    with _plain_help():
        import typer

        from jax_kernels.cli import _app

        for words in _commands(typer.main.get_command(_app()), ()):
            name = " ".join(("jax-kernels", *words))
            parts.append(f"{'#' * min(2 + len(words), 4)} `{name}`\n\n```text\n{_help(words)}\n```\n")
    return "\n".join(parts)


@contextlib.contextmanager
def _plain_help() -> Iterator[None]:
    """typer prints plain text of a fixed width inside. It reads these settings when it is imported."""
    settings = {"TYPER_USE_RICH": "0", "COLUMNS": "100"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    for name, child in getattr(command, "commands", {}).items():
        yield from _commands(child, (*words, name))


def _help(words: tuple[str, ...]) -> str:
    from jax_kernels.cli import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return output.getvalue().strip()
