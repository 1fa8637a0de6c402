"""The launch chains of the bridge's programs, read from executables compiled for an H200."""

import functools
import itertools
import json
from pathlib import Path

import pytest

from tests.support.cases.tiers import cases
from tests.support.processes import forked
from tests.tools import compile_chains

TIMEOUT = 240
SCRIPT = Path(compile_chains.__file__)

# By case: the kernels of this library, in order. XLA's kernels may lie between them.
KERNELS = {
    "inference": ["attention_forward_sm90"],
    "forward": ["attention_forward_sm90"],
    "forward bounded": ["attention_row_norms", "attention_row_norms", "attention_forward_sm90"],
    "forward odd": ["attention_forward_sm90"],
    "forward 1002": ["attention_forward_sm90"],
    "backward": ["attention_backward_rows", "attention_backward_sm90"],
    "backward odd": ["attention_backward_rows", "attention_backward_sm90"],
    "backward rows": ["attention_backward_rows", "attention_backward_sm90"],
    "backward deterministic": ["attention_backward_rows", "attention_backward_sm90", "attention_backward_dq_sm90"],
    "forward triton": ["attention_forward_triton"],
    "backward triton": ["attention_backward_dkv_triton", "attention_backward_dq_triton"],
    "layer_norm": ["norm_forward_sm90"],
    "layer_norm backward": ["norm_forward_sm90", "norm_backward_sm90"],
    "rms_norm": ["norm_forward_sm90"],
    "rms_norm backward": ["norm_forward_sm90", "norm_backward_sm90"],
    "matmul": ["matmul_sm90"],
    "matmul backward": ["matmul_sm90", "matmul_sm90"],
    "grouped_matmul": ["grouped_matmul_sm90"],
    "grouped_matmul backward": ["grouped_matmul_sm90", "grouped_matmul_sm90", "grouped_weight_gradient_sm90"],
    "int4": ["matmul_low_bit_sm90", "matmul_join_triton"],
    "mxfp8": ["matmul_low_bit_sm90", "matmul_join_triton"],
    "mxfp4 gated": ["matmul_low_bit_sm90", "matmul_join_triton"],
}
# By case: the number of launches, including XLA's.
LAUNCHES = {
    "grouped_matmul": 5,  # four for the schedule
    "inference": 1,
    "forward": 1,
    "forward odd": 1,
    "forward 1002": 2,  # lse is sliced: a row is no multiple of 16 bytes
    "backward": 3,
    "backward odd": 3,
    "backward rows": 3,
    "backward deterministic": 3,
}
QUICK = ["backward odd"]


@functools.cache
def compiled(gpu, case):
    env = {"JAX_KERNELS_INTERPRET": None}
    done = forked.run(SCRIPT, gpu, case, env=env, timeout=TIMEOUT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.parametrize("case", cases(list(KERNELS), QUICK))
def test_chain_has_all_kernels_and_buffers(case):
    chain = compiled("h200", case)
    steps = chain["steps"]
    ours = [
        step["name"]
        for step in steps
        if step["kind"] in ("kernel", "mosaic") and not step["name"].startswith(("input_", "loop_", "wrapped_"))
    ]
    stems = [name.removesuffix("_kernel").removesuffix("_mosaic_gpu") for name in ours]
    assert stems == KERNELS[case]
    program = compile_chains.CASES[case]()
    used = set(itertools.chain.from_iterable(step["buffers"] for step in steps))
    assert {f"in{index}" for index in range(len(program.specs))} <= used
    outputs = {"inference": 1, "forward": 2}.get(case.split()[0])
    assert outputs is None or {name for name in used if name.startswith("out")} == {f"out{i}" for i in range(outputs)}
    assert ("work" in used) == bool(chain["workspace"])
    assert chain["work_used"] <= chain["workspace"]
    assert len(steps) == LAUNCHES.get(case, len(steps))
    assert {step["kind"] for step in steps} <= {"kernel", "mosaic", "fill", "copy"}


@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.parametrize("case", cases(["inference", "inference 1002"], []))
def test_inference_writes_only_out(case):
    """It writes no lse, as the call does not need it: lse would take half of the memory that such a call allocates."""
    chain = compiled("h200", case)
    assert [sorted(step["buffers"]) for step in chain["steps"]] == [["in0", "in1", "in2", "out0"]]
    assert chain["workspace"] == 0


@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.slow
def test_forward_with_lse_is_one_launch():
    (step,) = compiled("h200", "forward triton")["steps"]
    assert step["buffers"] == ["in0", "in1", "in2", "out0", "out1"]
    assert step["shared_memory"] > 48 * 1024


@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
@pytest.mark.slow
@pytest.mark.parametrize("case", ["forward xla", "matmul xla"])
def test_program_without_our_kernels_has_no_chain(case):
    assert compiled("h200", case) == {"reason": "the plan has no kernel of this library"}


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
def test_constants_keep_their_values():
    """The program's HLO is their only source: int32 values, one of them negative, and bools."""
    constants = compiled("h200", "constants")["constants"]
    assert (-7).to_bytes(4, "little", signed=True).hex() + (400).to_bytes(4, "little").hex() in constants
    blocks = [[number % 3 == 0 for number in range(32 * batch, 32 * batch + 16)] for batch in range(2)]
    assert bytes(itertools.chain.from_iterable(blocks)).hex() in constants


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
def test_program_of_xla_kernels_has_a_chain():
    (step,) = compiled("h200", "elementwise")["steps"]
    assert (step["kind"], step["buffers"]) == ("kernel", ["in0", "out0"])


@pytest.mark.compile
@pytest.mark.timeout(TIMEOUT + 30)
def test_decoding_a_token_is_two_launches():
    """Queries are read in place, without padding rows of zeros."""
    steps = compiled("h200", "token")["steps"]
    assert [step["name"] for step in steps] == [
        "attention_decode_sm90_mosaic_gpu_kernel",
        "attention_decode_merge_triton",
    ]
    assert steps[0]["buffers"][:4] == ["in1", "in3", "in0", "in2"]
