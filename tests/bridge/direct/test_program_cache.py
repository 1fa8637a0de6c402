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
    Bytes,
    Constant,
    Copy,
    Dims,
    Fill,
    Kernel,
    LaunchChain,
    MosaicKernel,
    MosaicLaunch,
    TensorMap,
    TensorMaps,
)
from jax_kernels.bridge.interop import warn_once as warn_once_module
from jax_kernels.tuned import cache
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
        MosaicKernel(
            name="n", module=b"ML\xefR", arguments=(PIECE,),
            launch=MosaicLaunch(
                name="n", cubin=b"\x7fELF", grid=Dims(x=2), block=Dims(x=128), cluster=Dims(), shared_memory=9,
                parameters=(
                    TensorMaps(maps=(TensorMap(source=PIECE, dtype=9, sizes=(8,), strides=(), box=(8,), swizzle=3),)),
                    PIECE, Bytes(value=b"\0\1"),
                ),
            ),
        ),
    ),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_CACHE", str(tmp_path))
    monkeypatch.delenv("JAX_KERNELS_PROGRAM_CACHE", raising=False)
    return tmp_path / "programs"


@pytest.fixture
def reports(monkeypatch):
    """Warnings that this process has given before are given again."""
    monkeypatch.setattr(warn_once_module, "_GIVEN", set())


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
def test_a_damaged_file_does_not_count(folder, damage, reports):
    key = program_cache.key_of("a")
    program_cache.store(key, CHAIN)
    (folder / key).write_bytes(damage((folder / key).read_bytes()))
    with pytest.warns(UserWarning, match="found a damaged file of compiled programs in .*Set JAX_KERNELS_CACHE"):
        assert program_cache.load(key) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one report
        assert program_cache.load(key) is None
    program_cache.store(key, CHAIN)
    assert program_cache.load(key) == CHAIN


def test_a_file_of_another_form_does_not_count(folder, reports):
    key = program_cache.key_of("a")
    program_cache.remember(key)
    assert program_cache.was_remembered(key)
    with pytest.warns(UserWarning, match="damaged file"):
        assert program_cache.load(key) is None
    assert program_cache.linked(key) is None
    program_cache._write(key, zlib.compress(b'{"type": "LaunchChain", "inputs": 3}'))
    assert program_cache.load(key) is None
    assert not program_cache.was_remembered(key)


def test_a_link_leads_to_a_chain(folder):
    key, other = program_cache.key_of("call"), program_cache.key_of("text")
    assert program_cache.linked(key) is None
    program_cache.link(key, other)
    assert program_cache.linked(key) is None  # the chain's file was removed
    program_cache.store(other, CHAIN)
    assert program_cache.linked(key) == CHAIN


def test_only_the_user_can_write_files(folder):
    """Also under a umask that lets others write, and in a folder that an earlier version made."""
    before = os.umask(0)
    try:
        key = program_cache.key_of("a")
        folder.mkdir(parents=True, mode=0o777)
        program_cache.store(key, CHAIN)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / key)] == [0o700, 0o600]
    folder.chmod(0o770)
    assert program_cache.load(key) == CHAIN
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_file_that_others_can_write_is_not_read(folder, reports):
    key = program_cache.key_of("a")
    program_cache.store(key, CHAIN)
    (folder / key).chmod(0o620)
    with pytest.warns(UserWarning, match=f"does not read .*{key}: a user other than you and root owns it, or may"):
        assert program_cache.load(key) is None


def test_a_folder_of_another_user_is_not_used(folder, reports, monkeypatch):
    key = program_cache.key_of("a")
    program_cache.store(key, CHAIN)
    own = os.stat
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setattr(Path, "stat", lambda path: os.stat_result([own(path)[0], 0, 0, 0, 5678, *own(path)[5:]]))
    with pytest.warns(UserWarning, match="does not use compiled programs in .*: a user other than you and root owns"):
        assert program_cache.load(key) is None
    program_cache.store(program_cache.key_of("b"), CHAIN)
    assert [path.name for path in folder.iterdir()] == [key]


def test_a_folder_that_cannot_be_written_is_read(folder, reports, monkeypatch):
    key = program_cache.key_of("a")
    program_cache.store(key, CHAIN)

    def refuse(*given, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(program_cache, "write_whole", refuse)
    assert program_cache.load(key) == CHAIN
    with pytest.warns(UserWarning, match="cannot keep compiled programs in .*Read-only file system"):
        program_cache.store(program_cache.key_of("b"), CHAIN)


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
    monkeypatch.setenv("MOSAIC_GPU_RUNTIME_LIB_PATH", "/elsewhere")  # JAX itself sets it
    assert program_cache.key_of("a") == first
    monkeypatch.setattr(program_cache, "versions", dict)
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
    monkeypatch.setattr(cache, "_users_folder", cache._users_folder.__wrapped__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert program_cache.folder() == tmp_path / "home" / "jax_kernels" / "programs"
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert program_cache.folder() is None
    monkeypatch.setenv("JAX_KERNELS_CACHE", "~a-user-without-a-home/cache")
    with pytest.raises(ValueError, match="JAX_KERNELS_CACHE: got '~a-user-without-a-home/cache', want a folder"):
        program_cache.folder()


def test_a_folder_that_cannot_be_written_warns_once(tmp_path, monkeypatch, reports):
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
