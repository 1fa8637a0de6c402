"""MixtureOfExperts against a dense float64 form that runs every expert on every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_kernels import gated_matmul, matmul
from jax_kernels.models import GatedMLP, MixtureOfExperts
from jax_kernels.models.layers.pairs import Pairs
from jax_kernels.models.layers.routing import Routing, largest, route
from jax_kernels.testing import rms_error
from tests.support.oracles.experts import dense_experts

DIM, WIDTH, EXPERTS, EACH = 24, 40, 6, 2
X = jnp.asarray(np.random.default_rng(0).standard_normal((3, 11, DIM)), jnp.float32)
CASES = {
    "softmax": {},
    "sigmoid": {"scores": "sigmoid", "weight_scale": 2.5, "balance_bias": True},
    "raw_weights": {"renormalize": False},
    "no_gate": {"gated": False, "activation": "relu"},
    "shared": {"shared_experts": 2},
    "one_each": {"experts_per_token": 1, "renormalize": False},
    "all_experts": {"experts_per_token": EXPERTS},
    "one_expert": {"num_experts": 1, "experts_per_token": 1, "renormalize": False},
}


def made(**changes):
    options = {"num_experts": EXPERTS, "experts_per_token": EACH} | changes
    module = MixtureOfExperts(DIM, WIDTH, **options, rngs=nnx.Rngs(0))
    if module.expert_bias is not None:
        module.expert_bias[...] = jnp.linspace(-0.3, 0.3, module.num_experts)
    return module


def weighted(out, loss):
    """One number that depends on all results."""
    return (jnp.sin(out) * jnp.arange(1, out.size + 1).reshape(out.shape) / out.size).sum() + 3 * loss


def flat(state):
    return {".".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(state)}


def check_against_dense(module, x, rtol=2e-6):
    """The result, the balance loss, and the gradients of x and of all parameters."""
    loss = lambda module, x: weighted(*(lambda out, of: (out, of.balance_loss))(*module.with_routing(x)))
    out, routing = nnx.jit(lambda module, x: module.with_routing(x))(module, x)
    got_parameters, got_x = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(module, x)
    with jax.enable_x64(True):
        p = {name: jnp.asarray(np.asarray(y), jnp.float64) for name, y in flat(nnx.state(module, nnx.Param)).items()}
        wide = jnp.asarray(np.asarray(x), jnp.float64)
        want, balance = dense_experts(module, p, wide.reshape(-1, DIM))
        of = lambda p, x: weighted(
            *(lambda out, loss: (out.reshape(x.shape), loss))(*dense_experts(module, p, x.reshape(-1, DIM)))
        )
        want_parameters, want_x = jax.grad(of, (0, 1))(p, wide)
    assert rms_error(np.asarray(out).reshape(want.shape), np.asarray(want)) < rtol
    np.testing.assert_allclose(routing.balance_loss, balance, rtol=1e-5)
    assert rms_error(np.asarray(got_x), np.asarray(want_x)) < 10 * rtol
    got = flat(got_parameters)
    assert got.keys() == want_parameters.keys()
    for name, gradient in want_parameters.items():
        size = np.abs(np.asarray(gradient)).max()
        np.testing.assert_allclose(np.asarray(got[name]), gradient, atol=30 * rtol * max(size, 1e-3), err_msg=name)
    return routing


@pytest.mark.parametrize("name", CASES)
def test_against_every_expert_on_every_token(name):
    module = made(**CASES[name])
    routing = check_against_dense(module, X)
    assert int(routing.load.sum()) == 33 * module.experts_per_token


def test_no_token_is_dropped_from_a_full_expert():
    """All tokens choose the same two experts; the others have no token, and a gradient of 0 in their matrices."""
    module = made(balance_bias=True)
    loads = [33, 0, 33, 0, 0, 0]
    module.expert_bias[...] = jnp.zeros(EXPERTS).at[jnp.array([0, 2])].set(9.0)
    assert check_against_dense(module, X).load.tolist() == loads
    gradient = nnx.grad(lambda module: module(X).sum())(module)
    is_moving = [bool(np.asarray(gradient["up_proj"][...][e]).any()) for e in range(EXPERTS)]
    assert is_moving == [load > 0 for load in loads]


def test_ties_take_the_first_experts():
    module = made()
    module.router[...] = jnp.zeros_like(module.router[...])
    routing = check_against_dense(module, X)
    assert routing.load.tolist() == [33, 33, 0, 0, 0, 0]
    np.testing.assert_allclose(routing.balance_loss, 1.0, rtol=1e-6)


def test_a_token_depends_on_no_other():
    module = made()
    bad = X.at[1, 4].set(jnp.nan)
    out, want = module(bad), module(X)
    assert np.isnan(out[1, 4]).all()
    keep = np.ones((3, 11), bool)
    keep[1, 4] = False
    np.testing.assert_array_equal(out[keep], want[keep])


def test_the_router_is_in_float32():
    """Two logits that bfloat16 cannot tell apart: the choice goes by the difference."""
    x = jnp.ones((1, DIM), jnp.bfloat16)
    module = made(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, experts_per_token=1)
    kernel = np.zeros((DIM, EXPERTS), np.float32)
    kernel[0], kernel[0, 3] = 1.0, 1.0 + 1e-4
    module.router[...] = jnp.asarray(kernel)
    assert module.router.dtype == jnp.float32
    out, routing = module.with_routing(x)
    assert out.dtype == jnp.bfloat16
    assert routing.load.tolist() == [0, 0, 0, 1, 0, 0]


def test_bfloat16_is_near_float32():
    module, exact = made(dtype=jnp.bfloat16, shared_experts=1), made(shared_experts=1)
    x = X.astype(jnp.bfloat16)
    loss = lambda module, x: jnp.sin(module(x).astype(jnp.float32)).sum()
    got, want = (nnx.grad(loss, argnums=(0, 1))(m, y) for m, y in ((module, x), (exact, x.astype(jnp.float32))))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert rms_error(np.asarray(a, np.float32), np.asarray(b, np.float32)) < 0.03


def test_residual_shapes_and_one_expert():
    """One expert without renormalisation has the weight 1, and is a GatedMLP."""
    module, mlp = made(**CASES["one_expert"]), GatedMLP(DIM, WIDTH, rngs=nnx.Rngs(0))
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(mlp, name).kernel[...] = getattr(module, name)[...][0]
    for shape in ((DIM,), (5, DIM), (2, 3, 4, DIM), (0, DIM)):
        x = jnp.linspace(-1, 1, int(np.prod(shape))).reshape(shape)
        np.testing.assert_allclose(module(x, residual=x), mlp(x) + x, atol=2e-6)


def test_residual_keeps_its_dtype():
    """As in a GatedMLP: a module with a dtype of its own casts the residual, another one promotes the result."""
    x, residual = X.astype(jnp.bfloat16), X + 2**-12
    module = made(param_dtype=jnp.bfloat16)
    out = module(x, residual=residual)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out - residual, module(x).astype(jnp.float32), atol=0.02)
    assert made(dtype=jnp.bfloat16)(x, residual=residual).dtype == jnp.bfloat16


@pytest.mark.slow
def test_second_derivatives_and_forward_mode():
    module = made(num_experts=3)
    graphdef, state = nnx.split(module)
    f = lambda x: jnp.sin(nnx.merge(graphdef, state)(x)).sum()
    x, direction = X[0, :2], jnp.ones((2, DIM))
    pushed = jax.jvp(f, (x,), (direction,))[1]
    np.testing.assert_allclose(pushed, (jax.grad(f)(x) * direction).sum(), rtol=1e-4)
    moved = jax.jvp(jax.grad(f), (x,), (direction,))[1]
    np.testing.assert_allclose((moved * direction).sum(), jax.hessian(lambda t: f(x + t * direction))(0.0), rtol=1e-3)


def test_balance_loss_is_between_1_and_the_number_of_experts():
    alone = jnp.array([0, 8, 0, 0])
    even = jnp.full(4, 2)
    loss = lambda load: float(Routing(load=load, probability=load.astype(jnp.float32)).balance_loss)
    assert (loss(alone), loss(even), loss(0 * even)) == (4.0, 1.0, 0.0)
    both = Routing(load=jnp.stack([alone, even]), probability=jnp.stack([alone, even]).astype(jnp.float32))
    np.testing.assert_array_equal(both.balance_loss, [4, 1])
    np.testing.assert_array_equal(both.largest_load, [4, 1])


def test_the_balance_loss_evens_the_load():
    module = made(experts_per_token=1)
    x = jax.random.normal(jax.random.key(0), (512, DIM)) + 1.0
    step = nnx.jit(nnx.value_and_grad(lambda module: module.with_routing(x)[1].balance_loss))
    losses = []
    for _ in range(60):
        loss, gradient = step(module)
        losses.append(float(loss))
        module.router[...] -= 0.1 * gradient["router"][...]
    assert losses[0] > 1.2
    assert losses[-1] < 1.0 + (losses[0] - 1) / 4


def test_the_bias_evens_the_load_without_a_loss():
    module = made(balance_bias=True, scores="sigmoid")
    module.expert_bias[...] = jnp.zeros(EXPERTS)
    x = jax.random.normal(jax.random.key(0), (512, DIM)) + 1.0
    step = nnx.jit(lambda module: module.with_routing(x)[1])
    first = step(module)
    for _ in range(150):
        module.update_bias(step(module).load, rate=5e-3)
    assert float(first.largest_load) > 1.5
    assert float(step(module).largest_load) < 1.1


def test_the_bias_moves_by_the_sign():
    module = made(balance_bias=True)
    before = np.asarray(module.expert_bias[...])
    module.update_bias(jnp.array([0, 1, 2, 2, 3, 4]), rate=0.25)
    np.testing.assert_allclose(module.expert_bias[...] - before, [0.25, 0.25, 0, 0, -0.25, -0.25], atol=1e-6)


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
@pytest.mark.parametrize("low", [-1e9, -300.0, -100.0, -88.0, -60.0, -3.0])
def test_weights_of_tiny_scores(scores, low):
    """Scores that underflow keep their ratios, and gradients that are finite; the bias chooses the experts."""
    logits = jnp.array([[low, low - 1, 0.0 if scores == "softmax" else low, low]])
    bias = jnp.array([2.0, 2.0, 0.0, 0.0])
    given = {"count": 2, "scores": scores, "renormalize": True, "scale": 2.0}

    def of(logits, dtype=np.float64):
        logits = np.asarray(logits, dtype)
        logs = logits if scores == "softmax" else -np.logaddexp(0, -logits)
        ratios = lambda logs: np.exp(logs - logs.max()) / np.exp(logs - logs.max()).sum()
        return 2 * ratios(logs[0, :2]), ratios(logs[0])

    weights, experts, routing = route(jnp.ones((1, 1)), logits, bias, **given)
    assert experts.tolist() == [[0, 1]]
    for got, want in zip((weights[0], routing.probability), of(logits), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-30)

    def loss(logits):
        weights, _, routing = route(jnp.ones((1, 1)), logits, bias, **given)
        return (weights * jnp.array([1.0, 3.0])).sum() + (routing.probability * jnp.arange(4.0)).sum()

    gradient = jax.grad(loss)(logits)
    assert np.isfinite(gradient).all()
    if low > -1e6:  # float64 differences
        wide = np.asarray(logits, np.float64)
        value = lambda wide: (of(wide)[0] * [1, 3]).sum() + (of(wide)[1] * np.arange(4)).sum()
        steps = 1e-5 * np.eye(4)[:, None]
        want = [(value(wide + step) - value(wide - step)) / 2e-5 for step in steps]
        np.testing.assert_allclose(gradient[0], want, atol=1e-5)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_weights_are_the_scores_over_their_sum(scores, renormalize):
    """At ordinary logits, and at infinite ones, which leave an expert out."""
    x, kernel = jnp.eye(64), jnp.asarray(np.random.default_rng(3).normal(size=(64, 8)) * 4, jnp.float32)
    given = {"count": 3, "scores": scores, "renormalize": renormalize, "scale": 1.5}
    weights, experts, routing = route(x, kernel, None, **given)
    found = jax.nn.softmax(kernel) if scores == "softmax" else jax.nn.sigmoid(kernel)
    chosen = jnp.take_along_axis(found, experts, axis=-1)
    want = chosen / chosen.sum(-1, keepdims=True) if renormalize else chosen
    np.testing.assert_allclose(weights, 1.5 * want, rtol=2e-6)
    np.testing.assert_allclose(routing.probability, (found / found.sum(-1, keepdims=True)).sum(0), rtol=2e-6)
    low = jnp.full((1, 8), -jnp.inf).at[0, :2].set(jnp.array([0.0, 1.0]))
    weights, experts, _ = route(jnp.ones((1, 1)), low, None, **given)
    assert experts[0, :2].tolist() == [1, 0]
    assert weights[0, 2] == 0
    assert np.isfinite(weights).all()


def test_logits_of_16_bits_are_exact():
    """The weights, and the gradients of a bfloat16 x and the float32 kernel, against float64."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((40, 256)), jnp.bfloat16)
    kernel = jnp.asarray(rng.standard_normal((256, EXPERTS)) / 3, jnp.float32)
    of_weights = jnp.asarray(rng.standard_normal((40, EXPERTS)), jnp.float32)
    given = {"count": EXPERTS, "scores": "softmax", "renormalize": False, "scale": 1.0}
    (weights, experts, _), vjp = jax.vjp(lambda x, kernel: route(x, kernel, None, **given), x, kernel)
    zeros = np.zeros(experts.shape, jax.dtypes.float0)
    of_routing = Routing(load=np.zeros(EXPERTS, jax.dtypes.float0), probability=jnp.zeros(EXPERTS))
    dx, dkernel = vjp((of_weights, zeros, of_routing))
    logits = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    assert (experts == np.argsort(-p, axis=1)).all()
    dp = np.zeros_like(p)
    np.put_along_axis(dp, np.asarray(experts), np.asarray(of_weights, np.float64), axis=1)
    dlogits = p * (dp - (dp * p).sum(1, keepdims=True))
    assert rms_error(weights, np.take_along_axis(p, np.asarray(experts), axis=1)) < 1e-6
    assert rms_error(dkernel, np.asarray(x, np.float64).T @ dlogits) < 1e-6
    want = dlogits @ np.asarray(kernel, np.float64).T
    assert dx.dtype == jnp.bfloat16
    assert rms_error(dx, want) < 1.05 * rms_error(jnp.asarray(want, jnp.bfloat16), want)
    tangent = jax.jvp(lambda x: route(x, kernel, None, **given)[0], (x,), (jnp.ones_like(x),))[1]
    assert np.isfinite(tangent).all()


