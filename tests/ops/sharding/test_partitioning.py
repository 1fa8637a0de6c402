"""Ops under jit on sharded arrays: the devices shard the batch and the heads, and nothing is gathered.

As a script, in a process with four CPU devices, it prints for each case the errors against one device and the
collectives of the partitioned program, on "auto" or "explicit" axes. With a GPU's name it compiles for that GPU, and
prints the program's collectives and the number of calls of each Mosaic kernel.
"""

import collections
import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_kernels import (
    decode_attention,
    dilated_attention,
    dispatch,
    dynamic_mask_attention,
    flash_attention,
    flash_attention_fp8,
    gated_matmul,
    grouped_matmul,
    layer_norm,
    masks,
    matmul,
    mlp,
    quantize,
    rms_norm,
)
from jax_kernels.inputs.matmul import MatmulOptions
from jax_kernels.ops.matmul import fp8
from jax_kernels.ops.planned_op import PlannedCall
from jax_kernels.ops.sharding import partitioning
from jax_kernels.ops.sharding.partitioning import Axis, Shares, partitioned
from jax_kernels.testing import rms_error
from tests.support.processes import cpu_devices

HEADS, ROWS, ONE = P("data", None, "tensor"), P("data"), P()
UNDER_SET_MESH = (
    "blocks",
    "scalar",
    "fp8",
    "meshes",
    "partly manual",
    "partly manual norm",
)  # cases that are compiled for GPUs under jax.set_mesh
COLLECTIVES = "all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"


def both(function, moving=3):
    """The result, and the gradients of the first arguments."""

    def run(*arrays):
        out, vjp = jax.vjp(lambda *first: function(*first, *arrays[moving:]), *arrays[:moving])
        return out, *vjp(out)

    return run


