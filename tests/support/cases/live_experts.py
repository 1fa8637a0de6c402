"""Cases of experts whose last rows belong to other devices: no kernel writes them, and no result depends on them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.grouped.experts import Combination, gated_experts
from jax_kernels.ops.grouped.rows import token_rows
from jax_kernels.testing import rms_error

__all__ = ["CASES", "LiveCase", "errors_by"]


@dataclasses.dataclass(frozen=True)
class LiveCase:
    """sizes: the rows of each expert of this device; the other pairs of a token and an expert are of other devices."""

    sizes: tuple[int, ...]
    tokens: int
    each: int = 2
    width: int = 64
    hidden: int = 64


CASES = {
    "part": LiveCase((5, 0, 70, 1), 136),
    "none": LiveCase((0, 0), 40),
    "all": LiveCase((64, 16), 40),
}


def _loss(tokens, gate, up, down, weights, *, case, order, is_plain, implementation):
    """The sums of experts' rows times a cotangent. is_plain: by the public ops' definition on live rows alone."""
    sizes = jnp.asarray(case.sizes, jnp.int32)
    # Not a constant, as in a model.
    sizes = jnp.where(jnp.isfinite(tokens[0, 0].astype(jnp.float32)), sizes, 0)
    live = sum(case.sizes)
    if is_plain:
        group = np.repeat(np.arange(len(case.sizes)), case.sizes)
        rows = tokens[order[:live] // case.each]
        hidden = jnp.einsum("mk,mkh->mh", rows, gate[group])
        hidden = jax.nn.silu(hidden) * jnp.einsum("mk,mkh->mh", rows, up[group])
        out = jnp.einsum("mh,mhk->mk", hidden, down[group]) * weights.reshape(-1)[order[:live], None]
        out = jnp.zeros_like(tokens).at[order[:live] // case.each].add(out)
    else:
        pairs, inverse, count = jnp.asarray(order), jnp.asarray(np.argsort(order).astype(np.int32)), sizes.sum()
        rows = token_rows(tokens, case.each, pairs, inverse, count)
        combination = Combination(weights, pairs, inverse, count)
        options = {"combination": combination, "implementation": implementation}
        out = gated_experts(rows, gate, up, down, sizes, **options)
    cotangent = np.arange(out.size).reshape(out.shape) % 7 / 4 - 0.5
    return (out.astype(jnp.float32) * cotangent).sum(), out


def errors_by(case: LiveCase, implementation: str | None) -> dict[str, tuple[float, float]]:
    """(error, bound) of the sums and of each gradient: relative to the values in float32, by root mean squares."""
    random = np.random.default_rng(0)
    normal = lambda *shape: random.standard_normal(shape) / shape[-2] ** 0.5
    groups, shape = len(case.sizes), (case.width, case.hidden)
    given = [normal(case.tokens, case.width), normal(groups, *shape), normal(groups, *shape)]
    given = [jnp.asarray(x, jnp.bfloat16) for x in (*given, normal(groups, *shape[::-1]))]
    given.append(jnp.asarray(np.abs(normal(case.tokens, case.each)), jnp.float32))
    order = random.permutation(case.tokens * case.each).astype(np.int32)

    def results(arrays, is_plain):
        differentiated = jax.value_and_grad(_loss, tuple(range(5)), has_aux=True)
        options = {"case": case, "order": order, "is_plain": is_plain, "implementation": implementation}
        (_, out), gradients = jax.jit(lambda *arrays: differentiated(*arrays, **options))(*arrays)
        return dict(zip(("out", "tokens", "gate", "up", "down", "weights"), (out, *gradients), strict=True))

    got = results(given, False)
    with jax.default_matmul_precision("highest"):
        want = results([x.astype(jnp.float32) for x in given], True)
    return {name: (rms_error(got[name], want[name]), 0.02) for name in want}
