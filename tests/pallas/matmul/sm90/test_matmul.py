"""The Hopper matmul in the Mosaic interpreter, with gradients and races; and its block specs, compiled without a GPU.

As a script it compiles one call: `python tests/pallas/matmul/sm90/test_matmul.py '{"activation": "silu", ...}'`.
"""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import pytest

from jax_kernels import explain, matmul
from jax_kernels.dispatch import on_device
from jax_kernels.inputs.matmul import MatmulInputs, MatmulOptions
from jax_kernels.ops.activations import ACTIVATIONS
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.matmul_specs import MatmulCall, MatmulSm90
from jax_kernels.pallas.matmul.sm90.matmul import matmul as matmul_sm90
from jax_kernels.pallas.matmul.sm90.state import Traits
from jax_kernels.pallas.mosaic import elementwise
from tests.support.cases import fp8_gated as fp8_gated_cases
from tests.support.cases import ids, tiers
from tests.support.cases import matmul_blocks as matmul_block_cases
from tests.support.interpreters import kernels as cases_interpreter
from tests.tools import compile_case

# Cores, whether to detect races, and cases of testing_matmul.HOPPER.
INTERPRETED = {
    "one_core": (1, True, ["plain", "edges", "transposed", "gated"]),
    "epilogue": (3, False, ["epilogue"]),
    "three_cores": (3, False, ["edges", "float32_out", "gated_transposed"]),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", tiers.cases(INTERPRETED, {"one_core", "epilogue"}))
def test_interpreted(group):
    cases_interpreter.check("jax_kernels.testing.matmul", *INTERPRETED[group])


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("cores", "names"), [(1, ["gated"]), pytest.param(3, ["plain", "transposed"], marks=pytest.mark.slow)]
)
def test_mlp_interpreted(cores, names):
    """Two launches have the derivative as their epilogue, or the sum of two matmuls."""
    cases_interpreter.check("jax_kernels.testing.mlp", cores, cores == 1, names)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("cores", "names"),
    [
        (1, ["row", "block_edges"]),
        pytest.param(3, ["tensor", "small", "large_rows"], marks=pytest.mark.slow),
        pytest.param(3, ["edges", "block"], marks=pytest.mark.slow),
    ],
)
def test_fp8_interpreted(cores, names):
    cases_interpreter.check("jax_kernels.testing.low_precision.fp8_matmul", cores, cores == 1, names)


@pytest.mark.timeout(240)
def test_fp8_gated_interpreted():
    """Gate and up have different scales."""
    cases_interpreter.check("tests.support.cases.fp8_gated", 1, True, list(fp8_gated_cases.CASES))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("cores", "names"),
    [
        (1, ["wide_edges"]),
        pytest.param(1, ["narrow_mlp"], marks=pytest.mark.slow),
        pytest.param(1, ["small_mlp", "three_warpgroups_mlp"], marks=pytest.mark.slow),
        pytest.param(1, ["tall_mlp", "tall_together_mlp"], marks=pytest.mark.slow),
        pytest.param(1, ["pingpong_edges"], marks=pytest.mark.slow),
        pytest.param(1, ["tall_gated"], marks=pytest.mark.slow),
        pytest.param(3, ["pingpong_epilogue", "pingpong_mlp", "pingpong_gated"], marks=pytest.mark.slow),
        pytest.param(3, ["tall_float32_out", "tall_transposed", "tall_together"], marks=pytest.mark.slow),
        pytest.param(1, ["wide_gated", "wide_gated_transposed"], marks=pytest.mark.slow),
        pytest.param(3, ["wide_epilogue", "wide_float32_out", "wide_transposed"], marks=pytest.mark.slow),
    ],
)
def test_other_blocks_interpreted(cores, names):
    """Warpgroups with separate tiles, and with 128 rows; epilogues with less work."""
    cases_interpreter.check("tests.support.cases.matmul_blocks", cores, cores == 1, names)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(matmul_block_cases.CASES | matmul_block_cases.GPU))
