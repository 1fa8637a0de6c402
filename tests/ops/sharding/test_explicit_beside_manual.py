"""Ops in a jax.shard_map of one mesh axis, with a second axis that is Explicit, on eight CPU devices.

As a script it prints the largest error of a case's results and gradients against a call without a mesh.
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
from jax.sharding import AxisType

from jax_kernels import (
    dilated_attention,
    flash_attention,
    gated_matmul,
    layer_norm,
    masks,
    matmul,
    mlp,
    ring_attention,
    rms_norm,
    sequence_parallel_dilated_attention,
    shard_sequence,
    unshard_sequence,
)
from jax_kernels.testing import rms_error
from tests.support.processes import cpu_devices

COLLECTIVES = r" (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
BATCH, WHOLE, TOKENS = jax.P("data"), jax.P(), jax.P(None, "sequence")
QUERY, KEY = (2, 32, 8, 8), (2, 32, 4, 8)
QKV = [(QUERY, BATCH), (KEY, BATCH), (KEY, BATCH)]
HEADS = [(QUERY, jax.P(None, None, "data")), *[(KEY, jax.P(None, None, "data"))] * 2]
X, W, DOWN = ((2, 4, 32), BATCH), ((32, 64), jax.P(None, "data")), ((64, 32), WHOLE)
DILATED = {"segment_lengths": (16, 32), "dilation_rates": (1, 2)}
IDS = np.repeat([[0, 1, -1], [0, 0, 2]], [12, 12, 8], axis=1).astype(np.int32)


def masked(query, key, value, bias, sinks, ids, pairs):
    mask = masks.dense(pairs) & masks.causal()
    options = {"segment_ids": ids, "mask": mask, "return_lse": True}
    out, lse = flash_attention(query, key, value, bias=bias, sinks=sinks, **options)
    return out, jnp.where(ids[:, None] < 0, 0, lse)


ATTENTION_ARRAYS = [
    *HEADS, ((1, 8, 32, 32), jax.P(None, "data")), ((8,), WHOLE),
    (IDS, WHOLE), (np.tri(32, dtype=bool)[None, None] ^ (np.arange(32) == 5), WHOLE),
]  # fmt: skip
# Name: an op, and its arrays or their shapes, each with its PartitionSpec.
OPS = {
    "flash": (functools.partial(flash_attention, is_causal=True), QKV),
    "masked": (masked, ATTENTION_ARRAYS),
    "score_mod": (lambda *a: flash_attention(*a, score_mod=lambda score, b, h, q, k: score - 0.1 * (q - k)), QKV),
    "dilated": (functools.partial(dilated_attention, **DILATED), QKV),
    "matmul": (lambda x, w, b: matmul(x, w, bias=b, activation="silu"), [X, W, ((64,), jax.P("data"))]),
    "gated": (functools.partial(gated_matmul, activation="silu"), [X, W, W]),
    "mlp": (mlp, [X, W, DOWN]),
    "rms_norm": (rms_norm, [X, ((32,), WHOLE)]),
    "layer_norm": (lambda x, s, b, r: layer_norm(x, s, b, residual=r), [X, ((32,), WHOLE), ((32,), WHOLE), X]),
}
# Name: an op of a sharded sequence, the op without a mesh, the layout, and options of the former op only.
SHARED = {
    f"{strategy} {layout}": (
        functools.partial(ring_attention, layout=layout, strategy=strategy),
        flash_attention, layout, options,
    )
    for strategy, layout, options in [
        ("ring", "zigzag", {"is_causal": True}),
        ("ring", "striped", {"is_causal": True}),
        ("ring", "contiguous", {}),
        ("halo", "zigzag", {"is_causal": True, "window": (3, 0)}),
        ("all_to_all", "zigzag", {"is_causal": True}),
        ("all_gather", "zigzag", {"is_causal": True}),
    ]
} | {"dilated sequence": (sequence_parallel_dilated_attention, dilated_attention, "contiguous", DILATED)}  # fmt: skip


def mesh_of():
    return jax.make_mesh((2, 4), ("data", "sequence"))  # with Explicit axes


def in_shard_map(function, spec, check_vma):
    return jax.shard_map(
        function, mesh=mesh_of(), in_specs=spec, out_specs=spec, axis_names={"sequence"}, check_vma=check_vma
    )


def arrays_of(given):
    random = np.random.default_rng(0)
    draw = lambda x: random.standard_normal(x).astype(np.float32) if isinstance(x, tuple) else x
    arrays = [jnp.asarray(draw(x)) for x, _ in given]
    return arrays, [spec for _, spec in given]


def loss(function, *arrays):
    """A scalar of all results of a function, with different cotangents."""
    return sum(jnp.sin(x.astype(jnp.float32)).sum() for x in jax.tree.leaves(function(*arrays)))


def error(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(rms_error(np.asarray(g, np.float32), np.asarray(w, np.float32))) for g, w in pairs)


def with_gradients(function, arrays):
    moving = tuple(i for i, x in enumerate(arrays) if x.dtype == jnp.float32)
    return jax.jit(lambda *a: (function(*a), jax.grad(functools.partial(loss, function), moving)(*a)))(*arrays)


def of_op(name, check_vma):
    op, given = OPS[name]
    arrays, specs = arrays_of(given)
    placed = [jax.device_put(x, jax.NamedSharding(mesh_of(), spec)) for x, spec in zip(arrays, specs, strict=True)]
    got = with_gradients(in_shard_map(op, WHOLE, check_vma), placed)
    for gradient, x in zip(got[1], [x for x in placed if x.dtype == jnp.float32], strict=True):
        assert gradient.sharding.is_equivalent_to(x.sharding, x.ndim), (gradient.sharding, x.sharding)
    return error(got, with_gradients(op, arrays))


def of_shared(name, check_vma):
    op, alone, layout, options = SHARED[name]
    arrays, _ = arrays_of(QKV)
    mesh = mesh_of()
    spec = jax.NamedSharding(mesh, jax.P("data", "sequence"))
    placed = [jax.device_put(shard_sequence(x, mesh, "sequence", layout=layout), spec) for x in arrays]
    shared = in_shard_map(functools.partial(op, axis_name="sequence", **options), TOKENS, check_vma)
    got = with_gradients(shared, placed)
    got = jax.tree.map(lambda x: unshard_sequence(x, mesh, "sequence", layout=layout), got)
    return error(got, with_gradients(functools.partial(alone, **options), arrays))


def of_costs(kinds):
    """The operations and collectives of gradient programs, of attention and of a ring."""
    mesh = jax.make_mesh((2, 4), ("data", "sequence"), kinds)
    ring = functools.partial(ring_attention, axis_name="sequence", strategy="halo", is_causal=True, window=3)
    found = []
    for op, spec, placed in (
        (functools.partial(flash_attention, is_causal=True), WHOLE, BATCH),
        (ring, TOKENS, jax.P("data", "sequence")),
    ):
        shared = jax.shard_map(op, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"sequence"}, check_vma=False)
        arrays = [jax.device_put(x, jax.NamedSharding(mesh, placed)) for x in arrays_of(QKV)[0]]
        gradients = jax.jit(jax.grad(functools.partial(loss, shared), (0, 1, 2)))
        compiled = gradients.lower(*arrays).compile()
        names = re.findall(COLLECTIVES, compiled.as_text())
        found.append((compiled.cost_analysis()["flops"], sorted(collections.Counter(names).items())))
    return found


def run_costs():
    """Nothing is computed twice, and the collectives are the same as with an Auto axis."""
    explicit, auto = (of_costs((kind,) * 2) for kind in (AxisType.Explicit, AxisType.Auto))
    assert explicit == auto, (explicit, auto)
    return 0.0


def run_errors():
    """Unsupported derivatives raise the usual errors."""
    (x, *_), mesh = arrays_of(QKV)[0], mesh_of()
    x = jax.device_put(x, jax.NamedSharding(mesh, BATCH))
    for op in (lambda x: flash_attention(x, x, x), lambda x: rms_norm(x, implementation="xla")):
        shared = in_shard_map(op, WHOLE, False)
        with pytest.raises(NotImplementedError, match=r"(attention|norm): no forward mode .* make Explicit axes Auto"):
            jax.jit(lambda x, f=shared: jax.jvp(f, (x,), (x,)))(x)
        slope = jax.grad(functools.partial(loss, shared))
        with pytest.raises(NotImplementedError, match=r"second derivatives: .* make Explicit axes Auto"):
            jax.jit(jax.grad(functools.partial(loss, slope)))(x)
    return 0.0


def run(name):
    if name in ("costs", "errors"):
        return {"costs": run_costs, "errors": run_errors}[name]()
    of = of_op if name in OPS else of_shared
    return max(of(name, check_vma) for check_vma in (True, False))


QUICK = ["errors", "costs", "masked", "matmul", "ring contiguous"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([name for name in (*OPS, *SHARED) if name not in QUICK], marks=pytest.mark.slow)]
)
def test_results_and_gradients(names):
    for name, found in cpu_devices.results_of(__file__, names, limit=380).items():
        assert found < 1e-5, (name, found)


if __name__ == "__main__":
    print(json.dumps({name: run(name) for name in sys.argv[1:]}))
