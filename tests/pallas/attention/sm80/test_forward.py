"""Attention forward by mma.sync: in JAX's interpreter, and its PTX for GPUs from sm_80 on, against float64.

As a script it runs cases by name, in the interpreter or as PTX compiled for a GPU:

    python tests/pallas/attention/sm80/test_forward.py interpret NAME...
    python tests/pallas/attention/sm80/test_forward.py GPU NAME
"""

import functools
import json
import os
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.device import device_info
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.sm80.forward import AttentionForwardSm80, attention_forward
from jax_kernels.testing import attention as testing
from jax_kernels.testing.attention_cases import AttentionCase as Case
from tests.support.cases import tiers
from tests.support.interpreters import ptx
from tests.support.oracles import attention as attention_oracle
from tests.support.processes import forked
from tests.tools import compile_case

_WIDE = {"head_dim": 128, "v_head_dim": 128}
_BOUNDS = {"is_causal": True, "q_offset": (5, -40), "kv_lengths": (70, 150), "garbage": True}
CASES = {
    case.name: case
    for case in (
        Case("full", batch=1, q_length=100, kv_length=203, heads=4),
        Case("causal", batch=1, q_length=130, kv_length=130, is_causal=True, **_WIDE),
        Case("rising", batch=1, q_length=70, kv_length=300, heads=1, kv_heads=1, magnitude=8.0, dtype="float16"),
        Case("bounds", q_length=100, kv_length=160, heads=1, kv_heads=1, **_BOUNDS),
        Case("window", batch=1, q_length=200, kv_length=200, heads=1, kv_heads=1, window=(33, 20), **_WIDE),
        Case("two_warpgroups", batch=1, q_length=200, kv_length=200, heads=1, kv_heads=1, is_causal=True, **_WIDE),
        Case("queries_in_smem", batch=1, q_length=140, kv_length=140, heads=1, kv_heads=1, is_causal=True, **_WIDE),
        Case("both", q_length=150, kv_length=160, heads=1, kv_heads=1, **_BOUNDS),
        Case("head_dim_80", batch=1, q_length=40, kv_length=30, heads=1, kv_heads=1, head_dim=80, v_head_dim=80),
    )
}
# Blocks other than the default, by case.
BLOCKS = {
    "rising": AttentionForwardSm80(block_q=128),
    "window": AttentionForwardSm80(block_kv=32),
    "two_warpgroups": AttentionForwardSm80(warpgroups=2),
    "queries_in_smem": AttentionForwardSm80(block_q=128, block_kv=32, q_in_smem=True),
    "both": AttentionForwardSm80(block_q=64, block_kv=32, q_in_smem=True, warpgroups=2),
}


def _call(case, interpret):
    """The forward of (query, key, value)."""
    given = case.arguments
    is_static = isinstance(given["q_offset"], int)
    rest = {"kv_lengths": given["kv_lengths"], "q_offset": None if is_static else given["q_offset"]}
    options = AttentionOptions(
        scale=case.head_dim**-0.5,
        is_causal=case.is_causal,
        window=case.window,
        q_offset=case.q_offset if is_static else None,
    )
    config = BLOCKS.get(case.name, AttentionForwardSm80())
    bounds = block_ranges.bounds_array(AttentionInputs(*_shapes(case), **rest), options)
    forward = lambda *arrays: attention_forward(
        AttentionInputs(*arrays, **rest), options, out_dtype=case.dtype, config=config, interpret=interpret
    )
    return forward, [] if bounds is None else [np.array(bounds)], config


def _shapes(case):
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in testing._shapes(case)[:3]]


def _errors(case, arrays, results):
    """(error, the largest error allowed) of each result, by name."""
    want = attention_oracle.attention(case, *arrays)
    bounds = testing.tolerance_of(case, arrays, want)
    results = dict(zip(("out", "lse"), results, strict=True))
    return {name: (testing.rms_error(x, getattr(want, name)), bounds[name]) for name, x in results.items()}


def _interpret(names):
    from tests.support.interpreters import mosaic

    mosaic.install()
    for case in map(CASES.get, names):
        arrays = testing.attention_inputs(case)
        print(json.dumps(_errors(case, arrays, jax.jit(_call(case, interpret=True)[0])(*arrays[:3]))))


