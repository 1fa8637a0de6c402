"""Runs steps of a ring by the Hopper kernels in JAX's Mosaic interpreter, against float64.

It is a script, as a kernel that deadlocks hangs its process. Each argument is the JSON of a case: head_dim, heads,
kv_heads, number (of the step), index (of the device), layout, is_causal, joins (whether earlier steps have a result),
and optionally v_head_dim, tokens (of a device) and mask (a name of MASKS).
It prints a line of JSON for each case: the errors, and whether there were races.
"""

import functools
import json
import sys

from tests.support.interpreters import mosaic as mosaic_interpreter  # first: it sets the environment

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels import masks
from jax_kernels.ops.ring.layouts import Layout
from jax_kernels.ops.ring.partial_results import BackwardInputs, Pair, Visitors
from jax_kernels.ops.ring.steps import Step
from tests.support.cases.rings import FUNCTION, errors_of

TOKENS = 256
MASKS = {"limits": masks.causal() & masks.sliding_window(150, 0) | masks.global_tokens(40), "function": FUNCTION}


def run(case: dict) -> dict:
    parameters = functools.partial(mosaic_interpreter._PARAMS, detect_races=True)
    plgpu.InterpretGPUParams = parameters
    heads, kv_heads, head_dim = case["heads"], case["kv_heads"], case["head_dim"]
    tokens, v_head_dim = case.get("tokens", TOKENS), case.get("v_head_dim", head_dim)
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    query, dout = (draw(1, tokens, heads, dim).astype(jnp.bfloat16) for dim in (head_dim, v_head_dim))
    key, value = (draw(1, tokens, kv_heads, dim).astype(jnp.bfloat16) for dim in (head_dim, v_head_dim))
    total = (draw(1, tokens, heads, v_head_dim), draw(1, heads, tokens)) if case["joins"] else None
    if total is not None:  # a query that has met no key
        total = total[0].at[:, 0].set(0), total[1].at[:, :, 0].set(-jnp.inf)
    lse_of_all, delta, so_far = draw(1, heads, tokens) + 6, draw(1, heads, tokens), draw(1, tokens, heads, head_dim)
    layout = Layout(name=case["layout"], devices=2, length=tokens, left=None, right=0 if case["is_causal"] else None)
    scale = head_dim**-0.5

    def step(query, index):
        options = {"scale": scale, "implementation": "mosaic_gpu"}
        mask = MASKS.get(case.get("mask"))
        number = case["number"]
        return Step(layout=layout, number=number, index=index, query=query, q_ids=None, mask=mask, options=options)

    visitors = Visitors(Pair.of(key, value), None)
    index = jnp.int32(case["index"])
    forward = lambda query, index, visitors, total: step(query, index).forward(
        visitors, total, is_last=case.get("is_last", False)
    )
    out, lse = jax.jit(forward)(query, index, visitors, total)

    def backward(query, index, visitors, given, so_far):
        at = step(query, index)
        parts = at.in_parts(visitors, 1 / 3) if case.get("in_parts") else [None]
        pairs = []
        for part in parts:
            so_far, pair = at.gradients(visitors, given, so_far, part)
            pairs.append(pair)
        return so_far, *(jnp.concatenate([getattr(x, name) for x in pairs], axis=2) for name in ("key", "value"))

    given = BackwardInputs(lse_of_all, delta, dout)
    dquery, dkey, dvalue = jax.jit(backward)(query, index, visitors, given, so_far)
    jax.block_until_ready((out, lse, dquery, dkey, dvalue))
    races = mosaic_interpreter.races_found()

    wide = lambda x: np.asarray(x, np.float64)
    q, k, v, do = wide(query), *(np.repeat(wide(x), heads // kv_heads, axis=2) for x in (key, value)), wide(dout)
    source = (case["index"] - case["number"]) % 2
    keep = np.ones((tokens, tokens), bool)
    q_places, k_places = layout.tokens(case["index"])[:, None], layout.tokens(source)
    if "mask" in case:
        keep = np.asarray(MASKS[case["mask"]].elements(0, 0, jnp.asarray(q_places), jnp.asarray(k_places)))
    elif case["is_causal"]:
        keep = q_places >= k_places
    scores = np.where(keep, np.einsum("bthd,bshd->bhts", q, k) * scale, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        want_lse = np.logaddexp.reduce(scores, axis=-1)
        p = np.where(keep, np.exp(scores - np.where(np.isneginf(want_lse), 0, want_lse)[..., None]), 0)
        want = np.einsum("bhts,bshd->bthd", p, v)
        if total is not None:
            both = np.logaddexp(want_lse, wide(total[1]))
            share = lambda x: np.where(np.isneginf(both), 0, np.exp(x - both)).swapaxes(1, 2)[..., None]
            want, want_lse = want * share(want_lse) + wide(total[0]) * share(wide(total[1])), both
    p = np.where(keep, np.exp(scores - wide(lse_of_all)[..., None]), 0)
    ds = p * (np.einsum("bthd,bshd->bhts", do, v) - wide(delta)[..., None])
    by_group = lambda x: x.reshape(1, tokens, kv_heads, -1, x.shape[-1]).sum(3)
    wants = {
        "out": (out, want),
        "lse": (lse, want_lse),
        "dquery": (dquery, wide(so_far) + np.einsum("bhts,bshd->bthd", ds, k)),
        "dkey": (dkey, by_group(np.einsum("bhts,bthd->bshd", ds, q)) * scale),
        "dvalue": (dvalue, by_group(np.einsum("bhts,bthd->bshd", p, do))),
    }
    errors = errors_of(wants, *zip(*wants.values(), strict=True))
    dtypes = {name: str(got.dtype) for name, (got, _) in wants.items()}
    return {"errors": errors, "races": races, "dtypes": dtypes}


if __name__ == "__main__":
    mosaic_interpreter.install()
    for argument in sys.argv[1:]:
        print(json.dumps(run(json.loads(argument))), flush=True)
