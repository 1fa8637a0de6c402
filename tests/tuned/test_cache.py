"""The files of tuned calls: two processes at once, and files, entries and folders that cannot serve."""

import errno
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import jax_kernels
from jax_kernels.tuned import cache
from jax_kernels.tuned.winners import Timed, Winner

BLOCKS = {"type": "MatmulTriton", "block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 3}
WINNER = Winner(
    date="2026-11-27",
    timer="cupti",
    with_gradients=False,
    untuned="triton",
    fastest="triton",
    timed=(
        Timed(name="triton", ms=1.32, untuned_ms=1.41, blocks={"forward": BLOCKS}),
        Timed(name="xla", ms=3.0, untuned_ms=3.0),
    ),
)


def key_of(name) -> str:
    """A key, as of a matmul with this number of rows, or with this text as one."""
    return json.dumps({"op": "matmul", "m": name})


A, B = key_of("a"), key_of("b")


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
    cache.store("NVIDIA H200", A, WINNER)
    cache.store("NVIDIA H200", B, WINNER)
    assert cache.find("NVIDIA H200") == {A: WINNER, B: WINNER}
    as_in_a_new_process(monkeypatch)
    assert cache.find("NVIDIA H200") == {A: WINNER, B: WINNER}
    assert cache.find("NVIDIA H100") == {}
    assert [path.name for path in folder.glob("*.json")] == ["NVIDIA_H200.json"]
    assert cache.listed() == {"NVIDIA H200": {A: WINNER, B: WINNER}}
    with cache.ignored():
        assert cache.find("NVIDIA H200") == {}


def test_a_file_is_read_once(folder):
    cache.store("NVIDIA H200", A, WINNER)
    cache.path_of("NVIDIA H200").write_text("changed by another process")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.find("NVIDIA H200") == {A: WINNER}


def test_a_named_implementation_keeps_the_others(folder):
    named = Winner(
        date="2026-11-28",
        timer="host",
        with_gradients=False,
        untuned="xla",
        fastest=None,
        timed=(Timed(name="xla", ms=2.0, untuned_ms=3.0),),
    )
    cache.store("GPU", A, WINNER)
    cache.store("GPU", A, named)
    joined = cache.find("GPU")[A]
    assert (joined.fastest, joined.of("xla").ms, joined.of("triton")) == ("triton", 2.0, WINNER.of("triton"))
    cache.store("GPU", A, WINNER)
    assert cache.find("GPU")[A] == WINNER


SCRIPT = """
import sys
from jax_kernels.tuned import cache
from tests.tuned.test_cache import WINNER, key_of
for number in range(20):
    cache.store("GPU", key_of(f"{sys.argv[1]} {number}"), WINNER)
"""


def test_two_processes_at_once(folder):
    runs = [subprocess.Popen([sys.executable, "-c", SCRIPT, name]) for name in ("one", "two")]
    assert [run.wait(120) for run in runs] == [0, 0]
    assert set(cache.find("GPU")) == {key_of(f"{name} {number}") for name in ("one", "two") for number in range(20)}
    assert not list(folder.glob("*.tmp"))


def change(path: Path, **changes) -> str:
    return json.dumps(json.loads(path.read_text()) | changes)


def entry(**changes) -> str:
    """The text of a file whose winner has these changes: of its fields, of the first one timed or its blocks."""
    tree = WINNER.as_json()
    first = tree["timed"][0]
    for name, x in changes.items():
        of = next((of for of in (first, tree) if name in of), first["blocks"]["forward"])
        of[name] = x
    return json.dumps({"version": jax_kernels.__version__, "device": "GPU", "winners": {A: tree}})


BROKEN = {
    "cut": (lambda path: path.read_text()[:-20], "is corrupt (JSONDecodeError"),
    "deep": (lambda path: "[" * 100_000, "is corrupt (RecursionError"),
    "binary": (lambda path: "\0", "is corrupt (JSONDecodeError"),
    "digits": (lambda path: "9" * 5_000, "is corrupt (ValueError"),
    "list": (lambda path: "[]", "is corrupt (TypeError"),
    "number": (lambda path: "1", "is corrupt (TypeError"),
    "null": (lambda path: "null", "is corrupt (TypeError"),
    "no winners": (lambda path: path.read_text().replace('"winners"', '"winner"'), "is corrupt (KeyError"),
    "list of winners": (lambda path: change(path, winners=[1]), "is corrupt (AttributeError"),
    "device": (lambda path: change(path, device="NVIDIA H100"), "is corrupt (ValueError: device"),
    "version": (lambda path: change(path, version="0.0.1"), "was written by version 0.0.1, and this is"),
    "key": (lambda path: change(path, winners={"a": WINNER.as_json()}), "and are ignored: a (JSONDecodeError"),
    "request": (lambda path: change(path, winners={"[1]": WINNER.as_json()}), "are ignored: [1] (TypeError: winners"),
    "winner": (lambda path: path.read_text().replace("untuned_ms", "before_ms"), "(TypeError"),
    "time": (lambda path: path.read_text().replace("1.32", '"fast"'), "(ValueError: winner: got the times"),
    "not a number": (lambda path: entry(ms=float("nan")), "(ValueError: winner: got the times"),
    "infinite": (lambda path: entry(ms=float("inf")), "(ValueError: winner: got the times"),
    "true time": (lambda path: entry(ms=True), "(ValueError: winner: got the times"),
    "gradients": (lambda path: entry(with_gradients="no"), "(TypeError: with_gradients: got 'no'"),
    "fastest": (lambda path: path.read_text().replace('"fastest": "triton"', '"fastest": "other"'), "as the fastest"),
    "name": (lambda path: path.read_text().replace('"triton"', '"tritn"'), "got 'tritn', want one of mosaic_gpu, tri"),
    "other op": (
        lambda path: entry(untuned="cudnn"),
        "implementation: got 'cudnn', want one of mosaic_gpu, tri",
    ),
    "text of blocks": (lambda path: entry(blocks="forward"), "(TypeError: "),
    "another op's": (lambda path: entry(type="NormTriton"), "got blocks of type 'NormTriton', want MatmulTriton"),
    "field": (lambda path: entry(block_q=64), "(TypeError: MatmulTriton.block_q: got 64, want no field"),
    "negative": (lambda path: entry(block_m=-5), "(ValueError: MatmulTriton.block_m: got -5, want 0 or more"),
    "odd": (lambda path: entry(block_m=96), "(ValueError: MatmulTriton.block_m=96 must be a power of two"),
    "fraction": (lambda path: entry(block_m=128.5), "(TypeError: MatmulTriton.block_m: got 128.5, want int"),
    "text": (lambda path: entry(block_m="128"), "(TypeError: MatmulTriton.block_m: got '128', want int"),
    "true": (lambda path: entry(row_group=True), "(TypeError: MatmulTriton.row_group: got True, want int"),
    "long": (lambda path: entry(block_m=1 << 20), "needs 67108864 32-bit registers, want at most 65536"),
    "deep blocks": (lambda path: entry(block_k=1 << 20), "bytes of shared memory, want at most 262144"),
    "stages": (lambda path: entry(num_stages=100), "needs 409600 bytes of shared memory, want at most 262144"),
    "warps": (lambda path: entry(num_warps=64), "needs 64 warps, want at most 32"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_serve(name, folder, monkeypatch):
    """It is reported once and ignored; the next winner replaces it."""
    cache.store("GPU", A, WINNER)
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
    cache.store("GPU", B, WINNER)
    as_in_a_new_process(monkeypatch)
    assert cache.find("GPU") == {B: WINNER}


def test_the_other_entries_of_a_file_serve(folder, monkeypatch):
    """One warning has the file, the first entry that cannot serve, and the number of others."""
    cache.store("GPU", A, WINNER)
    path = cache.path_of("GPU")
    good = WINNER.as_json()
    path.write_text(change(path, winners={B: good | {"date": 1}, A: good, key_of("c"): good | {"untuned": "x"}}))
    as_in_a_new_process(monkeypatch)
    with pytest.warns(RuntimeWarning, match="cannot serve") as caught:
        assert cache.find("GPU") == {A: WINNER}
    assert [str(path) in str(x.message) and f"{B} (TypeError" in str(x.message) for x in caught] == [True]
    assert str(caught[0].message).endswith(" and 1 more")
    assert cache.listed() == {"GPU": {A: WINNER}}


def test_files_that_cannot_serve_are_not_listed(folder):
    """One warning for each."""
    folder.mkdir()
    for name, text in {
        "deep": "[" * 100_000,
        "list": "[]",
        "name": '{"device": "GPU"}',
        "type": '{"device": 1}',
    }.items():
        (folder / f"{name}.json").write_text(text)
    with pytest.warns(RuntimeWarning, match="is corrupt") as caught:
        assert cache.listed() == {}
    assert len(caught) == 4


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    """One warning says so, and the winner serves this process."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_KERNELS_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cache, "_LOADED", {})
    monkeypatch.setattr(cache, "_REPORTED", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.store("GPU", A, WINNER)
        cache.store("GPU", B, WINNER)
    assert [x.category for x in caught] == [RuntimeWarning]
    assert "cannot be written" in str(caught[0].message)
    assert cache.find("GPU") == {A: WINNER, B: WINNER}


def test_an_ignored_file_that_cannot_be_written(folder):
    """A second warning says so: the first one is about the content."""
    path = cache.path_of("GPU")
    path.mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="cannot be read") as caught:
        assert cache.find("GPU") == {}
    assert len(caught) == 1
    with pytest.warns(RuntimeWarning, match="cannot be written") as caught:
        cache.store("GPU", A, WINNER)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.store("GPU", B, WINNER)
    assert cache.find("GPU") == {A: WINNER, B: WINNER}


def test_a_file_that_cannot_be_read_is_not_replaced(folder, monkeypatch):
    """After an error of the disk, its winners may be there again."""
    cache.store("GPU", A, WINNER)
    as_in_a_new_process(monkeypatch)

    def fails(self):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fails)
        with pytest.warns(RuntimeWarning) as caught:
            cache.store("GPU", B, WINNER)
    assert ["cannot be read" in str(caught[0].message), "cannot be written" in str(caught[1].message)] == [True, True]
    assert len(caught) == 2
    assert cache.find("GPU") == {B: WINNER}
    as_in_a_new_process(monkeypatch)
    assert cache.find("GPU") == {A: WINNER}


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder(folder, monkeypatch):
    cache.store("GPU", A, WINNER)
    folder.chmod(0o500)
    try:
        as_in_a_new_process(monkeypatch)
        with pytest.warns(RuntimeWarning, match="cannot be written"):
            cache.store("GPU", B, WINNER)
        assert set(cache.find("GPU")) == {A, B}
    finally:
        folder.chmod(0o700)


def test_clear(folder, monkeypatch):
    assert cache.clear() == []
    cache.store("GPU", A, WINNER)
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
            cache.store("GPU", A, WINNER)
    finally:
        cache._users_folder.cache_clear()
