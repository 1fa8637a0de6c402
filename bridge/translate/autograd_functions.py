"""torch.autograd.Functions in a score_mod. JAX differentiates a Function's forward.

A Function whose backward is not the derivative of its forward, such as a straight-through estimator, is refused. The
check compares numerical slopes at a few values.
"""

import inspect
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from jax_kernels.bridge.translate.torch_shapes import UnsupportedTorchOpError

__all__ = ["check"]

_NUMBERS = (-2.5, -1.25, -0.6, -0.1, 0.2, 0.75, 1.5, 3.0)
_DEEPEST = 40  # frames that are searched
_AGREES: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def check() -> None:
    """Raises UnsupportedTorchOpError if the caller runs in a Function's forward whose backward is not its derivative.

    It looks for the forward of a torch.autograd.Function among the calling frames. Elsewhere it does nothing.
    """
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None:
            return
        if frame.f_code.co_name == "forward" and (function := _of_forward(frame.f_code)) is not None:
            if not _agrees(function, frame):
                raise UnsupportedTorchOpError(
                    f"applies the torch.autograd.Function {function.__name__}, whose backward is not the derivative of "
                    "its forward as JAX takes it"
                )
            return
        frame = frame.f_back


def _of_forward(code: types.CodeType) -> type[torch.autograd.Function] | None:
    """The torch.autograd.Function whose forward has this code; None if there is none."""
    for kind in _every(torch.autograd.Function):
        if getattr(vars(kind).get("forward"), "__func__", None) is not None and kind.forward.__code__ is code:
            return kind
    return None


def _every(kind: type[torch.autograd.Function]) -> Iterator[type[torch.autograd.Function]]:
    for below in kind.__subclasses__():
        yield below
        yield from _every(below)


def _agrees(function: type[torch.autograd.Function], frame: types.FrameType) -> bool:
    """Whether the Function's backward is the derivative of its forward; tested once. frame: a call of its forward."""
    found = _AGREES.get(function)
    if found is None:
        _AGREES[function] = True  # during the check
        try:
            found = _is_derivative(function, _arguments(function, frame))
        except Exception:
            found = False
        _AGREES[function] = found
    return found


def _arguments(function: type[torch.autograd.Function], frame: types.FrameType) -> list[Any]:
    """The arguments of the call of the Function's forward that runs in this frame, without ctx."""
    names = list(inspect.signature(function.forward).parameters)
    has_context = function.setup_context is torch.autograd.Function.setup_context
    return [frame.f_locals[name] for name in names[has_context:]]


def _is_derivative(function: type[torch.autograd.Function], args: list[Any]) -> bool:
    """Whether the Function's backward equals the numerical slopes of its forward, at a few values of each tensor.

    args: arguments for apply; each TracedTensor among them is replaced by float64 test values.
    """
    from jax_kernels.bridge.translate.torch_to_jnp import TracedTensor

    with torch._C.DisableTorchFunction(), torch.enable_grad():
        for place in (i for i, x in enumerate(args) if isinstance(x, TracedTensor)):
            given: list[Any] = [
                torch.tensor(0.4, dtype=torch.float64) if isinstance(x, TracedTensor) else x for x in args
            ]
            x = given[place] = torch.tensor(_NUMBERS, dtype=torch.float64, requires_grad=True)
            (slopes,) = torch.autograd.grad(function.apply(*given).sum(), x)
            step = 1e-5
            moved = ((*given[:place], x.detach() + by, *given[place + 1 :]) for by in (step, -step))
            up, down = (function.apply(*arguments) for arguments in moved)
            if not torch.allclose(slopes, (up - down) / (2 * step), atol=1e-6, rtol=1e-4):
                return False
    return True