def cases(length, dim, implementation):
    """Name: function, shapes or arrays, their PartitionSpecs, the allowed collectives."""
    query, key, one_key = ((4, length, heads, dim) for heads in (4, 2, 1))
    attend = lambda *qkv, **options: flash_attention(*qkv, implementation=implementation, **options)
    dilate = lambda *qkv, **options: dilated_attention(
        *qkv, segment_lengths=(length // 2, length), dilation_rates=(1, 2), implementation=implementation, **options
    )
    ids, pairs = ("ids", (4, length)), (4, 4, length, length)
    qkv, shared = (query, key, key), (HEADS,) * 3
    by_distance = lambda score, b, h, q, k: score - 0.1 * jnp.abs(q - k)
    by_head = lambda slopes: lambda score, b, h, q, k: score - slopes[h] * jnp.abs(q - k)
    takes_dense = "xla" if implementation == "triton" else implementation
    multiply_8_bits = lambda *xw, **options: matmul(*xw, precision="fp8", implementation=takes_8_bits, **options)
    eight = (4, 128, 128), (128, 256)
    takes_8_bits = "mosaic_gpu" if implementation == "mosaic_gpu" else "xla"
    composed = lambda ids: masks.causal() & masks.segments(ids)
    sums = {"all-reduce"}
    x, w, wide = (4, 16, 128), (128, 256), (4, 16, 256)
    multiply = lambda *xw, **options: matmul(*xw, implementation=implementation, **options)
    grouped = lambda x, w, n, **options: grouped_matmul(x, w, 9 * n, implementation=implementation, **options)
    groups, columns_of_data = ((64, 128), (4, 128, 256), ("ids", (4,))), P(None, "data")
    columns, by_rows = P(None, "tensor"), P("data", "tensor")
    up, down = (128, 256), (256, 128)
    of_table = (Axis("rows"), None, None)
    low_bits = lambda x, w, format: multiply(x, quantize(w, format, axis=-2))
    return {
        "causal": (both(lambda *a: attend(*a, is_causal=True)), qkv, shared, set()),
        "one kv head": (both(attend), (query, one_key, one_key), (HEADS, ROWS, ROWS), sums),
        "segments": (both(lambda q, k, v, i: attend(q, k, v, segment_ids=i)), (*qkv, ids), (*shared, ROWS), set()),
        "composed": (both(lambda q, k, v, i: attend(q, k, v, mask=composed(i))), (*qkv, ids), (*shared, ROWS), set()),
        "dense": (
            both(lambda q, k, v, m: flash_attention(q, k, v, mask=m, implementation=takes_dense)),
            (*qkv, ("bool", pairs)), (*shared, ROWS), set(),
        ),
        "bias": (
            both(lambda q, k, v, b: attend(q, k, v, bias=b), 4), (*qkv, (1, *pairs[1:])), (*shared, columns), sums,
        ),
        "dynamic mask": (
            both(lambda q, k, v, b, m: dynamic_mask_attention(q, k, v, m, b, implementation=takes_dense), 4),
            (*qkv, (4, 2, length, length), ("bool", (4, 2, length, length))),
            (*shared, by_rows, by_rows), set(),
        ),
        "sinks": (both(lambda q, k, v, s: attend(q, k, v, sinks=s), 4), (*qkv, (4,)), (*shared, ONE), sums),
        "score_mod": (both(lambda *a: attend(*a, score_mod=by_distance)), qkv, shared, set()),
        "scalar": (
            both(lambda q, k, v, s: attend(q, k, v, score_mod=lambda score, b, h, i, j: score * s), 4), (*qkv, ()),
            (*shared, ONE), sums,
        ),
        "score_mod of heads": (
            both(lambda q, k, v, s: attend(q, k, v, score_mod=by_head(s)), 4), (*qkv, (4,)), (*shared, ONE),
            {"all-gather", "all-reduce"},
        ),
        "decode": (
            lambda q, k, v, n, m, b: decode_attention(
                q[:, :2], k, v, kv_lengths=4 * n, implementation=implementation,
                **({"mask": m, "bias": b} if implementation == "triton" else {}),
            ),
            (*qkv, ("ids", (4,)), ("bool", (4, 1, 1, length)), (1, 4, 1, length)),
            (*shared, ROWS, ROWS, columns), set(),
        ),
        "dilated": (both(dilate), qkv, (ROWS,) * 3, set()),
        "dilated heads": (both(dilate), qkv, shared, set()),
        "dilated heads groups": (
            both(lambda *a: dilate(*a, heads="groups", combine="mean", is_causal=True)), qkv, shared, set(),
        ),
        "dilated heads packed": (
            both(lambda q, k, v, i: dilate(q, k, v, segment_ids=i, order="hilbert")), (*qkv, ids), (*shared, ROWS),
            set(),
        ),
        "dilated heads partition": (both(lambda *a: dilate(*a, layout="partition")), qkv, shared, set()),
        "dilated a head each": (both(dilate), (query,) * 3, (P(None, None, ("data", "tensor")),) * 3, set()),
        "dilated one kv head": (both(dilate), (query, one_key, one_key), (HEADS, ROWS, ROWS), sums),
        "partly manual dilated": (both(partly_manual(dilate, P("data"), manual="data")), qkv, shared, set()),
        "dilated in order": (
            both(lambda q, k, v, i: dilate(q, k, v, segment_ids=i, order="hilbert")), (*qkv, ids), (ROWS,) * 4, set(),
        ),
        "rms_norm": (both(lambda x, s: rms_norm(x, s, implementation=implementation), 2), (x, (128,)), (by_rows, ONE),
                     sums),
        "partly manual": (
            both(partly_manual(lambda q, k, v: attend(q, k, v, is_causal=True), P(None, None, "tensor"))), qkv, shared,
            set(),
        ),
        "partly manual norm": (
            both(partly_manual(lambda x, s: rms_norm(x, s, implementation=implementation), P(None, "tensor"), ONE), 2),
            (x, ("scale", (128,))), (by_rows, ONE), sums,
        ),
        "layer_norm": (
            both(lambda x, s, b, r: layer_norm(x, s, b, residual=r, implementation=implementation)[0], 4),
            (x, (128,), (128,), x), (by_rows, ONE, ONE, by_rows), sums,
        ),
        "columns": (both(multiply, 2), (x, w), (ROWS, columns), sums),
        "fp8": (both(lambda x, w: multiply_8_bits(x, w), 2), eight, (ROWS, columns), sums),
        "fp8 rows": (both(lambda x, w: multiply_8_bits(x, w, scaling="row"), 2), eight, (ROWS, ONE), sums),
        "fp8 blocks": (both(lambda x, w: multiply_8_bits(x, w, scaling="block"), 2), eight, (ROWS, ONE), sums),
        "attention in 8 bits": (
            lambda *qkv: flash_attention_fp8(
                *(a.astype(jnp.float8_e4m3fn) for a in qkv), is_causal=True, implementation=takes_8_bits
            ),
            qkv, shared, set(),
        ),
        "table": (
            partitioned(
                lambda x: x[..., jnp.array([2, 0, 1])],
                Shares(arguments=[of_table], results=lambda _: [of_table], lengths={"rows": 4}),
            ),
            (x,), (ROWS,), set(),
        ),
        "tokens": (
            both(lambda *a: of_tokens(*a, implementation), 5), (x, (128,), up, up, down),
            (by_rows, ONE, ONE, ONE, ONE), sums,
        ),
        "fp8 tokens": (both(lambda x, w: multiply_8_bits(x, w, scaling="row"), 2), eight, (by_rows, ONE), sums),
        "fp8 token blocks": (
            both(lambda x, w: multiply_8_bits(x, w, scaling="block"), 2), ((2, 256, 128), (128, 256)), (by_rows, ONE),
            sums,
        ),
        "mlp": (
            both(lambda x, a, b, g: mlp(x, a, b, w_gate=g, implementation=implementation), 4), (x, up, down, up),
            (ROWS, columns, P("tensor"), columns), sums,
        ),
        "int8": (lambda x, w: low_bits(x, w, "int8"), (x, w), (ROWS, ONE), set()),
        "int4": (lambda x, w: low_bits(x, w, "int4"), (wide, (256, 256)), (ROWS, ONE), set()),
        "rounded": (rounded, ((512, 256),), (P("data", "tensor"),), sums),
        "depth": (both(multiply, 2), (x, w), (HEADS, P("tensor")), sums),
        "epilogue": (
            both(lambda x, w, b, r: multiply(x, w, bias=b, residual=r, activation="silu"), 4),
            (x, w, (256,), wide), (ROWS, columns, P("tensor"), HEADS), sums,
        ),
        "gated": (
            both(lambda *a: gated_matmul(*a, activation="silu", implementation=implementation)), (x, w, w),
            (ROWS, columns, columns), sums,
        ),
        "grouped": (
            both(lambda x, w, b, n: grouped(x, w, n, bias=b, activation="silu"), 3),
            (*groups[:2], (4, 256), groups[2]), (ONE, P(None, None, "data"), columns_of_data, ONE), sums,
        ),
        "grouped depth": (both(grouped, 2), groups, (columns, P(None, "tensor", "data"), ONE), sums),
        "blocks": (
            both(lambda x, s, w: blocks(x, s, w, implementation), 3), (x, (128,), (128, 128)), (ROWS, ONE, ONE), sums,
        ),
    }  # fmt: skip


def blocks(x, scale, w, implementation):
    """Three blocks, each with a norm and a matmul, then a norm."""
    norm = lambda x: rms_norm(x, scale, implementation=implementation)
    block = jax.jit(lambda x: matmul(norm(x), w, residual=x, implementation=implementation))
    return norm(block(block(block(x))))


def of_tokens(x, scale, up, gate, down, implementation):
    """A block with sharded batch and tokens: a norm, an mlp with a residual, a gated unit, a matmul."""
    how = {"implementation": implementation}
    normed = rms_norm(x, scale, **how)
    x = mlp(normed, up, down, w_gate=gate, residual=x, **how)
    return matmul(gated_matmul(x, gate, up, **how), down, residual=x, **how)


def partly_manual(function, *specs, manual="tensor"):
    """The function in a shard_map of one mesh axis. specs: of its arrays; the first is also the result's."""

    def run(*arrays):
        if jax.sharding.get_abstract_mesh().empty:
            return function(*arrays)
        given = specs if len(specs) > 1 else specs * len(arrays)
        return jax.shard_map(function, in_specs=given, out_specs=specs[0], axis_names={manual})(*arrays)

    return run


def rounded(x):
    """x and its transpose in 8 bits, by the kernel that returns both."""
    results = []
    for scaling in ("tensor", "row", "block"):
        options = MatmulOptions(out_dtype="bfloat16", scaling=scaling)
        call = PlannedCall("mosaic_gpu", None, options, dispatch.interpreting())
        results.append([(y.values.astype(jnp.float32), y.scale) for y in fp8.both_ways(call, x)])
    return results


def array(random, given, dtype=jnp.bfloat16):
    if given[:1] == ("ids",):
        return jnp.asarray(np.sort(random.integers(0, 3, given[1]), axis=-1), jnp.int32)
    if given[:1] == ("scale",):  # float32, since XLA for CPUs fails on a sum of bfloat16 in a partly manual shard_map
        return jnp.asarray(random.standard_normal(given[1]), jnp.float32)
    if given[:1] == ("bool",):
        return jnp.asarray(random.random(given[1]) < 0.7)
    return jnp.asarray(random.standard_normal(given), dtype)


def collectives_of(text):
    return sorted(name for name in COLLECTIVES if re.search(rf"\b{name}(-start)?\(", text))


def on_cpus(name, kind=AxisType.Auto):
    random = np.random.default_rng(0)
    function, given, specs, _ = cases(64, 16, "triton")[name]
    arrays = [array(random, x) for x in given]
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (kind,) * 2)
    shared = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(function).lower(*shared).compile()
    got, want = jax.tree.leaves(compiled(*shared)), jax.tree.leaves(jax.jit(function)(*arrays))
    as_float = lambda x: np.asarray(x, np.float32)
    errors = [float(rms_error(as_float(g), as_float(w))) for g, w in zip(got, want, strict=True)]
    return {"errors": errors, "found": collectives_of(compiled.as_text()), "spec": str(got[0].sharding.spec)}


