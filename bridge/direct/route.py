"""Decides which calls take the direct route. Compiles a launch chain for each function and set of shapes.

A launch chain is compiled at the first call. A self-test on each device compares a small program's results with the
DLPack route. If it fails, calls on this device take the DLPack route, with one warning. A function without a chain
takes the DLPack route silently; `reasons` lists the reasons.
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

from jax_kernels import chunks, dispatch
from jax_kernels.bridge.direct import call_key, dlpack_route, program_cache
from jax_kernels.bridge.direct.chain import LaunchChain, NotDirectError
from jax_kernels.bridge.direct.compile import Target, compile_chain
from jax_kernels.bridge.direct.launcher import LoadedChain, torch_allocator
from jax_kernels.bridge.direct.loaded_kernels import unload_dropped
from jax_kernels.bridge.interop import dlpack
from jax_kernels.bridge.interop.cuda_driver import driver_version
from jax_kernels.bridge.interop.donated_outputs import JaxFunction
from jax_kernels.masks import Mask

__all__ = ["Operands", "clear", "count", "disabled", "enabled", "find", "is_enabled", "launch", "reasons"]

_MOST_CHAINS = 512


class ArraySignature(Protocol):
    """The shape and JAX dtype of a Mask's array. weak_type: whether JAX promotes it like a Python number."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> jnp.dtype: ...
    @property
    def weak_type(self) -> bool: ...


class MaskSignature(Protocol):
    """The structure of the tuple of a call's Masks, and the shape and dtype of each of its leaves, in order."""

    @property
    def structure(self) -> jax.tree_util.PyTreeDef: ...
    @property
    def arrays(self) -> Sequence[ArraySignature]: ...
    def __hash__(self) -> int: ...


class Operands(Protocol):
    """The Masks of a call, on the call's device. signature: their structure, and their arrays' shapes and dtypes.

    tensors(device): the Masks' arrays as PyTorch tensors, in the signature's order; None if PyTorch lacks a dtype, or
    if a CUDA graph is being captured and there is no earlier copy.
    """

    @property
    def masks(self) -> tuple[Mask, ...]: ...
    @property
    def signature(self) -> MaskSignature: ...
    def tensors(self, device: torch.device) -> list[torch.Tensor] | None: ...


@dataclasses.dataclass(kw_only=True)
class _Entry:
    """The route of a function for one set of shapes. chain: None for the DLPack route. reason: why it has no chain.

    reason is "" if there is a chain. used: the value of _State.newest at this entry's last use; the entry with the
    smallest is dropped first.
    """

    chain: LoadedChain | None
    reason: str
    used: int


@dataclasses.dataclass(kw_only=True)
class _State:
    """The state of the direct route in this process.

    is_enabled: whether the route is on. entries: by function, Masks' signature, memory_limit, and shapes, dtypes and
    device of the tensors. refused: for each tested device, the reason that the route fails there; None if it works.
    refused_mosaic: the same for Mosaic kernels alone. warned: the reason in the one warning, None before it. newest:
    the number of entries that were ever made.
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
    """A context manager that makes all calls inside its block, of all threads, take the DLPack route."""
    return _switched(False)


def enabled() -> contextlib.AbstractContextManager[None]:
    """A context manager that turns the direct route on inside its block, for all threads."""
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
    """Launches a jitted JAX function on tensors of one GPU by the direct route, and returns its results.

    Returns None, and launches nothing, if the route is off, the device is no CUDA GPU, the function has no launch chain
    for these shapes, or the Masks' arrays cannot be read as tensors. Then the caller takes the DLPack route.

    function: takes the tuple of Masks unless operands is None, then an array or None for each entry of tensors; returns
    a flat sequence. operands: the call's Masks.
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
    """The loaded chain of a jitted JAX function for these shapes, dtypes and device; None if it takes the DLPack route.

    function: takes the tuple of Masks unless operands is None, then an array or None for each entry of tensors.
    operands: the call's Masks. The first call for a function and shapes compiles the chain.

    The chain's inputs are the Masks' arrays, then the tensors that are not None. While a CUDA graph is being captured,
    nothing can be compiled: then returns None for a function and shapes that were not called before.
    """
    first = next(x for x in tensors if x is not None)
    if not _STATE.is_enabled or first.device.type != "cuda":
        return None
    masks = None if operands is None else operands.signature
    key = function, masks, chunks.limit(), *[None if x is None else (x.shape, x.dtype, x.device) for x in tensors]
    entry = _STATE.entries.get(key)
    if entry is None:
        entry = _make(key, function, tensors, masks)
        if entry is None:
            return None
    entry.used = _STATE.newest
    return entry.chain


