"""Builds the sdist and the wheel of HEAD reproducibly, checks them in a fresh environment, and uploads nothing.

    python tests/tools/release.py [--out dist] [--no-install]

It fails if a tracked file has changes, if the version differs between its files, or if two builds differ in a byte. The
timestamps in the files are HEAD's. The packages' README has the text of README.md; its links to files of the repository
become links to the project URL "Source" of pyproject.toml, or plain text without such a URL: the package index has no
files. --no-install leaves out the fresh environment, whose packages come from the package index.
"""

import argparse
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)\s]+)\)")
# Runs in the fresh environment, outside of the repository.
SMOKE = """
import importlib.metadata, jax, jax_kernels
version = importlib.metadata.version("jax-kernels")
assert jax_kernels.__version__ == version, version
for name in dir(jax_kernels):
    getattr(jax_kernels, name)
x = jax.numpy.ones((1, 16, 2, 8))
out, gradient = jax.value_and_grad(lambda x: jax_kernels.flash_attention(x, x, x, is_causal=True).sum())(x)
assert out == x.size, out
print(f"jax_kernels {version} from {jax_kernels.__file__}, jax {jax.__version__}: attention and its gradient ran")
"""


def readme_for_index(text: str, source: str | None) -> str:
    """A README whose links are absolute: relative ones lead to `source`; without it, images go and links become text.

    source: the URL of the repository's files, to which a path is appended.
    """

    def absolute(match: re.Match[str]) -> str:
        if "://" in match["path"] or match["path"].startswith("#"):
            return match[0]
        if source is None:
            return "" if match["image"] else match["text"]
        return f"{match['image']}[{match['text']}]({source.rstrip('/')}/{match['path']})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(absolute, part) for part in parts)


def normalized_sdist(data: bytes, epoch: int) -> bytes:
    """The same archive with sorted members, no owner, and `epoch` as each timestamp."""
    with tarfile.open(fileobj=io.BytesIO(data)) as source:
        members = [(x, source.extractfile(x)) for x in sorted(source.getmembers(), key=lambda x: x.name)]
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as target:
            for member, content in members:
                info = tarfile.TarInfo(member.name)
                info.type, info.size, info.mtime = member.type, member.size, epoch
                info.mode = 0o755 if member.isdir() else 0o644
                target.addfile(info, content)
    return gzip.compress(plain.getvalue(), mtime=epoch)


def versions(root: Path) -> dict[str, str | None]:
    """The version in each file that has it; None where it is missing."""
    found = {"pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]}
    patterns = {
        "jax_kernels/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (\S+)$",
        "CHANGELOG.md": r"^## (\d\S*)",
    }
    for name, pattern in patterns.items():
        match = re.search(pattern, (root / name).read_text(), re.MULTILINE)
        found[name] = match and match[1]
    return found


def exported(root: Path, folder: Path) -> int:
    """Writes the files of HEAD into the folder, with README.md for the package index. Returns HEAD's time."""
    git = lambda *args: subprocess.run(["git", "-C", str(root), *args], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
        archive.extractall(folder, filter="tar")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    readme = folder / "README.md"
    readme.write_text(readme_for_index(readme.read_text(), project.get("urls", {}).get("Source")))
    return int(git("log", "-1", "--format=%ct"))


def build(tree: Path, epoch: int) -> dict[str, bytes]:
    """{file name: content} of the sdist, and of the wheel that is built from it."""
    with tempfile.TemporaryDirectory() as folder:
        copy, out = Path(folder) / "tree", Path(folder) / "out"
        shutil.copytree(tree, copy, symlinks=True)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
        env = os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, env=env, umask=0o022, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit((done.stdout + done.stderr)[-3000:])
        files = {path.name: path.read_bytes() for path in out.iterdir()}
    return {name: normalized_sdist(data, epoch) if name.endswith(".gz") else data for name, data in files.items()}


def metadata(wheel: bytes) -> Message:
    """The metadata of a wheel; the payload is the README."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        name = next(x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def check_metadata(found: Message) -> None:
    """Raises SystemExit if a field that the package index shows is missing, or if the README has a relative link."""
    for field in (
        "Summary",
        "Keywords",
        "License-Expression",
        "Classifier",
        "Requires-Python",
        "Description-Content-Type",
    ):
        if not found.get_all(field):
            raise SystemExit(f"pyproject.toml: got no {field} in the wheel's metadata, want one")
    outside = "".join(part for part in FENCE.split(found.get_payload()) if not part.startswith("```"))
    if relative := [x["path"] for x in LINK.finditer(outside) if not re.match(r"\w+://|#", x["path"])]:
        raise SystemExit(f"README.md: got relative links in the package's text, want absolute ones: {relative}")


def check_installed(wheel: Path) -> None:
    """Installs the wheel and its dependencies into a fresh environment, and runs a small call there."""
    with tempfile.TemporaryDirectory() as folder:
        run = lambda *args, **more: subprocess.run([str(x) for x in args], check=True, cwd=folder, **more)
        run(sys.executable, "-m", "venv", "fresh")
        python = Path(folder) / "fresh" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel.resolve())
        run(python, "-m", "pip", "check")
        run(python, "-I", "-c", SMOKE, env=_without_python_path() | {"JAX_PLATFORMS": "cpu"})


def _without_python_path() -> dict[str, str]:
    return {name: x for name, x in os.environ.items() if not name.startswith("PYTHON")}


def main(arguments: Any) -> None:
    dirty = subprocess.run(
        ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    if dirty:
        raise SystemExit(f"got changes that are not committed, want none: HEAD is built\n{dirty}")
    found = versions(ROOT)
    if len(set(found.values())) != 1:
        raise SystemExit(f"got versions {found}, want the same in all files")
    with tempfile.TemporaryDirectory() as folder:
        epoch = exported(ROOT, Path(folder))
        first, second = (build(Path(folder), epoch) for _ in range(2))
    if first != second:
        differ = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
        raise SystemExit(f"got different files from two builds, want equal ones: {differ}")
    (wheel,) = (name for name in first if name.endswith(".whl"))
    check_metadata(metadata(first[wheel]))
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, data in sorted(first.items()):
        (out / name).write_bytes(data)
        print(f"{hashlib.sha256(data).hexdigest()}  {out / name}")
    if not arguments.no_install:
        check_installed(out / wheel)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="dist", help="the folder for the two files")
    parser.add_argument("--no-install", action="store_true", help="leaves out the check in a fresh environment")
    main(parser.parse_args())
