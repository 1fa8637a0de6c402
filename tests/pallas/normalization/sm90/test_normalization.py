"""The Hopper norms in the Mosaic interpreter, with gradients and races; and their block specs, compiled without a GPU.

As a script it compiles a forward and a backward: `python test_normalization.py 32768-4096-layer_norm-bfloat16-0`.
"""

import contextlib
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import explain, layer_norm, rms_norm
from jax_kernels.dispatch import on_device
from jax_kernels.inputs.normalization import NormInputs, NormOptions
from jax_kernels.ops.normalization.implementations import _by_joined_rows
from jax_kernels.pallas.block_specs.normalization_specs import NormSm90
from jax_kernels.pallas.normalization.sm90.traits import Traits, row_warps_of
from jax_kernels.reference import normalization as reference
from tests.support.cases import ids, norm_blocks
from tests.support.cases.tiers import cases
from tests.support.interpreters import kernels as cases_interpreter
from tests.tools import compile_case

# Cores, whether to detect races, and cases of norm_cases.HOPPER.
INTERPRETED = {
    "races": (1, True, ["row_for_each_warp", "no_weights", "rms_four_warpgroups"]),
    "more_races": (1, True, ["no_bias"]),
    "one_core": (1, False, ["many_short_rows"]),
    "more": (1, False, ["one_warpgroup", "two_warpgroups"]),
    "three_cores": (3, False, ["rms_one_warpgroup", "wide_two_warpgroups", "four_warpgroups"]),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", cases(INTERPRETED, {"races", "one_core"}))
def test_interpreted(group):
    cases_interpreter.check("jax_kernels.testing.normalization", *INTERPRETED[group])


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("cores", "names"),
    [
        pytest.param(4, ["four"], marks=pytest.mark.slow),
        pytest.param(8, ["two", "rms_two", "long", "rms_long", "not_shared"], marks=pytest.mark.slow),
    ],
)
def test_rows_shared_by_ctas_interpreted(cores, names):
    cases_interpreter.check("tests.support.cases.norm_blocks", cores, False, names)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(norm_blocks.CASES))
def test_rows_shared_by_ctas_on_a_gpu(name):
    if jax.devices()[0].compute_capability != "9.0":
        pytest.skip("needs Hopper")
    for what, (error, bound) in norm_blocks.errors_by(norm_blocks.CASES[name], "mosaic_gpu").items():
        assert error <= bound, what


def test_long_rows_need_a_cluster():
    x = lambda columns: jax.ShapeDtypeStruct((64, columns), jnp.bfloat16)
    plan = lambda columns: explain(layer_norm, x(columns), implementation="mosaic_gpu").config
    with on_device("H200"):
        with pytest.raises(NotImplementedError, match="these are 32768"):
            plan(32768)
        with norm_blocks.replaced(norm_blocks.CASES["long"].forward):
            assert plan(32768).forward.cluster == 2
            with pytest.raises(NotImplementedError, match="these are 65536"):
                plan(65536)  # 32768 columns in each CTA are too many
    with pytest.raises(ValueError, match=r"NormSm90\.cluster=2 needs 4 row_warps or more, turns, and no claims"):
        NormSm90(row_warps=4, warpgroups=4, stages=2, cluster=2)
    with pytest.raises(ValueError, match=r"NormSm90\.cluster=3 must be 1, 2, 4 or 8"):
        NormSm90(row_warps=4, warpgroups=4, stages=2, cluster=3)


# Columns, the most warps that may share a row, and the number chosen.
ROW_WARPS = [(1024, 1, 1), (4096, 4, 4), (8192, 8, 8), (16384, 16, 16), (768, 4, 1), (2560, 16, 4), (14336, 16, 16)]
ROW_WARPS += [(13312, 16, 8), (16384, 4, 8), (4096, 1, 4), (2048, 1, 1)]
ROW_WARPS += [(100, 4, None), (2176, 4, None), (16896, 16, None), (32768, 16, None)]


@pytest.mark.parametrize(("columns", "most", "want"), ROW_WARPS)
def test_warps_per_row(columns, most, want):
    assert row_warps_of(columns, most) == want


@pytest.mark.parametrize(
    ("rows", "turns", "ctas"), [(32768, 4, 8192), (1000, 1, 1000), (3 * 132 * 4, 3, 528), (1, 1, 1)]
)
def test_every_block_runs(rows, turns, ctas):
    """A CTA takes several blocks; only one if there are too few blocks for all SMs."""
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    config = NormSm90(row_warps=4, warpgroups=1, stages=4, turns=4)
    traits = Traits.of(x, NormOptions(is_centred=True, eps=1e-6), config, core_count=132, copies=1)
    assert (traits.turns, traits.ctas) == (turns, ctas)
    assert (ctas - 1) * turns < traits.blocks <= ctas * turns


def test_supports():
    x = lambda columns, dtype="bfloat16": jax.ShapeDtypeStruct((64, columns), jnp.dtype(dtype))
    plan = lambda *x: explain(layer_norm, *x, implementation="mosaic_gpu")
    with on_device("H200"):
        assert plan(x(4096, "float16")).config.backward.row_warps == 4
        with pytest.raises(NotImplementedError, match="not of float32"):
            plan(x(4096, "float32"))
        with pytest.raises(NotImplementedError, match=r"a multiple of 128 up to 2048.* these are 1000"):
            plan(x(1000))
    with on_device("A100"), pytest.raises(NotImplementedError, match="needs Hopper"):
        plan(x(4096))


