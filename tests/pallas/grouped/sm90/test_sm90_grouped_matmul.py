"""The Hopper grouped matmul in the Mosaic interpreter, with races; its schedule; and its block specs, compiled.

As a script it compiles one call, forward and backward:
`python tests/pallas/grouped/sm90/test_sm90_grouped_matmul.py '{"activation": "silu", ...}'`.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, grouped_gated_matmul, grouped_matmul, quantize
from jax_kernels.dispatch import on_device
from jax_kernels.inputs.group_tiles import found_tiles, group_offsets
from jax_kernels.pallas.block_specs.matmul_specs import GroupedSm90
from jax_kernels.pallas.grouped.sm90.state import BLOCK_M, COLUMNS, ROWS, Turn, WorkTile
from jax_kernels.testing import grouped_gated_matmul as gated_cases
from jax_kernels.testing import grouped_matmul as cases
from jax_kernels.testing.low_precision import fp8_grouped_matmul as fp8_cases
from tests.support.cases import ids, tiers
from tests.support.cases import live_experts as live_cases
from tests.support.interpreters import kernels as cases_interpreter
from tests.tools import compile_case


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("cores", "names"),
    [
        pytest.param(1, ["small"], marks=pytest.mark.slow),
        (3, ["overlapping"]),
        pytest.param(1, ["blocks"], marks=pytest.mark.slow),
        pytest.param(3, ["past", "all_in_one", "edges", "small"], marks=pytest.mark.slow),
    ],
)
def test_interpreted(cores, names):
    """Races are detected on one core, in cases whose blocks of rows do not overlap."""
    cases_interpreter.check("jax_kernels.testing.grouped_matmul", cores, cores == 1, names)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("cores", "names"),
    [
        (3, ["tiny_scales"]),
        pytest.param(1, ["gated_small", "small", "blocks"], marks=pytest.mark.slow),
        pytest.param(3, ["overlapping", "past", "all_in_one", "edges"], marks=pytest.mark.slow),
        pytest.param(3, ["gated_overlapping", "gated_edges"], marks=pytest.mark.slow),
    ],
)
def test_8_bits_interpreted(cores, names):
    cases_interpreter.check("jax_kernels.testing.low_precision.fp8_grouped_matmul", cores, cores == 1, names)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("cores", "names"),
    [(1, ["small"]), pytest.param(3, ["overlapping", "past", "edges", "all_in_one"], marks=pytest.mark.slow)],
)
def test_gated_interpreted(cores, names):
    cases_interpreter.check("jax_kernels.testing.grouped_gated_matmul", cores, cores == 1, names)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("cores", "names"), [(3, ["none"]), (3, ["part", "all"])])
def test_rows_of_other_devices_interpreted(cores, names):
    """They hold NaN, because no kernel writes them."""
    cases_interpreter.check("tests.support.cases.live_experts", cores, False, names)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize("name", ids.named(live_cases.CASES))
def test_rows_of_other_devices_on_a_gpu(name, implementation):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs Hopper")
    for result, (error, bound) in live_cases.errors_by(live_cases.CASES[name], implementation).items():
        assert error <= bound, result


GPU_CASES = (
    cases.HOPPER
    | cases.LONG
    | {f"gated_{name}": case for name, case in (gated_cases.HOPPER | gated_cases.LONG).items()}
)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(GPU_CASES))
def test_on_hopper(name):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs Hopper")
    case = GPU_CASES[name]
    if reason := cases.why_not(case, "mosaic_gpu"):
        pytest.skip(reason)
    for result, (error, bound) in cases.errors_by(case, "mosaic_gpu").items():
        assert error <= bound, result


FP8_CASES = fp8_cases.HOPPER | fp8_cases.GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(FP8_CASES))
def test_8_bits_on_hopper(name):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs Hopper")
    for result, (error, bound) in fp8_cases.errors_by(FP8_CASES[name], "mosaic_gpu").items():
        assert error <= bound, result


@pytest.mark.parametrize(
    "sizes",
    [(0, 5, 1, 63, 0, 13), (64, 128, 65), (300, 0, 0), (0, 0, 300), (129, 191), (1, 127, 2, 190), (400, -5, 3)],
)
@pytest.mark.parametrize("short_last", [False, True])
def test_schedule(sizes, short_last):
    """Each row is stored, by warpgroups of its group only. A count is 64, 0 or all rows of a small group.

    With short_last, tiles for two warpgroups come first, then tiles for one, then the rows of no group.
    """
    rows = 320
    found = found_tiles(group_offsets(jnp.asarray(sizes, jnp.int32), rows), rows, BLOCK_M, short_last=short_last)
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), rows)
    part_ends = np.append(ends, rows)
    part_starts = np.append(0, ends)
    stored, kinds = np.full(rows, -1), []
    for i in range(int(found.used[-1])):
        group, first, end, start = (int(x[i]) for x in found[:4])
        tile = WorkTile.of(group=group, first=first, end=end, start=start, column=0)
        assert start == part_starts[group]
        for row, number in zip(map(int, tile.rows), map(int, tile.counts), strict=True):
            assert number in (0, ROWS) or (row == start and number == part_ends[group] - start < ROWS)
            assert start <= row
            assert row + number <= part_ends[group]
            stored[row : row + number] = group
        kinds.append(2 if group == len(sizes) else int(tile.counts[1] == 0))
    np.testing.assert_array_equal(stored, np.repeat(np.arange(len(part_ends)), part_ends - part_starts))
    assert not short_last or kinds == sorted(kinds)


def test_turns():
    """Each tile is taken once. With snake, a CTA's rank in a turn is the opposite of its rank in the next turn."""
    tiles, ctas = 23, 4
    for snake in (False, True):
        taken = []
        for cta in range(ctas):
            turn = Turn(rank=cta, number=0, ctas=ctas, snake=snake)
            while turn.index < tiles:
                taken.append(turn.index)
                turn = turn.following()
        assert sorted(taken) == list(range(tiles))
        assert taken[:3] == ([0, 7, 8] if snake else [0, 4, 8])


