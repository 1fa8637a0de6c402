"""Cached calls: a call that was made before needs only one check of its tensors.

The key of a cached call is its statics (a hashable value for all of the call but its tensors: the other arguments, and
which arguments are tensors) and its tensors without their values. A guard of PyTorch compares the tensors in a
microsecond. A call that the guard does not cover runs like a first call: under compilers, forward-mode
differentiation or modes, with tensors that autocast casts, or with strided tensors.
"""

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from jax_kernels import chunks
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
_limit = chunks.limit
_functions_looking_on = torch._C._len_torch_function_stack
_recorder = torch._C._get_tracing_state


def _never(*tensors: torch.Tensor) -> bool:
    return False


@dataclasses.dataclass(eq=False, slots=True)
class CachedCall:
    """A cached call. Calling it with the list of the call's tensors returns the call's results.

    chain: a function (*tensors) that runs the call and returns a list of tensors, such as a LoadedChain. unpack: makes
    the call's results from this list. function: None if no gradient is needed; else a torch.autograd.Function whose
    forward (ctx, cached call, *tensors) runs the chain and returns the list as a tuple. info: a value for this
    Function. backward_cache: the cached calls of the backward; None without a Function.

    is_direct, has_grad: whether the direct route, and gradients, were on when the call was cached. limit: the
    memory_limit at this time. CallCache.record sets the other fields. statics: the key without the tensors. check: a
    function (*tensors) that returns whether the call is valid for these tensors. references: weak references to the
    Masks, which drop the cached call when a Mask dies.
    """

    chain: Callable[..., list[torch.Tensor]]
    unpack: Callable[[list[torch.Tensor]], Any]
    function: type[torch.autograd.Function] | None = None
    info: Any = None
    backward_cache: "CallCache | None" = dataclasses.field(init=False)
    is_direct: bool = dataclasses.field(init=False, default_factory=route.is_enabled)
    has_grad: bool = dataclasses.field(init=False, default_factory=torch.is_grad_enabled)
    limit: int | None = dataclasses.field(init=False, default_factory=chunks.limit)
    statics: Hashable = dataclasses.field(init=False, default=None)
    check: Callable[..., bool] = dataclasses.field(init=False, default=_never)
    references: Sequence[weakref.ref[Mask]] = dataclasses.field(init=False, default=())

    def __post_init__(self) -> None:
        self.backward_cache = None if self.function is None else CallCache()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        if self.function is None:
            return self.unpack(self.chain(*tensors))
        return self.unpack(self.function.apply(self, *tensors))


class CallCache:
    """The cached calls of one op, at most 512; the oldest are dropped. `lookup` checks the last found call first."""

    __slots__ = ("__weakref__", "_calls", "_last", "_nothing")

    def __init__(self) -> None:
        self._nothing = CachedCall(None, _never)  # type: ignore[arg-type]
        self._last = self._nothing
        self._calls: dict[Hashable, CachedCall] = {}
        _ALL.add(self)

    def lookup(self, statics: Hashable, tensors: Sequence[torch.Tensor]) -> CachedCall | None:
        """The cached call for these statics and tensors; None if there is none, or if the call must run in full.

        A call runs in full under torch.jit.trace, forward-mode differentiation or a torch function mode. Code that
        torch.compile traces must not call it.
        """
        if _recorder() is not None:  # its errors end the trace, and must reach the caller of torch.jit.trace
            return None
        call = self._last
        try:
            is_last = call.has_grad is _is_grad_enabled() and call.is_direct is _ROUTE.is_enabled
            if is_last and call.limit == _limit() and call.statics == statics:
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
        """The valid call for these statics and tensors among all cached calls; None if there is none.

        The next `lookup` checks the call that was found first.
        """
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
        """Caches a call, so that `lookup` returns it for equal statics and tensors with equal properties.

        make: returns the call to cache, or None to cache nothing. Caches nothing under PyTorch's modes, or if a tensor
        is not contiguous, has no memory, is batched, is on the meta device, or is of a subclass other than
        torch.nn.Parameter.

        masks: the Masks whose ids are in the statics. The cached call is dropped when one of the Masks dies. So it
        keeps no Mask alive, and no later Mask with the same id can match it. `lookup` does not return the call if a
        tensor that a mask's function read has changed.
        """
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return
        if not all(x.is_contiguous() and not x.is_meta and not torch_internals.is_batched(x) for x in tensors):
            return
        if any(x._is_zerotensor() for x in tensors):
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
        """Drops the call with this key, which has the form that `_key` returns."""
        self._last = self._nothing
        self._calls.pop(key, None)

    def clear(self) -> None:
        self._last = self._nothing
        self._calls.clear()

    def __len__(self) -> int:
        return len(self._calls)


def _forget(reference: "weakref.ref[CallCache]", key: Hashable, _: weakref.ref[Mask]) -> None:
    """Drops the call with this key, as a callback of a weak reference to a Mask. reference: of the CallCache."""
    cache = reference()
    if cache is not None:
        cache.forget(key)


def same_tensors(read: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> bool:
    """Whether a call reads exactly the tensor objects that it was given, in order, and no copies or others."""
    return len(read) == len(given) and all(map(operator.is_, read, given))


_ALL: weakref.WeakSet[CallCache] = weakref.WeakSet()


def clear() -> None:
    """Drops all cached calls of all ops."""
    for cache in list(_ALL):
        cache.clear()


def count() -> int:
    """The number of cached calls of all ops."""
    return sum(map(len, list(_ALL)))


def _autocast_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype | None:
    """The dtype to which autocast casts on the first tensor's device; None if autocast is off, or without tensors."""
    if not tensors:
        return None
    device = tensors[0].device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _under_autocast(check: torch_internals.Check, tensors: Sequence[torch.Tensor]) -> torch_internals.Check:
    """A check of a later call's tensors that fails if `check` does, or if autocast casts to another dtype than now.

    check: a function (*tensors) that fails if autocast has been turned on or off. tensors: the tensors of this call.
    """
    dtype = _autocast_dtype(tensors)
    if dtype is None:
        return check
    device = tensors[0].device.type
    return lambda *given: torch.get_autocast_dtype(device) is dtype and check(*given)


def _key(statics: Hashable, tensors: Sequence[torch.Tensor]) -> Hashable:
    """The key of a call: its statics, PyTorch's settings that matter, and its tensors without their values.

    None if a tensor is of a subclass other than torch.nn.Parameter.
    """
    if any(type(x) not in _TYPES for x in tensors):
        return None
    modes = torch.is_grad_enabled(), route._STATE.is_enabled, _limit(), _autocast_dtype(tensors)
    return statics, modes, *[(x.shape, x.dtype, x.device, x.requires_grad, type(x)) for x in tensors]