def test_other_blocks_on_a_gpu(name):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs Hopper")
    case = (matmul_block_cases.CASES | matmul_block_cases.GPU)[name]
    for what, (error, bound) in matmul_block_cases.errors_by(case, "mosaic_gpu").items():
        assert error <= bound, what


def test_bad_blocks():
    blocks = functools.partial(MatmulSm90, block_n=128, stages=4, row_group=8)
    with pytest.raises(ValueError, match=r"MatmulSm90\.compute_wgs=3 must be 2 with pingpong"):
        blocks(pingpong=True, compute_wgs=3)
    with pytest.raises(ValueError, match=r"MatmulSm90\.wg_rows=96 must be 64 or 128"):
        blocks(wg_rows=96)
    with pytest.raises(ValueError, match=r"MatmulSm90\.block_n=256 must be at most 192 with wg_rows=128"):
        MatmulSm90(block_n=256, stages=4, row_group=8, wg_rows=128)
    x = jax.ShapeDtypeStruct((128, 128), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="early_bias and short_activation are for operands of 16 bits"):
        matmul_sm90(
            MatmulInputs(x, x), MatmulOptions(out_dtype="bfloat16"), config=blocks(pingpong=True), core_count=1,
            interpret=False,
        )  # fmt: skip


@pytest.mark.parametrize(("m", "n", "row_group"), [(900, 640, 3), (128, 64, 8), (1024, 512, 4), (1000, 256, 5)])
@pytest.mark.parametrize("cluster", [1, 2])
def test_every_work_tile_runs_once(m, n, row_group, cluster):
    """Includes the last band, which has fewer rows of tiles if row_group does not divide them.

    The CTAs of a cluster may have tiles below the last row.
    """
    inputs = MatmulInputs(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, 64), (64, n))))
    config = MatmulSm90(block_n=128, stages=2, row_group=row_group, cluster=cluster)
    traits = Traits.of(inputs, MatmulOptions(out_dtype="bfloat16"), config)
    indices = jnp.arange(traits.tiles, dtype=jnp.int32)
    places = [jax.vmap(functools.partial(traits.place, nth=nth))(indices) for nth in range(traits.cluster)]
    rows, columns = (jnp.concatenate(numbers) for numbers in zip(*places, strict=True))
    rows, columns = rows[rows < m], columns[rows < m]
    want = {(row, column) for row in range(0, m, traits.block_m) for column in range(0, n, 128)}
    found = list(zip(rows.tolist(), columns.tolist(), strict=True))
    assert len(found) == len(want)
    assert set(found) == want


def test_row_serves_matmuls_that_fill_its_waves():
    """On 132 SMs, 8192 x 8192 takes 20.85 rounds of 128 x 192, and 16384 x 4096 takes 21.3."""
    shape = {"rows": 8192, "columns": 8192, "inner": 8192, "bits": 16, "core_count": 132}
    call = MatmulCall(**shape, is_gated=False, is_aligned=True, derives=False, has_long_epilogue=False)

    def block_n(**other):
        return block_specs.matmul_row((9, 0), "mosaic_gpu", dataclasses.replace(call, **other))[0].config.block_n

    assert block_n() == 192
    assert block_n(rows=16384, columns=4096) == block_n(rows=4096, columns=4096) == 256
    assert block_n(core_count=114) == 256  # 24.1 rounds
    assert block_n(derives=True) == block_n(is_gated=True) == block_n(bits=8) == 256
    # With a short inner dimension, hiding the epilogue is worth 5.9 % of the last round.
    short = {"rows": 16384, "columns": 4096, "inner": 2048}
    assert block_n(**short, has_long_epilogue=True) == 192
    assert block_n(**short) == block_n(**short | {"inner": 2049}, has_long_epilogue=True) == 256
    assert block_n(**short | {"rows": 2048, "columns": 2048}, has_long_epilogue=True) == 256  # 33 %