NOT_SERVED = {
    "float32": ({"dtype": "float32"}, "it takes and returns bfloat16 and float16, not float32"),
    "float32_out": ({"out_dtype": "float32"}, "it takes and returns bfloat16 and float16, not float32"),
    "columns": ({"n": 200}, "it needs K and N in multiples of 64"),
    "depth": ({"k": 200}, "it needs K and N in multiples of 64"),
    "activation": ({"activation": lambda z: jnp.floor(z)}, "it cannot compute floor in its activation"),
    "fp8_depth": ({"k": 192, "precision": "fp8"}, "its 8-bit matmuls need K and N in multiples of 128"),
    "fp8_columns": ({"n": 192, "precision": "fp8"}, "its 8-bit matmuls need K and N in multiples of 128"),
    "fp8_float32": ({"dtype": "float32", "precision": "fp8"}, "it takes and returns bfloat16 and float16, not float32"),
    "device": ({"device": "A100"}, "it needs Hopper (compute capability 9.0)"),
}


def _types(m=1001, n=512, k=1024, groups=8, dtype="bfloat16", **options):
    shapes = {"x": (m, k), "w": (groups, n, k) if options.get("transpose_w") else (groups, k, n)}
    types = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, shape in shapes.items()}
    return types | {"group_sizes": jax.ShapeDtypeStruct((groups,), jnp.int32)} | options


@pytest.mark.parametrize("name", NOT_SERVED)
def test_limits(name):
    given, reason = NOT_SERVED[name]
    device = given.get("device", "H200")
    given = _types(**{key: x for key, x in given.items() if key != "device"})
    with on_device(device), pytest.raises(NotImplementedError) as error:
        explain(grouped_matmul, **given, implementation="mosaic_gpu")
    assert reason in str(error.value)


def test_plan_of_8_bits():
    """The Hopper kernel runs both 8-bit matmuls of a gradient. One kernel quantizes x.

    Quantized weights are not transposed.
    """
    types = _types(m=4096, precision="fp8")
    with on_device("H200"):
        plan = explain(grouped_matmul, **types)
        sizes = types.pop("group_sizes")
        call = lambda x, w, sizes: grouped_matmul(x, w, sizes, precision="fp8").astype(jnp.float32).sum()
        program = str(jax.make_jaxpr(jax.grad(call, (0, 1)))(types["x"], types["w"], sizes))
        weights = jax.eval_shape(lambda w: quantize(w.mT, scaling="row"), types["w"])
        served = str(
            jax.make_jaxpr(lambda *given: grouped_matmul(*given, transpose_w=True))(types["x"], weights, sizes)
        )
        odd = explain(grouped_matmul, **_types(m=4097, precision="fp8"))
    assert isinstance(plan.config.backward, GroupedSm90)
    assert not isinstance(odd.config.backward, GroupedSm90)
    assert plan.implementation == odd.implementation == "mosaic_gpu"
    assert "measured on NVIDIA H200" in plan.source
    assert program.count("grouped_matmul_sm90") == 2 * served.count("grouped_matmul_sm90") > 0
    assert "grouped_weight_gradient_sm90" in program
    assert "transpose[" not in served
    assert "matmul_quantize_rows_triton" in served


