"""Paths on the command line: folders and files that cannot be read."""

import os

import numpy as np
import pytest

from jax_kernels.models import read_text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of texts with a subfolder that cannot be listed, even by the superuser."""
    folder, closed = tmp_path / "text", tmp_path / "text" / "closed"
    closed.mkdir(parents=True)
    for path in (folder / "a.txt", closed / "b.txt"):
        path.write_text("the word is alpha;\n" * 20)
    scan = os.scandir

    def scandir(path="."):
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(closed))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return folder


@pytest.mark.parametrize(
    "words", [("eval", "TEXT"), ("train", "--text", "TEXT", "--out", "OUT"), ("demo", "--text", "TEXT", "--out", "OUT")]
)
def test_a_subfolder_that_cannot_be_read_is_named(run, folder, words):
    names = {"TEXT": str(folder), "OUT": str(folder.parent / "out")}
    code, _, err = run(*(names.get(word, word) for word in words))
    assert (code, err.count("\n")) == (2, 1)
    assert str(folder / "closed") in err
    assert "Permission denied" in err


def test_hidden_folders_and_unreadable_files_of_a_text(folder, monkeypatch):
    """A hidden folder is not listed; a file that cannot be read is named."""
    (folder / "closed").rename(folder / ".hidden")
    assert len(read_text(folder)) == 20 * 19

    def refuse(path, *_, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(OSError, match=r"paths: .+a\.txt cannot be read \(Permission denied\)"):
        read_text(folder)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--text", "FILE", "--out", "NAME"),
        ("demo", "--out", "NAME"),
        ("demo", "--text", "NAME", "--out", "OUT"),
        ("generate", "x", "--checkpoint", "NAME"),
        ("bench", "rms_norm", "--json", "NAME"),
        ("check", "--op", "rms_norm", "--json", "NAME"),
    ],
)
@pytest.mark.parametrize("kind", ["long", "loop"])
def test_names_that_no_file_can_have(run, tmp_path, words, kind):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("a text of one file" * 20)
    name = str(tmp_path / ("x" * 300 if kind == "long" else "loop/x"))
    names = {"NAME": name, "FILE": str(tmp_path / "file"), "OUT": str(tmp_path / "out")}
    code, out, err = run(*(names.get(word, word) for word in words))
    assert (code in (1, 2), out, err.count("\n")) == (True, "", 1)
    assert err.startswith("jax-kernels: ")
    assert name in err


@pytest.mark.parametrize(("words", "option"), [(("profile",), "script"), (("tune", "--from"), "--from")])
def test_a_script_with_too_long_a_name(run, words, option):
    assert run(*words, "x" * 300) == (2, "", f"jax-kernels: {option}: got {'x' * 300!r}, want a Python script\n")
