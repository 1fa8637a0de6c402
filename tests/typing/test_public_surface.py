"""The public functions have the types that users' type checkers see."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyright")
FILE = Path(__file__).with_name("public_surface.py")
ROOT = FILE.parents[2]


@pytest.mark.slow
def test_pyright_accepts_the_public_surface():
    pyright = [sys.executable, "-m", "pyright"]
    if subprocess.run([*pyright, "--version"], capture_output=True).returncode:  # it loads its program once
        pytest.skip("pyright has no program")
    command = [*pyright, "--outputjson", "--pythonpath", sys.executable, str(FILE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    found = [f"{x['range']['start']['line'] + 1}: {x['message']}" for x in report["generalDiagnostics"]]
    assert not found, "\n".join(found)
