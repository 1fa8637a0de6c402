"""flash_attention under JAX's transformations, and at lengths whose score matrix fits in no memory ("xla" on a CPU)."""

import functools
import math
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import flash_attention
from jax_kernels.dispatch import on_device
from jax_kernels.reference import attention_chunks
from jax_kernels.testing import ATTENTION_CASES, AttentionCase, attention_float64, attention_inputs, rms_error, why_not
from tests.support.cases import tiers
from tests.support.processes import forked

xla = functools.partial(flash_attention, implementation="xla")
with_lse = functools.partial(xla, return_lse=True)

# Heads in groups, an offset, lengths, rows without keys: in float32, which shows small errors.
SMALL = next(case for case in ATTENTION_CASES if case.name == "everything")


@pytest.mark.parametrize("argnums", tiers.cases([0, 1, 2, (0, 2)], ["1", "(0, 2)"], "argnums"))
def test_gradient_by_some_inputs(argnums):
    query, key, value, dout, dlse = attention_inputs(SMALL)

    def loss(*qkv):
        out, lse = with_lse(*qkv, is_causal=True)
        return (out * dout).sum() + (lse * dlse).sum()

    all_three = jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, value)
    some = jax.jit(jax.grad(loss, argnums))(query, key, value)
    for got, index in zip(jax.tree.leaves(some), np.atleast_1d(argnums), strict=True):
        assert rms_error(got, all_three[index]) < 1e-6


def test_gradient_through_lse_alone():
    query, key, value, dout, dlse = attention_inputs(SMALL)
    want = attention_float64(SMALL, query, key, value, jnp.zeros_like(dout), dlse)

    def loss(*qkv):
        lse = with_lse(*qkv, **SMALL.arguments)[1]
        return (jnp.where(jnp.isneginf(lse), 0, lse) * dlse).sum()

    dq, dk, dv = jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, value)
    assert rms_error(dq, want.dq) < 2e-6
    assert rms_error(dk, want.dk) < 2e-6
    assert not dv.any()


def test_key_halves_merge_by_lse():
    """The identity on which ring, dilated and split-KV attention rest, with its gradient."""
    query, key, value, dout, dlse = attention_inputs(SMALL)

    def merged(query, key, value):
        (a, l_a), (b, l_b) = (with_lse(query, key[:, half], value[:, half]) for half in (slice(0, 17), slice(17, None)))
        lse = jnp.logaddexp(l_a, l_b)
        share = lambda x: jnp.exp(x - lse).swapaxes(1, 2)[..., None]
        return a * share(l_a) + b * share(l_b), lse

    @functools.partial(jax.jit, static_argnums=0)
    def results(f, *qkv):
        outs, vjp = jax.vjp(f, *qkv)
        return (*outs, *vjp((dout, dlse)))

    for got, want in zip(results(merged, query, key, value), results(with_lse, query, key, value), strict=True):
        assert rms_error(got, want) < 2e-6


def loss_of(query, key, value, mask=None, kv_lengths=None, q_offset=0):
    out, lse = with_lse(query, key, value, mask=mask, kv_lengths=kv_lengths, q_offset=q_offset, is_causal=True)
    return (out * jnp.cos(out)).sum() + jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse)).sum()