@pytest.mark.parametrize("gated", [True, False])
def test_one_expert_of_8_bits_is_a_dense_matmul(gated):
    """The result and all gradients equal the dense 8-bit matmuls, but for the gradients of weights in 16 bits."""
    module = made(num_experts=1, experts_per_token=1, gated=gated, precision="fp8")
    row = {"precision": "fp8", "scaling": "row", "implementation": "xla"}

    def dense(x, up, down, gate):
        if gate is None:
            return matmul(matmul(x, up, activation="silu", **row), down, **row)
        return matmul(gated_matmul(x, gate, up, activation="silu", **row), down, **row)

    kernels = [None if y is None else y[...][0] for y in (module.up_proj, module.down_proj, module.gate_proj)]
    want, vjp = jax.vjp(dense, X, *kernels)
    got, of_module = jax.vjp(lambda module, x: module(x), module, X)
    assert rms_error(got, want) < 1e-6
    dmodule, dx = of_module(jnp.sin(want))
    dx_want, *dkernels = vjp(jnp.sin(want))
    # Both cotangents of a grouped gated unit share the scales of rows; otherwise a value may round to its neighbour.
    assert rms_error(dx, dx_want) < (0.05 if gated else 1e-3)
    for name, of_kernel in zip(("up_proj", "down_proj", "gate_proj"), dkernels, strict=True):
        if of_kernel is not None:
            assert rms_error(flat(nnx.state(dmodule))[name][0], of_kernel) < 0.05, name


