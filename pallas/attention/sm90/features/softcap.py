"""The softcap of scores in the Hopper kernels: tanh by a reciprocal, or by a polynomial for small scores."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.pallas.attention.softmax import LOG2E
from jax_kernels.pallas.mosaic.layouts import ROW
from jax_kernels.pallas.mosaic.registers import any_of_warp_above, reciprocal

# tanh(x) / x in powers of x^2, for |x| <= 0.75: the error is at most 1.2e-5, which P in bfloat16 does not resolve.
TANH_UP_TO = 0.75
TANH = (0.99998898, -0.33269671, 0.12742697, -0.03545278)


def softcapped(scores, cap: float, scale: float):
    """tanh(scores * scale / cap), without the final factor cap. Its error, times cap, is far below the rounding of
    P.
    """
    return 1 - 2 * reciprocal(1 + jnp.exp2(scores * (2 * LOG2E * scale / cap)))


def tanh_polynomial(x, factor: float, times: float = 1.0):
    """tanh(x * factor) * times by a polynomial, for |x * factor| <= 0.75 (TANH_UP_TO)."""
    powers = [coefficient * factor ** (2 * i + 1) * times for i, coefficient in enumerate(TANH)]
    square = x * x
    return x * functools.reduce(lambda total, power: total * square + power, powers[-2::-1], powers[-1])


def tanh_limits(factor: float):
    """The largest |x| for which tanh_polynomial(x, factor) is valid, repeated for 64 rows: float32 [64] in
    registers.
    """
    return plgpu.layout_cast(jnp.full((64,), TANH_UP_TO / abs(factor), jnp.float32), ROW)


def softcapped_tile(scores, cap: float, scale: float):
    """tanh(scores * scale / cap) for scores [64, n] in the layout of wgmma's results.

    A warp with only small scores uses a polynomial, which saves two of an element's three special functions.
    """
    factor = scale / cap
    limits = tanh_limits(factor)
    exact = functools.partial(softcapped, cap=cap, scale=scale)
    polynomial = functools.partial(tanh_polynomial, factor=factor)
    return lax.cond(any_of_warp_above(jnp.abs(scores), limits), exact, polynomial, scores)
