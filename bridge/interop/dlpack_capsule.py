"""JAX arrays over the memory of PyTorch's tensors, which they do not keep alive.

Who makes one keeps the tensor until JAX has used it, or gives its memory away in the order of a stream that waits for
JAX first. A capsule of PyTorch's would keep the tensor. Then a thread of JAX's lets go of it, and takes the
interpreter's lock from the thread that calls.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import torch

from jax_kernels.bridge.interop.bounded_dict import drop_oldest

__all__ = ["Lender"]

_NAME = b"dltensor"
_POINTER = 8
_HEAD = 24  # bytes of a DLManagedTensor up to the shape: the data's address, the device, the rank and the dtype
_MOST = 1024


class _Functions(NamedTuple):
    """Functions of Python and of C, which are called with the interpreter's lock held. free: its address."""

    capsule: Callable[..., Any]
    pointer: Callable[..., int]
    malloc: Callable[[int], int]
    copy: Callable[..., Any]
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


class _Form(NamedTuple):
    """A DLManagedTensor without the data's address. shape: what it points to."""

    rest: bytes
    shape: Any


def _form_of(tensor: torch.Tensor) -> _Form:
    """The form of a contiguous tensor, whose device and dtype are as PyTorch itself writes them.

    The deleter is C's free, of the struct alone.
    """
    functions = _functions()
    capsule = torch.utils.dlpack.to_dlpack(tensor.detach())
    head = ctypes.string_at(functions.pointer(capsule, _NAME), _HEAD)
    shape = (ctypes.c_int64 * max(1, tensor.dim()))(*tensor.shape)
    strides, offset, context = 0, 0, 0  # no strides: row-major
    numbers = (ctypes.addressof(shape), strides, offset, context, functions.free)
    return _Form(head[_POINTER:] + b"".join(x.to_bytes(_POINTER, "little") for x in numbers), shape)


class Lender:
    """Makes arrays on one JAX device of contiguous tensors with elements.

    to_array: jaxlib's function from a DLPack capsule to an array.
    """

    def __init__(self, to_array: Callable[..., jax.Array], device: jax.Device, code: int) -> None:
        """code: of the device's kind, in DLPack."""
        self._to_array = to_array
        self._device = device
        self._code = code
        self._forms: dict[Any, _Form] = {}
        self._kept: dict[Any, jax.Array] = {}

    def over(self, tensor: torch.Tensor, stream: int | None = None) -> jax.Array:
        """A new array. stream: one that JAX gave for this; JAX waits for it before it uses the array."""
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
        """The array of this address, shape and dtype, made once. It waits for nothing, and must never be donated."""
        key = tensor.data_ptr(), tensor.shape, tensor.dtype
        array = self._kept.get(key)
        if array is None or array.is_deleted():  # as somebody may do to all of jax.live_arrays()
            array = self.over(tensor)
            self._kept[key] = array
            drop_oldest(self._kept, _MOST)
        return array
