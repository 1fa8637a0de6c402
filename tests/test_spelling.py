"""Hints for unknown arguments: misspelt names, and other libraries' names, in JAX and through the bridge."""

import inspect

import jax.numpy as jnp
import pytest
import torch

import jax_kernels
from jax_kernels import bridge, masks, prepare_mask
from jax_kernels.cli.ops import OPS
from jax_kernels.spelling import OTHER_NAMES, did_you_mean, name_hint

ATTENTION = ("causal", "attn_mask", "sm_scale", "dropout_p", "softmax_scale", "window_size")
NO_DROPOUT = "there is no dropout of attention weights"
# The calls of the bridge that take these names as aliases.
ALIASES = ("causal", "attn_mask", "softmax_scale", "window_size")


def parameters(function):
    return [name for name, x in inspect.signature(function).parameters.items() if x.kind is not x.VAR_KEYWORD]


def wanted(name, known):
    """The end of the error for a name that a function with the arguments `known` does not have."""
    own = OTHER_NAMES.get(name)
    return NO_DROPOUT if name == "dropout_p" else f"; did you mean {own!r}?" if own in known else ""


@pytest.mark.parametrize("op", [name for name in OPS if "query" in parameters(getattr(jax_kernels, name))])
@pytest.mark.parametrize("name", ATTENTION)
def test_jax_ops_name_the_argument_that_may_be_meant(op, name):
    function = getattr(jax_kernels, op)
    known = parameters(function)
    if op in ("block_sparse_attention", "dynamic_mask_attention"):  # they pass the rest to flash_attention
        known = [*known, *parameters(jax_kernels.flash_attention)]
    required = [x for x in inspect.signature(function).parameters.values() if x.default is x.empty]
    x = jnp.zeros((1, 8, 2, 16))
    mask = jnp.ones((1, 1), bool) if op == "block_sparse_attention" else jnp.ones((1, 1, 8, 8), bool)
    given = {y.name: mask for y in required if y.kind is not y.VAR_KEYWORD} | dict.fromkeys(
        ("query", "key", "value"), x
    )
    for call in (function, lambda **arguments: jax_kernels.explain(function, **arguments)):
        with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{name}'") as raised:
            call(**given, **{name: None})
        assert wanted(name, known) in str(raised.value)
        assert str(raised.value).count("did you mean") <= 1


@pytest.mark.parametrize(
    "op", [name for name in OPS if "query" in parameters(getattr(jax_kernels, name)) and hasattr(bridge, name)]
)
@pytest.mark.parametrize("name", ["sm_scale", "dropout_p", "causal"])
def test_the_bridge_names_the_argument_that_may_be_meant(op, name):
    function = getattr(bridge, op)
    has_aliases = op in ("flash_attention", "block_sparse_attention", "dynamic_mask_attention")
    if has_aliases and name in ALIASES:
        return
    required = [x for x in inspect.signature(function).parameters.values() if x.default is x.empty]
    x = torch.zeros(1, 8, 2, 16)
    mask = torch.ones((1, 1) if op == "block_sparse_attention" else (1, 1, 8, 8), dtype=torch.bool)
    arrays = {"query": x, "key": x, "value": x}
    others = {y.name: mask for y in required if y.kind is not y.VAR_KEYWORD and y.name not in arrays}
    others |= {"mask": mask} if op == "dynamic_mask_attention" else {}
    with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{name}'") as raised:
        function(**arrays, **others, **{name: None})
    known = parameters(getattr(jax_kernels, "flash_attention" if has_aliases else op))
    assert wanted(name, known) in str(raised.value)


def test_other_ops_name_the_argument_that_may_be_meant():
    x = jnp.zeros((8, 16))
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'; did you mean 'eps'"):
        jax_kernels.rms_norm(x, epsilon=1e-6)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gamma'; did you mean 'scale'"):
        jax_kernels.layer_norm(x, gamma=x[0])
    with pytest.raises(TypeError, match="unexpected keyword argument 'activations'; did you mean 'activation'"):
        jax_kernels.matmul(x, x.T, activations="gelu")
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'; did you mean 'eps'"):
        bridge.rms_norm(torch.zeros(8, 16), epsilon=1e-6)
    query = jnp.zeros((1, 8, 2, 16))
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'; did you mean 'is_causal'"):
        prepare_mask(masks.causal(), query, query, causal=True)


def test_errors_from_inside_a_call_stay_as_they_are():
    """A TypeError that a caller's own function raises gets no hint of the op's arguments."""

    def flash_attention_mod(score, *positions):
        raise TypeError("mod() got an unexpected keyword argument 'causal'")

    query = jnp.zeros((1, 8, 2, 16))
    with pytest.raises(TypeError) as raised:
        jax_kernels.flash_attention(query, query, query, score_mod=flash_attention_mod)
    assert "did you mean" not in str(raised.value)


def test_hints():
    assert name_hint("causal", ["is_causal"]) == did_you_mean("is_causl", ["is_causal"])
    assert name_hint("causal", ["x"]) == name_hint("dropout_p", ["x"]) == ""
    assert NO_DROPOUT in name_hint("dropout_p", ["query"])
