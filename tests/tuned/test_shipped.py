"""The winners that are part of the library: their order among the user's own and the block specs, and their files."""

import dataclasses
import functools
import importlib
import json
import sys
import typing

import jax
import jax.numpy as jnp
import pytest

from jax_kernels import explain, flash_attention, gated_matmul, matmul, rms_norm
from jax_kernels.device import DeviceInfo, device_info
from jax_kernels.dispatch import tuning_key
from jax_kernels.ops.attention import decode_implementations as decoding
from jax_kernels.ops.attention.implementations.request import AttentionRequest
from jax_kernels.ops.matmul import implementations as matmuls
from jax_kernels.ops.normalization import implementations as norms
from jax_kernels.ops.planned_op import PlannedOp
from jax_kernels.pallas.block_specs import candidates
from jax_kernels.tuned import blocks as file_blocks
from jax_kernels.tuned import cache
from jax_kernels.tuned.winners import Timed, Winner
from tests.support.cases.requests import request_of
from tests.tools import compile_case

H200 = device_info("h200")
OPS = {
    "flash_attention": (importlib.import_module("jax_kernels.ops.attention.flash_attention").OP, AttentionRequest),
    "decode_attention": (decoding.OP, decoding.DecodeRequest),
    "matmul": (matmuls.OP, matmuls.MatmulRequest),
    "gated_matmul": (matmuls.GATED, matmuls.MatmulRequest),
    **{name: (op, norms.NormRequest) for name, op in norms.OPS.items()},
}

X = jax.ShapeDtypeStruct((2, 4096, 16, 128), jnp.bfloat16)
CALL = functools.partial(explain, flash_attention, X, X, X, is_causal=True, device="h200")
KEY = json.dumps(
    {"op": "flash_attention", "batch": 2, "q_length": 4096, "kv_length": 4096, "heads": 16, "kv_heads": 16}
    | {"head_dim": 128, "v_head_dim": 128, "dtype": "bfloat16", "is_causal": True, "q_offset": 0}
)


