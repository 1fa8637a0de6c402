"""Masks built from scores, and masks by name, in attention: outputs and gradients equal the dense mask's."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import dynamic_mask_attention, flash_attention, masks
from jax_kernels.masks.presets import PRESETS
from jax_kernels.testing import rms_error

pytestmark = pytest.mark.usefixtures("no_interpret")

B, T, S, H, HKV, D = 2, 40, 45, 4, 2, 8
jit = lambda f: jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})


def arrays(seed):
    random = np.random.default_rng(seed)
    shapes = ((B, T, H, D), (B, S, HKV, D), (B, S, HKV, D))
    return tuple(jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes)


def loss(out, lse):
    return jnp.sum(out * jnp.cos(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, jnp.sin(lse)))


@jit
def of_dense(bias, keep, *qkv):
    """The loss and its gradients, including the bias's. bias and keep may have key's heads."""

    def run(bias, *qkv):
        keep_, bias = (jnp.repeat(x, H // x.shape[1], axis=1) for x in (keep, bias))
        return loss(*flash_attention(*qkv, mask=keep_, bias=bias, return_lse=True, implementation="xla"))

    return jax.value_and_grad(run, (0, 1, 2, 3))(bias, *qkv)


def check(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rms_error(g, w) < 2e-6, np.shape(w)


# (bias [B, H or Hkv, T, S], a threshold, query, key) -> Mask.
BUILDERS = {
    "top_k": lambda bias, tau, q, k: masks.top_k(bias, 5),
    "top_k_among": lambda bias, tau, q, k: masks.top_k(bias[:, :, :1], 7, among=masks.causal(), q_length=T, q_offset=3),
    "threshold": lambda bias, tau, q, k: masks.threshold(bias, tau),
    "threshold_of_lists": lambda bias, tau, q, k: masks.threshold(bias, tau) | masks.sliding_window(2, 0),
    "top_k_blocks": lambda bias, tau, q, k: masks.top_k_blocks(masks.pooled_scores(q, k, (8, 16)), 2, (8, 16)),
    "mixture_of_blocks": lambda bias, tau, q, k: (
        masks.top_k_blocks(
            masks.pooled_scores(q, k, 16), 2, 16, among=masks.causal(), always=masks.sliding_window(0, 0)
        )
        & masks.causal()
    ),
}
OF_KEY_HEADS = ("top_k", "top_k_among", "threshold")


def through(name, attend, heads):
    """Tests a builder. The program that takes gradients also builds the mask, from the bias that attention adds."""

    @jit
    def run(bias, tau, *qkv):
        made = BUILDERS[name](bias, tau, *qkv[:2])

        def of(bias, *qkv):
            mask = BUILDERS[name](bias, tau, *qkv[:2])
            return loss(*attend(*qkv, mask=mask, bias=bias, return_lse=True))

        return jax.value_and_grad(of, (0, 1, 2, 3))(bias, *qkv), made.to_dense(T, S)

    @hypothesis.given(seed=st.integers(0, 99), tau=st.floats(-1, 3, width=32), hidden=st.sampled_from([0.0, 0.1, 0.9]))
    @hypothesis.settings(max_examples=4)
    def property_of(seed, tau, hidden):
        random = np.random.default_rng(seed)
        bias = random.standard_normal((B, heads, T, S)).astype(np.float32)
        bias = np.where(random.random(bias.shape) < hidden, -np.inf, bias)
        got, keep = run(bias, tau, *arrays(seed))
        check(got, of_dense(bias, jnp.broadcast_to(keep, bias.shape), *arrays(seed)))

    property_of()


@pytest.mark.parametrize("name", BUILDERS)
def test_builders(name):
    through(name, flash_attention, H)


@pytest.mark.parametrize("name", OF_KEY_HEADS)
def test_builders_of_key_heads(name):
    through(name, dynamic_mask_attention, HKV)


OPTIONS = {
    "attention_sinks": {"left": 5, "n": 2},
    "bigbird": {"q_length": T, "kv_length": S, "block_size": 8, "heads": H, "random_blocks": 1},
    "block_sparse": {"blocks": np.random.default_rng(0).random((B, 1, 5, 6)) < 0.4, "block_size": 8},
    "causal": {},
    "dilated": {"rate": 3},
    "global_local": {"n": np.array([3, 0], np.int32), "left": 4, "right": 1},
    "longformer": {"window": 6, "n": 1, "rate": 2},
    "prefix_lm": {"n": np.array([5, 30], np.int32)},
    "sliding_window": {"left": 6, "right": None},
    "strided": {"stride": 4},
}
assert set(OPTIONS) == set(PRESETS)


@pytest.mark.parametrize("name", OPTIONS)
def test_presets(name):
    mask, qkv = masks.preset(name, **OPTIONS[name]), arrays(0)
    run = lambda mask, *qkv: loss(*dynamic_mask_attention(*qkv, mask, return_lse=True))
    got = jit(jax.value_and_grad(run, (1, 2, 3)))(mask, *qkv)
    keep = jnp.broadcast_to(mask.to_dense(T, S), (B, H, T, S))
    value, gradients = of_dense(jnp.zeros((B, H, T, S)), keep, *qkv)
    check(got, (value, gradients[1:]))
