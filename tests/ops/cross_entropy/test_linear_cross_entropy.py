"""linear_cross_entropy against float64: results, gradients, transforms, memory, plans and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_kernels import explain, linear_cross_entropy, memory_limit
from jax_kernels.ops.sharding.partitioning import on_one_device
from jax_kernels.testing import linear_cross_entropy as cases
from tests.support import jaxprs
from tests.support.cases import ids
from tests.support.oracles.plain_loss import (
    DEPTH,
    OPTIONS,
    TARGETS,
    TOKENS,
    VOCABULARY,
    WEIGHTS,
    W,
    X,
    close,
    normal,
    ours,
    plain,
)


@pytest.mark.parametrize("name", ids.named(cases.CASES))
def test_against_float64(name):
    for result, (error, bound) in cases.errors_by(cases.CASES[name], "xla").items():
        assert error <= bound, result


@pytest.mark.parametrize("name", ["mean", "sum", "weighted_mean", "softcap", "float16_mean", "float32"])
def test_tiles_and_chunks(name, small_tiles):
    for result, (error, bound) in cases.errors_by(cases.CASES[name], "xla").items():
        assert error <= bound, result


@pytest.mark.gpu
@pytest.mark.parametrize("name", ids.named(cases.CASES | cases.LONG))
def test_on_gpu(name):
    for result, (error, bound) in cases.errors_by((cases.CASES | cases.LONG)[name], None).items():
        assert error <= bound, result


PRECISIONS = pytest.mark.parametrize("precision", [None, "fp8"], ids=["exact", "fp8"])


@PRECISIONS
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_all_derivatives(reduction, precision, small_tiles):
    """Reverse and forward mode, and second derivatives, of x, w and weights."""
    given, right = (X, W, WEIGHTS), lambda *y: plain(*y, reduction, precision).sum()
    total = lambda *y: ours(reduction, precision)(*y).sum()
    close(jax.value_and_grad(total, (0, 1, 2))(*given), jax.value_and_grad(right, (0, 1, 2))(*given))
    directions = tuple(normal(*y.shape, seed=4) for y in given)
    close(jax.jvp(total, given, directions), jax.jvp(right, given, directions))
    second = lambda f: jax.jvp(jax.grad(f, (0, 1, 2)), given, directions)[1]
    close(second(total), second(right), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (0, 0, 0)])
def test_vmap(reduction, axes, small_tiles):
    gradient = jax.value_and_grad(lambda *y: (ours(reduction)(*y) ** 2).sum(), (0, 1, 2))
    stacked = [jnp.stack([y, y[::-1]]) for y in (X, W, WEIGHTS)]
    given = [many if axis == 0 else one for many, one, axis in zip(stacked, (X, W, WEIGHTS), axes, strict=True)]
    got = jax.jit(jax.vmap(gradient, axes))(*given)
    for i in range(2):
        want = gradient(*(y[i] if axis == 0 else y for y, axis in zip(given, axes, strict=True)))
        close(jax.tree.map(lambda y, i=i: y[i], got), want)


def shapes_of(jaxpr):
    """The (shape, dtype) of each array that a jaxpr makes, also inside loops."""
    for equation in jaxpr.eqns:
        yield from ((tuple(x.aval.shape), x.aval.dtype) for x in equation.outvars if hasattr(x.aval, "shape"))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from shapes_of(inner)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("implementation", ["xla"])
def test_logits_are_never_a_whole_array(reduction, implementation, small_tiles):
    """No array of a differentiated call has as many elements as the logits of all tokens."""
    options = {"reduction": reduction, "implementation": implementation}
    tokens, vocabulary = 64, VOCABULARY
    x, w, targets = normal(tokens, 4), normal(4, vocabulary), jnp.zeros(tokens, jnp.int32)
    loss = lambda x, w: linear_cross_entropy(x, w, targets, **options).sum()
    made = list(shapes_of(jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(x, w).jaxpr))
    assert max(int(np.prod(shape)) for shape, _ in made) < tokens * vocabulary / 2
    if reduction == "none":
        assert ((tokens, 8), jnp.float32) in made
    else:
        assert ((3, vocabulary), jnp.float32) in made


@PRECISIONS
@pytest.mark.parametrize(("reduction", "matmuls"), [("none", 4), ("mean", 3), ("sum", 3)])
def test_matmuls_of_a_differentiated_call(reduction, matmuls, precision, small_tiles):
    loss = lambda x, w: ours(reduction, precision)(x, w, WEIGHTS).sum()
    matmuls_of = lambda function: jaxprs.count("dot_general", jax.make_jaxpr(function)(X, W).jaxpr)
    assert matmuls_of(jax.value_and_grad(loss, (0, 1))) == matmuls
    assert matmuls_of(loss) == 1
    assert matmuls_of(jax.value_and_grad(loss)) == (4 if reduction == "none" else 2)  # jit removes the fourth


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_no_transposed_copy_is_kept(reduction):
    """Between forward and backward: w as it was given, and the gradient of w if the forward made it."""
    _, vjp = jax.vjp(lambda x, w: ours(reduction)(x, w, WEIGHTS), X, W)
    kept = [x.shape for x in jax.tree.leaves(vjp)].count((VOCABULARY, DEPTH))
    assert kept == (1 if reduction == "mean" else 0)


def test_padding_of_any_kind():
    """Targets below 0 and ignore_index do not count, also with an ignore_index outside the vocabulary."""
    want = linear_cross_entropy(X, W, TARGETS, reduction="mean")
    for index, dtype in ((-100, np.int64), (255, np.uint8), (VOCABULARY + 1, np.int32), (2**40, np.int64)):
        targets = np.where(TARGETS < 0, index, np.asarray(TARGETS, np.int64)).astype(dtype)
        np.testing.assert_array_equal(linear_cross_entropy(X, W, targets, ignore_index=index, reduction="mean"), want)
    index = int(TARGETS[0, 1])
    losses = linear_cross_entropy(X, W, TARGETS, ignore_index=index)
    np.testing.assert_array_equal(losses == 0, (TARGETS < 0) | (index == TARGETS))
    none = jnp.full(TOKENS, -100)
    for reduction in ("none", "sum", "mean"):
        loss = lambda x, w, how=reduction: linear_cross_entropy(x, w, none, reduction=how).sum()
        found = jax.value_and_grad(loss, (0, 1))(X, W)
        assert all((y == 0).all() for y in jax.tree.leaves(found))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_weights_of_tokens_that_do_not_count(reduction):
    """They have no influence, not even NaN or infinity: a mask that was divided by a length of 0 has such weights."""
    call = lambda x, w, weights: linear_cross_entropy(x, w, TARGETS, weights=weights, reduction=reduction)
    loss = jax.value_and_grad(lambda *arrays: call(*arrays).sum(), (0, 1, 2))
    want = loss(X, W, WEIGHTS)
    for value in (jnp.nan, jnp.inf):
        weights = jnp.where(TARGETS < 0, value, WEIGHTS)
        np.testing.assert_array_equal(call(X, W, weights), call(X, W, WEIGHTS))
        for a, b in zip(jax.tree.leaves(loss(X, W, weights)), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_traced_target_outside_the_vocabulary(reduction):
    """Its loss is NaN; the gradients of other tokens are not."""
    beyond = TARGETS.at[1, 1].set(VOCABULARY)
    loss = jax.jit(lambda x, targets: linear_cross_entropy(x, W, targets, reduction=reduction))
    assert np.isnan(loss(X, beyond)).sum() == 1
    assert np.isfinite(jax.grad(lambda x: jnp.nansum(loss(x, beyond)))(X)).all()
    with pytest.raises(
        ValueError, match="targets: got ids up to 37, want 0 to 36, or below 0 for tokens that do not count"
    ):
        linear_cross_entropy(X, W, beyond)


def test_float16_gradients_of_many_tokens():
    """A mean over many tokens has cotangents below float16's range."""
    tokens = 4096
    x, w = normal(tokens, 8).astype(jnp.float16), normal(8, 11, seed=1).astype(jnp.float16)
    targets = jnp.asarray(np.random.default_rng(0).integers(0, 11, tokens))
    loss = lambda x, w: linear_cross_entropy(x, w, targets, reduction="mean")
    scaled = lambda x, w: loss(x, w) * 2.0**15  # as a loss scale does
    got = jax.grad(scaled, (0, 1))(x, w)
    want = jax.grad(scaled, (0, 1))(x.astype(jnp.float32), w.astype(jnp.float32))
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) < 2e-3 * np.linalg.norm(b)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_float32_w_with_bfloat16_x(reduction):
    """The gradient of w is in its dtype, for x with one axis of tokens and with two."""
    x = X.astype(jnp.bfloat16)
    loss = lambda x, w, targets: linear_cross_entropy(x, w, targets, reduction=reduction).sum()
    want = jax.grad(lambda w: loss(x.astype(jnp.float32), w.astype(jnp.bfloat16).astype(jnp.float32), TARGETS))(W)
    for given, targets in ((x, TARGETS), (x.reshape(-1, DEPTH), TARGETS.reshape(-1))):
        got = jax.grad(loss, 1)(given, W, targets)
        assert got.dtype == jnp.float32
        assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_inside_shard_map(reduction, small_tiles):
    """The gradient of replicated weights is summed over the devices, once."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,))
    rows = P("data") if reduction == "none" else P()

    def call(x, w, weights):
        def local(x, w, targets, weights):
            loss = linear_cross_entropy(x, w, targets, weights=weights, reduction=reduction, **OPTIONS)
            return loss if reduction == "none" else jax.lax.psum(loss, "data")

        data = P("data")
        specs = {"in_specs": (data, P(), data, data), "out_specs": rows}
        return jax.shard_map(local, mesh=mesh, **specs)(x, w, TARGETS, weights).sum()

    total = lambda *y: ours(reduction)(*y).sum()
    got = jax.jit(jax.value_and_grad(call, (0, 1, 2)))(X, W, WEIGHTS)
    close(got, jax.value_and_grad(total, (0, 1, 2))(X, W, WEIGHTS))


@PRECISIONS
def test_on_explicit_axes(precision):
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), (AxisType.Explicit,) * 2)
    place = lambda y, *spec: jax.device_put(y, jax.NamedSharding(mesh, P(*spec)))
    with jax.set_mesh(mesh):
        given = place(X, "data"), place(W, None, "tensor"), place(WEIGHTS, "data")
        assert jax.typeof(ours("none", precision)(*given)).sharding.spec == P("data", None)
        gradient = jax.grad(ours("mean", precision), (0, 1))
        close(jax.jit(gradient)(*given), gradient(X, W, WEIGHTS))


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_no_token_and_one_token(shape, reduction):
    x, targets = jnp.ones((*shape, DEPTH)), jnp.ones(shape, jnp.int32)
    loss = lambda x, w: linear_cross_entropy(x, w, targets, reduction=reduction).sum()
    value, gradients = jax.value_and_grad(loss, (0, 1))(x, W)
    assert [y.shape for y in gradients] == [x.shape, W.shape]
    want = 0 if 0 in shape else jax.nn.logsumexp(x @ W) - (x @ W)[1]
    np.testing.assert_allclose(value, want, rtol=1e-5)


def test_explain():
    plan = explain(linear_cross_entropy, X, W, TARGETS, reduction="mean")
    assert plan.implementation == "xla"


ORDERS = {
    "h200 mean": ("h200", "mean", 128, "mosaic_gpu"),
    "h200 sum": ("h200", "sum", 128, "mosaic_gpu"),
    "h200 none": ("h200", "none", 128, "xla"),
    "h200 odd vocabulary": ("h200", "mean", 129, "xla"),
    "a100 mean": ("a100", "mean", 128, "xla"),
}


@pytest.mark.parametrize(("device", "reduction", "vocabulary", "want"), ORDERS.values(), ids=list(ORDERS))
def test_the_first_implementation(device, reduction, vocabulary, want):
    x, w = jnp.ones((4, 64), jnp.bfloat16), jnp.ones((64, vocabulary), jnp.bfloat16)
    plan = explain(linear_cross_entropy, x, w, jnp.zeros(4, jnp.int32), reduction=reduction, device=device)
    assert plan.implementation == want


def test_several_devices_keep_w_sharded(monkeypatch):
    """Under jit on a host of several devices XLA may shard w; a concrete array on one device is not sharded."""
    monkeypatch.setattr(jax, "device_count", lambda *_: 2)
    x, w = jnp.ones((4, 64), jnp.bfloat16), jnp.ones((64, 128), jnp.bfloat16)
    chosen = lambda x, w: (
        explain(linear_cross_entropy, x, w, jnp.zeros(4, jnp.int32), reduction="mean", device="h200").implementation
    )
    found = []
    jax.jit(lambda x, w: found.append(chosen(x, w)))(x, w)
    with on_one_device():
        jax.jit(lambda x, w: found.append(chosen(x, w)))(x, w)
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))):
        jax.jit(lambda x, w: found.append(chosen(x, w)))(x, w)
    assert [*found, chosen(x, w)] == ["xla", *["mosaic_gpu"] * 3]


BAD = {
    "w": ({"w": W.T}, ValueError, "w: got shape (37, 16), want [D, V] with x's D = 16"),
    "no vocabulary": ({"w": W[:, :0]}, ValueError, "w: got shape (16, 0), want [D, V] with one entry"),
    "targets": ({"targets": TARGETS[:1]}, ValueError, "targets: got shape (1, 7), want x's (3, 7)"),
    "float targets": ({"targets": TARGETS * 1.0}, TypeError, "targets: got dtype float32, want integers"),
    "x": ({"x": X.astype(int)}, TypeError, "x: got dtype int32, want bfloat16, float16 or float32"),
    "weights": ({"weights": WEIGHTS[0]}, ValueError, "weights: got shape (7,), want x's (3, 7)"),
    "bool weights": ({"weights": WEIGHTS > 0}, TypeError, "weights: got dtype bool, want bfloat16"),
    "reduction": ({"reduction": "max"}, ValueError, "reduction: got 'max', want 'none', 'mean' or 'sum'"),
    "smoothing": ({"label_smoothing": 1.5}, ValueError, "label_smoothing: got 1.5, want a number from 0 to 1"),
    "z_loss": ({"z_loss": -1.0}, ValueError, "z_loss: got -1.0, want a number of 0 or more"),
    "softcap": ({"softcap": 0.0}, ValueError, "softcap: got 0.0, want a number above 0, or None"),
    "ignore_index": ({"ignore_index": 0.5}, TypeError, "ignore_index: got float, want an int"),
    "implementation": ({"implementation": "cudnn"}, ValueError, "implementation"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    change, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        linear_cross_entropy(**({"x": X, "w": W, "targets": TARGETS} | change))


@pytest.mark.parametrize(("reduction", "steps"), [("sum", 4), ("none", 3)])
def test_a_memory_limit_makes_smaller_tiles(reduction, steps):
    """16 tokens of 1536 logits: tiles of 4 tokens, or chunks of 512 logits, the fewest, forward and backward."""
    x, w, targets = normal(16, 8), normal(8, 1536, seed=1), jnp.arange(16)
    loss = lambda x, w: linear_cross_entropy(x, w, targets, reduction=reduction, implementation="xla").sum()
    call = jax.value_and_grad(loss, (0, 1))
    whole = call(x, w)
    with memory_limit(4 * 4 * 1536):
        traced = jax.jit(call).trace(x, w)
        close(traced.lower().compile()(x, w), whole)
    text = str(traced.jaxpr)
    assert max(int(length) for length in re.findall(r"length=(\d+)", text)) == steps


def test_a_large_memory_limit_makes_no_larger_tiles(small_tiles):
    traced = lambda: str(jax.make_jaxpr(jax.grad(ours("sum"), (0, 1)))(X, W, WEIGHTS))
    free = traced()
    with memory_limit(2**40):
        assert traced() == free
