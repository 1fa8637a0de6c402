"""Selects the calls of the direct route. Each function and set of shapes has a chain, compiled at the first call.

A self-test on each device compares a small program's results with the DLPack route. If it fails, calls on this device
take the DLPack route, with one warning. A function without a chain takes the DLPack route silently; `reasons` lists the
reasons.
"""

import contextlib
import dataclasses
import functools
import os
import threading
import warnings
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import torch

from jax_kernels import dispatch
from jax_kernels.bridge.direct.chain import LaunchChain, NotDirectError
from jax_kernels.bridge.direct.compile import Target, compile_chain
from jax_kernels.bridge.direct.launcher import LoadedChain, torch_allocator, unload_dropped
from jax_kernels.bridge.interop import dlpack
from jax_kernels.bridge.interop.donated_outputs import JaxFunction
from jax_kernels.masks import Mask

__all__ = ["Operands", "clear", "count", "disabled", "enabled", "find", "is_enabled", "launch", "reasons"]

_MOST_CHAINS = 512


class ArraySignature(Protocol):
    """The shape and dtype of a Mask's array."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> jnp.dtype: ...
    @property
    def weak_type(self) -> bool: ...


class MaskSignature(Protocol):
    """The structure of a call's Masks, and each of their arrays without its values."""

    @property
    def structure(self) -> jax.tree_util.PyTreeDef: ...
    @property
    def arrays(self) -> Sequence[ArraySignature]: ...
    def __hash__(self) -> int: ...


class Operands(Protocol):
    """The Masks of a call. tensors: their arrays as PyTorch tensors, or None if there is no copy to read."""

    @property
    def masks(self) -> tuple[Mask, ...]: ...
    @property
    def signature(self) -> MaskSignature: ...
    def tensors(self, device: torch.device) -> list[torch.Tensor] | None: ...


@dataclasses.dataclass(kw_only=True)
class _Entry:
    """The route of a function with a set of shapes. chain: None for the DLPack route. reason: the reason for it.

    used: _State.newest at the last use of this entry.
    """

    chain: LoadedChain | None
    reason: str
    used: int


@dataclasses.dataclass(kw_only=True)
class _State:
    """The entries by function and shapes, and the results of the self-tests.

    refused, refused_mosaic: for each device, the reason that the direct route, or its Mosaic kernels, fail there; None
    if they work. warned: the reason in the one warning. newest: the number of entries made so far.
    """

    is_enabled: bool
    entries: dict[Hashable, _Entry] = dataclasses.field(default_factory=dict)
    refused: dict[torch.device, str | None] = dataclasses.field(default_factory=dict)
    refused_mosaic: dict[torch.device, str | None] = dataclasses.field(default_factory=dict)
    warned: str | None = None
    newest: int = 0


def _is_wanted(setting: str | None) -> bool:
    """Whether the value of JAX_KERNELS_DIRECT turns the route on. Raises ValueError unless it is unset, 0 or 1."""
    if setting not in (None, "", "0", "1"):
        raise ValueError(f"JAX_KERNELS_DIRECT: got {setting!r}, want 0 to turn the direct route off, or 1")
    return setting != "0"


_STATE = _State(is_enabled=_is_wanted(os.environ.get("JAX_KERNELS_DIRECT")))
_LOCK = threading.RLock()


def is_enabled() -> bool:
    """Whether the direct route is on. JAX_KERNELS_DIRECT=0 and `disabled` turn it off."""
    return _STATE.is_enabled


def disabled() -> contextlib.AbstractContextManager[None]:
    """Makes all calls inside the block, of all threads, take the DLPack route."""
    return _switched(False)


def enabled() -> contextlib.AbstractContextManager[None]:
    """Turns the direct route on inside the block, for all threads."""
    return _switched(True)


@contextlib.contextmanager
def _switched(is_enabled: bool) -> Iterator[None]:
    before, _STATE.is_enabled = _STATE.is_enabled, is_enabled
    try:
        yield
    finally:
        _STATE.is_enabled = before


