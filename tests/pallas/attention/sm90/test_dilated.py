"""Dilated attention by the Hopper kernels, which read views of whole arrays: interpreted, and compiled.

As a script it compiles one call: `python tests/pallas/attention/sm90/test_dilated.py HEAD_DIM`.
"""

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_kernels import dilated_attention
from tests.support.cases import tiers
from tests.support.processes import forked
from tests.tools import compile_case

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "tests" / "support" / "interpreters" / "dilated.py"
# The pattern, and which calls read views, without and with gradients.
INTERPRETED = {
    "one_key_head_and_a_rate_that_divides_nothing": (
        {"num_heads": 2, "kv_heads": 1, "length": 32, "head_dim": 64, "is_causal": True, "bounded": True}
        | {"segment_lengths": [32, 32, 32], "dilation_rates": [1, 2, 3]},
        [[True, True, False]] * 2,
    ),
    "groups_and_rows_of_no_whole_tiles": (
        {"num_heads": 3, "kv_heads": 3, "length": 48, "head_dim": 128}
        | {"segment_lengths": [48, 24, 24], "dilation_rates": [2, 2, 1], "heads": "groups", "combine": "mean"},
        [[True, True, False]] * 2,
    ),
    "short_branches_in_one_launch": (
        {"batch": 2, "num_heads": 4, "kv_heads": 2, "length": 32, "head_dim": 64, "is_causal": True}
        | {"segment_lengths": [16, 32], "dilation_rates": [1, 2], "bandwidth": 4.8e12},
        [[True, True], [False]],
    ),
    "groups_of_which_two_are_one_launch": (
        {"batch": 2, "num_heads": 3, "kv_heads": 3, "length": 64, "head_dim": 64}
        | {"segment_lengths": [8, 64, 64], "dilation_rates": [1, 8, 8], "heads": "groups", "bandwidth": 5e9},
        [[True, True, True], [True, False]],
    ),
    "blocks_of_keys_one_after_another": (
        {"num_heads": 4, "kv_heads": 2, "length": 32, "head_dim": 64, "is_causal": True, "cores": 1}
        | {"segment_lengths": [32, 32], "dilation_rates": [1, 2]},
        [[True, True]] * 2,
    ),
    "rows_and_heads_of_other_numbers": (
        {"num_heads": 6, "kv_heads": 2, "length": 48, "head_dim": 64}
        | {"segment_lengths": [16, 48, 48], "dilation_rates": [3, 1, 2]},
        [[False, True, True]] * 2,
    ),
}


QUICK = {"short_branches_in_one_launch"}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", tiers.cases(INTERPRETED, QUICK))
def test_interpreted(name):
    case, strided = INTERPRETED[name]
    done = forked.run(SCRIPT, json.dumps(case), env=forked.UNOPTIMISED, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["strided"] == strided
    for what, (error, bound) in result["errors"].items():
        assert error <= bound, (what, error, bound)


def _compile(head_dim: int) -> None:
    arrays = [jax.ShapeDtypeStruct((1, 16384, heads, head_dim), jnp.bfloat16) for heads in (12, 3, 3, 12)]
    attend = functools.partial(
        dilated_attention, segment_lengths=(16384,), dilation_rates=(2,), is_causal=True, implementation="mosaic_gpu"
    )

    def both(query, key, value, dout):
        out, vjp = jax.vjp(attend, query, key, value)
        return out, *vjp(dout)

    compiled, _ = compile_case.lower_and_compile("h200", both, *arrays)
    memory = compiled.memory_analysis()
    print(memory.temp_size_in_bytes / (arrays[0].size * arrays[0].dtype.itemsize))


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("head_dim", tiers.cases([64, 128], {}, "head_dim"))
def test_compiles(head_dim):
    """Classes end within groups of heads, so the kernels divide a head's index: no spills, no serialised matmuls.

    The kv loop is so long that the forward computes a bound of the scores.

    In addition to inputs and outputs, only compact arrays of half of the tokens are allocated: dquery in float32, with
    the bytes of query, and dkey and dvalue, with a quarter of this each. No other temporary is as large as an input.
    """
    printed, kernels, others = compile_case.compile_script(__file__, str(head_dim))
    assert len(kernels) == 2, kernels
    passes = {name: figures for name, figures in others.items() if name.startswith("dilated_")}
    assert {name.split("__")[0] for name in passes} == {"dilated_merge", "dilated_total"}, others
    kernels |= passes
    assert 1 < float(printed) < 1.5
    for name, figures in kernels.items():
        assert figures["spill_stores"] + figures["spill_loads"] == 0, (name, figures)
        assert figures["notes"] == [], (name, figures)


if __name__ == "__main__":
    _compile(int(sys.argv[1]))
