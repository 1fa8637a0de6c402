"""sequence_parallel_dilated_attention on four CPU devices, in a process of its own: as dilated_attention on one.

As a script it prints, for each case, the errors of out, lse, dq, dk and dv against float64.
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEVICES = 4
# segment_lengths, dilation_rates, is_causal, heads, key heads, of 32 tokens: 8 on each device.
CASES = {
    "all_lengths": ((4, 8, 16, 100), (1, 2, 4, 8), True, 4, 4),
    "not_causal": ((8, 16, 32), (3, 2, 4), False, 8, 2),
    "across_alone": ((32,), (2,), True, 4, 1),
    "local_alone": ((8,), (3,), True, 3, 3),
}


def main() -> dict:
    import jax
    import jax.numpy as jnp
    import numpy as np

    sys.path.insert(0, str(Path(__file__).parents[1]))
    import dilated_oracle

    from jax_kernels import sequence_parallel_dilated_attention
    from jax_kernels.testing import rms_error

    mesh = jax.make_mesh((DEVICES,), ("sequence",), (jax.sharding.AxisType.Auto,))
    tokens, of_lse = jax.sharding.PartitionSpec(None, "sequence"), jax.sharding.PartitionSpec(None, None, "sequence")
    found = {}
    for name, (lengths, rates, is_causal, heads, kv_heads) in CASES.items():
        random = np.random.default_rng(0)
        normal = lambda *shape, random=random: jnp.asarray(random.standard_normal(shape), jnp.float32)
        query, dout = normal(2, 32, heads, 8), normal(2, 32, heads, 6)
        key, value, dlse = normal(2, 32, kv_heads, 8), normal(2, 32, kv_heads, 6), normal(2, heads, 32)
        pattern = {"segment_lengths": lengths, "dilation_rates": rates, "is_causal": is_causal}
        attend = functools.partial(
            sequence_parallel_dilated_attention, axis_name="sequence", return_lse=True, implementation="xla", **pattern
        )
        shared = jax.shard_map(attend, mesh=mesh, in_specs=(tokens,) * 3, out_specs=(tokens, of_lse))

        @jax.jit
        def run(query, key, value, dout, dlse, shared=shared):
            results, vjp = jax.vjp(shared, query, key, value)
            return *results, *vjp((dout, dlse))

        got = run(query, key, value, dout, dlse)
        want = dilated_oracle.dilated_attention(query, key, value, dout, dlse, **pattern)
        halves = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (query, key, value)]
        dtypes = [x.dtype.name for x in jax.eval_shape(shared, *halves)]
        text = str(jax.make_jaxpr(shared)(query, key, value))
        gathered = [int(rows) for rows in re.findall(r"f32\[\d+,(\d+),\d+,\d+\]\S* = all_gather", text)]
        errors = [rms_error(g, w) for g, w in zip(got, want, strict=True)]
        found[name] = {"errors": errors, "dtypes": dtypes, "gathered": gathered}
    return found


@pytest.fixture(scope="module")
def results():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0",
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", CASES)
def test_is_dilated_attention(name, results):
    for what, error in zip(("out", "lse", "dq", "dk", "dv"), results[name]["errors"], strict=True):
        assert error < 1e-6, what


@pytest.mark.timeout(240)
def test_what_travels(results):
    """Keys and values of the long segments alone, of each the rows that take part: segment / rate."""
    gathered = {name: result["gathered"] for name, result in results.items()}
    assert gathered == {
        "all_lengths": [16 // 4] * 2 + [32 // 8] * 2,
        "not_causal": [16 // 2] * 2 + [32 // 4] * 2,
        "across_alone": [32 // 2] * 2,
        "local_alone": [],
    }


@pytest.mark.timeout(240)
def test_dtypes(results):
    """Also of one branch alone, which nothing is merged with."""
    assert {tuple(result["dtypes"]) for result in results.values()} == {("bfloat16", "float32")}


def test_errors():
    import jax
    import jax.numpy as jnp

    from jax_kernels import sequence_parallel_dilated_attention

    def shape(length, pattern):
        x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        attend = functools.partial(sequence_parallel_dilated_attention, axis_name="i", **pattern)
        return jax.make_jaxpr(attend, axis_env=[("i", 4)])(x, x, x)

    for lengths, rates, message in (
        ((8, 3), (1, 1), "segment_lengths[1]: got 3 with 8 tokens on each of 4 devices, want a divisor of 8, or 8"),
        ((24,), (1,), "segment_lengths[0]: got 24 with 8 tokens"),
        ((12,), (1,), "segment_lengths[0]: got 12 with 8 tokens"),
        ((16,), (3,), "dilation_rates[0]: got 3 for segments longer than the 8 tokens of a device, want a divisor"),
        ((8, 0), (1, 1), "segment_lengths: got (8, 0), want one number or more, all positive"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            shape(8, {"segment_lengths": lengths, "dilation_rates": rates})


if __name__ == "__main__":
    print(json.dumps(main()))
