"""linear_cross_entropy against float64, and that its logits are never a whole array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.models import linear_cross_entropy

BATCH, LENGTH, DEPTH, VOCABULARY = 2, 7, 16, 37


def arrays(dtype=jnp.float32, scale=1.0):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.standard_normal((BATCH, LENGTH, DEPTH)) * scale, dtype)
    w = jnp.asarray(random.standard_normal((DEPTH, VOCABULARY)), jnp.float32)
    targets = random.integers(0, VOCABULARY, (BATCH, LENGTH))
    targets[0, :2] = -1
    cotangent = jnp.asarray(random.standard_normal((BATCH, LENGTH)), jnp.float32)
    return x, w, jnp.asarray(targets, jnp.int32), cotangent


def oracle(x, w, targets, cotangent):
    """(losses, dx, dw) in float64."""
    x, w, cotangent = (np.asarray(y, np.float64) for y in (x, w, cotangent))
    logits = x @ w
    largest = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - largest).sum(-1)) + largest[..., 0]
    counts = targets >= 0
    one_hot = np.eye(VOCABULARY)[np.maximum(targets, 0)]
    losses = np.where(counts, lse - (logits * one_hot).sum(-1), 0)
    dlogits = (np.exp(logits - lse[..., None]) - one_hot) * np.where(counts, cotangent, 0)[..., None]
    return losses, dlogits @ w.T, np.einsum("btv,btd->dv", dlogits, x)


@pytest.mark.parametrize("chunk", [1, 10, 37, 4096])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_against_float64(chunk, transpose_w):
    x, w, targets, cotangent = arrays()
    turned = lambda w: w.T if transpose_w else w
    call = lambda x, w: linear_cross_entropy(x, turned(w), targets, transpose_w=transpose_w, chunk=chunk)
    losses, vjp = jax.vjp(jax.jit(call), x, w)
    for got, want in zip((losses, *vjp(cotangent)), oracle(x, w, targets, cotangent), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-6)


OPTIONS = {"plain": {}, "all": {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 1e-2}}


def plain_loss(x, w, targets, weights, reduction, softcap=None, label_smoothing=0.0, z_loss=0.0):
    """The reduced loss by the definition in linear_cross_entropy's docstring, from whole logits."""
    logits = jnp.matmul(x, w, precision="highest")
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = lse - (1 - label_smoothing) * chosen - label_smoothing * logits.mean(-1) + z_loss * lse**2
    weights = jnp.where(targets >= 0, weights, 0)
    total = (weights * losses).sum()
    return total / weights.sum() if reduction == "mean" else total


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk", [5, None])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions_equal_the_definition(reduction, chunk, options):
    """Values and gradients of x, w and the weights; and the gradients of "none" are near."""
    x, w, targets, weights = arrays()
    call = lambda x, w, weights: linear_cross_entropy(
        x, w.T, targets, weights=weights, reduction=reduction, transpose_w=True, chunk=chunk, **OPTIONS[options]
    )
    plain = lambda x, w, weights: plain_loss(x, w, targets, weights, reduction, **OPTIONS[options])
    got, want = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(x, w, jnp.abs(weights)) for f in (call, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=4e-6, rtol=2e-6), got, want)


def test_of_no_token_the_sum_and_the_mean_are_zero():
    x, w, targets, _ = arrays()
    for reduction in ("sum", "mean"):
        loss = lambda x: linear_cross_entropy(x, w, jnp.full_like(targets, -100), reduction=reduction)  # noqa: B023
        value, gradient = jax.value_and_grad(loss)(x)
        assert value == 0
        assert not np.asarray(gradient).any()


def test_a_reduction_has_three_matmuls_and_no_full_logits():
    x, w, targets, _ = arrays()
    counts = {}
    for reduction in ("none", "sum"):
        loss = lambda x, w: linear_cross_entropy(x, w, targets, chunk=10, reduction=reduction).sum()  # noqa: B023
        program = str(jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(x, w))
        counts[reduction] = program.count("dot_general")
        assert f"f32[{BATCH},{LENGTH},{VOCABULARY}]" not in program
    assert counts == {"none": 4, "sum": 3}


def test_bfloat16_is_as_exact_as_a_plain_evaluation():
    x, w, targets, cotangent = arrays(jnp.bfloat16)

    def plain(x, w):
        logits = jnp.matmul(x, w.astype(x.dtype), preferred_element_type=jnp.float32)
        losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jnp.where(targets >= 0, losses, 0)

    want = oracle(x, w, targets, cotangent)
    results = []
    for call in (lambda x, w: linear_cross_entropy(x, w, targets, chunk=8), plain):
        losses, vjp = jax.vjp(call, x, w)
        results.append([np.linalg.norm(a - b) for a, b in zip((losses, *vjp(cotangent)), want, strict=True)])
    for ours, theirs in zip(*results, strict=True):
        assert 0 < ours < 1.1 * theirs


