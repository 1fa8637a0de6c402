"""Converts score_mods and mask functions that are written for PyTorch, in FlexAttention's form, to jnp.

A score_mod in jnp code stays unchanged. A score_mod in torch operations is traced by torch_to_jnp. The tensors that it
reads from closures, globals or defaults become arguments of the call: their values are data, and they have gradients.
The function without these tensors is its template: a copy with a number for each tensor.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.typing import ArrayLike
from torch.utils.weak import WeakIdKeyDictionary

from jax_kernels.bridge.interop import dlpack, torch_internals
from jax_kernels.bridge.interop.bounded_dict import drop_oldest
from jax_kernels.bridge.interop.keyed_cache import unique_name
from jax_kernels.bridge.translate import captures, function_identity, snapshots, torch_to_jnp
from jax_kernels.bridge.translate.captures import Path
from jax_kernels.masks.checks import reads

__all__ = [
    "Function",
    "RefusedError",
    "ScoreMod",
    "apart_in_graph",
    "bind_tensors",
    "looks_at",
    "mask_mod",
    "read",
    "split_tensors",
    "to_jnp",
]

type Function = Callable[..., torch.Tensor] | Callable[..., jax.Array]  # in torch operations, or in jnp code
type ScoreMod = (
    Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    | Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
)
type _Value = torch.Tensor | ArrayLike  # a mask function's argument after the indices

_WANT = (
    "want an elementwise function of scalars in torch's elementwise operations, or in jnp code, as in "
    "jnp.where(q_idx >= kv_idx, jnp.tanh(score), -jnp.inf)"
)
_MOST = 4096
_TEMPLATES: dict[str, captures.Root] = {}  # by name: functions with a `Placeholder` for each tensor that they read
_NAMES: dict[Hashable, str] = {}  # key of twins -> name
_OF_FUNCTION: weakref.WeakKeyDictionary[Function, tuple[str, list[Path]] | tuple[None, None]] = (
    weakref.WeakKeyDictionary()
)


def split_tensors(function: Function, argument: str = "score_mod") -> tuple[str, tuple[Path, ...]] | None:
    """(name, paths): separates a function from the tensors that it reads; None if it reads none.

    name: the name of its template, which is the function with an argument for each tensor; bind_tensors makes a
    function of it again. Functions that differ in identity only share a template. paths: for each distinct tensor the
    path from the function to it, for `read`. argument: the name of the function in errors. Raises TypeError, naming the
    tensor, for a dtype that JAX lacks.
    """
    root = captures.root_of(function)
    if root is None:
        return None
    placeholders: dict[int, function_identity.Placeholder] = {}
    paths: list[Path] = []

    def placeholder(x: Any, path: Path) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in placeholders:
            _check(argument, root, x, path)
            placeholders[id(x)] = function_identity.Placeholder(len(paths))
            paths.append(path)
        return placeholders[id(x)]

    bare = captures.copied(root, placeholder)
    if not paths:
        return None
    try:
        key = function_identity.function_key(bare, is_copy=True)
    except (function_identity.UncomparableFunctionError, TypeError):
        name, of_paths = _of_function(function)
        if name not in _TEMPLATES or of_paths != paths:
            name = _kept(bare)
            with contextlib.suppress(TypeError):
                _OF_FUNCTION[function] = name, paths
        return name, tuple(paths)
    if (name := _NAMES.get(key)) not in _TEMPLATES:
        _NAMES[key] = name = _kept(bare)
        drop_oldest(_NAMES, _MOST)
    return name, tuple(paths)


def _of_function(function: Function) -> tuple[str, list[Path]] | tuple[None, None]:
    """(template's name, paths) that this function object got before; (None, None) if it got none, or has no hash."""
    try:
        return _OF_FUNCTION.get(function, (None, None))
    except TypeError:  # it has no hash
        return None, None


@torch_internals.constant_in_graph
def apart_in_graph(function: Function) -> tuple[str, tuple[Path, ...]] | None:
    """(name, paths): separates a function from the tensors that it reads, in code that torch.compile traces.

    name: the name of its template, for bind_tensors. paths: from the function to each tensor, for `read`. None if it
    reads no tensor. The result is a constant of the graph. Raises TypeError, naming the tensor, for a dtype that JAX
    lacks.
    """
    return split_tensors(function)


def _check(argument: str, function: captures.Root, x: torch.Tensor, path: Path) -> None:
    """Raises TypeError, naming the tensor, if JAX lacks its dtype. int64 passes, because `read` narrows it to int32.

    argument: the argument that the function is. path: from the function to the tensor x.
    """
    wants = {torch.float64: "torch.float32", torch.uint64: "torch.int32"}
    if x.dtype in wants or x.dtype.is_complex:
        want = wants.get(x.dtype, "a real dtype")
        hint = f"; cast it before, with .to({want})" if x.dtype in wants else ""
        raise TypeError(
            f"{argument}: got a function {_qualname(function)} that reads a tensor of {x.dtype} {tuple(x.shape)}, "
            f"{captures.text_of(function, path)}, want {want}{hint}"
        )


def _qualname(function: Function | captures.Root | None) -> str:
    inner = getattr(function, "func", function)
    return getattr(inner, "__qualname__", repr(inner))


_CHECKED: WeakIdKeyDictionary = WeakIdKeyDictionary()  # int64 tensor -> version whose values were found to fit int32


def read(
    argument: str, function: Function | None, paths: Sequence[Path]
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """(tensors, are_valid): the tensors that a function reads at these paths now, with int64 cast to int32.

    paths: from split_tensors. are_valid: None if all int64 values are known to fit int32. Otherwise it is a bool tensor
    without axes that is True if they fit: the host does not wait for values on a GPU, and in a graph there are none.

    Raises ValueError, naming the tensor, if a value that is known on the host does not fit int32. argument: the name of
    the function in this error.
    """
    root = captures.root_of(function)
    tensors = [captures.reached(root, path) for path in paths]
    if not any(x.dtype == torch.int64 for x in tensors):
        return tensors, None
    are_valid = None
    for index, path in enumerate(paths):
        x = tensors[index]
        if x.dtype != torch.int64:
            continue
        tensors[index] = narrow = x.to(torch.int32)
        if torch_internals.has_known_values(x):
            _check_values(argument, root, path, x, narrow)
        elif x.device.type != "meta":
            is_valid = (narrow == x).all()
            are_valid = is_valid if are_valid is None else are_valid & is_valid
    return tensors, are_valid


def _check_values(
    argument: str, function: captures.Root | None, path: Path, x: torch.Tensor, narrow: torch.Tensor
) -> None:
    """Raises ValueError, naming the tensor, unless all values of the int64 tensor x fit int32. narrow: x as int32."""
    version = None if x.is_inference() else x._version
    if version is not None and _CHECKED.get(x) == version:
        return
    if not bool((narrow == x).all()):
        furthest = int(x.flatten()[x.abs().flatten().argmax()])
        raise ValueError(
            f"{argument}: got a function {_qualname(function)} that reads a tensor of torch.int64 {tuple(x.shape)}, "
            f"{captures.text_of(function, path)}, with the value {furthest}, want values that fit int32"
        )
    _CHECKED[x] = version


def _kept(function: captures.Root) -> str:
    """Stores a template, a function with a `Placeholder` for each tensor, under a new name. Returns the name."""
    name = unique_name("score_mod")
    _TEMPLATES[name] = function
    drop_oldest(_TEMPLATES, _MOST)
    return name


def bind_tensors(template: str, arrays: Sequence[jax.Array], argument: str = "score_mod") -> Callable[..., jax.Array]:
    """A function of arrays, in jnp, with the same results as the function from which a template was made.

    template: its name, from split_tensors. arrays: the values that it reads, one for each path that
    split_tensors returned. argument: the name of the function in errors. Raises TypeError, naming the function, if it
    uses an operation without a form in jnp: at once if argument is "score_mod", else when the new function is called.
    """
    values = [torch_to_jnp.TracedTensor(x, is_read=True) for x in arrays]
    fill = lambda x, path: values[x.number] if isinstance(x, function_identity.Placeholder) else x
    named = _named(argument, captures.copied(_TEMPLATES[template], fill))
    if argument == "score_mod":
        try:
            _trace(named)
        except RefusedError:
            raise
        except Exception as error:
            raise RefusedError(
                f"{argument}: {_qualname(_TEMPLATES[template])} raised {type(error).__name__} when traced "
                f"({_line(error)}); it reads torch.Tensors, so it cannot be in jnp code; {_WANT}"
            ) from error
    return named


def to_jnp(function: Function, name: str = "score_mod") -> Function:
    """A score_mod in jnp: the function itself if it is in jnp code, else its jnp form if it is in torch operations.

    The function reads no tensors but its arguments. name: its name in errors. Other objects, and functions that raise
    when traced, are returned unchanged: the op then raises its own error.

    Raises TypeError, naming the function, if it uses torch and has no form in jnp.
    """
    if not callable(function) or _traces(function):
        return function
    named = _named(name, function)
    try:
        _trace(named)
    except RefusedError:
        raise
    except Exception:
        return function  # it is in jnp code, and the op raises its error
    return named


def mask_mod(
    function: Function, arrays: Sequence[_Value] = ()
) -> tuple[Function, list[torch.Tensor], tuple[Path, ...]]:
    """(function in jnp, tensors, paths): converts a mask's function of (b, h, q_idx, kv_idx, *arrays).

    The function in jnp takes arrays of indices, then the tensors that the original function reads, then `arrays`.
    tensors: these tensors, with int64 cast to int32. paths: from the original function to each of them. For functions
    that differ in identity only, the converted functions are equal. arrays: the arguments after the indices.

    Raises TypeError, naming the function, if it uses torch and has no form in jnp, and ValueError for a tensor of int64
    whose values do not fit int32.
    """
    if not callable(function):
        return function, [], ()
    indices = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    found = split_tensors(function, "function")
    if found is not None:
        template, paths = found
        tensors, are_valid = read("function", function, paths)
        if are_valid is not None and not bool(are_valid):  # making a mask reads the values on the host
            for path in paths:
                x = captures.reached(captures.root_of(function), path)
                _check_values("function", captures.root_of(function), path, x, x.to(torch.int32))
        made = _OfIndices(template, len(paths))
        _refuse(made, *indices, *map(_struct, (*tensors, *arrays)))
        return made, tensors, paths
    given = [*indices, *map(_struct, arrays)]
    function = snapshots.snapshot(function)
    try:
        jax.eval_shape(function, *given)
        return function, [], ()
    except Exception:
        named = _OfIndices(function)
    try:
        jax.eval_shape(named, *given)
    except RefusedError:
        raise
    except Exception:
        return function, [], ()  # it is in jnp code, and the builder raises its error
    return named, [], ()


def _refuse(function: Function, *given: jax.ShapeDtypeStruct | ArrayLike) -> None:
    """Raises RefusedError if the function uses a torch operation without a form in jnp. Ignores all other errors.

    given: shapes and dtypes, or arrays, of the function's arguments. The function that makes the mask raises the other
    errors.
    """
    try:
        jax.eval_shape(function, *given)
    except RefusedError:
        raise
    except Exception:
        return


def _struct(x: _Value) -> jax.ShapeDtypeStruct | ArrayLike:
    """A tensor's shape and dtype for a JAX trace; other values unchanged."""
    if not isinstance(x, torch.Tensor):
        return x
    return jax.ShapeDtypeStruct(tuple(x.shape), dlpack.jax_dtype(x.dtype))


@dataclasses.dataclass(frozen=True)
class _OfIndices:
    """A mask's function in torch operations as a function in jnp: call it as (b, h, q, k, *tensors, *arrays).

    b, h, q, k: int32 arrays of indices with broadcastable shapes. Returns an array of the broadcast shape, but with
    size 1 along axes of indices that the function does not read. function: the original function of scalars, if it
    reads no tensors; else the name of its template, which reads `count` tensors.
    """

    function: Any
    count: int = 0

    def __call__(self, b: jax.Array, h: jax.Array, q: jax.Array, k: jax.Array, *arrays: jax.Array) -> jax.Array:
        if isinstance(self.function, str):
            function = bind_tensors(self.function, arrays[: self.count], "function")
        else:
            function = _named("function", self.function)
        return _of_each(lambda *indices: function(*indices, *arrays[self.count :]), b, h, q, k)

    @property
    def __name__(self) -> str:
        return _qualname(_TEMPLATES.get(self.function, self.function))


def _of_each(function: Callable[..., jax.Array], *indices: jax.Array) -> jax.Array:
    """Maps a function of four int32 scalars over arrays with broadcastable shapes. Returns an array.

    An index that the function does not read does not add its axes: the result has size 1 there.
    """
    indices = tuple(map(jnp.asarray, indices))
    program = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct((), jnp.int32)] * 4)
    is_read = [reads(program.jaxpr, i) for i in range(4)]
    given = [x if needs else jnp.int32(0) for x, needs in zip(indices, is_read, strict=True)]
    rank = max(x.ndim for x in given)
    shapes = [(1,) * (rank - x.ndim) + x.shape for x in given]
    mapped = [axis for axis in range(rank) if any(shape[axis] != 1 for shape in shapes)]
    for axis in reversed(mapped):
        function = jax.vmap(function, tuple(None if shape[axis] == 1 else 0 for shape in shapes))
    flat = [
        x.reshape([n for n in shape if n != 1]) if 1 in shape else x for x, shape in zip(given, shapes, strict=True)
    ]
    result = function(*flat)
    return jnp.expand_dims(result, [axis for axis in range(rank) if axis not in mapped])


