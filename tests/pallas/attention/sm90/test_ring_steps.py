"""Steps of a ring by the Hopper kernels in JAX's Mosaic interpreter: numerics against float64, and races."""

import json
from pathlib import Path

import pytest

from tests.support.cases import tiers
from tests.support.processes import forked

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "tests" / "support" / "interpreters" / "ring.py"
STEP = {"head_dim": 64, "heads": 2, "kv_heads": 2, "number": 1, "index": 1, "layout": "zigzag", "is_causal": True}
# On a later device of a causal zigzag all queries see the first keys; on an earlier device the last queries see all
# keys.
CASES = {
    "own_keys": STEP | {"number": 0, "joins": False},
    "later": STEP | {"joins": True},
    "earlier": STEP | {"index": 0, "joins": True, "is_last": True, "in_parts": True},
    "grouped_128": STEP | {"head_dim": 128, "heads": 4, "index": 0, "joins": True, "in_parts": True},
    "first_128": STEP | {"head_dim": 128, "joins": False},
    "dead_128": STEP | {"head_dim": 128, "layout": "contiguous", "index": 0, "joins": True, "is_last": True},
    "striped": STEP | {"layout": "striped", "joins": True, "is_last": True},
    "full": STEP | {"is_causal": False, "layout": "contiguous", "joins": True},
    "masked_own_keys": STEP | {"number": 0, "is_causal": False, "mask": "limits", "joins": False},
    "masked": STEP | {"is_causal": False, "mask": "limits", "joins": True},
    "masked_striped": STEP | {"layout": "striped", "index": 0, "is_causal": False, "mask": "limits", "joins": True},
    "masked_128": STEP | {"head_dim": 128, "is_causal": False, "mask": "limits", "joins": True, "is_last": True},
    "masked_dead": STEP
    | {"layout": "contiguous", "index": 0, "is_causal": False, "mask": "limits", "joins": True, "is_last": True},
    "masked_in_parts": STEP
    | {"head_dim": 128, "is_causal": False, "mask": "limits", "joins": True, "is_last": True, "in_parts": True},
    "function_in_parts": STEP
    | {
        "head_dim": 128,
        "heads": 4,
        "index": 0,
        "is_causal": False,
        "mask": "function",
        "joins": True,
        "in_parts": True,
    },
    "wide": STEP | {"head_dim": 256, "index": 0, "joins": True, "is_last": True},
    "padded_40": STEP | {"head_dim": 40, "joins": True},
    "padded_96": STEP | {"head_dim": 96, "index": 0, "joins": True, "is_last": True},
    "two_widths": STEP | {"head_dim": 64, "v_head_dim": 32, "heads": 4, "joins": True},
    "odd_length": STEP | {"tokens": 18, "is_causal": False, "layout": "contiguous", "joins": True},
    "odd_first": STEP | {"tokens": 150, "number": 0, "joins": False},
    "odd_and_padded": STEP | {"tokens": 85, "head_dim": 80, "layout": "striped", "joins": True, "is_last": True},
}
QUICK = ["earlier", "odd_and_padded"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", tiers.groups(CASES, QUICK, 4))
def test_steps(names):
    done = forked.run(str(SCRIPT), *(json.dumps(CASES[name]) for name in names), env={}, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(names)
    for name, result in zip(names, found, strict=True):
        assert not result["races"], name
        is_rounded = CASES[name].get("is_last") and CASES[name]["head_dim"] <= 128
        assert result["dtypes"]["out"] == ("bfloat16" if is_rounded else "float32"), name
        assert {result["dtypes"][what] for what in ("lse", "dquery", "dkey", "dvalue")} == {"float32"}, name
        for what, error in result["errors"].items():
            # P and dS are bfloat16 as operands of matmuls. out is rounded to bfloat16 in the last step.
            assert error < (1e-6 if what == "lse" else 3e-3), (name, what, error)
