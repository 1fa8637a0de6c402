"""A typical call of an op, by which the command line and the support matrix judge the op's implementations.

The table TYPICAL of a module of jax_kernels.testing has the typical calls of the module's ops.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from jax_kernels import dispatch

__all__ = ["AXIS", "LENGTH", "TypicalCall", "on_devices", "spec"]

LENGTH = 1024
AXIS = "sequence"  # the mesh axis over which a sequence is sharded


@dataclasses.dataclass(frozen=True)
class TypicalCall:
    """A public op, and a typical call, by which `jax-kernels info` judges its implementations.

    function: the op. implementations: the names that the op knows. q_length: the number of queries of the typical call
    of an attention op, which has one batch entry, LENGTH keys and 8 heads of head_dim 128. shapes: for an op that is
    no attention, the shapes of its arrays; () for attention. dtype: of all arrays; None for the 16-bit dtype that the
    device supports. arguments: the other arguments of the call, by name. devices: the number of devices over which the
    sequence is sharded; None for a whole sequence.
    """

    function: Callable[..., Any]
    implementations: tuple[str, ...] = ("mosaic_gpu", "triton", "cudnn", "xla")
    q_length: int = LENGTH
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str | None = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    devices: int | None = None

    def plan(self, sixteen_bits: str, implementation: str) -> dispatch.Plan:
        """The Plan of the typical call by this implementation. Raises NotImplementedError if it cannot serve the call.

        sixteen_bits: the name of the dtype of arrays whose `dtype` is None.
        """
        shapes = [(1, length, 8, 128) for length in (self.q_length, LENGTH, LENGTH)]
        given = (spec(shape, self.dtype or sixteen_bits) for shape in self.shapes or shapes)
        with on_devices(self.devices):
            return dispatch.explain(self.function, *given, **self.arguments, implementation=implementation)


def on_devices(count: int | None) -> contextlib.AbstractContextManager[Any]:
    """A context manager: plans inside it see a mesh with this number of devices along AXIS; no mesh for None."""
    if count is None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(AbstractMesh((count,), (AXIS,), (AxisType.Auto,)))


def spec(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    """The ShapeDtypeStruct of an array of this shape and dtype."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