def for_gpu(gpu, name):
    """The collectives of the program that XLA compiles for four absent GPUs.

    The name "meshes" also compiles for two GPUs, after the program for four, with equal shards of x.
    """
    from jax.experimental import topologies
    from jax.sharding import AbstractMesh, Mesh

    from jax_kernels.dispatch import on_device
    from tests.tools import compile_case

    implementation = "mosaic_gpu" if gpu == "h200" else "triton"
    with on_device(gpu) as info:
        function, given, specs, _ = cases(512, 64, implementation)["rms_norm" if name == "meshes" else name]
        config = compile_case.target_config(info)
        devices = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x4x1").devices
        device = compile_case.abstract_device(info)

        def compiled(grid, given):
            mesh = Mesh(np.array(devices[: grid[0] * grid[1]]).reshape(grid), ("data", "tensor"))
            # The mesh gets a device whose compute capability Mosaic can read.
            mesh.__dict__["abstract_mesh"] = AbstractMesh(
                mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=device
            )
            shapes = [jax.eval_shape(lambda x=x: array(np.random.default_rng(0), x)) for x in given]
            shapes = [
                jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
                for x, spec in zip(shapes, specs, strict=True)
            ]
            without_mesh = AbstractMesh((), (), abstract_device=device)
            is_set = name in UNDER_SET_MESH
            with jax.set_mesh(mesh) if is_set else jax.sharding.use_abstract_mesh(without_mesh):
                return jax.jit(function).lower(*shapes).compile().as_text()

        specs = (ROWS, ONE) if name == "meshes" else specs
        text = compiled((2, 2), given)
        if name == "meshes":
            text += compiled((2, 1), given)
    # A hash identifies each Mosaic kernel. It covers the whole kernel, including its number in the program.
    calls = collections.Counter(re.findall(r'kernel_hash = ("(?:[^"\\]|\\.)*")', text))
    return {"found": collectives_of(text), "calls": sorted(calls.values())}


