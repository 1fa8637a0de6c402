"""Passes arrays between PyTorch and JAX: order of work on the GPU, and memory ownership.

In: JAX reads the tensor's own memory, once the work queued on PyTorch's current stream has run. Tensors that JAX cannot
read in place (strided, lazily conjugated or negated, badly aligned) are copied first.

Out: PyTorch owns every output. A program writes its results to PyTorch tensors where it can (donated_outputs.py).
Otherwise JAX's memory is copied to a new tensor on PyTorch's current stream, after JAX's work and without waiting on
the host. The memory is given back to JAX once the copy has run. A tensor over JAX's own memory would not be safe: when
the tensor dies, JAX reuses the memory at once, though another stream may still read it, and `Tensor.record_stream` does
not reach JAX's allocator. The copy costs the time to read and write the output once.

jaxlib's own DLPack functions are used if they have their names of jax 0.11 and 0.12: the public functions cost more
than twice the time of a call.
"""

import atexit
import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax._src import core

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.dlpack_capsule import CapsuleFactory
from jax_kernels.bridge.interop.keep_alive import StreamKeepAlive

__all__ = [
    "after_current_stream",
    "call_on_tensors",
    "check_dense",
    "check_dtype",
    "copy_to_jax",
    "export_arrays",
    "has_private",
    "has_torch_dtype",
    "held_bytes",
    "import_tensors",
    "is_capturing",
    "jax_device",
    "jax_dtype",
    "lender",
    "outside_of_traces",
    "readable",
    "refuse_capture",
    "torch_device",
    "torch_dtype",
    "wait_for",
]

_NARROW = (
    *("bfloat16", "float16", "float32", "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2"),
)
# JAX narrows these to 32 bits, silently, unless jax_enable_x64 is set.
_WIDE = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}

_TO_JAX = {getattr(torch, name): jnp.dtype(name) for name in (*_NARROW, *_WIDE)}
_TO_TORCH = {name: dtype for dtype, name in _TO_JAX.items()}

