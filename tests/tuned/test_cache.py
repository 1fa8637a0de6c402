"""The files of tuned calls: two processes at once, and files and folders that cannot serve."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from jax_kernels.tuned import cache
from jax_kernels.tuned.winners import Timed, Winner

WINNER = Winner(
    date="2026-11-27",
    timer="cupti",
    with_gradients=False,
    untuned="fast",
    fastest="fast",
    timed=(
        Timed(name="fast", ms=1.32, untuned_ms=1.41, blocks={"forward": {"type": "Blocks", "block_q": 64}}),
        Timed(name="slow", ms=3.0, untuned_ms=3.0),
    ),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, which this process has not read."""
    monkeypatch.setenv("JAX_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_LOADED", {})
    monkeypatch.setattr(cache, "_REPORTED", set())
    return tmp_path / "tuning"


def as_in_a_new_process(monkeypatch):
    monkeypatch.setattr(cache, "_LOADED", {})


def test_a_winner_comes_back(folder, monkeypatch):
    assert cache.find("NVIDIA H200") == {}
    cache.store("NVIDIA H200", "a", WINNER)
    cache.store("NVIDIA H200", "b", WINNER)
    assert cache.find("NVIDIA H200") == {"a": WINNER, "b": WINNER}
    as_in_a_new_process(monkeypatch)
    assert cache.find("NVIDIA H200") == {"a": WINNER, "b": WINNER}
    assert cache.find("NVIDIA H100") == {}
    assert [path.name for path in folder.glob("*.json")] == ["NVIDIA_H200.json"]
    assert cache.listed() == {"NVIDIA H200": {"a": WINNER, "b": WINNER}}
    with cache.ignored():
        assert cache.find("NVIDIA H200") == {}


def test_a_file_is_read_once(folder):
    cache.store("NVIDIA H200", "a", WINNER)
    cache.path_of("NVIDIA H200").write_text("changed by another process")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.find("NVIDIA H200") == {"a": WINNER}


def test_a_named_implementation_keeps_the_others(folder):
    named = Winner(
        date="2026-11-28",
        timer="host",
        with_gradients=False,
        untuned="slow",
        fastest=None,
        timed=(Timed(name="slow", ms=2.0, untuned_ms=3.0),),
    )
    cache.store("GPU", "a", WINNER)
    cache.store("GPU", "a", named)
    joined = cache.find("GPU")["a"]
    assert (joined.fastest, joined.of("slow").ms, joined.of("fast")) == ("fast", 2.0, WINNER.of("fast"))
    cache.store("GPU", "a", WINNER)
    assert cache.find("GPU")["a"] == WINNER


SCRIPT = """
import sys
from jax_kernels.tuned import cache
from tests.tuned.test_cache import WINNER
for number in range(20):
    cache.store("GPU", f"{sys.argv[1]} {number}", WINNER)
"""


def test_two_processes_at_once(folder):
    runs = [subprocess.Popen([sys.executable, "-c", SCRIPT, name]) for name in ("one", "two")]
    assert [run.wait(120) for run in runs] == [0, 0]
    assert set(cache.find("GPU")) == {f"{name} {number}" for name in ("one", "two") for number in range(20)}
    assert not list(folder.glob("*.tmp"))


def change(path: Path, **changes) -> str:
    return json.dumps(json.loads(path.read_text()) | changes)


BROKEN = {
    "cut": (lambda path: path.read_text()[:-20], "is corrupt (JSONDecodeError"),
    "list": (lambda path: "[]", "is corrupt (TypeError"),
    "winner": (lambda path: path.read_text().replace("untuned_ms", "before_ms"), "is corrupt (TypeError"),
    "time": (lambda path: path.read_text().replace("1.32", '"fast"'), "is corrupt (ValueError"),
    "fastest": (lambda path: path.read_text().replace('"fastest": "fast"', '"fastest": "other"'), "is corrupt"),
    "device": (lambda path: change(path, device="NVIDIA H100"), "is corrupt (ValueError: device"),
    "version": (lambda path: change(path, version="0.0.1"), "was written by version 0.0.1, and this is"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_serve(name, folder, monkeypatch):
    """It is reported once and ignored; the next winner replaces it."""
    cache.store("GPU", "a", WINNER)
    path = cache.path_of("GPU")
    broken, report = BROKEN[name]
    path.write_text(broken(path))
    as_in_a_new_process(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cache.find("GPU") == {}
        assert cache.find("GPU") == {}
        as_in_a_new_process(monkeypatch)
        assert cache.find("GPU") == {}
    assert [x.category for x in caught] == [RuntimeWarning]
    assert report in str(caught[0].message)
    assert str(path) in str(caught[0].message)
    cache.store("GPU", "b", WINNER)
    as_in_a_new_process(monkeypatch)
    assert cache.find("GPU") == {"b": WINNER}


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    """One warning says so, and the winner serves this process."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_KERNELS_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cache, "_LOADED", {})
    monkeypatch.setattr(cache, "_REPORTED", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.store("GPU", "a", WINNER)
        cache.store("GPU", "b", WINNER)
    assert [x.category for x in caught] == [RuntimeWarning]
    assert "cannot be written" in str(caught[0].message)
    assert cache.find("GPU") == {"a": WINNER, "b": WINNER}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder(folder, monkeypatch):
    cache.store("GPU", "a", WINNER)
    folder.chmod(0o500)
    try:
        as_in_a_new_process(monkeypatch)
        with pytest.warns(RuntimeWarning, match="cannot be written"):
            cache.store("GPU", "b", WINNER)
        assert set(cache.find("GPU")) == {"a", "b"}
    finally:
        folder.chmod(0o700)


def test_clear(folder, monkeypatch):
    assert cache.clear() == []
    cache.store("GPU", "a", WINNER)
    assert cache.clear() == [folder / "GPU.json"]
    assert cache.find("GPU") == {}
    assert cache.listed() == {}


def test_the_folder_of_the_user(monkeypatch):
    monkeypatch.delenv("JAX_KERNELS_CACHE")
    assert cache.folder().parts[-2:] == ("jax_kernels", "tuning")
    assert cache.folder().is_absolute()
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    cache._users_folder.cache_clear()
    try:
        assert cache.folder() is None
        assert cache.find("GPU") == {}
        assert cache.listed() == {}
        with pytest.raises(ModuleNotFoundError, match="platformdirs"):
            cache.store("GPU", "a", WINNER)
    finally:
        cache._users_folder.cache_clear()