def test_experts_of_8_bits():
    """Near the experts of 32 bits, but not nearer than 8 bits are; the router is the same."""
    module, plain = made(precision="fp8", shared_experts=1), made(shared_experts=1)
    (got, routing), (want, of_plain) = module.with_routing(X), plain.with_routing(X)
    assert 0.005 < rms_error(got, want) < 0.06
    assert routing.load.tolist() == of_plain.load.tolist()
    loss = lambda module, x: (module(x) ** 2).sum()
    (got, dx), (want, of_plain) = (nnx.grad(loss, argnums=(0, 1))(of, X) for of in (module, plain))
    assert rms_error(dx, of_plain) < 0.12
    for name, gradient in flat(want).items():
        assert rms_error(flat(got)[name], gradient) < 0.12, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("width", [6, 7])
def test_rows_of_tokens(width, dtype):
    """The rows of each expert, and all derivatives, some pairs without a row. Values of 16 bits are copied in words."""
    rng = np.random.default_rng(0)
    pairs = Pairs.of(jnp.array([[2, 0], [1, 3], [0, 2], [3, 1]]), 3)  # 3 is an expert of another device
    x, dx = (jnp.asarray(rng.standard_normal((4, width)), dtype) for _ in range(2))
    drows = jnp.asarray(rng.standard_normal((8, width)), dtype)
    order = np.array([1, 4, 2, 7, 0, 5, 3, 6])
    assert pairs.order.tolist() == order.tolist()
    rows, of_dx = jax.jvp(pairs.rows, (x,), (dx,))
    assert rows.dtype == dtype
    assert jnp.array_equal(rows, x[order // 2])
    assert jnp.array_equal(of_dx, dx[order // 2])
    want = np.zeros((4, width))
    np.add.at(want, order // 2, np.asarray(drows, np.float64))
    found = jax.vjp(pairs.rows, x)[1](drows)[0]
    assert jnp.array_equal(found, jnp.asarray(want.astype(np.float32), dtype))
    square = lambda x: (pairs.rows(x) ** 2).sum()
    moved = jax.jvp(jax.grad(square), (x,), (dx,))[1]
    np.testing.assert_allclose(moved.astype(float), 4 * dx.astype(float), rtol=0.02)
    assert jnp.array_equal(jax.jacrev(pairs.rows)(x), jax.jacfwd(pairs.rows)(x))


def test_rows_of_fewer_experts_than_a_token_has():
    """A token's experts differ, so that it has at most one row of a single expert."""
    pairs = Pairs.of(jnp.array([[0, 1], [1, 1], [1, 0]]), 1, skips=True)
    assert pairs.order.tolist() == [0, 5, 1]
    assert pairs.live_count == pairs.sizes.sum() == 2
    assert Pairs.of(jnp.array([[0, 1]]), 2).live_count is None


@pytest.mark.parametrize("count", [254, 255, 256, 300])
def test_order_of_many_experts(count):
    """Experts from 0 to `count`, `count` for experts of other devices, also beyond 8 bits."""
    experts = np.random.default_rng(0).permutation(count + 1)[:, None]
    pairs = Pairs.of(jnp.asarray(experts), count)
    assert experts[np.asarray(pairs.order), 0].tolist() == list(range(count + 1))


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_the_largest_scores(count):
    """As lax.top_k finds them: equal scores, infinities and NaN in the order of their indices, each index once."""
    special = jnp.array([0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan, 1.0, 1.0, -1.0])
    scores = jax.random.choice(jax.random.key(0), special, (400, 12))
    scores = scores.at[0].set(-jnp.inf).at[1].set(0.0).at[2].set(jnp.nan)
    want = jax.lax.top_k(jnp.where(scores == 0, 0.0, scores), count)[1]
    np.testing.assert_array_equal(jax.jit(largest, static_argnums=1)(scores, count), want)


ERRORS = {
    "dim": ({"model_dim": -1}, ValueError, "model_dim: got -1, want 0 or more"),
    "experts": ({"num_experts": 0}, ValueError, "num_experts: got 0, want 1 or more"),
    "each": ({"experts_per_token": 7}, ValueError, "experts_per_token: got 7, want 1 to 6"),
    "scores": ({"scores": "tanh"}, ValueError, "scores='tanh' must be 'softmax' or 'sigmoid'"),
    "gated": ({"gated": 1}, TypeError, "gated: got int, want a bool"),
    "scale": ({"weight_scale": 0}, ValueError, "weight_scale=0 must be positive"),
    "shared": ({"shared_experts": 1, "gated": False}, ValueError, "shared_experts: got 1 with gated=False, want 0"),
    "activation": ({"activation": None}, TypeError, "activation: got None, want a name"),
    "rules": ({"rules": {}}, TypeError, "rules: got dict, want ShardingRules"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_arguments_are_named(name):
    options, error, message = ERRORS[name]
    given = {"model_dim": DIM, "mlp_dim": WIDTH, "num_experts": EXPERTS, "experts_per_token": EACH} | options
    with pytest.raises(error, match=message):
        MixtureOfExperts(**given, rngs=nnx.Rngs(0))


def test_bad_inputs_are_named():
    module = made()
    with pytest.raises(ValueError, match=r"x: got float32 \(3, 5\), want floats \[..., model_dim\] = \[..., 24\]"):
        module(jnp.ones((3, 5)))
    with pytest.raises(ValueError, match="balance_bias: got False, want True"):
        module.update_bias(jnp.ones(EXPERTS))
    with pytest.raises(ValueError, match=r"load: got shape \(3,\), want \[num_experts\] = \(6,\)"):
        made(balance_bias=True).update_bias(jnp.ones(3))


def test_group_sizes_stay_on_the_device():
    """One program serves all loads: a second call, with another load, compiles nothing."""
    module, traces = made(balance_bias=True), []

    @nnx.jit
    def call(module, x):
        traces.append(x.shape)
        return module(x)

    call(module, X)
    module.expert_bias[...] = jnp.arange(EXPERTS, dtype=jnp.float32)
    call(module, X)
    assert len(traces) == 1
