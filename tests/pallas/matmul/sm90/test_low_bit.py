"""The Hopper matmul of low-bit weights: in the Mosaic interpreter, with races, and compiled without a GPU.

As a script it compiles one call: `python tests/pallas/matmul/sm90/test_low_bit.py '{"format": "int4", ...}'`.
"""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_kernels.inputs.matmul import MatmulOptions
from jax_kernels.pallas.block_specs.matmul_specs import MatmulLowBitSm90
from jax_kernels.pallas.matmul.sm90.low_bit import LowBitTraits
from jax_kernels.quantization.formats import LowBit
from tests.support.cases import ids, low_bit_blocks, tiers
from tests.support.interpreters import kernels as cases_interpreter
from tests.tools import compile_case

INTERPRETED = {
    "one_core": (1, True, ["int4", "int8_row", "mxfp4", "mxfp4_one"]),
    "gated": (3, False, ["int4_gated", "mxfp8"]),
    "three_cores": (3, False, ["int4_32", "int4_256", "int8"]),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", tiers.cases(INTERPRETED, {"one_core", "gated"}))
def test_interpreted(group):
    cases_interpreter.check("jax_kernels.testing.low_precision.low_bit_matmul", *INTERPRETED[group])


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("cores", "names"),
    [
        pytest.param(4, ["two", "an_empty_split"], marks=pytest.mark.slow),
        pytest.param(4, ["residual", "gated", "alone", "row", "mxfp4_one"], marks=pytest.mark.slow),
    ],
)
def test_cluster_split_k_interpreted(cores, names):
    cases_interpreter.check("tests.support.cases.low_bit_blocks", cores, False, names)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(low_bit_blocks.CASES | low_bit_blocks.GPU))
def test_cluster_split_k_on_a_gpu(name):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs Hopper")
    case = (low_bit_blocks.CASES | low_bit_blocks.GPU)[name]
    for what, (error, bound) in low_bit_blocks.errors_by(case, "mosaic_gpu").items():
        assert error <= bound, what


def traits_of(layout, n, k, activation=None, **blocks):
    """Traits for 16 rows of x by weights [n, k], on 132 SMs."""
    return LowBitTraits(
        options=MatmulOptions(out_dtype="bfloat16", transpose_w=True, activation=activation),
        config=MatmulLowBitSm90(compute_wgs=4, stages=6, **blocks),
        layout=layout,
        m=16,
        n=n,
        k=k,
        dtype=jnp.bfloat16,
        weights=1,
        core_count=132,
    )


@pytest.mark.parametrize(
    ("n", "k", "activation", "want"),
    [
        (8192, 8192, None, (4, 8, True)),
        (4096, 14336, None, (8, 7, True)),
        (64, 1280, None, (4, 2, True)),  # five steps: the last CTA of four has none
        (28672, 8192, None, (1, 32, True)),
        (8192, 8192, jnp.sin, (4, 8, False)),  # Mosaic cannot compute sin well: a second launch has the epilogue
    ],
)
def test_cluster_split_k_counts(n, k, activation, want):
    traits = traits_of(LowBit(format="int4", group=128), n, k, activation, cluster_join=True)
    assert (traits.splits, traits.steps_of_split, traits.joins) == want
    assert traits.splits * traits.steps_of_split >= traits.k_steps


@pytest.mark.parametrize(
    ("format", "group", "n", "k", "want"),
    [
        ("int4", 128, 8192, 8192, (4, 4, 8)),
        ("int4", 128, 4096, 14336, (4, 8, 7)),
        ("int4", 32, 192, 256, (1, 1, 1)),  # one warpgroup, and one step
        ("int8", None, 28672, 8192, (4, 1, 64)),
        ("mxfp4", 32, 65536, 512, (4, 1, 2)),
    ],
)
def test_split_k_counts(format, group, n, k, want):
    """(compute warpgroups, CTAs of a tile, steps of each CTA)."""
    traits = traits_of(LowBit(format=format, group=group), n, k)
    assert (traits.compute_wgs, traits.splits, traits.steps_of_split) == want
    assert traits.tiles * traits.splits <= max(132, traits.tiles)
    assert (traits.splits - 1) * traits.steps_of_split < traits.k_steps <= traits.splits * traits.steps_of_split
    assert 2 <= traits.stages <= 6


