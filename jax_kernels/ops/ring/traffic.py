"""The work of each device in a call of ring_attention, and the bytes that a device sends."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.ops.ring.layouts import DOCUMENTS, Layout
from jax_kernels.tracing.jaxprs import jaxprs_in_params

__all__ = ["pairs_of_devices", "sent_bytes", "work_shares"]

# By primitive, the bytes that each of n devices sends for one byte of its operand.
_SENDS: dict[str, Callable[[int], float]] = {
    "ppermute": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "psum": lambda n: 2 * (n - 1) / n,
}


def pairs_of_devices(layout: Layout, strategy: str) -> tuple[float, ...]:
    """For each device, the pairs of a query and a key that the layout's limits keep, divided by the number of heads.

    With "all_to_all" a device has a part of the heads for all tokens, else all heads for its own tokens.
    """
    length = layout.devices * layout.length
    if layout.name == DOCUMENTS:  # the positions are data; the documents can only leave fewer pairs
        all_pairs = length * (length + 1) / 2 if layout.right == 0 else float(length) ** 2
        return (all_pairs / layout.devices,) * layout.devices

    def pairs(device: int) -> float:
        positions = layout.tokens(device)
        first = 0 if layout.left is None else np.maximum(positions - layout.left, 0)
        last = length - 1 if layout.right is None else np.minimum(positions + layout.right, length - 1)
        return float(np.sum(np.broadcast_to(np.maximum(last - first + 1, 0), positions.shape)))

    found = tuple(pairs(device) for device in range(layout.devices))
    return (sum(found) / layout.devices,) * layout.devices if strategy == "all_to_all" else found


def work_shares(layout: Layout, strategy: str) -> tuple[float, ...]:
    """Each device's share of the pairs of all devices."""
    pairs = pairs_of_devices(layout, strategy)
    return tuple(x / sum(pairs) for x in pairs)


def sent_bytes(function: Callable[[], Any], axis_name: str, devices: int) -> float:
    """The bytes that a device sends along a mesh axis in function(), which is traced. Must run inside the shard_map.

    An all-gather and a sum count as in a ring of the devices, which sends the least bytes. devices: of the axis.
    """
    return _sent(jax.make_jaxpr(function)().jaxpr, axis_name, devices)


def _sent(jaxpr: Any, axis_name: str, devices: int) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name.removesuffix("_invariant")
        axes = equation.params.get("axis_name", equation.params.get("axes", ()))
        if name in _SENDS and axis_name in (axes if isinstance(axes, tuple | list) else (axes,)):
            operands = [x.aval for x in equation.invars]
            given = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in operands)
            total += given * _SENDS[name](devices)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        total += times * sum(_sent(inner, axis_name, devices) for inner in jaxprs_in_params(equation.params))
    return total
