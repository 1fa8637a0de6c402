"""The cache of launch chains on disk: keys, files that are shared and bounded, and its settings."""

import dataclasses
import os
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_kernels import dispatch, matmul, rms_norm
from jax_kernels.bridge.direct import compile as direct_compile
from jax_kernels.bridge.direct import program_cache
from jax_kernels.bridge.direct.chain import (
    Array,
    BufferSlice,
    Constant,
    Copy,
    Dims,
    Fill,
    Kernel,
    LaunchChain,
    MosaicKernel,
)
from tests.tools import compile_case
from tests.tools.compile_chains import target_of

PIECE = BufferSlice(buffer=1, offset=256, size=8)
CHAIN = LaunchChain(
    inputs=(Array(shape=(2, 3), dtype="bfloat16", size=12),),
    outputs=(Array(shape=(), dtype="float32", size=4),),
    workspace=1024,
    constants=(Constant(name="c", value=bytes(range(256))),),
    steps=(
        Fill(target=PIECE, value=7),
        Copy(source=PIECE, target=PIECE),
        Kernel(
            name="k", cubin=b"\x7fELF\0\xff", grid=Dims(x=2, y=3), block=Dims(x=128), cluster=Dims(), shared_memory=9,
            arguments=(PIECE, PIECE), zeroed=(PIECE,),
        ),
        MosaicKernel(name="m", module=b"ML\xefR", arguments=(PIECE,)),
    ),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_CACHE", str(tmp_path))
    monkeypatch.delenv("JAX_KERNELS_PROGRAM_CACHE", raising=False)
    return tmp_path / "programs"


def test_a_chain_is_read_as_it_was_written(folder):
    key = program_cache.key_of("a")
    assert program_cache.load(key) is None
    program_cache.store(key, CHAIN)
    assert program_cache.load(key) == CHAIN
    assert program_cache.load(program_cache.key_of("b")) is None
    assert [path.name for path in folder.iterdir()] == [key]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:40] + b"x" + data[41:]]
)
def test_a_damaged_file_does_not_count(folder, damage):
    key = program_cache.key_of("a")
    program_cache.store(key, CHAIN)
    (folder / key).write_bytes(damage((folder / key).read_bytes()))
    assert program_cache.load(key) is None
    program_cache.store(key, CHAIN)
    assert program_cache.load(key) == CHAIN


def test_a_file_of_another_form_does_not_count(folder):
    key = program_cache.key_of("a")
    program_cache.remember(key)
    assert program_cache.was_remembered(key)
    assert program_cache.load(key) is None
    program_cache._write(key, zlib.compress(b'{"type": "LaunchChain", "inputs": 3}'))
    assert program_cache.load(key) is None
    assert not program_cache.was_remembered(key)


def test_the_least_used_files_are_removed(folder, monkeypatch):
    monkeypatch.setattr(program_cache, "MOST_BYTES", 3 * 132)
    keys = [program_cache.key_of(str(i)) for i in range(4)]
    for i, key in enumerate(keys[:3]):
        program_cache._write(key, bytes(100))
        os.utime(folder / key, (i, i))
    program_cache._read(keys[0])  # used now
    program_cache._write(keys[3], bytes(100))
    assert {path.name for path in folder.iterdir()} == {keys[0], keys[2], keys[3]}


def test_keys_depend_on_compilers_and_settings(monkeypatch):
    first = program_cache.key_of("a")
    assert program_cache.key_of("a") == first != program_cache.key_of("a", "")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert program_cache.key_of("a") != first
    monkeypatch.undo()
    monkeypatch.setattr(program_cache, "_versions", lambda: "{}")
    assert program_cache.key_of("a") != first


def test_settings(folder, monkeypatch, tmp_path):
    assert program_cache.folder() == folder
    monkeypatch.setenv("JAX_KERNELS_PROGRAM_CACHE", "0")
    assert program_cache.folder() is None
    program_cache.store("key", CHAIN)
    assert not folder.exists()
    monkeypatch.setenv("JAX_KERNELS_PROGRAM_CACHE", "yes")
    with pytest.raises(ValueError, match="JAX_KERNELS_PROGRAM_CACHE: got 'yes', want 0 to turn"):
        program_cache.folder()
    monkeypatch.delenv("JAX_KERNELS_PROGRAM_CACHE")
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))  # the user's own cache
    try:
        assert program_cache.folder() is None
        monkeypatch.setenv("JAX_KERNELS_PROGRAM_CACHE", "1")
        assert program_cache.folder() == folder
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", "/tmp")
    assert program_cache.folder() is None
    monkeypatch.undo()
    monkeypatch.delenv("JAX_KERNELS_CACHE", raising=False)
    monkeypatch.delenv("JAX_KERNELS_PROGRAM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert program_cache.folder() == tmp_path / "home" / "jax_kernels" / "programs"
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert program_cache.folder() is None


def test_a_folder_that_cannot_be_written_warns_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_KERNELS_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"cannot keep compiled programs in .*file.programs \(.*Set JAX_KERNELS_CACHE"):
        program_cache.store("a", CHAIN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program_cache.store("b", CHAIN)
    assert program_cache.load("a") is None


@pytest.mark.slow
def test_processes_share_a_folder(folder):
    """Several write and read the same key at once; each reads nothing or a whole file."""
    code = (
        "from jax_kernels.bridge.direct import program_cache as p\n"
        "for i in range(200):\n"
        "    p._write('key', bytes([i]) * 100_000)\n"
        "    x = p._read('key')\n"
        "    assert x is None or (len(x) == 100_000 and len(set(x)) == 1)\n"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[3])}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert [path.name for path in folder.iterdir()] == ["key"]


def text_of(function, *shapes):
    lowered = compile_case.lower("h200", function, *shapes)
    return program_cache.program_text(lowered, lowered.as_text())


@pytest.mark.compile
def test_texts_do_not_depend_on_earlier_kernels():
    """JAX numbers Mosaic's kernels in a process. Another shape, option or constant has another text."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    product = lambda x, w: matmul(x, w, implementation="mosaic_gpu")
    square = shape(256, 256)
    first = text_of(product, square, square)
    assert text_of(product, square, square) == first
    gelu = lambda x, w: matmul(x, w, activation="gelu", implementation="mosaic_gpu")
    wide = text_of(product, square, shape(256, 512))
    both = lambda x, w: product(product(x, w), w)
    texts = {first, text_of(gelu, square, square), wide, text_of(both, square, square)}
    assert len(texts) == 4


@pytest.mark.compile
def test_a_second_compilation_reads_the_file(folder, monkeypatch):
    function = lambda x, scale: (rms_norm(x, scale, implementation="triton"),)
    specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((96, 512), (512,))]

    def compiled():
        with dispatch.on_device("h200"):
            return direct_compile.compile_chain(target_of("h200"), function, specs)

    first = compiled()
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(direct_compile, "chain_of", lambda *given: pytest.fail("compiled again"))
    assert compiled() == first
    other = dataclasses.replace(target_of("h200"), core_count=100)
    monkeypatch.setattr(direct_compile, "chain_of", lambda *given: CHAIN)
    with dispatch.on_device("h200"):
        assert direct_compile.compile_chain(other, function, specs) == CHAIN
    assert len(list(folder.iterdir())) == 2