def looks_at(function: Function, arrays: Sequence[_Value]) -> tuple[bool, bool]:
    """(whether a mask's function reads the batch index, whether it reads the head index).

    function: in jnp, as mask_mod returns it. arrays: all its arguments after the four indices.
    """
    indices = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    program = jax.make_jaxpr(function)(*indices, *map(_struct, arrays)).jaxpr
    return reads(program, 0), reads(program, 1)


class RefusedError(TypeError):
    """Raised by to_jnp, bind_tensors and mask_mod for a function that uses a torch operation without a form in jnp."""


def _traces(function: Function) -> bool:
    """Whether JAX can trace the function as a score_mod, so that it is in jnp code."""
    try:
        _trace(function)
    except Exception:
        return False
    return True


def _trace(function: Function) -> None:
    """Traces a score_mod with a float32 score and four int32 indices, all scalars. Raises the function's errors."""
    index = jax.ShapeDtypeStruct((), jnp.int32)
    jax.eval_shape(function, jax.ShapeDtypeStruct((), jnp.float32), index, index, index, index)


def _named(name: str, function: Function) -> Callable[..., jax.Array]:
    """A function of arrays, in jnp, with the same results as a function in torch operations.

    When called, it raises RefusedError for a torch operation without a form in jnp. name: the argument that the
    function is, for this error.
    """
    inner = torch_to_jnp.to_jnp(function)
    own = _qualname(function)

    def of_arrays(*args: jax.Array) -> jax.Array:
        try:
            return inner(*args)
        except torch_to_jnp.UnsupportedTorchOpError as error:
            raise RefusedError(f"{name}: {own} {error}; {_WANT}") from error

    return of_arrays


def _line(error: Exception) -> str:
    """The first line of an error's text."""
    return str(error).split("\n")[0]