def test_traced_under_vmap_and_shard_map():
    """Results have the types of the caller's transformations. Nothing runs."""
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    norm = lambda x, scale: layer_norm(x, scale, implementation="mosaic_gpu")
    gradients = lambda norm: jax.grad(lambda *given: norm(*given).astype(jnp.float32).sum(), (0, 1))
    sharded = jax.shard_map(norm, mesh=mesh, in_specs=(jax.P("rows"), jax.P()), out_specs=jax.P("rows"))
    x, scale = jax.ShapeDtypeStruct((3, 8, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.float32)
    with on_device("H200"):
        mapped = jax.eval_shape(jax.vmap(gradients(norm), (0, None)), x, scale)
        split = jax.eval_shape(gradients(sharded), x, scale)
    assert [y.shape for y in mapped] == [(3, 8, 256), (3, 256)]
    assert [y.shape for y in split] == [(3, 8, 256), (256,)]


@pytest.mark.parametrize("moving", [("x",), ("x", "residual"), ("residual",), ("x", "scale"), ("scale", "bias")])
def test_vmap_of_a_forward(moving):
    """If the calls have the same weights, their rows are joined. Otherwise a loop runs over the calls."""
    sizes = []

    def forward(inputs, options, **_):
        sizes.append(math.prod(inputs.x.shape[:-1]))
        return reference.norm_forward(inputs, options)

    options = NormOptions(is_centred=True, eps=1e-6, scale_offset=0.0)
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    shapes = {"x": (5, 8), "residual": (5, 8), "scale": (8,), "bias": (8,)}
    arrays = {name: normal(i, *((3, *x) if name in moving else x)) for i, (name, x) in enumerate(shapes.items())}
    axes = NormInputs(**{name: 0 if name in moving else None for name in shapes})
    run = lambda forward: jax.vmap(lambda inputs: forward(inputs, options), (axes,))(NormInputs(**arrays))
    got, want = run(_by_joined_rows(forward)), run(reference.norm_forward)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert max(sizes) == (15 if set(moving) <= {"x", "residual"} else 5)


# Rows, columns, the op, the dtype of its weights, and whether there is a residual.
COMPILED = [f"{shape}-layer_norm-bfloat16-0" for shape in ("32768-4096", "16384-8192", "65536-1024", "8192-16384")]
COMPILED += ["32768-4096-layer_norm-float32-1", "8192-16384-layer_norm-float32-1", "16384-14336-layer_norm-bfloat16-1"]
COMPILED += ["65537-1024-rms_norm-float32-1", "16384-8192-rms_norm-bfloat16-0", "16384-2048-layer_norm-float32-1"]


# Also the blocks of a forward whose rows are split over CTAs: CTAs, warps of each, turns, stages.
COMPILED += ["8192-16384-layer_norm-bfloat16-0-2-8-3-4", "4096-32768-layer_norm-bfloat16-1-2-16-2-3"]
COMPILED += ["2048-65536-rms_norm-float32-0-4-16-2-3"]


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize("call", cases(COMPILED, [COMPILED[0], COMPILED[3]]))
def test_compiled(call):
    """Two launches without spills. Where CTAs share rows, Triton has the backward."""
    printed, mosaic, _ = compile_case.compile_script(__file__, call)
    is_shared = call.count("-") > 4
    assert bool(json.loads(printed)) == is_shared
    directions = ("forward",) if is_shared else ("backward", "forward")
    assert sorted(mosaic) == [f"norm_{direction}_sm90_mosaic_gpu_kernel" for direction in directions]
    for name, figures in mosaic.items():
        assert figures["spill_stores"] + figures["spill_loads"] == 0, name
        assert figures["shared_memory"] <= 232448


def _compile(rows: str, columns: str, op: str, weights: str, has_residual: str, *shared: str) -> list[str]:
    """Compiles in this process. Returns the names of the Triton kernels."""
    x = jax.ShapeDtypeStruct((int(rows), int(columns)), jnp.bfloat16)
    given = {"x": x, "scale": jax.ShapeDtypeStruct(x.shape[1:], jnp.dtype(weights))}
    if op == "layer_norm":
        given["bias"] = given["scale"]
    if int(has_residual):
        given["residual"] = x
    norm = {"layer_norm": layer_norm, "rms_norm": rms_norm}[op]

    def both(given, dout):
        results, vjp = jax.vjp(lambda given: norm(**given, implementation="mosaic_gpu"), given)
        return results, vjp(dout)

    blocks: contextlib.AbstractContextManager = contextlib.nullcontext()
    if shared:
        ctas, row_warps, turns, stages = map(int, shared)
        forward = NormSm90(row_warps=row_warps, warpgroups=4, stages=stages, turns=turns, cluster=ctas)
        blocks = norm_blocks.replaced(forward)
    with blocks:
        return compile_case.lower_and_compile("h200", both, given, (x, x) if int(has_residual) else x)[1]


if __name__ == "__main__":
    print(json.dumps(_compile(*sys.argv[1].split("-"))))
