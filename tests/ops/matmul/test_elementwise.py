"""check_elementwise: the functions that it accepts as activations, and the functions that it refuses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels.ops.matmul.elementwise import check_elementwise

TABLE, ONE = jnp.arange(5.0), jnp.array([2.0])
ROOT = lambda z: jax.lax.fori_loop(0, 3, lambda i, y: y - (y * y - z) / (2 * y + 1e-3), z)
TAKEN = {
    "gelu": jax.nn.gelu,
    "exact_gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "mish": lambda z: z * jnp.tanh(jax.nn.softplus(z)),
    "relu6": jax.nn.relu6,
    "squareplus": jax.nn.squareplus,
    "squared_relu": lambda z: jnp.square(jax.nn.relu(z)),
    "zeros": lambda z: jnp.where(z > 0, z, jnp.zeros_like(z)),
    "number_of_an_array": lambda z: z * TABLE[1],
    "array_of_one": lambda z: z * ONE,
    "jitted": jax.jit(lambda z: z * TABLE[1]),
    "polynomial": lambda z: jnp.polyval(TABLE, z),
    "interpolated": lambda z: jnp.interp(z, TABLE, TABLE * TABLE),
    "looked_up": lambda z: TABLE[jnp.clip(z, 0, 4).astype(int)],
    "loop": ROOT,
    "while": lambda z: jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.sin(c[0]), c[1] + 1), (z, 0))[0],
    "vectorized": jnp.vectorize(lambda a: jnp.where(a > 0, a, jnp.exp(a))),
    "vmap_of_branches": jax.vmap(jax.vmap(lambda a: jax.lax.cond(a > 0, jnp.sin, jnp.cos, a))),
    "derivative": lambda z: jax.vjp(jnp.tanh, z)[1](jnp.ones_like(z))[0],
    "checkpointed": jax.checkpoint(jnp.sin),
    "nan": lambda z: jnp.where(z > 0, z, jnp.nan),
    "callback": lambda z: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(z.shape, z.dtype), z),
    "narrow": lambda z: jnp.tanh(z.astype(jnp.bfloat16)),
}
REFUSED = {
    "softmax": (jax.nn.softmax, "with reduce_max, reduce_sum, want an elementwise function"),
    "rolled": (lambda z: jnp.roll(z, 1, 0), "with concatenate, slice"),
    "reversed": (lambda z: z[::-1], "with rev"),
    "first": (lambda z: z - z[:, :1], "with slice"),
    "taken": (lambda z: z.at[jnp.array([1, 0])].get(mode="clip"), "with gather"),
    "repeated": (lambda z: jnp.broadcast_to(z, (4, *z.shape))[1], "with slice"),
    "outer": (lambda z: (z.reshape(-1, 1) * z.reshape(1, -1)).sum(0).reshape(z.shape), "with reduce_sum"),
    "largest": (lambda z: jax.lax.top_k(z, 3)[0], "with top_k"),
    "fft": (lambda z: jnp.fft.fft(z).real, "with fft"),
    "transposed": (lambda z: z.T.reshape(z.shape), "with transpose"),
    "product": (lambda z: z @ jnp.eye(z.shape[1]), "with dot_general"),
    "loop_until_all": (
        lambda z: jax.lax.while_loop(lambda y: (y > 0).any(), lambda y: y - 1, z),
        "with reduce_or",
    ),
    "sum_that_is_carried": (
        lambda z: jax.lax.fori_loop(0, 3, lambda i, y: z + y.sum(), jnp.zeros_like(z)),
        "with reduce_sum",
    ),
    "places": (lambda z: z * jnp.arange(z.shape[-1]), "with mul with an array"),
    "jitted_places": (jax.jit(lambda z: z * jnp.arange(z.shape[-1])), "with mul with an array"),
    "dropout": (lambda z: z * jax.random.bernoulli(jax.random.key(0), 0.5, z.shape), "with mul with an array"),
    "size": (lambda z: z / z.size, "that depends on its argument's shape"),
    "rows": (lambda z: jnp.sin(z) if z.shape[0] == 2 else jnp.cos(z) * 2, "that depends on its argument's shape"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_accepted(name):
    check_elementwise(TAKEN[name])


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(f"activation: got a function {message}")):
        check_elementwise(function)


def test_traced_array_in_a_jitted_function():
    def loss(a):
        check_elementwise(jax.jit(lambda z: z * a))
        return a

    with pytest.raises((ValueError, TypeError), match="activation: "):
        jax.grad(loss)(2.0)