def test_plan():
    with on_device("H200"):
        plan = explain(grouped_matmul, **_types())
        few = explain(grouped_matmul, **_types(m=512))
    assert plan.implementation == "mosaic_gpu"
    assert isinstance(plan.config.forward, GroupedSm90)
    assert "measured on NVIDIA H200" in plan.why
    assert "not measured" not in plan.source
    assert few.implementation == "triton"
    assert "not measured" in few.why
    with pytest.raises(ValueError, match=r"GroupedSm90\.block_n=320 must be at most 256"):
        GroupedSm90(block_n=320, stages=3, row_group=8)


def test_zeros_are_stored_in_a_loop():
    """A third of the time to lower the kernel was for unrolled stores of rows past the last group."""
    types = _types(m=4096, n=1024)
    arrays = [types[name] for name in ("x", "w", "group_sizes")]
    call = lambda x, w, sizes: grouped_matmul(x, w, sizes, implementation="mosaic_gpu")
    with on_device("H200"):
        block_n = explain(grouped_matmul, **types).config.forward.block_n
        program = str(jax.make_jaxpr(call)(*arrays))
    ways = 11  # of a store: all 64 rows; 32, 16 or 8 of them; 1 to 7
    assert program.count("copy_smem_to_gmem") == ways * (block_n // COLUMNS + 1)


COMPILED = {
    "plain": {},
    "transposed": {"transpose_w": True, "activation": "gelu", "has_bias": True},
    "float16": {"dtype": "float16", "activation": "gelu_tanh", "has_bias": True},
    "gated": {"is_gated": True, "activation": "silu"},
    "gated_transposed": {"is_gated": True, "activation": "gelu", "transpose_w": True, "dtype": "float16"},
    "odd_rows": {"m": 1001, "activation": "silu"},
    "fp8": {"precision": "fp8", "activation": "gelu", "has_bias": True},
    "fp8_plain": {"precision": "fp8", "transpose_w": True, "dtype": "float16"},
    "fp8_gated": {"precision": "fp8", "is_gated": True, "activation": "silu"},
    "fp8_forward": {"precision": "fp8", "is_forward": True},
    "fp8_gated_transposed": {"precision": "fp8", "is_gated": True, "activation": "gelu", "transpose_w": True},
}


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("name", tiers.cases(COMPILED, ["plain"]))
def test_compiled(name):
    """Forward and backward, or forward alone: no launch spills or zeroes accumulators.

    Triton computes the gradient of w if the number of rows is not a multiple of 8.
    """
    printed, mosaic, _ = compile_case.compile_script(__file__, json.dumps(COMPILED[name]))
    is_odd = name == "odd_rows"
    # They quantize x, the cotangents, and the weights one way; the backward quantizes both weights together.
    passes = {"fp8": 3, "fp8_plain": 3, "fp8_gated": 3, "fp8_forward": 1, "fp8_gated_transposed": 4}.get(name, 0)
    want = ["matmul_quantize_rows_triton"] * passes + ["grouped_weight_gradient_triton"] * is_odd
    assert sorted(json.loads(printed)) == sorted(want)
    kernels = ["grouped_matmul_sm90", "grouped_weight_gradient_sm90"][: 1 if is_odd or name == "fp8_forward" else 2]
    assert sorted(mosaic) == [f"{kernel}_mosaic_gpu_kernel" for kernel in kernels]
    for figures in mosaic.values():
        assert figures["spill_stores"] == 0
        assert figures["registers"] <= 168
        assert figures["shared_memory"] <= 232448
        assert figures["unseen_zeros"] == 0


def _compile(options: dict) -> list[str]:
    """Compiles in this process. Returns the names of the Triton kernels."""
    has_bias, op = options.pop("has_bias", False), grouped_matmul
    is_gated, is_forward = options.pop("is_gated", False), options.pop("is_forward", False)
    given = _types(**({"m": 4096, "n": 4096, "k": 2048} | options))
    arrays = {name: given.pop(name) for name in ("x", "w")}
    sizes, (m, _), dtype = given.pop("group_sizes"), arrays["x"].shape, arrays["x"].dtype
    columns = arrays["w"].shape[1 if given.get("transpose_w") else 2]
    if is_gated:
        op = grouped_gated_matmul
        arrays["w_gate"] = arrays["w_up"] = arrays.pop("w")
    if has_bias:
        arrays["bias"] = jax.ShapeDtypeStruct((8, columns), dtype)

    def run(arrays, sizes, dout):
        call = lambda arrays: op(**arrays, group_sizes=sizes, **given, implementation="mosaic_gpu")
        if is_forward:
            return call(arrays)
        out, vjp = jax.vjp(call, arrays)
        return out, vjp(dout)

    return compile_case.lower_and_compile("h200", run, arrays, sizes, jax.ShapeDtypeStruct((m, columns), dtype))[1]


if __name__ == "__main__":
    print(json.dumps(_compile(json.loads(sys.argv[1]))))