COMPILED = {
    "int4": {},
    "int4_epilogue": {"activation": "gelu", "has_bias": True, "has_residual": True, "m": 1},
    "int4_group32": {"group_size": 32, "transpose_w": True, "scale_dtype": "bfloat16", "m": 32},
    "int4_group256": {"group_size": 256, "m": 64},
    "int4_row": {"scaling": "row", "m": 1},
    "int4_float16": {"dtype": "float16", "m": 64},
    "int4_gated": {"is_gated": True, "m": 32},
    "int4_narrow": {"n": 192},
    "int8": {"activation": "silu"},
    "int8_row": {"scaling": "row", "m": 64},
    "int8_float16": {"dtype": "float16", "group_size": 32},
    "mxfp8": {},
    "mxfp8_gated": {"dtype": "float16", "is_gated": True, "m": 32},
    "mxfp4": {},
    "mxfp4_one": {"m": 1},
    "mxfp4_float16": {"dtype": "float16", "m": 64, "has_residual": True},
    "int4_joined": {"cluster_join": True},
    "int4_joined_epilogue": {
        "cluster_join": True,
        "m": 1,
        "activation": "gelu",
        "has_bias": True,
        "has_residual": True,
    },
    "int4_joined_gated": {"cluster_join": True, "is_gated": True, "m": 32, "activation": "silu"},
    "int8_joined": {"cluster_join": True, "m": 64, "out_dtype": "float32", "has_residual": True},
}


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("name", tiers.cases(list(COMPILED), ["int8_row", "mxfp4_float16"]))
def test_compiled(name):
    """Two launches, or one that joins; few spills at 64 rows of mxfp4, none else; and no wgmma that is serialised."""
    printed, mosaic, _ = compile_case.compile_script(
        __file__, json.dumps({"format": name.split("_")[0]} | COMPILED[name])
    )
    assert json.loads(printed) == ([] if "joined" in name else ["matmul_join_triton"])
    (figures,) = mosaic.values()
    assert figures["spill_stores"] <= (16 if name == "mxfp4_float16" else 0), figures
    assert not figures["notes"]
    assert figures["shared_memory"] <= 232448


def _compile(options: dict) -> list[str]:
    """Compiles in this process. Returns the names of the Triton kernels."""
    from jax_kernels import gated_matmul, matmul
    from jax_kernels.quantization import quantize

    dtype, blocks = options.pop("dtype", "bfloat16"), {"cluster_join": options.pop("cluster_join", False)}
    m, n, k = (options.pop(name, size) for name, size in (("m", 16), ("n", 8192), ("k", 8192)))
    given = {x: options.pop(x) for x in ("format", "group_size", "scaling", "scale_dtype") if x in options}
    axis = -1 if options.get("transpose_w") else -2
    shape = (n, k) if axis == -1 else (k, n)
    w = jax.eval_shape(lambda w: quantize(w, axis=axis, **given), jax.ShapeDtypeStruct(shape, jnp.float32))
    arrays = {"x": jax.ShapeDtypeStruct((m, k), jnp.dtype(dtype))}
    if options.pop("has_bias", False):
        arrays["bias"] = jax.ShapeDtypeStruct((n,), jnp.float32)
    if options.pop("has_residual", False):
        arrays["residual"] = jax.ShapeDtypeStruct((m, n), jnp.dtype(options.get("out_dtype", dtype)))
    leaves, tree = jax.tree.flatten(w)
    is_gated = options.pop("is_gated", False)

    def run(arrays, leaves):
        w, x = jax.tree.unflatten(tree, leaves), arrays["x"]
        rest = {name: y for name, y in arrays.items() if name != "x"} | options | {"implementation": "mosaic_gpu"}
        return gated_matmul(x, w, w, **rest) if is_gated else matmul(x, w, **rest)

    with low_bit_blocks.replaced(blocks):
        return compile_case.lower_and_compile("h200", run, arrays, leaves)[1]


if __name__ == "__main__":
    print(json.dumps(_compile(json.loads(sys.argv[1]))))
