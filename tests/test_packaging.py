"""The wheel and the sdist contain the folders that are linked into jax_kernels, as real files, and only there."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("pallas", "bridge", "models")

pytestmark = pytest.mark.timeout(400)


def run(*command, **kwargs):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300, **kwargs)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist, built from a copy of the checkout. The wheel is built from the sdist."""
    copy = tmp_path_factory.mktemp("checkout") / "checkout"
    ignore = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "runs", "site")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignore)
    run("-m", "build", "--no-isolation", copy)
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (wheel,) = built.glob("jax_kernels-*.whl")
    return wheel


def sources(folder: str) -> set[str]:
    return {f"jax_kernels/{folder}/{path.relative_to(ROOT / folder)}" for path in (ROOT / folder).rglob("*.py")}


def test_wheel(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        links = [entry.filename for entry in archive.infolist() if (entry.external_attr >> 28) == 0xA]
        assert archive.read("jax_kernels/__init__.py") == (ROOT / "jax_kernels/__init__.py").read_bytes()
        entry_points = next(name for name in names if name.endswith(".dist-info/entry_points.txt"))
        assert "jax-kernels = jax_kernels.cli:main" in archive.read(entry_points).decode()
    assert not links
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"jax_kernels"}
    assert "jax_kernels/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)
    for folder in LINKED:
        assert sources(folder)
        assert sources(folder) <= names
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "jax_kernels/tuned/shipped").glob("*.json")}
    assert shipped <= names
    python = {str(path.relative_to(ROOT)) for path in (ROOT / "jax_kernels").rglob("*.py")}
    assert python <= names


def test_sdist(built):
    (sdist,) = built.glob("jax_kernels-*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    for folder in LINKED:
        for name in sources(folder):
            assert files[name].isfile(), f"{name} is a link"
    assert {"pyproject.toml", "LICENSE", "jax_kernels/py.typed"} <= set(files)
    assert not [name for name in files if name.partition("/")[0] in LINKED]
    # All tests, or none: they need the Makefile, benchmarks/ and docs/, which a package does not have.
    assert not [name for name in files if name.partition("/")[0] in ("tests", "benchmarks")]
    assert not [name for name, member in files.items() if member.issym() or member.islnk()]


def test_installed_wheel_imports(wheel, tmp_path):
    target = tmp_path / "site"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    code = """
import importlib.util, pathlib, sys
import jax, jax_kernels, jax_kernels.pallas.block_specs, jax_kernels.testing, jax_kernels.cli
for module in (jax_kernels, jax_kernels.pallas.block_specs, jax_kernels.testing):
    assert pathlib.Path(module.__file__).is_relative_to(sys.argv[1]), module.__file__
for name in ("bridge", "models"):
    assert importlib.util.find_spec(f"jax_kernels.{name}") is not None, name
for name in ("pallas", "bridge", "models"):
    assert importlib.util.find_spec(name) is None, name
print(jax_kernels.flash_attention(*[jax.numpy.ones((1, 4, 2, 8))] * 3).sum())
"""
    env = os.environ | {"PYTHONPATH": str(target), "JAX_PLATFORMS": "cpu"}
    assert float(run("-c", code, target, cwd=tmp_path, env=env)) == 64