@pytest.mark.parametrize(
    ("in_axes", "shapes"),
    [
        pytest.param((0, 0, 0), {}, marks=pytest.mark.slow),
        pytest.param((0, None, None), {}, marks=pytest.mark.slow),
        ((None, 1, 0), {}),
        ((0, None, 0, 0, None), {"mask": (3, 1, 1, 9, 11), "kv_lengths": (2,)}),
        ((None, 0, 0, None, 0, 0), {"mask": (2, 4, 9, 11), "kv_lengths": (3, 2), "q_offset": (3,)}),
        ((0, 0, 0, None, None, None), {"mask": (9, 11), "q_offset": (2,)}),
    ],
    ids=["all", "query", "key_value", "mask", "lengths_offset", "shared_mask"],
)
def test_vmap(in_axes, shapes):
    """vmap, vmap(grad) and grad(vmap) equal a loop over the mapped axis."""
    random = np.random.default_rng(0)
    in_axes = in_axes + (None,) * (6 - len(in_axes))
    arrays = []
    for axis, (length, heads, width) in zip(in_axes, ((9, 4, 8), (11, 2, 8), (11, 2, 6)), strict=False):
        x = random.standard_normal((2, length, heads, width), np.float32)
        x = x if axis is None else np.stack([x, 2 * x, x - 1], axis)
        arrays.append(jnp.asarray(x))
    mask = jnp.asarray(random.random(shapes["mask"]) < 0.7) if "mask" in shapes else None
    lengths = jnp.asarray(random.integers(0, 12, shapes["kv_lengths"]), jnp.int32) if "kv_lengths" in shapes else None
    offset = jnp.asarray(random.integers(0, 5, shapes["q_offset"]), jnp.int32) if "q_offset" in shapes else 0
    arrays += [mask, lengths, offset]
    if isinstance(offset, int):
        arrays, in_axes = arrays[:-1], in_axes[:-1]

    take = lambda i: [x if axis is None else jnp.take(x, i, axis) for x, axis in zip(arrays, in_axes, strict=True)]
    grad = jax.grad(loss_of, (0, 1, 2))
    loop = [jax.jit(lambda *a: (loss_of(*a), grad(*a)))(*take(i)) for i in range(3)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *loop)
    np.testing.assert_allclose(jax.jit(jax.vmap(loss_of, in_axes))(*arrays), want[0], rtol=2e-6, atol=1e-5)
    for got, w in zip(jax.jit(jax.vmap(grad, in_axes))(*arrays), want[1], strict=True):
        assert rms_error(got, w) < 2e-6

    total = lambda *qkv: jax.vmap(loss_of, in_axes)(*qkv, *arrays[3:]).sum()
    for got, w, axis in zip(jax.jit(jax.grad(total, (0, 1, 2)))(*arrays[:3]), want[1], in_axes, strict=False):
        assert rms_error(got, w.sum(0) if axis is None else jnp.moveaxis(w, 0, axis)) < 2e-6


SHARED_BIAS, OWN_BIAS = (1, 4, 9, 11), (3, 1, 4, 9, 11)


@pytest.mark.parametrize(
    ("bias_axis", "bias", "sinks_axis", "implementation"),
    [
        (None, SHARED_BIAS, None, "xla"),
        pytest.param(None, SHARED_BIAS, None, "triton", marks=pytest.mark.slow),
        (0, OWN_BIAS, 0, "xla"),
        pytest.param(None, (2, 1, 1, 11), 0, "xla", marks=pytest.mark.slow),
        (1, (2, 3, 4, 1, 11), None, "xla"),
    ],
    ids=["shared", "shared_triton", "own", "each_entry", "moved"],
)
def test_vmap_of_bias_sinks_and_segments(bias_axis, bias, sinks_axis, implementation, monkeypatch):
    """A shared array has a gradient for each call under vmap(grad), and the sum of these under grad(vmap)."""
    if implementation == "triton":
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape, np.float32))
    query, key, value = normal(3, 2, 9, 4, 8), normal(2, 11, 2, 8), normal(2, 11, 2, 6)
    sinks = normal(*(3, 4) if sinks_axis == 0 else (4,))
    ids = tuple(jnp.asarray(random.integers(-1, 2, shape), jnp.int32) for shape in ((3, 2, 9), (2, 11)))
    arrays = (query, key, value, normal(*bias), sinks)
    axes = (0, None, None, bias_axis, sinks_axis)

    def loss(query, key, value, bias, sinks, q_ids):
        out, lse = flash_attention(
            query, key, value, bias=bias, sinks=sinks, segment_ids=(q_ids, ids[1]), window=(6, 5), softcap=2.0,
            return_lse=True, implementation=implementation,
        )  # fmt: skip
        return (out * jnp.cos(out)).sum() + jnp.sin(lse).sum()

    results = jax.jit(jax.value_and_grad(loss, range(5)))
    take = lambda i: [x if axis is None else jnp.take(x, i, axis) for x, axis in zip(arrays, axes, strict=True)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *(results(*take(i), ids[0][i]) for i in range(3)))
    got = jax.jit(jax.vmap(results, (*axes, 0)))(*arrays, ids[0])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for g, w in zip(got[1], want[1], strict=True):
        assert rms_error(g, w) < 2e-6
    total = lambda *arrays: jax.vmap(loss, (*axes, 0))(*arrays, ids[0]).sum()
    for g, w, axis in zip(jax.jit(jax.grad(total, range(5)))(*arrays), want[1], axes, strict=True):
        assert rms_error(g, w.sum(0) if axis is None else jnp.moveaxis(w, 0, axis)) < 2e-6