def results(gpu, names):
    interpret = "" if gpu in ("h200", "a100") else "1"
    return cpu_devices.results_of(__file__, names, gpu, devices=4, limit=280, JAX_KERNELS_INTERPRET=interpret)


NAMES = list(cases(64, 16, "triton"))
DILATED = [name for name in NAMES if "dilated" in name]  # all cases in one process would take too long
OTHERS = [name for name in NAMES if name not in DILATED]
QUICK = ["partly manual", "mlp", "causal", "decode", "rms_norm", "table"]


# JAX cannot trace a score_mod on Auto axes whose arrays have Explicit axes. quantize names no axes for its arrays.
EXPLICIT = [
    name
    for name in OTHERS
    if name not in ("score_mod of heads", "scalar", "rounded", "int8", "int4") and "manual" not in name
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("auto", QUICK),
        ("explicit", ["dynamic mask"]),
        pytest.param("auto", DILATED, marks=pytest.mark.slow),
        pytest.param("auto", OTHERS, marks=pytest.mark.slow),
        pytest.param("explicit", ["causal", "depth", "epilogue"], marks=pytest.mark.slow),
        pytest.param("explicit", DILATED[:4], marks=pytest.mark.slow),
        pytest.param("explicit", EXPLICIT, marks=pytest.mark.slow),
    ],
)
def test_devices_shard_the_work(kind, names):
    for name, found in results(kind, names).items():
        may = cases(64, 16, "triton")[name][3]
        may = may | {"all-gather"} if kind == "explicit" and name == "sinks" else may  # of two values
        assert set(found["found"]) <= may, (name, found)
        # Sums over devices are rounded to bfloat16 once more.
        assert max(found["errors"]) < (6e-3 if may else 1e-6), (name, found)
        assert "data" in found["spec"], (name, found)