def launch(
    function: JaxFunction, tensors: Sequence[torch.Tensor | None], operands: Operands | None = None
) -> list[torch.Tensor] | None:
    """The results of a jitted JAX function on tensors of one GPU by the direct route; None if it has no chain.

    operands: the CallMasks whose Masks are the function's first argument, or None if the function takes no Masks.
    """
    chain = find(function, tensors, operands)
    if chain is None:
        return None
    readable = map(_readable, filter(_is_there, tensors))
    if operands is None or not operands.masks:
        return chain(*readable)
    masks = operands.tensors(chain.device)
    return None if masks is None else chain(*masks, *readable)


def find(
    function: JaxFunction, tensors: Sequence[torch.Tensor | None], operands: Operands | None = None
) -> LoadedChain | None:
    """The chain of a function for tensors of these shapes; None if it has no chain. Compiles it at the first call.

    The chain's inputs are the Masks' arrays, then the tensors. Returns None for an unknown function while a CUDA graph
    is being captured, because nothing can be compiled then.
    """
    first = next(x for x in tensors if x is not None)
    if not _STATE.is_enabled or first.device.type != "cuda":
        return None
    masks = None if operands is None else operands.signature
    key = function, masks, *[None if x is None else (x.shape, x.dtype, x.device) for x in tensors]
    entry = _STATE.entries.get(key)
    if entry is None:
        entry = _make(key, function, tensors, masks)
        if entry is None:
            return None
    entry.used = _STATE.newest
    return entry.chain


def reasons() -> list[str]:
    """The reason for each device without the direct route, and for each function and shapes on the DLPack route."""
    refused = [f"{device}: {reason}" for device, reason in _STATE.refused.items() if reason is not None]
    return refused + [entry.reason for entry in list(_STATE.entries.values()) if entry.chain is None]


def clear() -> None:
    """Drops all chains, and the reasons of functions without a chain. The next call of a function makes them again."""
    with _LOCK:
        _STATE.entries.clear()
        unload_dropped()


def count() -> int:
    """The number of entries: functions with a set of shapes, with or without a chain."""
    return len(_STATE.entries)


def _is_there(x: torch.Tensor | None) -> bool:
    return x is not None


def _readable(x: torch.Tensor) -> torch.Tensor:
    if x.is_contiguous() and not x.is_neg() and not x.is_conj():
        return x  # the chain checks the alignment
    return dlpack.readable(x)


def _make(
    key: Hashable, function: JaxFunction, tensors: Sequence[torch.Tensor | None], masks: MaskSignature | None
) -> _Entry | None:
    device = next(x.device for x in tensors if x is not None)
    if dlpack.is_capturing(device):
        return None
    dlpack.jax_device(device)  # raises an error if JAX lacks the device
    with _LOCK:
        if key in _STATE.entries:
            return _STATE.entries[key]
        chain, reason = None, _refused(device)
        if reason is None:
            try:
                chain = _loaded(function, tensors, masks, device)
            except NotDirectError as error:
                reason = str(error)
            except Exception as error:  # for any error in JAX's internals, use the DLPack route
                reason = f"{type(error).__name__}: {error}"
                _warn(f"a function on {device}", reason)
        _STATE.newest += 1
        entry = _Entry(chain=chain, reason=reason or "", used=_STATE.newest)
        _STATE.entries[key] = entry
        if len(_STATE.entries) > _MOST_CHAINS:
            del _STATE.entries[min(_STATE.entries, key=lambda key: _STATE.entries[key].used)]
        return entry


def _refused(device: torch.device) -> str | None:
    """The reason that the route fails on a device; None if it works. The self-test runs once per device."""
    if device not in _STATE.refused:
        _STATE.refused[device] = _fails(device, "kernels")
    return _STATE.refused[device]


def _fails(device: torch.device, kind: str) -> str | None:
    """Runs a self-test on a device. Returns the reason if it fails, after a warning; None if it passes."""
    try:
        _test(device, kind)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        _warn(str(device), reason)
        return reason
    return None


def _warn(what: str, reason: str) -> None:
    """Warns that `what` takes the DLPack route. Only the first call warns."""
    if _STATE.warned is not None:
        return
    _STATE.warned = reason
    warnings.warn(
        f"jax_kernels.bridge does not launch the kernels of {what} directly, so calls take more host "
        f"time: {reason}. JAX_KERNELS_DIRECT=0 turns the direct route and this warning off.",
        RuntimeWarning,
        stacklevel=2,
    )


