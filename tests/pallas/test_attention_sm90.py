"""The Hopper kernels in JAX's Mosaic interpreter: numerics against float64, and races.

The interpreter sees neither overlap hazards of wgmma nor layouts nor shared-memory overflow: the compile tests
and the tests on a GPU do.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "mosaic_interpreter.py"
SMALL = {"batch": 1, "q_length": 128, "kv_length": 128, "heads": 1, "kv_heads": 1}

CASES = {
    "causal": SMALL | {"is_causal": True, "q_length": 256, "kv_length": 256, "races": True},
    "full_128": SMALL | {"head_dim": 128, "v_head_dim": 128, "races": True},
    "odd": SMALL | {"q_length": 77, "kv_length": 203},
    "odd_causal": SMALL | {"q_length": 133, "kv_length": 66, "is_causal": True},
    "gqa": SMALL | {"heads": 4, "kv_heads": 2, "is_causal": True, "q_length": 70, "kv_length": 150, "q_offset": 80},
    "negative_offset": SMALL | {"is_causal": True, "q_offset": -40, "kv_length": 100},
    "lengths": SMALL | {"batch": 3, "q_length": 65, "kv_length": 130, "kv_lengths": [0, 130, 65], "heads": 2},
    "lengths_and_offsets": SMALL
    | {"batch": 2, "is_causal": True, "kv_lengths": [100, 40], "q_offset": [-20, 60], "head_dim": 128},
    "fp16": SMALL | {"dtype": "float16", "is_causal": True},
    "head_dim_40": SMALL | {"head_dim": 40, "v_head_dim": 24, "is_causal": True},
    "head_dim_192": SMALL | {"head_dim": 192, "v_head_dim": 128, "is_causal": True, "kv_length": 70},
    "head_dim_256": SMALL | {"head_dim": 256, "v_head_dim": 256, "is_causal": True, "races": True},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPT), json.dumps(CASES[name])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["races"]
    for what, error in result["errors"].items():
        assert error <= result["bounds"][what], (what, error, result["bounds"][what])
