"""Attention forward by mma.sync: in the Mosaic interpreter against float64, and compiled for GPUs from sm_80 on.

As a script it interprets cases, or compiles one call:

    python tests/pallas/attention/sm80/test_forward_sm80.py interpret NAME...
    python tests/pallas/attention/sm80/test_forward_sm80.py compile GPU '{"head_dim": 128, "is_causal": true}'
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp

from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention.sm80 import forward as sm80
from jax_kernels.testing.attention_cases import AttentionCase
from tests.support.processes import forked
from tests.tools import compile_case

Blocks = sm80.AttentionForwardSm80
# Cases by name, with the kernel's blocks.
CASES = {
    "full": (AttentionCase("full"), Blocks()),
    "causal": (AttentionCase("causal", q_length=130, kv_length=130, is_causal=True), Blocks()),
}


def _forward(case, config, query, key, value, *, interpret):
    given = case.arguments
    offset = given["q_offset"]
    inputs = AttentionInputs(
        query, key, value, kv_lengths=given["kv_lengths"], q_offset=None if isinstance(offset, int) else offset
    )
    options = AttentionOptions(
        scale=case.head_dim**-0.5,
        is_causal=case.is_causal,
        window=given["window"],
        q_offset=offset if isinstance(offset, int) else None,
    )
    return sm80.attention_forward(inputs, options, out_dtype=query.dtype, config=config, interpret=interpret)


def _interpret(names):
    from tests.support.interpreters import mosaic
    from tests.support.oracles import attention as oracle
    from jax_kernels.testing import attention as testing

    mosaic.install()
    found = {}
    for name in names:
        case, config = CASES[name]
        arrays = testing.attention_inputs(case)
        got = jax.jit(functools.partial(_forward, case, config, interpret=True))(*arrays[:3])
        want = oracle.attention(case, *arrays)
        bounds = testing.tolerance_of(case, arrays, want)
        found[name] = {n: (testing.rms_error(x, getattr(want, n)), bounds[n]) for n, x in zip(("out", "lse"), got)}
    print(json.dumps(found))


if __name__ == "__main__":
    _interpret(sys.argv[2:])