def _run_ptx(gpu, name):
    """Compiles a case, runs its PTX, and prints the errors, the opcodes and the faults found."""
    case = CASES[name]
    forward, bounds, config = _call(case, interpret=False)
    compile_case.lower_and_compile(gpu, forward, *_shapes(case))
    (path,) = Path(os.environ["MOSAIC_GPU_DUMP_TO"]).glob("*.ptx")
    text, arrays = path.read_text(), testing.attention_inputs(case)

    def run(kernel):
        out = np.full(arrays[3].shape, np.nan, arrays[3].dtype)
        lse = np.full((case.batch, case.heads, case.q_length), np.nan, np.float32)
        ctas = case.batch * case.heads * -(-case.q_length // config.rows)
        # MLIR orders a kernel's parameters by their first use.
        kernel.run([*bounds, *map(np.array, arrays[:3]), out, lse], ctas)
        return out, lse

    kernel = ptx.Kernel(text)
    found = {"errors": _errors(case, arrays, run(kernel)), "opcodes": kernel.opcodes}
    if name == "causal":
        found["faults"] = [_fault(run, re.sub(old, new, text, flags=re.MULTILINE)) for old, new in FAULTS.values()]
    print(json.dumps(found))


def _fault(run, text):
    try:
        run(ptx.Kernel(text))
    except AssertionError as error:
        return str(error)
    return "none"


# Faults in the PTX, by the error that the PTX interpreter has to raise: (pattern, its replacement).
FAULTS = {
    "write of bytes that another warp reads": (r"(cp.async.wait_group 0;) bar.sync 1, 128;", r"\1"),
    "read of a copy in flight": (r"cp.async.wait_group 0;", ""),
    "access outside the arrays": (r"(selp.b32.*), 16, 0,", r"\1, 16, 16,"),
}
# The interpreter of Mosaic kernels has no barrier for two warpgroups: their cases run as PTX only.
ONE_WARPGROUP = [name for name in CASES if BLOCKS.get(name, AttentionForwardSm80()).warpgroups == 1]
INTERPRETED = tiers.groups(ONE_WARPGROUP, {"bounds"}, 3)
# Bytes. sm_120's instructions address shared memory with more registers.
SPILLS = {("rtx pro 6000", "queries_in_smem"): 256}
# XLA pads head_dim 80 before the kernel.
COMPILED = tiers.some_pairs(
    ["a100", "a6000", "rtx4090", "h200", "rtx pro 6000"],
    [name for name in CASES if name != "head_dim_80"],
    {("a100", "causal")},
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", INTERPRETED)
def test_interpreted(names):
    done = forked.run(__file__, "interpret", *names, env=forked.UNOPTIMISED, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    for name, line in zip(names, done.stdout.splitlines(), strict=True):
        for result, (error, bound) in json.loads(line).items():
            assert error <= bound, (name, result)


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize(("gpu", "name"), COMPILED)
def test_compiled(gpu, name):
    printed, mosaic, _ = compile_case.compile_script(__file__, gpu, name)
    (figures,) = mosaic.values()
    most = SPILLS.get((gpu, name), 0)
    assert max(figures["spill_stores"], figures["spill_loads"]) <= most, figures
    assert figures["notes"] == []
    assert figures["shared_memory"] <= device_info(gpu).shared_memory_per_block
    found = json.loads(printed)
    for result, (error, bound) in found["errors"].items():
        assert error <= bound, result
    names = " ".join(found["opcodes"])
    for opcode in ("mma.sync.aligned.m16n8k16", "ldmatrix.sync.aligned.m8n8.x4.trans", "cp.async.cg.shared.global"):
        assert opcode in names
    assert "wgmma" not in names
    assert "cp.async.bulk" not in names
    assert found.get("faults", list(FAULTS)) == list(FAULTS)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"softcap": 5.0}, NotImplementedError, "got softcap, want only"),
        ({"dtype": "float32"}, TypeError, "got float32, float32, float32, float32, want"),
        ({"head_dim": 192, "v_head_dim": 192}, ValueError, r"got \(2, 128, 2, 192\), .*, D up to 128"),
        ({"v_head_dim": 128}, ValueError, "S, Hkv, D. twice"),
        ({"heads": 3}, ValueError, "H a multiple of Hkv"),
        ({"kv_length": 0}, ValueError, "want no empty axis"),
    ],
)
def test_refuses(changes, error, message):
    case = Case("refused", **changes)
    options = AttentionOptions(scale=1.0, softcap=case.softcap)
    forward = functools.partial(attention_forward, config=AttentionForwardSm80(), interpret=False)
    with pytest.raises(error, match=message):
        forward(AttentionInputs(*_shapes(case)), options, out_dtype=case.dtype)


def test_refuses_to_interpret_two_warpgroups():
    forward = functools.partial(attention_forward, config=AttentionForwardSm80(warpgroups=2), interpret=True)
    with pytest.raises(NotImplementedError, match="interpret: got True with 2 warpgroups"):
        forward(AttentionInputs(*_shapes(CASES["causal"])), AttentionOptions(scale=1.0), out_dtype="bfloat16")


def test_refuses_blocks_that_spill():
    forward = functools.partial(attention_forward, config=AttentionForwardSm80(block_q=128), interpret=False)
    with pytest.raises(ValueError, match="got block_q 128 for head_dim 128, want 64 or q_in_smem"):
        forward(AttentionInputs(*_shapes(CASES["causal"])), AttentionOptions(scale=1.0), out_dtype="bfloat16")


@pytest.mark.parametrize(
    "blocks",
    [
        {"block_q": 96},
        {"block_kv": 128},
        {"block_q": 128, "block_kv": 32},
        {"warpgroups": 2, "block_kv": 32},
        {"warpgroups": 3},
    ],
)
def test_refuses_blocks(blocks):
    with pytest.raises(ValueError, match=r"got .*, want"):
        AttentionForwardSm80(**blocks)


if __name__ == "__main__":
    _interpret(sys.argv[2:]) if sys.argv[1] == "interpret" else _run_ptx(*sys.argv[1:])
