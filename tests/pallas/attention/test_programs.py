"""program_digests.py: moved lines change no digest, and a changed kernel changes its own digest."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.support.processes.python import done_by

ROOT = Path(__file__).parents[3]
ROW = ("implementation=mosaic_gpu", "head_dim=64", "is_causal=1")


def of_version(folder: Path, edits: dict[str, tuple[str, str]]) -> dict:
    """The digests by program_digests.py for a copy of the library. edits: by file, (old text, new text)."""
    for name in ("jax_kernels", "pallas", "bridge", "models"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    for name, (old, new) in edits.items():
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))
    script, paths = ROOT / "tests" / "tools" / "program_digests.py", f"{folder}{os.pathsep}{ROOT}"
    done = done_by(script, "--here", "h200", *ROW, PYTHONPATH=paths, JAX_PLATFORMS="cpu")
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_digests(tmp_path):
    softmax = "pallas/attention/softmax.py"
    as_it_is = of_version(tmp_path / "as_it_is", {})
    moved = of_version(tmp_path / "moved", {softmax: ("PARTIAL_COLUMNS = 8", "# A line more.\nPARTIAL_COLUMNS = 8")})
    changed = of_version(tmp_path / "changed", {softmax: ("PARTIAL_COLUMNS = 8", "PARTIAL_COLUMNS = 16")})
    assert as_it_is["kernels"]
    assert moved == as_it_is
    same = [a == b for a, b in zip(as_it_is["kernels"], changed["kernels"], strict=True)]
    assert same.count(False) == 1  # the forward's digest
    assert changed["xla"] == as_it_is["xla"]
