"""Runs a jitted JAX function on PyTorch's tensors, by the direct route or by the DLPack route."""

from collections.abc import Callable, Sequence

import torch

from jax_kernels.bridge.direct import dlpack_route, route
from jax_kernels.bridge.direct.launcher import LoadedChain
from jax_kernels.bridge.direct.route import Operands
from jax_kernels.bridge.interop.donated_outputs import FlatArguments, JaxFunction
from jax_kernels.bridge.interop.keyed_cache import memoize
from jax_kernels.bridge.operators.call_cache import CachedCall, CallCache

__all__ = ["execute", "launcher_for"]


def execute(
    function: JaxFunction, tensors: Sequence[torch.Tensor | None], operands: Operands | None = None
) -> list[torch.Tensor]:
    """Calls a jitted JAX function on tensors of one device. Returns its results as a list of new tensors.

    function: takes the tuple of Masks unless operands is None, then an array or None for each entry of tensors; returns
    a flat sequence of arrays. operands: the call's Masks.

    On a GPU the direct route launches the kernels if the function has a launch chain. Otherwise the DLPack route runs
    the function, and raises RuntimeError while a CUDA graph is being captured: JAX queues its work on a separate
    stream, which the graph would not contain.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    if device.type == "cuda" and (launched := _launched(function, tensors, given, operands)) is not None:
        return launched
    return _through_jax(function, tensors, given, operands)


def _through_jax(
    function: JaxFunction,
    tensors: Sequence[torch.Tensor | bool | None],
    given: Sequence[torch.Tensor],
    operands: Operands | None,
) -> list[torch.Tensor]:
    """Calls a jitted JAX function by the DLPack route: JAX runs it. Returns its results as a list of new tensors.

    tensors: an entry for each argument after the Masks; only whether it is None is used. given: the tensors for the
    entries that are not None, in order. operands: the call's Masks; None if the function takes no Masks. Raises
    RuntimeError while a CUDA graph is being captured.
    """
    masks = () if operands is None else (operands.masks,)
    structure = None if operands is None else operands.signature
    arguments = FlatArguments(masks, given, tuple([x is None for x in tensors]), structure)
    return dlpack_route.run(function, arguments, given[0].device)


class _JaxLauncher:
    """A function of the non-None tensors that calls a jitted JAX function by the DLPack route, without a launch chain.

    tensors: of a first call: later calls have None for the same arguments. operands: the call's Masks, or None.
    """

    __slots__ = ("_function", "_operands", "_places")

    def __init__(
        self, function: JaxFunction, tensors: Sequence[torch.Tensor | None], operands: Operands | None
    ) -> None:
        self._function = function
        self._places = [None if x is None else True for x in tensors]
        self._operands = operands

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return _through_jax(self._function, self._places, tensors, self._operands)


def launcher_for(
    function: JaxFunction, tensors: Sequence[torch.Tensor | None], operands: Operands | None = None
) -> Callable[..., list[torch.Tensor]]:
    """A function (*tensors) that calls a jitted JAX function on tensors of the same properties, without checks.

    It takes the tensors that are not None, and returns the list of results. It launches the function's launch chain if
    there is one and the Masks' arrays can be read as tensors, and otherwise takes the DLPack route.

    function: takes the tuple of Masks unless operands is None, then an array or None for each entry of tensors.
    tensors: the tensors of a first call. operands: the call's Masks.
    """
    chain, other = route.find(function, tensors, operands), _JaxLauncher(function, tensors, operands)
    device = next(x.device for x in tensors if x is not None)
    if chain is None or operands is None or not operands.masks or device.type != "cuda":
        return chain or other
    return _MaskedChain(chain, other, operands, device)


class _MaskedChain:
    """A function of a call's non-None tensors that launches a chain whose first inputs are the Masks' arrays.

    other: the same function by the DLPack route, for calls whose Masks' arrays cannot be read as tensors. operands: the
    call's Masks.
    """

    __slots__ = ("_chain", "_device", "_operands", "_other")

    def __init__(self, chain: LoadedChain, other: _JaxLauncher, operands: Operands, device: torch.device) -> None:
        self._chain = chain
        self._other = other
        self._operands = operands
        self._device = device

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        masks = self._operands.tensors(self._device)
        return self._other(*tensors) if masks is None else self._chain(*masks, *tensors)


@memoize
def _cache_of(function: JaxFunction) -> CallCache:
    """The cached calls of a jitted function."""
    return CallCache()


def _launched(
    function: JaxFunction, tensors: Sequence[torch.Tensor | None], given: list[torch.Tensor], operands: Operands | None
) -> list[torch.Tensor] | None:
    """The results of a jitted function by the direct route, from a cached call if there is one.

    None if the direct route cannot run it: the route is off, the device is no CUDA GPU, the function has no launch
    chain for these shapes, or the Masks' arrays cannot be read as tensors. given: the non-None entries of `tensors`, in
    order.
    """
    if operands is not None and operands.masks:
        return route.launch(function, tensors, operands)
    cache = _cache_of(function)
    statics = tuple(x is None for x in tensors)
    if (call := cache.lookup(statics, given)) is not None:
        return call(given)
    results = route.launch(function, tensors, operands)
    if results is not None:
        cache.record(statics, given, lambda: _call_of(route.find(function, tensors, operands)))
    return results


def _call_of(chain: LoadedChain | None) -> CachedCall | None:
    """A cached call that returns the chain's list of outputs; None without a chain."""
    return None if chain is None else CachedCall(chain, lambda results: results)
