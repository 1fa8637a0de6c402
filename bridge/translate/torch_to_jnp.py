"""Runs a score_mod or a mask's function, written in torch operations, on arrays that JAX traces.

A TracedTensor wraps such an array. PyTorch's operators, tensor methods and functions take TracedTensors and return
TracedTensors: each operation runs its jnp form, which torch_table lists.
"""

import contextlib
import functools
import inspect
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch
from torch.overrides import TorchFunctionMode

from jax_kernels.bridge.interop import dlpack
from jax_kernels.bridge.translate import autograd_functions
from jax_kernels.bridge.translate.torch_shapes import SHAPES, TORCHS, Form, Operand, UnsupportedTorchOpError, dtype_of
from jax_kernels.bridge.translate.torch_table import CASTS, FORMS, IN_PLACE, RANDOM, VIEWS

__all__ = ["TracedTensor", "UnsupportedTorchOpError", "to_jnp"]

_OPERATORS = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")},
    **{name: getattr(operator, name) for name in ("lshift", "rshift", "xor")},
    **{name: getattr(operator, f"{name}_") for name in ("and", "or")},
}
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OPERATORS_OF_LIBRARIES = {"approx::tanh": "tanh"}  # attention-gym's name for the GPU's faster instruction
_WANT_TENSORS = "want it as a variable of its own, as in `bias = module.bias` before the function"


class _MissingError(UnsupportedTorchOpError, AttributeError):
    """Raised for an attribute that a TracedTensor lacks. It is an AttributeError, so that hasattr works."""


class _State(threading.local):
    """The operations that the function which this thread traces must not use.

    refused: the reason, by the name of the operation; empty if the thread traces no function.
    """

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}


_STATE = _State()


