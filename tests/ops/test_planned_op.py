"""The machinery that all ops use, tested with an op of two lines."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import dilated_attention, explain, flash_attention, gated_matmul, matmul, mlp, rms_norm
from jax_kernels.device import device_info
from jax_kernels.dispatch import Implementation, Request, without_blocks
from jax_kernels.ops.planned_op import Blocks, PlannedOp, batched, join_batch, kernel, split_batch
from jax_kernels.tracing.promotion import under_defaults


@dataclasses.dataclass(frozen=True)
class ScaleRequest(Request):
    length: int


def _scaled(x, y, *, options, config, core_count, interpret):
    assert (config, core_count, interpret) == ("blocks of 8", 3, False)
    assert not jax.config.jax_enable_x64
    return x * options + (0 if y is None else y), x.sum(axis=1)


def _check(*, x, y, scale, implementation):
    return ScaleRequest("scale", device_info("a100"), x.shape[1]), (x, y)


def scale(x, y=None, *, scale=2.0, implementation=None):
    request, arrays = _check(x=x, y=y, scale=scale, implementation=implementation)
    return batched(OP, OP.call(request, scale, implementation))(*arrays)


TABLE = {
    "short": Implementation(
        "short",
        lambda request: "it takes up to 4" if request.length > 4 else None,
        lambda request: (Blocks(forward="blocks of 8", core_count=3), "this test"),
        kernel(_scaled),
        None,
    ),
    "any": Implementation(
        "any", lambda request: None, without_blocks,
        lambda x, y, *, options, config, interpret: (x * options + (0 if y is None else y), x.sum(axis=1)), None,
    ),
}  # fmt: skip
OP = PlannedOp("scale", TABLE, lambda request: (("short", "any"), "an order of this test"))
OP.explained_by(_check)(scale)


@pytest.fixture(autouse=True)
def _no_interpret(no_interpret):
    pass


def test_plan_matches_the_call():
    x = jnp.ones((2, 3))
    assert explain(scale, x).implementation == "short"
    assert explain(scale, jnp.ones((2, 5))).passed_over == (("short", "it takes up to 4"),)
    assert explain(scale, x, implementation="any").why == "asked for by name"
    assert "blocks of 8" in str(explain(scale, x))
    with pytest.raises(TypeError, match=r"scale takes 2 positional arguments \(x, y\), got 3"):
        explain(scale, x, x, 2.0)
    with pytest.raises(TypeError, match="scale got an unexpected keyword argument 'scales'"):
        explain(scale, x, scales=2.0)
    with pytest.raises(TypeError, match="scale missing a required argument: 'x'"):
        explain(scale)


@pytest.mark.parametrize("implementation", TABLE)
def test_vmap_joins_the_batch(implementation):
    x, y = (np.random.default_rng(i).random((4, 2, 3)).astype(np.float32) for i in range(2))
    call = lambda x, y: scale(x, y, scale=3.0, implementation=implementation)
    for in_axes, args in (((0, 0), (x, y)), ((0, None), (x, y[0])), ((1, None), (x.swapaxes(0, 1), None))):
        got = jax.vmap(call, in_axes)(*args)
        wanted = x * 3 + (0 if args[1] is None else args[1])
        np.testing.assert_allclose(got[0], wanted, rtol=1e-6)
        np.testing.assert_allclose(got[1], x.sum(axis=2), rtol=1e-6)


def test_call_is_hashable():
    request = ScaleRequest("scale", device_info("a100"), 3)
    assert batched(OP, OP.call(request, 2.0)) is batched(OP, OP.call(request, 2.0))
    assert batched(OP, OP.call(request, 2.0)) is not batched(OP, OP.call(request, 3.0))


def test_split_inverts_join():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    np.testing.assert_array_equal(split_batch(2, join_batch(2, x, True)), x)
    np.testing.assert_array_equal(split_batch(5, join_batch(5, x[0], False)), jnp.broadcast_to(x[0], (5, 3, 4)))
    np.testing.assert_array_equal(join_batch(2, x[:, :1], True, length=3).reshape(2, 3, 4)[:, 2], x[:, 0])


def test_under_defaults():
    @under_defaults
    def added(x, *, y=1):
        """Its words."""
        return x + y

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert added(jnp.ones((2, 2)), y=jnp.ones(2, jnp.bfloat16)).shape == (2, 2)
        with pytest.raises(ValueError, match="rank"):
            jnp.ones((2, 2)) + jnp.ones(2)
    assert str(inspect.signature(added)) == "(x, *, y=1)"
    assert added.__doc__ == "Its words."


@pytest.mark.parametrize("name", ["matmul", "gated_matmul", "mlp", "rms_norm", "flash_attention", "dilated_attention"])
def test_second_derivatives(name, monkeypatch):
    """Kernels raise a clear error, as for forward mode. test_forward_mode.py has the values by XLA."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    x = jax.random.normal(jax.random.key(0), (16, 16), jnp.bfloat16)
    heads = x.reshape(1, 8, 2, 16)
    pattern = {"segment_lengths": (4,), "dilation_rates": (1,)}
    calls = {
        "matmul": lambda x, **how: matmul(x, x, activation="silu", **how),
        "gated_matmul": lambda x, **how: gated_matmul(x, x, x, **how),
        "mlp": lambda x, **how: mlp(x, x, x, w_gate=x, **how),
        "rms_norm": rms_norm,
        "flash_attention": lambda x, **how: flash_attention(x, x, x, **how),
        "dilated_attention": lambda x, **how: dilated_attention(x, x, x, **pattern, **how),
    }
    given = heads if "attention" in name else x
    first = lambda x, how: jax.grad(lambda x: calls[name](x, implementation=how).astype(jnp.float32).sum())(x)
    second = lambda how: jax.grad(lambda x: (first(x, how).astype(jnp.float32) ** 2).sum())(given)
    with pytest.raises(NotImplementedError, match="second derivatives: kernels have none"):
        second("triton")
    assert jnp.abs(second("xla").astype(jnp.float32)).max() > 0
    by_kernel = functools.partial(calls[name], implementation="triton")
    message = rf"^{name}: its kernels have a derivative only in reverse mode; implementation='xla' has forward mode"
    forward_modes = (
        lambda: jax.jvp(by_kernel, (given,), (given,)),
        lambda: jax.jit(lambda x: jax.jvp(by_kernel, (x,), (x,)))(given),
        lambda: jax.jacfwd(by_kernel)(given),
        lambda: jax.jit(jax.jacfwd(by_kernel))(given),
        lambda: jax.jacfwd(jax.vmap(by_kernel))(given[None]),
        lambda: jax.vmap(jax.linearize(jax.jit(by_kernel), given)[1])(given[None]),
        lambda: jax.linearize(jax.jit(by_kernel), given)[1](given),
    )
    for push in forward_modes:
        with pytest.raises(NotImplementedError, match=message):
            push()
    with pytest.raises(NotImplementedError, match=r"only in reverse mode|second derivatives: kernels"):
        jax.jvp(lambda x: first(x, "triton"), (given,), (given,))


def test_vmapped_kernel_gradients(monkeypatch):
    """The gradient of a vmap of a kernel call, with mapped tangents, equals each call's gradient."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((3, 5, 32), (32, 16))))
    calls = {
        name: jax.vmap(functools.partial(matmul, precision="tf32", implementation=name), (0, None))
        for name in ("triton", "xla")
    }
    norms = {name: jax.vmap(functools.partial(rms_norm, implementation=name)) for name in ("triton", "xla")}
    for found in (calls, norms):
        arguments = (x, w) if found is calls else (x,)
        got, want = (jax.grad(lambda *given, of=of: jnp.square(of(*given)).sum())(*arguments) for of in found.values())
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)