def reasons() -> list[str]:
    """The reasons for the DLPack route: of each device that failed its self-test, then of each function and shapes."""
    refused = [f"{device}: {reason}" for device, reason in _STATE.refused.items() if reason is not None]
    return refused + [entry.reason for entry in list(_STATE.entries.values()) if entry.chain is None]


def clear() -> None:
    """Drops all chains, and the reasons of functions without a chain. The next call of a function makes them again.

    Waits for the GPUs whose kernels it unloads.
    """
    with _LOCK:
        _STATE.entries.clear()
        unload_dropped()


def count() -> int:
    """The number of pairs of a function and a set of shapes for which the route, direct or DLPack, has been chosen."""
    return len(_STATE.entries)


def _is_there(x: torch.Tensor | None) -> bool:
    return x is not None


def _readable(x: torch.Tensor) -> torch.Tensor:
    if x.is_contiguous() and not x.is_neg() and not x.is_conj() and not x._is_zerotensor():
        return x  # the chain checks the alignment
    return dlpack.readable(x)


def _make(
    key: Hashable, function: JaxFunction, tensors: Sequence[torch.Tensor | None], masks: MaskSignature | None
) -> _Entry | None:
    """Compiles and loads a function's chain, and stores the new entry, with the chain or the reason, under `key`.

    key: of _State.entries. masks: the signature of the call's Masks; None if the function takes no Masks. Returns the
    entry that is stored already, if there is one. Returns None, and stores nothing, while a CUDA graph is being
    captured. Raises an error if JAX lacks the device.
    """
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
    """The reason that the direct route fails on a device; None if it works. Tests a device at the first call for it."""
    if device not in _STATE.refused:
        _STATE.refused[device] = _fails(device, "kernels")
    return _STATE.refused[device]


def _fails(device: torch.device, kind: str) -> str | None:
    """Runs the self-test `kind`, a key of _TESTS, on a device.

    Returns None if it passes, also if it passed in an earlier process on such a GPU with the same versions; otherwise
    warns, and returns the reason.
    """
    try:
        key = _self_test_key(device, kind)
        if key is None or not program_cache.was_remembered(key):
            _test(device, kind)
            if key is not None:
                program_cache.remember(key)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        _warn(str(device), reason)
        return reason
    return None


def _self_test_key(device: torch.device, kind: str) -> str | None:
    """The key under which program_cache remembers that a self-test passed; None if the cache is off."""
    if program_cache.folder() is None:
        return None
    facts = _target(device).description, torch.__version__, driver_version(), program_cache.source_digest()
    return program_cache.key_of("self-test", kind, *facts)


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
    """Compiles a function's chain for these shapes, and loads it on the device.

    masks: the signature of the call's Masks; None if the function takes no Masks. Raises NotDirectError, with the
    reason, if the function has no chain, or if it has Mosaic kernels and their self-test failed.
    """
    unload_dropped()
    own = () if masks is None else masks.arrays
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in own]
    specs += [jax.ShapeDtypeStruct(x.shape, dlpack.jax_dtype(x.dtype)) for x in tensors if x is not None]
    flat = _of_arrays(function, tensors, masks)
    key = _call_key(function, tensors, device) if masks is None else None
    chain = _compiled(flat, specs, device, key)
    if chain.has_mosaic:
        if device not in _STATE.refused_mosaic:
            _STATE.refused_mosaic[device] = _fails(device, "Mosaic's")
        if (reason := _STATE.refused_mosaic[device]) is not None:
            raise NotDirectError(reason)
    return LoadedChain(chain, device, by_jax=dlpack_route.by_jax(flat, device))