def test_vmapped_16_bit_bias_gradient_is_rounded_once(monkeypatch):
    """32 batch entries and mapped calls share a bias. Its gradient has the same error as without vmap.

    A second rounding, for each entry, would make the error 1.5 times larger.
    """
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")  # with "xla" the compiler may leave out a rounding
    attend = functools.partial(flash_attention, implementation="triton")
    random = np.random.default_rng(0)
    query, key, value, dout = (
        jnp.asarray(random.standard_normal(shape), jnp.bfloat16)
        for shape in ((2, 32, 16, 2, 8), (32, 16, 2, 8), (32, 16, 2, 8), (32, 16, 2, 8))
    )
    bias = jnp.asarray(random.standard_normal((1, 2, 16, 16)), jnp.bfloat16)
    gradient = jax.jit(jax.grad(lambda query, bias: (attend(query, key, value, bias=bias) * dout).sum(), 1))
    each = lambda bias: jnp.stack([gradient(x, bias) for x in query])
    exact, without = each(bias.astype(jnp.float32)), each(bias)
    got = jax.jit(jax.vmap(gradient, (0, None)))(query, bias)
    assert got.dtype == without.dtype == jnp.bfloat16
    assert rms_error(got, exact) < 1.1 * rms_error(without, exact)


def test_vmap_of_vmap():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 1, 9, 2, 8), np.float32))
    got = jax.jit(jax.vmap(jax.vmap(xla)))(x, x, x)
    want = xla(*(x.reshape(6, 9, 2, 8),) * 3).reshape(got.shape)
    np.testing.assert_allclose(got, want, atol=1e-6)


def run_on_four_devices(script):
    head = """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import PartitionSpec as P
        from jax_kernels import flash_attention
        from jax_kernels.testing import rms_error

        x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 24, 8, 16), np.float32))
    """
    code = textwrap.dedent(head) + textwrap.dedent(script)
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=4 {forked.QUICK_COMPILES}",
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=170, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("axis_type", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])
def test_jit_scan_remat_shard_map(axis_type):
    """Layers over a 2 x 2 mesh of batch and heads, by shard_map and by XLA alone, equal the layers of one device."""
    run_on_four_devices(f"""
        mesh = jax.make_mesh((2, 2), ("data", "model"), (jax.sharding.AxisType.{axis_type},) * 2)
        spec = P("data", None, "model", None)

        def attend(x):
            return flash_attention(x, x, x, is_causal=True)

        def loss(attend, x):
            layer = jax.checkpoint(lambda x, scale: (x + attend(x * scale), None))
            return jnp.tanh(jax.lax.scan(layer, x, jnp.asarray([0.5, 1.0, 1.5]))[0]).sum()

        sharded = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
        placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
        want = jax.jit(jax.value_and_grad(lambda x: loss(attend, x)))(x)
        for f in (sharded, attend):
            got = jax.jit(jax.value_and_grad(lambda x: loss(f, x)))(placed)
            assert len(got[1].sharding.device_set) == 4, got[1].sharding
            assert rms_error(got[0], want[0]) < 5e-6  # a sum of magnitude 48 of 12,288 values of magnitude 0.6
            assert rms_error(got[1], want[1]) < 1e-5
    """)


@pytest.mark.timeout(180)
def test_shard_map_of_queries():
    """Devices have different queries and the same keys: gradients of the common arrays are summed."""
    run_on_four_devices("""
        mesh = jax.make_mesh((4,), ("seq",), (jax.sharding.AxisType.Auto,))

        options = {"is_causal": True, "return_lse": True, "window": 9}

        def part(query, key, value, bias, sinks):
            offset = jax.lax.axis_index("seq") * query.shape[1]
            return flash_attention(query, key, value, bias=bias, sinks=sinks, q_offset=offset, **options)

        spec = P(None, "seq")
        in_specs = (spec, P(), P(), P(), P())
        sharded = jax.shard_map(part, mesh=mesh, in_specs=in_specs, out_specs=(spec, P(None, None, "seq")))
        whole = lambda q, k, v, bias, sinks: flash_attention(q, k, v, bias=bias, sinks=sinks, **options)

        def loss(attend, *qkv):
            out, lse = attend(*qkv)
            return (out * jnp.cos(out)).sum() + jnp.sin(lse).sum()

        bias, sinks = x[0, None, :, 0, 0], x[0, 1, :, 0]
        arrays = (x, x[:, :, ::2] + 1, jnp.cos(x[:, :, ::4].repeat(2, 2)), bias, sinks)
        got, want = (jax.jit(jax.grad(lambda *a: loss(f, *a), range(5)))(*arrays) for f in (sharded, whole))
        for g, w in zip(got, want, strict=True):
            assert rms_error(g, w) < 2e-6
    """)


