"""The request of a call, without running the call."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.dispatch import Request, on_device
from jax_kernels.ops.planned_op import TunableCall, tuned_by

__all__ = ["request_of"]


class _Recorder:
    """A Tuner that takes the request of a call."""

    lists_composed = False
    request: Request

    def tuned(self, tunable: TunableCall) -> tuple[Any, Any]:
        self.request = tunable.request
        return tunable.call, tunable.inputs

    def composed(self, tunable: TunableCall) -> Any:
        return tunable.inputs


def request_of(op: Callable[..., Any], *shapes: tuple[int, ...], gpu: str = "h200", **arguments: Any) -> Any:
    """The request of op(*arrays, **arguments) with bfloat16 arrays of these shapes, on a GPU that may be absent."""
    recorder = _Recorder()
    specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with on_device(gpu), tuned_by(recorder):
        jax.eval_shape(functools.partial(op, **arguments), *specs)
    return recorder.request