@pytest.mark.compile
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("gpu", "names"),
    [
        pytest.param("h200", ["causal", "rms_norm", "tokens", "table"], marks=pytest.mark.slow),
        pytest.param("h200", DILATED, marks=pytest.mark.slow),
        pytest.param("h200", OTHERS, marks=pytest.mark.slow),
        pytest.param("a100", DILATED, marks=pytest.mark.slow),
        # A100's kernels do not round to 8 bits: there matmul refuses the precision.
        pytest.param("a100", [name for name in OTHERS if name != "rounded"], marks=pytest.mark.slow),
    ],
)
def test_programs_for_gpus_gather_nothing(gpu, names):
    for name, found in results(gpu, names).items():
        assert set(found["found"]) <= cases(512, 64, "triton")[name][3], (name, found)


@pytest.mark.compile
@pytest.mark.timeout(300)
def test_sharded_kernel_is_lowered_once():
    """XLA asks for each call's shard anew. Otherwise JAX would number each kernel, and XLA compile each."""
    # Norms forward and backward, the matmul, and the matmuls of x's and w's gradients.
    assert results("h200", ["blocks"])["blocks"]["calls"] == [3, 3, 3, 4, 4]


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.timeout(300)
def test_program_is_keyed_by_the_mesh():
    """A program for one mesh does not serve a mesh of more devices."""
    assert results("h200", ["meshes"])["meshes"]["found"] == ["all-reduce"]


def test_sharded_tokens_raise_on_explicit_axes():
    mesh = jax.make_mesh((1,), ("sequence",), (AxisType.Explicit,))
    x = jax.device_put(jnp.ones((1, 8, 2, 8)), NamedSharding(mesh, P(None, "sequence")))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"tokens that are sharded over 'sequence'.*ring_attention"),
    ):
        flash_attention(x, x, x)


@pytest.mark.parametrize(("devices", "dtype"), [(2, "bfloat16"), (3, "float32"), (4, "float32")])
def test_sum_over_devices_is_rounded_once(devices, dtype):
    """A single addition is rounded once in any dtype. With several additions, all except the last would round, too."""
    x = jax.ShapeDtypeStruct((8,), jnp.bfloat16)
    summed = functools.partial(partitioning._summed, lambda x: (x,), [("data",)])
    jaxpr = jax.make_jaxpr(summed, axis_env=[("data", devices)])(x)
    (found,) = [equation.invars[0].aval.dtype for equation in jaxpr.eqns if "psum" in equation.primitive.name]
    assert found == dtype
    assert [x.dtype for x in jaxpr.out_avals] == [jnp.bfloat16]


if __name__ == "__main__":
    gpu, *names = sys.argv[1:]
    kinds = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    print(json.dumps({name: on_cpus(name, kinds[gpu]) if gpu in kinds else for_gpu(gpu, name) for name in names}))