@pytest.mark.parametrize(
    ("options", "block_n"),
    [({}, 256), ({"bias": True}, 256), ({"activation": "gelu"}, 192), ({"out_dtype": "float32"}, 192)],
)
def test_long_epilogues(options, block_n):
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    given = options | ({"bias": array(4096)} if "bias" in options else {})
    with on_device("h200"):
        plan = explain(matmul, array(16384, 2048), array(2048, 4096), **given)
    assert (plan.implementation, plan.config.forward.block_n) == ("mosaic_gpu", block_n)


@pytest.mark.parametrize("name", ["gelu_tanh", "sigmoid", "silu"])
def test_short_epilogues(name, monkeypatch):
    """They equal the long functions up to float32's rounding. Other functions have no short form."""
    monkeypatch.setattr(elementwise.registers.interpreter, "INTERPRETED", True)
    x = jnp.linspace(-100, 100, 8001)
    short, right = elementwise.shortened(ACTIVATIONS[name]), ACTIVATIONS[name]
    assert jnp.abs(short(x) - right(x)).max() < 2e-6 * 100
    assert jnp.abs(short(x / 20) - right(x / 20)).max() < 2e-6
    assert elementwise.shortened(jnp.tanh) is elementwise.shortened(None) is None


COMPILED = {
    "plain": {},
    "transposed": {"transpose_w": True, "activation": "gelu", "has_bias": True, "has_residual": True},
    "float16": {"dtype": "float16", "activation": "gelu_tanh", "has_bias": True},
    "narrow": {"n": 128, "activation": "sigmoid", "has_residual": True},
    "float32_out": {"out_dtype": "float32", "activation": "tanh", "has_residual": True},
    "relu": {"activation": "relu"},
    "function": {"activation": "softplus_squared", "is_mlp": True},
    "silu": {"activation": "silu", "has_bias": True},
    "gated": {"activation": "silu", "is_gated": True},
    "fp8": {"precision": "fp8"},
    "fp8_rows": {"precision": "fp8", "scaling": "row", "activation": "gelu_tanh", "has_bias": True},
    "fp8_blocks": {"precision": "fp8", "scaling": "block", "has_bias": True, "has_residual": True},
    "fp8_gated": {"precision": "fp8", "activation": "silu", "is_gated": True},
    "fp8_gated_blocks": {"precision": "fp8", "scaling": "block", "activation": "silu", "is_gated": True},
    "mlp": {"activation": "gelu", "is_mlp": True, "has_bias": True},
    "mlp_gated": {"activation": "silu", "is_mlp": True, "is_gated": True, "transpose_w": True, "has_residual": True},
    "gated_float32_out": {"activation": "gelu", "is_gated": True, "out_dtype": "float32", "has_residual": True},
}
EPILOGUE, PINGPONG = matmul_block_cases.EPILOGUE, matmul_block_cases.PINGPONG
TALL, WIDE = matmul_block_cases.TALL, matmul_block_cases.WIDE | {"short_activation": True}
COMPILED |= {
    "early": {"activation": "gelu_tanh", "has_bias": True, "has_residual": True, "blocks": EPILOGUE},
    "pingpong": {"activation": "gelu_tanh", "has_bias": True, "has_residual": True, "blocks": PINGPONG | EPILOGUE},
    "pingpong_float32_out": {"out_dtype": "float32", "has_bias": True, "blocks": PINGPONG},
    "pingpong_gated": {"activation": "silu", "is_gated": True, "blocks": PINGPONG | EPILOGUE},
    "pingpong_mlp": {"activation": "gelu", "is_mlp": True, "has_bias": True, "transpose_w": True, "blocks": PINGPONG},
    "tall": {"activation": "gelu_tanh", "has_bias": True, "has_residual": True, "blocks": TALL | EPILOGUE},
    "tall_gated": {"activation": "silu", "is_gated": True, "blocks": TALL},
    "tall_mlp_gated": {"activation": "silu", "is_mlp": True, "is_gated": True, "has_residual": True, "blocks": TALL},
    "tall_together": {"activation": "gelu_tanh", "has_bias": True, "blocks": TALL | {"pingpong": False}},
    "wide": {"activation": "gelu_tanh", "has_bias": True, "has_residual": True, "blocks": WIDE},
    "wide_gated": {"activation": "silu", "is_gated": True, "blocks": WIDE | {"stages": 5}},
    "wide_gated_residual": {"is_gated": True, "has_residual": True, "blocks": WIDE | {"stages": 5}},
    "wide_gated_transposed": {"activation": "silu", "is_gated": True, "transpose_w": True, "blocks": WIDE},
    "wide_float32_out": {"out_dtype": "float32", "has_bias": True, "blocks": WIDE},
    "wide_transposed": {"dtype": "float16", "activation": "gelu", "transpose_w": True, "blocks": WIDE},
}


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("name", tiers.cases(COMPILED, ["wide"]))
def test_compiled(name):
    """Forward and backward: no launch spills but for some epilogues, once a work tile, or zeroes accumulators."""
    printed, mosaic, others = compile_case.compile_script(__file__, json.dumps(COMPILED[name]))
    passes = {
        "both_ways": {"fp8": 3, "fp8_rows": 3, "fp8_blocks": 3, "fp8_gated": 1, "fp8_gated_blocks": 5}.get(name, 0)
    }
    passes |= {"joined_both_ways": 2, "gated_gradients": 1} if name == "fp8_gated" else {}
    wanted = [f"matmul_{kind}_triton" for kind, count in passes.items() for _ in range(count)]
    assert sorted(json.loads(printed)) == sorted(wanted)
    assert all(others[kernel]["spill_stores"] == 0 for kernel in wanted)
    assert list(mosaic) == ["matmul_sm90_mosaic_gpu_kernel"]
    for figures in mosaic.values():
        assert figures["spill_stores"] <= {
            "pingpong_mlp": 8,
            "wide": 8,
            "wide_gated_residual": 64,
        }.get(name, 0)
        assert figures["registers"] <= 168
        assert figures["shared_memory"] <= 232448
        assert figures["unseen_zeros"] == 0