def _of_arrays(
    function: JaxFunction, tensors: Sequence[torch.Tensor | None], masks: MaskSignature | None
) -> JaxFunction:
    """The function of a chain's inputs: of the Masks' arrays, then of the tensors that are not None.

    Arrays that come from tensors have no weak types. This changes no comparison of a Mask.
    """
    there = [x is not None for x in tensors]
    count = 0 if masks is None else len(masks.arrays)

    def flat(*arrays):
        first = () if masks is None else (jax.tree.unflatten(masks.structure, arrays[:count]),)
        given = iter(arrays[count:])
        return function(*first, *(next(given) if is_there else None for is_there in there))

    flat.__name__ = getattr(function, "__name__", flat.__name__)
    return flat


def _call_key(function: JaxFunction, tensors: Sequence[torch.Tensor | None], device: torch.device) -> str | None:
    """The key under which a chain is found without lowering; None for a function that is not known by name."""
    given = [None if x is None else jax.ShapeDtypeStruct(x.shape, dlpack.jax_dtype(x.dtype)) for x in tensors]
    info = dispatch.device_info(dlpack.jax_device(device))
    return call_key.key_of(function, given, _target(device).description, info)


def _compiled(
    function: JaxFunction, specs: Sequence[jax.ShapeDtypeStruct], device: torch.device, key: str | None = None
) -> LaunchChain:
    """The launch chain of a function of arrays with these shapes and dtypes, planned and compiled for a GPU.

    key: of the call on disk, or None.
    """
    with dlpack.outside_of_traces(), dispatch.on_device(dispatch.device_info(dlpack.jax_device(device))):
        return compile_chain(_target(device), function, specs, key)


@functools.cache
def _target(device: torch.device) -> Target:
    """The facts of this GPU that XLA compiles for."""
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
    """A self-test's function: (RMS norm of x, dx, dscale). x, dout: bfloat16 [96, 512]. scale: bfloat16 [512].

    Its program has Triton kernels, unless this JAX has no Pallas-Triton, XLA kernels, and workspace between them.
    """
    from jax_kernels.ops.normalization import normalization
    from jax_kernels.pallas.triton import backend

    by = "triton" if backend.AVAILABLE else "xla"
    out, pullback = jax.vjp(lambda *given: normalization.rms_norm(*given, implementation=by), x, scale)
    return out, *pullback(dout)


def _product(x, w):
    """A self-test's function: (x @ w,), by a Mosaic kernel. x, w: bfloat16 [256, 256]."""
    from jax_kernels.ops.matmul import matmul

    return (matmul.matmul(x, w, implementation="mosaic_gpu"),)


_TESTS: dict[str, tuple[JaxFunction, tuple[tuple[int, ...], ...]]] = {
    "kernels": (_norm, ((96, 512), (512,), (96, 512))),
    "Mosaic's": (_product, ((256, 256), (256, 256))),
}


def _test(device: torch.device, kind: str) -> None:
    """Compares the direct route with the DLPack route on a small program, a key of _TESTS.

    The direct route's outputs and workspace begin as NaN. Raises RuntimeError if a result's relative error, by norms,
    is 1e-2 or more.
    """
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
    """A bfloat16 tensor of test values between -1 and 1, without use of PyTorch's random number generator."""
    size = functools.reduce(lambda x, y: x * y, shape)
    return torch.arange(size, device=device, dtype=torch.float32).mul(0.37).sin().reshape(shape).to(torch.bfloat16)


def _poisoned(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor on the current GPU, filled with NaN; bytes are filled with 255, so all floats in them are NaN."""
    fresh = torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
    return fresh.fill_(255 if fresh.dtype == torch.uint8 else float("nan"))
