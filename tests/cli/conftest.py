"""Fixtures of the tests of the jax-kernels command."""

import pytest

from jax_kernels import cli


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        with pytest.raises(SystemExit) as exited:
            cli.main(list(arguments))
        captured = capsys.readouterr()
        return exited.value.code or 0, captured.out, captured.err

    return run