def _loaded(
    function: JaxFunction, tensors: Sequence[torch.Tensor | None], masks: MaskSignature | None, device: torch.device
) -> LoadedChain:
    """Compiles and loads a function's chain. masks: the signature of its Masks, or None. Raises NotDirectError."""
    unload_dropped()
    there = [x is not None for x in tensors]
    own = () if masks is None else masks.arrays
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in own]
    specs += [jax.ShapeDtypeStruct(x.shape, dlpack.jax_dtype(x.dtype)) for x in tensors if x is not None]

    def filled(*arrays):
        first = () if masks is None else (jax.tree.unflatten(masks.structure, arrays[: len(own)]),)
        given = iter(arrays[len(own) :])
        return function(*first, *(next(given) if is_there else None for is_there in there))

    chain = _compiled(filled, specs, device)
    if chain.has_mosaic:
        if device not in _STATE.refused_mosaic:
            _STATE.refused_mosaic[device] = _fails(device, "Mosaic's")
        if (reason := _STATE.refused_mosaic[device]) is not None:
            raise NotDirectError(reason)
    return LoadedChain(chain, device)


def _compiled(function: JaxFunction, specs: Sequence[jax.ShapeDtypeStruct], device: torch.device) -> LaunchChain:
    with dlpack.outside_of_traces(), dispatch.on_device(dispatch.device_info(dlpack.jax_device(device))):
        return compile_chain(_target(device), function, specs)


@functools.cache
def _target(device: torch.device) -> Target:
    facts = torch.cuda.get_device_properties(device)
    info = dispatch.device_info(dlpack.jax_device(device))
    return Target(
        kind=dlpack.jax_device(device).device_kind,
        compute_capability=(facts.major, facts.minor),
        core_count=facts.multi_processor_count,
        shared_memory_per_block=info.shared_memory_per_block,
        shared_memory_per_core=facts.shared_memory_per_multiprocessor,
        threads_per_core=facts.max_threads_per_multi_processor,
        registers_per_core=facts.regs_per_multiprocessor,
        l2_cache=facts.L2_cache_size,
        total_memory=facts.total_memory,
        memory_bandwidth=info.memory_bandwidth or 10**12,
        clock_ghz=getattr(facts, "clock_rate", 1_700_000) / 1e6,
    )


def _norm(x, scale, dout):
    """A norm and its gradient: Triton kernels, XLA kernels, and workspace between them."""
    from jax_kernels.ops.normalization import normalization

    out, pullback = jax.vjp(lambda *given: normalization.rms_norm(*given, implementation="triton"), x, scale)
    return out, *pullback(dout)


def _product(x, w):
    from jax_kernels.ops.matmul import matmul

    return (matmul.matmul(x, w, implementation="mosaic_gpu"),)


_TESTS: dict[str, tuple[JaxFunction, tuple[tuple[int, ...], ...]]] = {
    "kernels": (_norm, ((96, 512), (512,), (96, 512))),
    "Mosaic's": (_product, ((256, 256), (256, 256))),
}


def _test(device: torch.device, kind: str) -> None:
    """Compares the two routes on a small program. Raises RuntimeError if their results differ."""
    function, shapes = _TESTS[kind]
    tensors = [_wave(shape, device) for shape in shapes]
    specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    poisoned = torch_allocator()._replace(empty=_poisoned)
    got = LoadedChain(_compiled(function, specs, device), device, allocator=poisoned)(*tensors)
    arrays, owners = dlpack.import_tensors(tensors, device)
    with dispatch.on_device(dispatch.device_info(dlpack.jax_device(device))):
        want = dlpack.export_arrays(jax.jit(function)(*arrays), device)
    del owners
    for ours, theirs in zip(got, want, strict=True):
        error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        if not error < 1e-2:
            raise RuntimeError(f"a self-test ({kind}) gave results that differ by {error} from the DLPack route")


def _wave(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Deterministic test values. They do not advance the user's random number generator."""
    size = functools.reduce(lambda x, y: x * y, shape)
    return torch.arange(size, device=device, dtype=torch.float32).mul(0.37).sin().reshape(shape).to(torch.bfloat16)


def _poisoned(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    fresh = torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
    return fresh.fill_(255 if fresh.dtype == torch.uint8 else float("nan"))