def _compile(options: dict) -> list[str]:
    """Compiles in this process. Returns the names of the Triton kernels."""
    from jax_kernels import gated_matmul, matmul, mlp

    dtype, n, blocks = options.pop("dtype", "bfloat16"), options.pop("n", 4096), options.pop("blocks", {})
    out_dtype = options.get("out_dtype", dtype)
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    arrays = {"x": array(4096, 2048), "w": array(n, 2048) if options.get("transpose_w") else array(2048, n)}
    is_gated, is_mlp = options.pop("is_gated", False), options.pop("is_mlp", False)
    if is_mlp:
        arrays = {"x": arrays["x"], "w_up": arrays["w"], "w_down": array(*arrays["w"].shape[::-1])}
        arrays |= {"w_gate": arrays["w_up"]} if is_gated else {}
    elif is_gated:
        arrays = {"x": arrays["x"], "w_gate": arrays["w"], "w_up": arrays["w"]}
    if options.pop("has_bias", False):
        arrays["bias_up" if is_mlp else "bias"] = array(n)
    dout = array(4096, 2048 if is_mlp else n, dtype=out_dtype)
    if options.pop("has_residual", False):
        arrays["residual"] = dout
    if options.get("activation") == "softplus_squared":
        options["activation"] = lambda x: jnp.square(jax.nn.softplus(x))
    op = mlp if is_mlp else gated_matmul if is_gated else matmul

    def both(arrays, dout):
        out, vjp = jax.vjp(
            lambda given: op(**given, **options, implementation="mosaic_gpu"),
            arrays,
        )
        return out, vjp(dout)

    with matmul_block_cases.replaced(blocks):
        return compile_case.lower_and_compile("h200", both, arrays, dout)[1]


if __name__ == "__main__":
    print(json.dumps(_compile(json.loads(sys.argv[1]))))