def winner(name="triton", ms=1.25, **fields):
    timed = Timed(name=name, ms=ms, untuned_ms=2.0, **fields)
    others = {"date": "2026-11-28", "timer": "cupti", "with_gradients": False, "untuned": name}
    return Winner(fastest=name, timed=(timed,), **others)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, and the winner of CALL as part of the library. The folder of the library's files."""
    monkeypatch.setenv("JAX_KERNELS_CACHE", str(tmp_path / "own"))
    monkeypatch.delenv("JAX_KERNELS_TUNED")
    monkeypatch.setattr(cache, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(cache, "_LOADED", {})
    monkeypatch.setattr(cache, "_REPORTED", set())
    cache.SHIPPED.mkdir()
    of_forward = {"block_q": 64, "block_kv": 32, "num_warps": 4, "num_stages": 2}
    given = {"forward": {"type": "AttentionForwardTriton", **of_forward}}
    tree = {"version": "0.0.1", "device": H200.name, "winners": {KEY: winner(blocks=given).as_json()}}
    (cache.SHIPPED / "NVIDIA_H200.json").write_text(json.dumps(tree))
    return cache.SHIPPED


def test_the_order_of_the_files(folder):
    """The user's own winner, then the library's, then the block spec. The plan says which one it has."""
    shipped = CALL()
    assert (shipped.implementation, shipped.config.forward.block_q, shipped.source) == ("triton", 64, "tuning")
    text = "tuned on 2026-11-28 (shipped with the library): 1.25 ms, block spec 2 ms"
    assert f"  {text}\n" in str(shipped)
    cache.store(H200.name, KEY, winner("cudnn", 1.0))
    own = CALL()
    assert (own.implementation, own.tuned.ms, own.tuned.is_shipped) == ("cudnn", 1.0, False)
    assert "shipped" not in str(own)
    assert CALL(implementation="triton").tuned == shipped.tuned  # the user's winner has no time of it
    assert CALL(implementation="mosaic_gpu").tuned is None
    assert json.loads(cache.path_of(H200.name).read_text())["winners"].keys() == {KEY}
    assert "shipped" not in cache.path_of(H200.name).read_text()


def test_an_own_winner_of_a_named_implementation(folder):
    """It leaves calls without a name to the library's winner."""
    cache.store(H200.name, KEY, dataclasses.replace(winner("cudnn", 1.0), fastest=None))
    assert CALL().implementation == "triton"
    assert CALL(implementation="cudnn").tuned.ms == 1.0


def test_turning_winners_off(folder, monkeypatch):
    cache.store(H200.name, KEY, winner("cudnn", 1.0))
    with cache.ignored():
        assert (cache.find(H200.name), cache.find_shipped(H200.name), CALL().tuned) == ({}, {}, None)
    monkeypatch.setenv("JAX_KERNELS_TUNED", "own")
    assert (cache.find(H200.name).keys(), cache.find_shipped(H200.name)) == ({KEY}, {})
    assert cache.listed_shipped() == {}
    monkeypatch.setenv("JAX_KERNELS_TUNED", "0")
    assert (cache.find(H200.name), cache.find_shipped(H200.name), CALL().tuned) == ({}, {}, None)
    monkeypatch.setenv("JAX_KERNELS_TUNED", "1")
    assert CALL().implementation == "cudnn"
    monkeypatch.setenv("JAX_KERNELS_TUNED", "no")
    with pytest.raises(ValueError, match="JAX_KERNELS_TUNED: got 'no', want 0"):
        CALL()


def test_a_broken_file(folder, monkeypatch):
    (folder / "NVIDIA_H200.json").write_text("{")
    with pytest.warns(RuntimeWarning, match="is corrupt"):
        assert CALL().tuned is None


def test_listing(folder):
    cache.store("GPU", KEY, winner())
    assert cache.listed().keys() == {"GPU"}
    assert [x.is_shipped for x in cache.listed_shipped()[H200.name].values()] == [True]
    assert cache.clear() == [cache.path_of("GPU")]
    assert (folder / "NVIDIA_H200.json").is_file()


def of_key(key: str, device: DeviceInfo):
    """The request of a winner's key, whose sizes are rounded."""
    values = json.loads(key)
    _, kind = OPS[values["op"]]
    hints = typing.get_type_hints(kind)
    fields = {}
    for field in dataclasses.fields(kind):
        value = values.pop(field.name, False if hints[field.name] is bool else None)
        if field.name == "shapes":
            value = tuple(map(tuple, value))
        elif field.name == "activation" and value is not None:
            module, _, name = value.rpartition(".")
            value = getattr(importlib.import_module(module), name)
        fields[field.name] = value
    assert not values, "a field that requests lack"
    return kind(**fields | {"device": device})


FILES = {path.stem: json.loads(path.read_text()) for path in sorted(cache.SHIPPED.glob("*.json"))}
MOST_SPILLS = 512  # bytes that a kernel may store to and load from the stack
_NAMED = ("batch", "q_length", "heads", "kv_heads", "head_dim", "is_causal")
# By a readable name, (the file's name, the key) of each winner of attention.
ATTENTION = {
    " ".join([stem, *(str(json.loads(key).get(name, "full")) for name in _NAMED)]): (stem, key)
    for stem, tree in FILES.items()
    for key in tree["winners"]
    if json.loads(key)["op"] == "flash_attention"
}


@pytest.mark.parametrize("stem", FILES)
def test_files(stem, monkeypatch):
    """Each file loads without a warning, and each of its blocks serves its call today."""
    monkeypatch.delenv("JAX_KERNELS_TUNED")
    monkeypatch.setattr(cache, "_LOADED", {})
    tree = FILES[stem]
    device = device_info(tree["device"])
    assert stem == cache.name_of(device.name).removesuffix(".json")
    assert device.name == tree["device"]
    winners = cache.find_shipped(device.name)
    assert winners.keys() == tree["winners"].keys()
    for key, found in winners.items():
        request = of_key(key, device)
        op, _ = OPS[request.op]
        assert tuning_key(request) == key
        assert found.timer == "cupti"
        choice = op.choose(request)
        assert (choice.implementation, choice.tuned.is_shipped) == (found.fastest, True)
        for timed in found.timed:
            choice = op.choose(request, timed.name)
            assert choice.tuned.ms == timed.ms <= timed.untuned_ms
            with cache.ignored():
                config, _ = op.implementations[timed.name].config(request)
            for field, blocks in timed.blocks.items():  # also the values that a winner leaves out are today's
                wanted = dataclasses.replace(getattr(config, field), **{k: x for k, x in blocks.items() if k != "type"})
                assert getattr(choice.config, field) == wanted


def _kernels(device: DeviceInfo, key: str) -> dict[str, typing.Any]:
    """The `kernels` of a report of compile_case for a winner of attention; empty if it has none of the library's."""
    request = of_key(key, device)
    choice = OPS[request.op][0].choose(request)
    if choice.implementation not in ("mosaic_gpu", "triton"):
        return {}
    names = "head_dim", "v_head_dim", "is_causal", "batch", "q_length", "kv_length", "heads", "kv_heads"
    spec = compile_case.Spec(
        implementation=choice.implementation,
        blocks=f"({choice.config.forward!r}, {choice.config.backward!r})",
        **{name: getattr(request, name) for name in names},
    )
    report = compile_case.compile_spec("h200", spec)
    assert not report["error"]
    return report["kernels"]


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.timeout((compile_case.TIMEOUT + 30) * max(1, len(ATTENTION)))
def test_compiled(monkeypatch):
    """Kernels of attention compile. One that spills a few registers can be the fastest, with many it cannot.

    The shipped files may have no winner of attention.
    """
    monkeypatch.delenv("JAX_KERNELS_TUNED")
    monkeypatch.setattr(cache, "_LOADED", {})
    for stem, key in ATTENTION.values():
        for kernel, figures in _kernels(device_info(FILES[stem]["device"]), key).items():
            assert figures["spill_stores"] + figures["spill_loads"] <= MOST_SPILLS, (key, kernel)


def test_requests_come_back_from_keys():
    """As in test_files, which has nothing to do as long as no file is shipped."""
    attention = request_of(flash_attention, *[X.shape] * 3, is_causal=True)
    x, w = (64, 128), (128, 256)
    for request in (attention, request_of(rms_norm, x), request_of(matmul, x, w), request_of(gated_matmul, x, w, w)):
        assert of_key(tuning_key(request), H200) == request
    assert tuning_key(attention) == KEY


def test_the_names_and_types_of_files():
    """A file may name the implementations that the ops have, and the types of blocks that tuning varies."""
    importlib.import_module("jax_kernels.cli.ops")  # which imports every op
    modules = [module for name, module in sys.modules.items() if name.startswith("jax_kernels.ops.")]
    found = [x for module in modules for x in vars(module).values()]
    ops = {x.name: x for x in [*found, *norms.OPS.values()] if isinstance(x, PlannedOp)}
    assert ops.keys() == file_blocks.IMPLEMENTATIONS.keys()
    for name, op in ops.items():
        assert set(op.implementations) == set(file_blocks.IMPLEMENTATIONS[name])
        varied = {implementation for implementation, x in op.implementations.items() if x.candidates is not None}
        assert {implementation for implementation, _ in file_blocks.TYPES.get(name, {})} == varied
    kinds = {x for x in vars(candidates).values() if dataclasses.is_dataclass(x)} - {candidates.TiledCall}
    assert {kind for of in file_blocks.TYPES.values() for kind in of.values()} == kinds


ROWS = (4096, 1024)
CANDIDATES = {
    **{f"attention D{d}": (flash_attention, *[(2, 4096, 8, d)] * 3) for d in (32, 64, 80, 96, 128, 192, 256)},
    "causal": (flash_attention, *[X.shape] * 3, {"is_causal": True}),
    "matmul": (matmul, ROWS, (1024, 512)),
    "gated_matmul": (gated_matmul, ROWS, (1024, 512), (1024, 512)),
    "rms_norm": (rms_norm, ROWS),
}


@pytest.mark.parametrize("name", CANDIDATES)
def test_all_candidates_are_taken(name):
    """All blocks that tuning times for a call."""
    function, *shapes = CANDIDATES[name]
    more = shapes.pop() if isinstance(shapes[-1], dict) else {}
    request, count = request_of(function, *shapes, **more), 0
    of_key = json.loads(tuning_key(request))
    for implementation, entry in OPS[request.op][0].implementations.items():
        listed = {} if entry.candidates is None else entry.candidates(request)
        for field, found in listed.items():
            for x in found:
                values = {key: y for key, y in vars(x).items() if isinstance(y, bool | int | None)}
                given = {"type": type(x).__name__} | values
                file_blocks.check_blocks(of_key, implementation, field, given, H200.shared_memory_per_block)
                count += 1
    assert count > 8