def test_float32_weight_gradient_sums_in_float32():
    """With x in 16 bits, only the cotangents of the logits are rounded, not the sum."""
    x, w, targets, cotangent = arrays(jnp.bfloat16)
    _, vjp = jax.vjp(lambda w: linear_cross_entropy(x, w, targets, chunk=8), w)
    (got,) = vjp(cotangent)
    rounded = lambda y: np.asarray(jnp.asarray(y, jnp.bfloat16), np.float64)
    logits, one_hot = rounded(x) @ rounded(w), np.eye(VOCABULARY)[np.maximum(targets, 0)]
    share = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) - one_hot
    dlogits = rounded(share * np.where(targets >= 0, cotangent, 0)[..., None])
    want = np.einsum("btv,btd->dv", dlogits, rounded(x))
    assert got.dtype == jnp.float32
    assert np.linalg.norm(got - want) < 3e-4 * np.linalg.norm(want)


def test_large_logits_and_targets_out_of_range():
    x, w, targets, _ = arrays(scale=1e4)
    losses = linear_cross_entropy(x, w, targets, chunk=8)
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(losses, oracle(x, w, targets, losses)[0], rtol=1e-5)
    beyond = targets.at[1, 1].set(VOCABULARY)
    losses = jax.jit(lambda targets: linear_cross_entropy(x, w, targets, chunk=8))(beyond)
    assert np.isnan(losses[1, 1])
    assert np.isnan(losses).sum() == 1
    with pytest.raises(
        ValueError, match="targets: got ids up to 37, want 0 to 36, or below 0 for tokens that do not count"
    ):
        linear_cross_entropy(x, w, beyond)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint8, np.uint32])
def test_targets_of_any_width(dtype):
    """Ids that int32 would wrap keep their values. -100, PyTorch's ignore_index, does not count."""
    x, w, targets, cotangent = arrays()
    targets = np.where(targets < 0, -100 if np.issubdtype(dtype, np.signedinteger) else 3, targets).astype(dtype)
    if dtype == np.int64:
        targets[1, 0] = -(2**32) + 5
    losses = linear_cross_entropy(x, w, targets)
    np.testing.assert_allclose(losses, oracle(x, w, targets.astype(np.int64), cotangent)[0], atol=3e-6)


def test_full_logits_are_never_stored():
    x, w, targets, _ = arrays()
    loss = lambda x, w: linear_cross_entropy(x, w, targets, chunk=10).sum()
    program = str(jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(x, w))
    assert f"f32[{BATCH},{LENGTH},10]" in program
    assert f"[{BATCH},{LENGTH},{VOCABULARY}]" not in program


def test_inside_shard_map_with_check_vma():
    """Even on one device the types show the varying axes: w's gradient has to be summed."""
    x, w, targets, cotangent = arrays()
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    rows = jax.P("data")

    def call(x, w):
        local = lambda x, w, targets: linear_cross_entropy(x, w, targets, chunk=10)
        return jax.shard_map(local, mesh=mesh, in_specs=(rows, jax.P(), rows), out_specs=rows)(x, w, targets)

    losses, vjp = jax.vjp(jax.jit(call), x, w)
    for got, want in zip((losses, *vjp(cotangent)), oracle(x, w, targets, cotangent), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-6)


def test_bad_arguments_are_named():
    x, w, targets, _ = arrays()
    for arguments, error, message in [
        ((x, w.T, targets), ValueError, r"w: got shape \(37, 16\), want \[D, V\] with x's \(2, 7, 16\)"),
        ((x, w, targets[:1]), ValueError, r"targets: got shape \(1, 7\), want x's \(2, 7\)"),
        ((x, w, targets * 1.0), TypeError, "targets: got dtype float32, want integers"),
        ((x.astype(jnp.int32), w, targets), TypeError, "x: got dtype int32, want floats"),
    ]:
        with pytest.raises(error, match=message):
            linear_cross_entropy(*arguments)
    for options, error, message in [
        ({"reduction": "avg"}, ValueError, "reduction: got 'avg', want 'none', 'mean' or 'sum'"),
        ({"weights": targets}, TypeError, "weights: got dtype int32, want floats"),
        ({"weights": x[:, :, 0].T}, ValueError, r"weights: got shape \(7, 2\), want x's \(2, 7\)"),
        ({"z_loss": -1.0}, ValueError, r"z_loss: got -1\.0, want a number of 0 or more"),
    ]:
        with pytest.raises(error, match=message):
            linear_cross_entropy(x, w, targets, **options)
    with pytest.raises(ValueError, match="chunk: got 0, want a positive int"):
        linear_cross_entropy(x, w, targets, chunk=0)
