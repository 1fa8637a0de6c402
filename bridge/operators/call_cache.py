"""Cached calls: a call that was made before needs only one check of its tensors.

The key of a cached call is its statics (the arguments that are no tensors, and which tensors the call has) and its
tensors without their values. A guard of PyTorch compares the tensors in a microsecond. A call that the guard does not
cover runs like a first call: under compilers, transforms, autocast or modes, or with strided tensors.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from jax_kernels.bridge.direct import route
from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.bounded_dict import drop_oldest
from jax_kernels.bridge.translate import mask_sources
from jax_kernels.masks import Mask

__all__ = ["CachedCall", "CallCache", "clear", "count", "same_tensors"]

_MOST = 512  # calls of an op
_TYPES = (torch.Tensor, torch.nn.Parameter)
# Looked up once, to save time in each call.
_ROUTE = route._STATE
_GRAPH = torch_internals._GRAPH
_is_transforming = torch._C._are_functorch_transforms_active
_is_grad_enabled = torch.is_grad_enabled
_functions_looking_on = torch._C._len_torch_function_stack


class CachedCall:
    """A cached call. Calling it with the tensors returns the call's results.

    chain: a LoadedChain, or a similar callable, that runs the call. is_direct, has_grad: whether the direct route, and
    gradients, were on when the call was made. finish: makes the results from the chain's list. function: if a gradient
    is needed, the Function whose forward takes this call and the tensors, and returns the chain's list. facts: facts of
    the call that the Function needs. backwards: cached calls of the backward. references: weak references to the Masks,
    which drop the cached call when a Mask dies.
    """

    __slots__ = (
        *("backwards", "chain", "check", "facts", "finish", "function", "has_grad", "is_direct", "references"),
        "statics",
    )

    def __init__(
        self,
        chain: Callable[..., list[torch.Tensor]],
        finish: Callable[[list[torch.Tensor]], Any],
        function: type[torch.autograd.Function] | None = None,
        facts: Any = None,
    ) -> None:
        self.chain = chain
        self.is_direct = route.is_enabled()
        self.has_grad = torch.is_grad_enabled()
        self.finish = finish
        self.function = function
        self.facts = facts
        self.backwards = None if function is None else CallCache()
        self.references: list[weakref.ref[Mask]] = []
        self.statics: Hashable = None
        self.check: Callable[..., bool] = _never

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        if self.function is None:
            return self.finish(self.chain(*tensors))
        return self.finish(self.function.apply(self, *tensors))


def _never(*tensors: torch.Tensor) -> bool:
    return False


class CallCache:
    """The cached calls of an op, at most _MOST. The last call is checked first."""

    __slots__ = ("__weakref__", "_calls", "_last", "_nothing")

    def __init__(self) -> None:
        self._nothing = CachedCall(None, _never)  # type: ignore[arg-type]
        self._last = self._nothing
        self._calls: dict[Hashable, CachedCall] = {}
        _ALL.add(self)

    def lookup(self, statics: Hashable, tensors: Sequence[torch.Tensor]) -> CachedCall | None:
        """The cached call for these tensors, or None. Not for code that torch.compile traces."""
        call = self._last
        try:
            is_last = call.has_grad is _is_grad_enabled() and call.is_direct is _ROUTE.is_enabled
            if is_last and call.statics == statics:
                for x in tensors:
                    if x.is_nested:  # PyTorch's guard would crash the process
                        return None
                is_last = call.check(*tensors)
            else:
                is_last = False
            if not is_last:
                found = self._search(statics, tensors)
                if found is None:
                    return None
                call = found
        # Statics that cannot be compared or hashed, such as arrays; arguments that are no tensors, or have no sizes.
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None
        if forward_ad._current_level >= 0 or _GRAPH.is_in_dual_level or _functions_looking_on():
            return None
        return None if _is_transforming() and torch_internals.is_forward_mode() else call

    def _search(self, statics: Hashable, tensors: Sequence[torch.Tensor]) -> CachedCall | None:
        if not self._calls:
            return None
        call = self._calls.get(_key(statics, tensors))
        if call is None or not call.check(*tensors):
            return None
        self._last = call
        return call

    def record(
        self,
        statics: Hashable,
        tensors: Sequence[torch.Tensor],
        make: Callable[[], CachedCall | None],
        masks: Sequence[Mask] = (),
    ) -> None:
        """Caches a call, unless its tensors cannot be checked, or are not read in place.

        make: returns the call, or None if the call cannot be cached. masks: the Masks whose ids are in the statics. The
        cached call is dropped when one of the Masks dies. So it keeps no Mask alive, and no later Mask with the same id
        can match it. A call is not found if a tensor of a mask's function has changed.
        """
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return
        if not all(x.is_contiguous() and not x.is_meta and not torch_internals.is_batched(x) for x in tensors):
            return
        key = _key(statics, tensors)
        call = None if key is None else make()
        if call is None:
            return
        check = torch_internals.tensor_guard(tensors)
        if check is None:
            return
        call.statics = statics
        call.check = mask_sources.watched(_under_autocast(check, tensors), masks)
        forget = functools.partial(_forget, weakref.ref(self), key)
        call.references = [weakref.ref(mask, forget) for mask in masks]
        try:
            self._calls[key] = call
        except TypeError:  # the statics are not hashable
            return
        drop_oldest(self._calls, _MOST)

    def forget(self, key: Hashable) -> None:
        """Drops the call of a key."""
        self._last = self._nothing
        self._calls.pop(key, None)

    def clear(self) -> None:
        self._last = self._nothing
        self._calls.clear()

    def __len__(self) -> int:
        return len(self._calls)


def _forget(reference: "weakref.ref[CallCache]", key: Hashable, _: weakref.ref[Mask]) -> None:
    known = reference()
    if known is not None:
        known.forget(key)


def same_tensors(read: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    """Whether a call reads the given tensor objects, and not copies."""
    return len(read) == len(given) and all(map(operator.is_, read, given))


_ALL: weakref.WeakSet[CallCache] = weakref.WeakSet()


def clear() -> None:
    """Drops all cached calls."""
    for known in list(_ALL):
        known.clear()


def count() -> int:
    """The number of cached calls."""
    return sum(len(known) for known in list(_ALL))


def _autocast_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype | None:
    """The autocast dtype for the tensors' device; None if autocast is off."""
    if not tensors:
        return None
    device = tensors[0].device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _under_autocast(check: torch_internals.Check, tensors: Sequence[torch.Tensor]) -> torch_internals.Check:
    """Extends a check that covers whether autocast is on: it also checks the autocast dtype."""
    dtype = _autocast_dtype(tensors)
    if dtype is None:
        return check
    device = tensors[0].device.type
    return lambda *given: torch.get_autocast_dtype(device) is dtype and check(*given)


def _key(statics: Hashable, tensors: Sequence[torch.Tensor]) -> Hashable:
    """The key of a call: its statics, and its tensors without their values. None if a tensor has an unknown type."""
    if any(type(x) not in _TYPES for x in tensors):
        return None
    modes = torch.is_grad_enabled(), route._STATE.is_enabled, _autocast_dtype(tensors)
    return statics, modes, *[(x.shape, x.dtype, x.device, x.requires_grad, type(x)) for x in tensors]
