"""The ids of parametrised tests show shapes, and the names of arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import masks
from jax_kernels.testing import AttentionCase, matmul, mlp, normalization
from jax_kernels.testing.low_precision import low_bit_matmul
from tests.support.cases import ids

ATTENTION = AttentionCase("odd", q_length=450, kv_length=70, heads=4)


def test_cases_show_their_shapes():
    assert ids.argument_id(ATTENTION, "case") == "odd-B2-T450-S70-H4/2-D64"
    assert ids.case_id("plain", matmul.CASES["plain"]) == "plain-M5x7-K64-N48"
    assert ids.case_id("x", mlp.Case((5, 64), 96, 48)) == "x-M5-K64-F96-N48"
    assert ids.case_id("x", normalization.Case((3, 1000))) == "x-3x1000"
    assert ids.case_id("plain", low_bit_matmul.CASES["plain"]) == "plain-M3-K300-N50"
    assert ids.case_id("int4", low_bit_matmul.HOPPER["int4"]) == "int4-M3-K512-N128"
    assert [x.id for x in ids.named({"a": ATTENTION, "b": {}})] == ["a-B2-T450-S70-H4/2-D64", "b"]


def test_case_name_with_its_shape_is_kept():
    assert ids.case_id("B2-T450-S70-H4/2-D64-causal", ATTENTION) == "B2-T450-S70-H4/2-D64-causal"


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("head_dim", 64, "D64"),
        ("shape", (2, 300, 4), "2x300x4"),
        ("window", (5, None), "window=5,None"),
        ("is_causal", True, "is_causal=True"),
        ("options", {}, "no options"),
        (
            "options",
            {"scale": 0.5, "bias": jax.ShapeDtypeStruct((2, 3), jnp.float32)},
            "options=scale=0.5,bias=float32(2x3)",
        ),
        ("dtype", jnp.bfloat16, "bfloat16"),
        ("dtype", np.dtype("int8"), "int8"),
        ("mask", masks.causal(), "mask=causal()"),
        ("text", "text", None),
        ("function", len, None),
        ("names", ("name",) * 50, None),
    ],
)
def test_arguments(name, value, want):
    assert ids.argument_id(value, name) == want