def loss_and_gradients(implementation):
    def loss(query, key, value):
        out, lse = flash_attention(query, key, value, is_causal=True, return_lse=True, implementation=implementation)
        return out.astype(jnp.float32).sum() + lse.sum()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


def test_no_score_matrix():
    """At 32,768 tokens no array of query length times key length is made, forward or backward (compiled only)."""
    length = 32768
    x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16)
    lowered = loss_and_gradients("xla").lower(x, x, x)
    shapes = re.findall(r"tensor<((?:\d+x)+)\w+>", lowered.as_text())
    largest = max(math.prod(int(n) for n in shape[:-1].split("x")) for shape in shapes)
    assert x.size <= largest <= attention_chunks.CHUNK_BYTES / 4 < length**2 / 8
    # The whole score matrix would take 8.6 GB in float32.
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 6 * attention_chunks.CHUNK_BYTES


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_sequence_of_131072_tokens():
    """Causal 16 x 128 forward and backward on Hopper: the last rows are right, memory is linear in the tokens."""
    reason = why_not(AttentionCase("", head_dim=128, v_head_dim=128, is_causal=True), "mosaic_gpu")
    if reason is not None:
        pytest.skip(reason)
    script = textwrap.dedent("""
        import jax, jax.numpy as jnp
        from jax_kernels import flash_attention
        from jax_kernels.testing import rms_error

        length, last = 131072, 64
        keys = jax.random.split(jax.random.key(0), 4)
        query, key, value, dout = (jax.random.normal(k, (1, length, 16, 128), jnp.bfloat16) for k in keys)

        @jax.jit
        def run(query, key, value, dout):
            f = lambda *qkv: flash_attention(*qkv, is_causal=True, return_lse=True, implementation="mosaic_gpu")
            (out, lse), vjp = jax.vjp(f, query, key, value)
            return out, lse, *vjp((dout, jnp.zeros_like(lse)))

        out, lse, dq, dk, dv = jax.block_until_ready(run(query, key, value, dout))
        peak = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]
        # query, key, value, dout, out, dq, dk, dv, and dq in float32 once more: ten arrays of query's size.
        assert peak < 13 * query.nbytes, f"{peak / query.nbytes:.1f} arrays of query's size"

        @jax.jit
        def tail(query, key, value, dout):
            f = lambda q: flash_attention(q, key, value, is_causal=True, q_offset=length - last, implementation="xla")
            out, vjp = jax.vjp(f, query[:, -last:])
            return out, *vjp(dout[:, -last:])

        want, want_dq = tail(query, key, value, dout)
        for name, got, right in (("out", out, want), ("dq", dq, want_dq)):
            error = rms_error(got[:, -last:], right)
            assert error < 6e-3, (name, error)  # two results in bfloat16
        # The rows of P add up to 1, so dv adds up to the sum of dout.
        error = rms_error(*(jnp.sum(x, axis=1, dtype=jnp.float32) for x in (dv, dout)))
        assert error < 5e-3, error
        assert bool(jnp.isfinite(dk.astype(jnp.float32)).all()) and bool(jnp.isfinite(lse).all())
    """)
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=380, env=env)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_kernel_programs_are_equal_under_x64(implementation):
    query = jax.ShapeDtypeStruct((2, 300, 4, 64), jnp.bfloat16)

    def loss(query):
        out = flash_attention(query, query, query, is_causal=True, implementation=implementation)
        return jnp.sum(out, dtype=jnp.float32)

    with jax.enable_x64(True), on_device("h200"):
        gradient = jax.eval_shape(jax.grad(loss), query)
    assert (gradient.shape, gradient.dtype) == (query.shape, query.dtype)