class TracedTensor:
    """A JAX array in code that is written for torch.Tensors: it has a tensor's operators, methods and properties.

    array: the JAX array, possibly a tracer. is_shared: whether another TracedTensor may be a view of the same memory in
    PyTorch. is_read: whether it is a tensor that the function reads from outside, as from a closure, and not its own
    result. Operations that change a shared or a read TracedTensor raise UnsupportedTorchOpError.
    """

    __array_ufunc__ = None  # NumPy's scalars leave operators to TracedTensor
    __hash__ = object.__hash__

    def __init__(self, array: jax.Array, *, is_read: bool = False) -> None:
        self.array = array
        self.is_shared = False
        self.is_read = is_read

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _called(_name_of(function), args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        own = name.removesuffix("_")
        if name not in FORMS and own not in FORMS:
            raise _MissingError(f"uses Tensor.{name}, which has no form in jnp here")
        return functools.partial(_method, name if name in FORMS else own, self, is_in_place=name not in FORMS)

    @property
    def dtype(self) -> torch.dtype:
        dtype = jnp.dtype(self.array.dtype)
        return TORCHS.get(dtype) or dlpack.torch_dtype("a result", dtype)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.array.shape)

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")  # functions make constants there, and JAX moves them

    @property
    def layout(self) -> torch.layout:
        return torch.strided

    @property
    def T(self) -> "TracedTensor":
        return _called("t", (self,), {})

    @property
    def mT(self) -> "TracedTensor":
        return _called("transpose", (self, -2, -1), {})

    @property
    def data(self) -> "TracedTensor":
        return _called("detach", (self,), {})

    requires_grad = is_cuda = is_nested = is_sparse = is_quantized = False
    is_cpu = True

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.array.ndim

    ndimension = dim

    def numel(self) -> int:
        return self.array.size

    nelement = numel

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        return False

    def is_signed(self) -> bool:
        return self.dtype.is_signed

    def is_contiguous(self, *_: torch.memory_format, **__: torch.memory_format) -> bool:
        return True

    def __getitem__(self, index: Any) -> "TracedTensor":
        return _called("__getitem__", (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        raise UnsupportedTorchOpError("assigns to a part of a tensor, want a new tensor, as from torch.where")

    def __neg__(self) -> "TracedTensor":
        return _called("neg", (self,), {})

    def __pos__(self) -> "TracedTensor":
        return self

    def __abs__(self) -> "TracedTensor":
        return _called("abs", (self,), {})

    def __invert__(self) -> "TracedTensor":
        return _called("bitwise_not", (self,), {})

    def __len__(self) -> int:
        if not self.array.ndim:
            self._has_no_value()
        return len(self.array)

    def __iter__(self) -> Iterator["TracedTensor"]:
        if not self.array.ndim:
            self._has_no_value()
        return iter(_called("unbind", (self,), {}))

    def _has_no_value(self, *_: int) -> NoReturn:
        raise UnsupportedTorchOpError(
            "asks for the value of a score or an index, as in `if`; want torch.where(condition, x, y)"
        )

    def __index__(self) -> int:
        raise UnsupportedTorchOpError(
            "asks for the value of a score or an index, as to look up a list, a NumPy array or a slice; want a look-up "
            "in a torch.Tensor, as in table[q_idx]"
        )

    __bool__ = __int__ = __float__ = __complex__ = item = tolist = numpy = _has_no_value


def _method(name: str, value: TracedTensor, /, *args: Any, is_in_place: bool = False, **kwargs: Any) -> Any:
    """The result of value.name(*args, **kwargs) for a tensor's method. is_in_place: whether it also changes value."""
    if name == "where":  # x.where(condition, y)
        condition, other = (*args, *kwargs.values())
        result = _called("where", (condition, value, other), {})
    else:
        result = _called(name, (value, *args), kwargs)
    return _assigned(name, value, result) if is_in_place else result


def _assigned(name: str, value: TracedTensor, result: TracedTensor) -> TracedTensor:
    """Writes an operation's result to `value`, like PyTorch's methods whose names end in "_". Returns `value`.

    name: the operation's name in errors. Raises UnsupportedTorchOpError if the value is shared or read from outside,
    and if the result has another shape, or a dtype that PyTorch does not cast to the value's dtype.
    """
    if value.is_shared or value.is_read:
        whose = "that the function reads" if value.is_read else "that shares memory with another"
        raise UnsupportedTorchOpError(f"changes a tensor {whose} in place, by {name}; want a new one")
    if not torch.can_cast(result.dtype, value.dtype) or result.shape != value.shape:
        raise UnsupportedTorchOpError(
            f"changes a tensor of {value.dtype} {tuple(value.shape)} in place to {result.dtype} {tuple(result.shape)}, "
            f"by {name}; want a new one"
        )
    value.array = result.array.astype(value.array.dtype)
    return value


type _Other = TracedTensor | float
type _Binary = Callable[[Operand, Operand], jax.Array]


def _operate(name: str, function: _Binary, *, swaps: bool = False) -> Callable[[TracedTensor, _Other], TracedTensor]:
    """A method for an operator, such as __add__, or with swaps=True its reflected form, such as __radd__."""

    def operate(self: TracedTensor, other: _Other) -> TracedTensor:
        pair = (self, other)[:: -1 if swaps else 1]
        return _result(name, function, pair, {})

    return operate


def _operate_in_place(name: str, function: _Binary) -> Callable[[TracedTensor, _Other], TracedTensor]:
    """A method for an operator that changes its first operand, such as __iadd__."""
    return lambda self, other: _assigned(name, self, _result(name, function, (self, other), {}))


for _own, _function in _OPERATORS.items():
    setattr(TracedTensor, f"__{_own}__", _operate(f"__{_own}__", _function))
    setattr(TracedTensor, f"__r{_own}__", _operate(f"__r{_own}__", _function, swaps=True))
    if _own != "matmul":
        setattr(TracedTensor, f"__i{_own}__", _operate_in_place(f"__i{_own}__", _function))
for _own in _COMPARISONS:
    setattr(TracedTensor, f"__{_own}__", _operate(f"__{_own}__", getattr(operator, _own)))


def _name_of(function: Callable[..., torch.Tensor]) -> str:
    """The name of a torch function, as torch_table lists it: "special_expit" is "expit", "__add__" is "add".

    An operator of another library keeps its namespace, as in "mylib::sin", unless it is known to be a torch function:
    "approx::tanh" is "tanh".
    """
    name = getattr(function, "__name__", str(function))
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        packet = getattr(function, "overloadpacket", function)
        qualified = str(packet._qualified_op_name)
        space, name = qualified.split("::")
        if space not in ("aten", "prims"):
            return _OPERATORS_OF_LIBRARIES.get(qualified, qualified)
    if name not in FORMS and name.startswith("special_"):
        name = name.removeprefix("special_")
    if name.startswith("__") and (own := name.strip("_")) in _OPERATORS:
        return own
    return name


def _called(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of torch's function or method of this name on TracedTensors, by its form in jnp.

    A name that ends in "_" changes the first argument and returns it. Raises UnsupportedTorchOpError if the name has no
    form, or is an operation that the traced function must not use.
    """
    autograd_functions.check()
    own = name if name in FORMS else name.removesuffix("_")
    form = FORMS.get(own)
    if form is None:
        why = ", as its values are random" if name in RANDOM else ""
        raise UnsupportedTorchOpError(f"uses torch's {name}, which has no form in jnp here{why}")
    if own in _STATE.refused:
        raise UnsupportedTorchOpError(f"uses torch's {name}, {_STATE.refused[own]}")
    if kwargs.get("out") is not None:
        raise UnsupportedTorchOpError(f"gives torch.{name} an `out`, want its result")
    given = {key: x for key, x in kwargs.items() if key != "out"}
    is_in_place = own != name
    if own in IN_PLACE:
        is_in_place = bool(given.pop("inplace", False)) or is_in_place
        most = len(inspect.signature(form).parameters)
        if len(args) > most:
            is_in_place, args = bool(args[most]) or is_in_place, args[:most]
    first: Any = args[0] if args else given.get("input", given.get("self"))
    result = _result(name, form, args, given)
    if is_in_place:
        return _assigned(name, first, result)
    if own in CASTS and isinstance(first, TracedTensor) and result.dtype == first.dtype:
        return first
    if own in VIEWS and isinstance(first, TracedTensor):
        first.is_shared = True
        for x in result if isinstance(result, tuple) else (result,):
            x.is_shared, x.is_read = True, first.is_read
    return result


def _result(name: str, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a form (a function in jnp) on the arrays of the arguments. Returns a TracedTensor, or a tuple of them.

    name: the torch function's name in errors. Raises UnsupportedTorchOpError if the form fails.
    """
    arrays = [_array(x) for x in args]
    given = {key: _array(x) for key, x in kwargs.items()}
    given = {"y" if key == "other" else "x" if key in ("input", "self") else key: x for key, x in given.items()}
    try:
        result = form(*arrays, **given)
    except UnsupportedTorchOpError:
        raise
    except Exception as error:
        shown = f"torch.{name}" if not name.startswith("__") else name
        reason = str(error).split("\n")[0]
        raise UnsupportedTorchOpError(f"calls {shown} in a way that has no form in jnp here ({reason})") from error
    if result is NotImplemented:
        raise UnsupportedTorchOpError(f"calls {name} with {type(args[-1]).__name__}, which has no form in jnp here")
    if isinstance(result, tuple):
        return tuple(map(TracedTensor, result))
    return TracedTensor(jnp.asarray(result))


def _array(x: Any) -> Any:
    """The JAX array of a TracedTensor; for a tuple or list, a tuple of such arrays; other values unchanged.

    Raises UnsupportedTorchOpError for a torch.Tensor, and for a slice that begins or ends at a TracedTensor.
    """
    if isinstance(x, TracedTensor):
        return x.array
    if isinstance(x, tuple | list):
        return tuple(map(_array, x))
    if isinstance(x, slice) and any(isinstance(part, TracedTensor) for part in (x.start, x.stop, x.step)):
        raise UnsupportedTorchOpError(
            "slices a tensor at a score or an index, want the look-up of one entry, as in table[q_idx]"
        )
    if isinstance(x, torch.Tensor):
        raise UnsupportedTorchOpError(
            f"reads a torch.Tensor of shape {tuple(x.shape)} through an object; {_WANT_TENSORS}"
        )
    return x


class _Constants(TorchFunctionMode):
    """A torch function mode inside which torch's functions take and return TracedTensors.

    Tensors that the code creates from numbers, as by torch.tensor, become TracedTensors too. Random functions raise
    UnsupportedTorchOpError.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = _name_of(function)
        if any(issubclass(kind, TracedTensor) for kind in types) or _holds(TracedTensor, args, kwargs):
            return _called(name, args, kwargs)
        if name in RANDOM:
            raise UnsupportedTorchOpError(
                f"uses torch's {name}, which has no form in jnp here, as its values are random"
            )
        made = function(*args, **kwargs)
        is_constant = isinstance(made, torch.Tensor) and not _holds(torch.Tensor, args, kwargs)
        return _constant(name, made) if is_constant else made


def _holds(kind: type, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an argument is an instance of `kind`, or has one inside nested tuples and lists."""
    return any(
        isinstance(x, kind) or (isinstance(x, tuple | list) and _holds(kind, x, {})) for x in (*args, *kwargs.values())
    )


def _constant(name: str, made: torch.Tensor) -> TracedTensor:
    """The TracedTensor of a tensor that the traced function creates from numbers; float64 becomes float32.

    name: the torch function that made it. Raises UnsupportedTorchOpError if the tensor requires a gradient, or has
    integers beyond int32.
    """
    if made.requires_grad:
        raise UnsupportedTorchOpError("makes a tensor with requires_grad=True, want a tensor that the function reads")
    dtype = torch.float32 if made.dtype == torch.float64 else made.dtype
    try:
        return TracedTensor(jnp.asarray(made.tolist(), dtype_of(dtype)))
    except OverflowError as error:
        raise UnsupportedTorchOpError(f"makes a tensor by torch.{name} with integers beyond int32 ({error})") from error


@contextlib.contextmanager
def _refusing(refused: dict[str, str]) -> Iterator[None]:
    """Makes these operations raise UnsupportedTorchOpError inside the block, in this thread: name -> reason."""
    before, _STATE.refused = _STATE.refused, refused
    try:
        yield
    finally:
        _STATE.refused = before


_MIXES = dict.fromkeys(
    (*SHAPES, "max", "min"), "which mixes or reshapes values, where an elementwise function is wanted"
)


def to_jnp(
    function: Callable[..., torch.Tensor] | Callable[..., jax.Array], *, is_elementwise: bool = False
) -> Callable[..., jax.Array]:
    """Turns a function of tensors, in torch operations, into a function of jax.Arrays that returns a jax.Array.

    When called, the new function raises UnsupportedTorchOpError for an operation without a form in jnp.

    is_elementwise: whether the new function will get arrays though the original is written for scalars. Reductions,
    look-ups and changes of shape then raise UnsupportedTorchOpError too.
    """

    @functools.wraps(function, updated=())
    def of_arrays(*args: jax.Array) -> jax.Array:
        with _Constants(), _refusing(_MIXES if is_elementwise else {}):
            result = function(*map(TracedTensor, args))
        if isinstance(result, bool | int | float):
            return jnp.asarray(result)
        return _array(result)

    return of_arrays