# Addresses of arrays are multiples of this many bytes: XLA's vector loads on a CPU, and Mosaic kernels need it.
_ALIGNMENT = {"cpu": 64, "cuda": 256}
_DLPACK_DEVICE = {"cpu": 1, "cuda": 2}


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError, with the argument's `name`, for a nested or sparse tensor."""
    if tensor.is_nested:
        raise ValueError(
            f"{name}: got a nested tensor, want a dense one, such as its values(); attention takes sequences of "
            "several lengths in one tensor with segment_ids, or by flash_attn_varlen_func"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: got layout {tensor.layout}, want a dense tensor; convert it with .to_dense()")


def check_dtype(name: str, dtype: torch.dtype, *, takes_64_bits: bool = False) -> None:
    """Raises TypeError, with the argument's `name`, if JAX lacks the dtype, or would narrow it to 32 bits.

    JAX narrows 64-bit numbers and complex128 unless jax_enable_x64 is set. takes_64_bits: whether the function that
    gets the argument may take them with this setting; this library's own functions have at most 32 bits.
    """
    short = str(dtype).removeprefix("torch.")
    if dtype not in _TO_JAX:
        raise TypeError(f"{name}: got dtype {dtype}, which JAX does not take; cast it first")
    if short in _WIDE and not jax.config.jax_enable_x64:
        cast = f"cast it first, with .to(torch.{_WIDE[short]})"
        if takes_64_bits:
            cast = f"which JAX narrows to 32 bits; {cast}, or set jax_enable_x64"
        else:
            cast = f"want at most 32 bits; {cast}"
        raise TypeError(f"{name}: got dtype {dtype}, {cast}")


def jax_dtype(dtype: torch.dtype) -> jnp.dtype:
    """The jnp.dtype of a PyTorch dtype, also of 64-bit dtypes. Raises KeyError for a dtype that JAX lacks."""
    return _TO_JAX[dtype]


def torch_dtype(name: str, dtype: jnp.dtype) -> torch.dtype:
    """The PyTorch dtype for a JAX array's dtype. Raises TypeError, with the array's `name`, if PyTorch lacks it."""
    if dtype not in _TO_TORCH:
        raise TypeError(f"{name}: got dtype {dtype}, which PyTorch does not take; cast it first")
    return _TO_TORCH[dtype]


def has_torch_dtype(dtype: jnp.dtype) -> bool:
    """Whether PyTorch has this dtype of a JAX array."""
    return dtype in _TO_TORCH


@functools.cache
def jax_device(device: torch.device) -> jax.Device:
    """The JAX device of a PyTorch device.

    Raises ValueError for a device that is neither a CPU nor a CUDA GPU, and RuntimeError if JAX lacks the device.
    """
    if device.type not in _DLPACK_DEVICE:
        raise ValueError(f"got a tensor on {device}, want one on a CPU or a CUDA device")
    if device.type == "cuda" and torch.version.hip:
        raise RuntimeError(
            f"got a tensor on {device}, which is an AMD GPU in this build of PyTorch ({torch.version.hip}), want a "
            "tensor on a CPU or an NVIDIA GPU"
        )
    try:
        devices = jax.local_devices(backend=device.type)
    except RuntimeError as error:
        hint = "install jax[cuda13]" if device.type == "cuda" else "add cpu to JAX_PLATFORMS"
        raise RuntimeError(
            f"got a tensor on {device}, but JAX has no {device.type} backend ({hint}): {error}"
        ) from error
    if device.type == "cpu":
        return devices[0]
    for candidate in devices:
        if candidate.local_hardware_id == device.index:
            return candidate
    raise RuntimeError(f"got a tensor on {device}, but JAX sees only {devices}")


def torch_device(argument: str, given: torch.device | str | int | None) -> torch.device:
    """The torch.device, with an index for a GPU. An int is a GPU's index; None is the current GPU, or the CPU without
    one.

    Raises ValueError or TypeError, with the name `argument`, for a device that PyTorch does not know, and for "cuda" if
    PyTorch has no GPU.
    """
    want = "want a torch.device, its name, or the index of a GPU"
    if isinstance(given, bool) or not isinstance(given, torch.device | str | int | None):
        raise TypeError(f"{argument}: got {type(given).__name__}, {want}")
    if given is None:
        given = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    except RuntimeError:
        raise ValueError(f"{argument}: got {given!r}, {want}") from None
    if found.type != "cuda" or found.index is not None:
        return found
    if not torch.cuda.is_available():
        raise ValueError(f"{argument}: got none, want a CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def import_tensors(
    tensors: Sequence[torch.Tensor], device: torch.device, *, is_one_call: bool = False
) -> tuple[list[jax.Array], list[torch.Tensor]]:
    """(arrays, owners): JAX arrays over the tensors' memory, and the tensors that own this memory.

    An owner is the tensor itself, detached, or a copy if JAX cannot read the tensor in place; both lists have the
    tensors' order.

    Keep the owners until the results have been exported: before that, PyTorch may give a dead tensor's memory away
    while JAX still reads it. The tensors must all be on `device`, and JAX must not write to them (never donate the
    arrays).

    is_one_call: a promise that all arrays go to one call of a function that was jitted with keep_unused, and the owners
    to export_arrays. Then only JAX's use of the first array waits for PyTorch's current stream.
    """
    owners = [readable(tensor) for tensor in tensors]
    if is_one_call and device.type == "cuda":
        owners = [owner.detach() if owner.requires_grad else owner for owner in owners]
    else:
        # Detached: the caller's own tensors may live longer, and would not show when JAX releases the memory.
        owners = [owner.detach() for owner in owners]
        for owner in owners:
            _LENT[next(_LOANS)] = owner
    target = jax_device(device)
    filled = [tensor for tensor in owners if tensor.numel()]
    arrays = iter(_over(filled, device, target, is_one_call))
    return [next(arrays) if t.numel() else jnp.zeros(t.shape, _TO_JAX[t.dtype], device=target) for t in owners], owners


def export_arrays(
    arrays: Iterable[jax.Array], device: torch.device, read: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """Contiguous new tensors on this device, owned by PyTorch, with the arrays' values.

    PyTorch's current stream waits for JAX; the host does not wait for a GPU. read: the tensors that JAX reads to
    compute the arrays (`owners` of import_tensors). They stay alive until the stream has copied the arrays. Raises
    TypeError if PyTorch lacks a dtype.
    """
    arrays = list(arrays)
    for index, array in enumerate(arrays):
        torch_dtype(f"output {index}", array.dtype)
    if device.type == "cpu":
        jax.block_until_ready(arrays)
        return [_view(array, None).clone() if array.size else _empty(array, device) for array in arrays]
    stream = _current_stream(device)
    # DLPack writes the default stream as 1. Its handle, 0, has another meaning in DLPack.
    handle = stream.cuda_stream or 1
    views = [_view(array, handle) if array.size else _empty(array, device) for array in arrays]
    if not any(array.size for array in arrays):
        jax.block_until_ready(arrays)  # no view makes the stream wait until JAX has read the tensors
    if torch.cuda.current_device() == device.index:
        return _cloned(views, stream, read)
    with torch.cuda.device(device):
        return _cloned(views, stream, read)


def _cloned(views: list[torch.Tensor], stream: torch.cuda.Stream, read: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies of the views, by work on `stream`, the current stream of the current GPU.

    views: tensors over JAX's memory. They and the tensors in `read` stay alive until the stream has made the copies.
    """
    tensors = [view.clone(memory_format=torch.contiguous_format) for view in views]
    _HELD.hold(stream, views, read)
    return tensors


def refuse_capture(device: torch.device) -> None:
    """Raises RuntimeError while a CUDA graph is being captured on PyTorch's current stream of a GPU.

    JAX runs its work on another stream, so the graph would not contain it. On a CPU it never raises.
    """
    if device.type == "cuda" and is_capturing(device):
        raise RuntimeError(
            "a JAX function cannot be captured in a CUDA graph: JAX runs it on a stream of its own. Call it outside "
            "torch.cuda.graph; a call that is launched directly can be captured after a first call of the same shapes "
            "and options outside"
        )


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on PyTorch's current stream of this GPU."""
    if not torch.cuda.is_initialized():
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def copy_to_jax(tensors: Sequence[torch.Tensor], device: torch.device) -> list[jax.Array]:
    """JAX arrays with the tensors' values, in JAX's own memory, so the caller may keep them.

    device: the device of the tensors. The host does not wait for a GPU. Raises RuntimeError while a CUDA graph is being
    captured.
    """
    return call_on_tensors(lambda *arrays: [jnp.copy(array) for array in arrays], tensors, device)


def call_on_tensors[Result](
    function: Callable[..., Result], tensors: Sequence[torch.Tensor], device: torch.device
) -> Result:
    """Calls function(*arrays) on JAX arrays over the tensors' memory, and returns its results, a pytree of arrays.

    The function must not return its arguments, or arrays over their memory. Later work of PyTorch's current stream
    waits until JAX has computed the results. Raises RuntimeError while a CUDA graph is being captured.
    """
    refuse_capture(device)
    with torch._C._DisableFuncTorch():  # an active transform would wrap the tensors made here
        arrays, owners = import_tensors(tensors, device)
        results = function(*arrays)
        leaves = [array for array in jax.tree.leaves(results) if array.size]
        if device.type == "cpu":
            jax.block_until_ready(leaves)
        else:
            handle = torch.cuda.current_stream(device).cuda_stream or 1
            for array in leaves:
                _view(array, handle)  # the stream waits for JAX
    del owners
    return results


def outside_of_traces() -> contextlib.AbstractContextManager[None]:
    """A context manager inside which JAX computes values, even while JAX traces a function that calls the bridge.

    Without it, JAX would add the bridge's own computations to the enclosing trace.
    """
    return contextlib.nullcontext() if core.trace_state_clean() else core.eval_context()


def _empty(array: jax.Array, device: torch.device) -> torch.Tensor:
    """A new tensor with an array's shape and dtype, without its values."""
    return torch.empty(array.shape, dtype=_TO_TORCH[array.dtype], device=device)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if JAX can read its memory as it is, else a copy.

    JAX reads contiguous tensors that have memory, and are not lazily conjugated or negated. Their address must be a
    multiple of 256 bytes on a GPU, of 64 on a CPU.
    """
    # DLPack lacks the bits for lazy conjugation and negation: JAX would read the wrong sign.
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor._is_zerotensor():  # autograd makes these zeros without memory
        tensor = tensor.clone()
    # JAX accepts some permutations, but compiles a program for each.
    tensor = tensor.contiguous()
    if tensor.data_ptr() % _ALIGNMENT[tensor.device.type]:
        tensor = tensor.clone()
    return tensor


class _DlpackFunctions(NamedTuple):
    """jaxlib's own DLPack functions.

    to_array(capsule, JAX device, stream or None, None, DLPack's device type) returns an array over a capsule's memory,
    which JAX uses after the stream. to_capsule(array, stream=...) returns a capsule; the stream waits for the array.
    """

    to_array: Callable[..., jax.Array]
    to_capsule: Callable[..., Any]


def _private() -> _DlpackFunctions | None:
    """jaxlib's own DLPack functions, or None if they are not found."""
    try:
        from jax._src.lib import _jax

        return _DlpackFunctions(
            to_array=_jax.dlpack_managed_tensor_to_buffer, to_capsule=_jax.buffer_to_dlpack_managed_tensor
        )
    except (ImportError, AttributeError):
        return None


_PRIVATE = _private()


def has_private() -> bool:
    """Whether jaxlib's own DLPack functions are found. Without them, only JAX's public jax.dlpack can be used."""
    return _PRIVATE is not None


def lender(device: torch.device) -> CapsuleFactory:
    """A new CapsuleFactory, which makes JAX arrays over PyTorch's tensors of this device, but keeps no tensor alive.

    Call it only if has_private() is True.
    """
    assert _PRIVATE is not None
    return CapsuleFactory(_PRIVATE.to_array, jax_device(device), _DLPACK_DEVICE[device.type])


def wait_for(array: jax.Array, device: torch.device) -> None:
    """Makes PyTorch's current stream of a GPU wait until JAX has written the array; on a CPU, the host waits.

    On a GPU, call it only if has_private() is True.
    """
    if device.type == "cpu":
        array.block_until_ready()
        return
    assert _PRIVATE is not None
    _PRIVATE.to_capsule(array, stream=_current_stream(device).cuda_stream or 1)


def _over(tensors: list[torch.Tensor], device: torch.device, target: jax.Device, is_one_call: bool) -> list[jax.Array]:
    """JAX arrays over the memory of tensors, which must be results of `readable` and not empty.

    On a GPU, JAX uses the arrays after the work that is now queued on PyTorch's current stream. target: the JAX device
    of `device`. is_one_call: makes only JAX's use of the first array wait; enough if one call takes all arrays.
    """
    if _PRIVATE is None:
        if device.type == "cuda":
            with torch.cuda.device(device):
                return [jax.dlpack.from_dlpack(tensor, device=target, copy=False) for tensor in tensors]
        # A pinned tensor would report a GPU as its device.
        tensors = [tensor.clone() if tensor.is_pinned() else tensor for tensor in tensors]
        return [jax.dlpack.from_dlpack(tensor, device=target, copy=False) for tensor in tensors]
    stream = after_current_stream(device)
    code = _DLPACK_DEVICE[device.type]
    to_array = _PRIVATE.to_array
    arrays = []
    for tensor in tensors:
        arrays.append(to_array(torch.utils.dlpack.to_dlpack(tensor), target, stream, None, code))
        if is_one_call:
            stream = None
    return arrays


class _Ready(threading.local):
    """One CUDA event for each GPU, by its index, which this thread records on PyTorch's streams again and again."""

    def __init__(self) -> None:
        self.events: dict[int, torch.cuda.Event] = {}


_READY = _Ready()


def after_current_stream(device: torch.device) -> int | None:
    """The handle of a stream of JAX, after it was made to wait for PyTorch's current stream of this GPU; None on a CPU.

    JAX uses an array that it gets with this stream only after the work that is now queued on PyTorch's stream.
    """
    if device.type != "cuda":
        return None
    stream = _stream_of_jax(device)
    ready = _READY.events.get(device.index)
    if ready is None:
        ready = _READY.events[device.index] = torch.cuda.Event()
    ready.record(_current_stream(device))
    stream.wait_event(ready)
    return stream.cuda_stream


@functools.cache
def _stream_of_jax(device: torch.device) -> torch.cuda.Stream:
    """JAX's stream of this GPU for waits for other libraries, as a PyTorch object."""
    return _external_stream(jax_device(device).get_stream_for_external_ready_events(), device)


def _current_stream(device: torch.device) -> torch.cuda.Stream:
    """PyTorch's current stream of a GPU, as a cached object: each torch.cuda.current_stream() makes a new one."""
    return _external_stream(torch_internals.stream_handle(device.index), device)


@functools.lru_cache(maxsize=64)
def _external_stream(stream: int, device: torch.device) -> torch.cuda.Stream:
    """The stream of this handle. Handle 0 is the default stream: torch.cuda.ExternalStream would make a new one."""
    return torch.cuda.ExternalStream(stream, device=device) if stream else torch.cuda.default_stream(device)


def _view(array: jax.Array, stream: int | None) -> torch.Tensor:
    """A tensor over the memory of a JAX array, which is not copied.

    stream: on a GPU, DLPack's number of a stream, which is made to wait until JAX has written the array; None on a CPU.
    """
    if _PRIVATE is not None:
        return torch.utils.dlpack.from_dlpack(_PRIVATE.to_capsule(array, stream=stream))
    return torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=stream))  # type: ignore[call-arg]


_HELD = StreamKeepAlive()


def held_bytes(device: torch.device) -> int:
    """The bytes of JAX's memory on a GPU that are kept allocated until PyTorch's streams have copied them."""
    return _HELD.sizes().get(device.index, 0)


# Tensors whose memory JAX may still be reading, by a running number.
_LENT: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
_LOANS = itertools.count()


@atexit.register
def _finish() -> None:
    """Waits, at the end of the process and for JAX at most 2 seconds, until neither library uses the other's memory.

    JAX's threads release a tensor under the interpreter's lock. After the interpreter has ended, that would abort the
    process.
    """
    read = _HELD.clear()
    deadline = time.monotonic() + 2
    while (_LENT or any(x() is not None for x in read)) and time.monotonic() < deadline:
        time.sleep(0.001)
