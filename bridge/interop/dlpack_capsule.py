"""JAX arrays over the memory of PyTorch tensors. The arrays do not keep the tensors alive.

The caller keeps a tensor until JAX has used it, or frees its memory in the order of a stream that waits for JAX first.
A PyTorch capsule would keep the tensor alive. Then one of JAX's threads would release the tensor, and take the
interpreter's lock from the calling thread.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import torch

from jax_kernels.bridge.interop.bounded_dict import drop_oldest

__all__ = ["CapsuleFactory"]

_NAME = b"dltensor"
_POINTER = 8
_HEAD = 24  # bytes of a DLManagedTensor up to the shape: the data's address, the device, the rank and the dtype
_MOST = 1024


class _Functions(NamedTuple):
    """Functions of Python and C, through ctypes, that are called with the interpreter's lock held.

    capsule: PyCapsule_New. pointer: PyCapsule_GetPointer. malloc, copy: C's malloc and memcpy. free: the address of C's
    free.
    """

    capsule: Callable[..., Any]
    pointer: Callable[..., int]
    malloc: Callable[[int], int]
    copy: Callable[[int, bytes, int], int]
    free: int


@functools.cache
def _functions() -> _Functions:
    capsule, pointer = ctypes.pythonapi.PyCapsule_New, ctypes.pythonapi.PyCapsule_GetPointer
    capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    c = ctypes.PyDLL(None)
    malloc, copy, free = c.malloc, c.memcpy, ctypes.cast(c.free, ctypes.c_void_p).value
    malloc.restype, malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    copy.restype, copy.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
    assert free is not None
    return _Functions(capsule=capsule, pointer=pointer, malloc=malloc, copy=copy, free=free)


class _TensorHeader(NamedTuple):
    """The bytes of DLPack's struct DLManagedTensor after the data's address, for one shape, dtype and device.

    rest: these bytes. shape: the array of sizes to which the struct points; keep it alive.
    """

    rest: bytes
    shape: ctypes.Array[ctypes.c_int64]


def _form_of(tensor: torch.Tensor) -> _TensorHeader:
    """The header, without the data's address, for all contiguous tensors of this tensor's shape, dtype and device.

    It has the device and the dtype that PyTorch writes for DLPack. The struct's deleter is C's free: it frees the
    struct, which the caller allocates by malloc, and not the tensor's memory.
    """
    functions = _functions()
    capsule = torch.utils.dlpack.to_dlpack(tensor.detach())
    head = ctypes.string_at(functions.pointer(capsule, _NAME), _HEAD)
    shape = (ctypes.c_int64 * max(1, tensor.dim()))(*tensor.shape)
    strides, offset, context = 0, 0, 0  # no strides: row-major
    numbers = (ctypes.addressof(shape), strides, offset, context, functions.free)
    return _TensorHeader(head[_POINTER:] + b"".join(x.to_bytes(_POINTER, "little") for x in numbers), shape)


class CapsuleFactory:
    """Makes JAX arrays on one device over the memory of PyTorch tensors, by DLPack, without keeping the tensors alive.

    The tensors must be contiguous and not empty, on the same device. to_array: jaxlib's function from a DLPack capsule
    to an array.
    """

    def __init__(self, to_array: Callable[..., jax.Array], device: jax.Device, code: int) -> None:
        """Makes arrays on `device`. code: DLPack's number for its type: 1 for a CPU, 2 for a CUDA GPU."""
        self._to_array = to_array
        self._device = device
        self._code = code
        self._forms: dict[tuple[torch.Size, torch.dtype], _TensorHeader] = {}
        self._kept: dict[tuple[int, torch.Size, torch.dtype], jax.Array] = {}

    def over(self, tensor: torch.Tensor, stream: int | None = None) -> jax.Array:
        """A new JAX array over the tensor's memory.

        stream: the handle of a stream for which JAX waits before it uses the array, as from
        dlpack.after_current_stream; None for no wait.
        """
        key = tensor.shape, tensor.dtype
        form = self._forms.get(key)
        if form is None:
            form = _form_of(tensor)
            self._forms[key] = form
            drop_oldest(self._forms, _MOST)
        _, _, malloc, copy, _ = functions = _functions()
        struct = malloc(_POINTER + len(form.rest))
        copy(struct, tensor.data_ptr().to_bytes(_POINTER, "little") + form.rest, _POINTER + len(form.rest))
        return self._to_array(functions.capsule(struct, _NAME, None), self._device, stream, None, self._code)

    def kept(self, tensor: torch.Tensor) -> jax.Array:
        """A JAX array over the tensor's memory, made once for each address, shape and dtype. JAX waits for no stream.

        Never donate it: later tensors at this address get the same array.
        """
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        array = self._kept.get(key)
        if array is None or array.is_deleted():  # a user may delete all of jax.live_arrays()
            array = self.over(tensor)
            self._kept[key] = array
            drop_oldest(self._kept, _MOST)
        return array
