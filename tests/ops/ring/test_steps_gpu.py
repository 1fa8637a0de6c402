"""The steps of a ring, run on one GPU for each device in turn: as exact as flash_attention of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import flash_attention
from jax_kernels.ops.ring.partial_results import BackwardInputs, Pair, Visitors
from jax_kernels.ops.ring.ring_attention import prepare
from jax_kernels.ops.ring.steps import Step
from jax_kernels.reference.attention import row_terms
from tests.support.cases.rings import FUNCTION, MASK, errors_of, score_mod

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TOKENS, DEVICES = 1024, 2

# Layout and options.
CASES = {
    "causal": ("zigzag", {"is_causal": True}),
    "window": ("zigzag", {"is_causal": True, "window": (300, 0)}),
    "mask": ("zigzag", {"mask": MASK}),
    "mask striped": ("striped", {"mask": MASK}),
    "mask contiguous": ("contiguous", {"mask": MASK}),
    "function": ("zigzag", {"mask": FUNCTION}),
    "score_mod": ("zigzag", {"is_causal": True, "score_mod": score_mod}),
    "score_mod striped": ("striped", {"is_causal": True, "score_mod": score_mod}),
    "bias": ("zigzag", {"is_causal": True, "bias": True}),
}


NEEDED = dict.fromkeys(("scale", "softcap", "deterministic", "precision", "implementation"))


def prepared(layout, options, *qkv):
    """A call of a ring of DEVICES, and its arrays. All devices have the same mask and score_mod."""
    found = []
    names = {"axis_name": "sequence", "layout": layout, "strategy": "ring"}

    def look(*qkv):
        found.append(prepare(*qkv, **names, **NEEDED | options))
        return qkv[0]

    mesh = jax.sharding.AbstractMesh((DEVICES,), ("sequence",), (jax.sharding.AxisType.Auto,))
    tokens = jax.P(None, "sequence")
    over = jax.shard_map(look, mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=False)
    jax.eval_shape(over, *(jnp.concatenate([x] * DEVICES, 1) for x in qkv))
    return found[0]


def ring(layout, options, given):
    """The results and the gradients of the steps of all devices, in the order of the tokens."""
    query, key, value, bias, dout, dlse = given
    local = TOKENS // DEVICES
    local_qkv = [x[:, :local] for x in (query, key, value)]
    options = options | ({} if bias is None else {"bias": jnp.zeros((1, bias.shape[1], local, TOKENS), bias.dtype)})
    call, arrays = prepared(layout, options, *local_qkv)
    queries = [call.layout.positions(index) for index in range(DEVICES)]
    parts = [[x[:, at] for x in (query, key, value)] for at in queries]
    step_of = lambda index, number: Step(
        layout=call.layout,
        number=number,
        index=jnp.int32(index),
        query=parts[index][0],
        q_ids=None,
        mask=arrays.mask,
        score_mod=arrays.score_mod,
        bias=None if bias is None else bias[:, :, queries[index]],
        options=dict(call.options),
    )
    visitors = [Visitors(Pair((k, v)), None) for _, k, v in parts]
    back = lambda xs, axis: jnp.concatenate(xs, axis)[(slice(None),) * axis + (jnp.argsort(jnp.concatenate(queries)),)]
    results, dqueries, grads = [], [], [jnp.zeros((2, *parts[0][1].shape)) for _ in queries]
    for index, at in enumerate(queries):
        steps = [step_of(index, number) for number in call.steps]
        total = None
        for number, step in zip(call.steps, steps, strict=True):
            total = step.forward(visitors[(index - number) % DEVICES], total, is_last=number == call.steps[-1])
        out, lse, *more = total
        out = out.astype(query.dtype)
        results.append((out, lse))
        terms = row_terms(out, lse, dout[:, at], dlse[:, :, at])
        given = BackwardInputs(lse=terms[0], delta=terms[1], dout=dout[:, at], lse_lo=more[0] if more else None)
        dquery = jnp.zeros(out.shape, jnp.float32)
        for number, step in zip(call.steps, steps, strict=True):
            source = (index - number) % DEVICES
            if more:
                found = step.all_gradients(visitors[source], given)
                dquery, pair = dquery + found.query / call.scale, jnp.stack([found.key, found.value])
            else:
                dquery, pair = step.gradients(visitors[source], given, dquery)
                pair = jnp.stack([pair.key, pair.value])
            grads[source] = grads[source] + pair
        dqueries.append(dquery * call.scale)
    dkv = back(grads, 2)
    out, lse = (back([one[i] for one in results], 1 + i) for i in range(2))
    return out, lse, back(dqueries, 1), dkv[0], dkv[1]


def both(attention, query, key, value, bias, dout, dlse):
    results, vjp = jax.vjp(lambda *qkv: attention(*qkv, **({} if bias is None else {"bias": bias})), query, key, value)
    return *results, *vjp((dout.astype(results[0].dtype), dlse.astype(jnp.float32)))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_as_exact_as_one_call(name, head_dim):
    layout, options = CASES[name]
    options = dict(options)
    random = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.bfloat16)
    query, key, value, dout = (normal(2, TOKENS, heads, head_dim) for heads in (4, 2, 2, 4))
    bias = normal(1, 4, TOKENS, TOKENS) if options.pop("bias", False) else None
    given = query, key, value, bias, dout, normal(2, 4, TOKENS).astype(jnp.float32)
    attend = functools.partial(flash_attention, return_lse=True, **options)
    wide = [None if x is None else x.astype(jnp.float32) for x in given]
    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(both, functools.partial(attend, implementation="xla")))(*wide)
    of_one = jax.jit(functools.partial(both, attend))(*given)
    of_steps = jax.jit(functools.partial(ring, layout, options))(given)
    one, steps = (errors_of(("out", "lse", "dq", "dk", "dv"), x, want) for x in (of_one, of_steps))
    for what, error in steps.items():
        assert error < max(1.3 * one[what], 1e-5), (what, error, one[what])
