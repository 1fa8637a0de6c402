"""Functions of scores and indices that are written for PyTorch, as FlexAttention takes them.

A score_mod in jnp code stays as it is. One in torch operations is traced by torch_forms. Tensors that it closes over,
or reads as globals or defaults, become arguments of the call: their values are data, and they have gradients.
"""

import dataclasses
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jax_kernels.bridge import torch_forms, twins
from jax_kernels.bridge.bounded import drop_oldest
from jax_kernels.bridge.once import fresh_name

__all__ = ["apart", "apart_in_graph", "filled", "in_jnp", "mask_mod", "reached"]

_WANT = (
    "want an elementwise function of scalars in torch's elementwise operations, or in jnp code, as in "
    "jnp.where(q_idx >= kv_idx, jnp.tanh(score), -jnp.inf)"
)
type Path = tuple[tuple[str, Any], ...]
_LIBRARIES = ("torch", "jax", "jaxlib", "numpy")
_MOST = 4096
_SKELETONS: dict[str, types.FunctionType] = {}  # with Places for the tensors that they read
_NAMES: dict[Any, str] = {}  # by the key of twins
_OF_FUNCTION: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = weakref.WeakKeyDictionary()


def reached(function: Any, path: Path) -> Any:
    """The values that the function reads there. torch.compile traces it."""
    for kind, key in path:
        if kind == "cell":
            function = function.__closure__[key].cell_contents
        elif kind == "default":
            function = function.__defaults__[key]
        elif kind == "keyword default":
            function = function.__kwdefaults__[key]
        else:
            function = function.__globals__[key]
    return function


def apart(function: Any, argument: str = "score_mod") -> tuple[str, tuple[Path, ...]] | None:
    """The function without its tensors; None where it reads none. Twins share a skeleton.

    Raises TypeError for a tensor of a dtype that JAX lacks, naming it.
    """
    if type(function) is not types.FunctionType:
        return None
    places: dict[int, twins.Place] = {}
    paths: list[Any] = []

    def place(x: Any, path: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in places:
            _check(argument, function, x)
            places[id(x)] = twins.Place(len(paths))
            paths.append(path)
        return places[id(x)]

    bare = _filled(function, place)
    if not paths:
        return None
    try:
        key = twins.key_of(bare)
    except twins.UnknownError:
        name, of_paths = _OF_FUNCTION.get(function, (None, None))
        if name not in _SKELETONS or of_paths != paths:
            name = _kept(bare)
            _OF_FUNCTION[function] = name, paths
        return name, tuple(paths)
    if (name := _NAMES.get(key)) not in _SKELETONS:
        _NAMES[key] = name = _kept(bare)
        drop_oldest(_NAMES, _MOST)
    return name, tuple(paths)


@torch.compiler.assume_constant_result
def apart_in_graph(function: Any) -> tuple[str, tuple[Path, ...]] | None:
    """apart, for code that torch.compile traces."""
    return apart(function)


def _check(argument: str, function: Any, x: torch.Tensor) -> None:
    wide = {torch.int64: torch.int32, torch.float64: torch.float32}
    if x.dtype in wide:
        raise TypeError(
            f"{argument}: got a function {function.__qualname__} that reads a tensor of {x.dtype} {tuple(x.shape)}, "
            f"want {wide[x.dtype]}; cast it before, with .to({wide[x.dtype]})"
        )


def _kept(function: types.FunctionType) -> str:
    """The name of a new skeleton."""
    name = fresh_name("score_mod")
    _SKELETONS[name] = function
    drop_oldest(_SKELETONS, _MOST)
    return name


def filled(skeleton: str, arrays: Any, argument: str = "score_mod") -> Callable[..., Any]:
    """The function of that skeleton in jnp, which reads the arrays in the place of its tensors.

    Raises TypeError, naming the function, where it has no form in jnp.
    """
    values = [torch_forms.Value(x) for x in arrays]
    read = lambda x, path: values[x.number] if isinstance(x, twins.Place) else x
    named = _named(argument, _filled(_SKELETONS[skeleton], read))
    if argument == "score_mod":
        try:
            _trace(named)
        except RefusedError:
            raise
        except Exception as error:
            raise RefusedError(
                f"{argument}: {_SKELETONS[skeleton].__qualname__} raised {type(error).__name__} when traced; it reads "
                f"torch.Tensors, so it cannot be in jnp code; {_WANT}"
            ) from error
    return named


def in_jnp(function: Any, name: str = "score_mod") -> Any:
    """A score_mod in jnp: the function itself, or its form where it is in torch operations and reads no tensors.

    Raises TypeError, naming the function, where it uses torch and has no form.
    """
    if not callable(function) or _traces(function):
        return function
    named = _named(name, function)
    try:
        _trace(named)
    except RefusedError:
        raise
    except Exception:
        return function  # it is in jnp code, and the op says what is wrong with it
    return named


def mask_mod(function: Any) -> tuple[Any, list[torch.Tensor]]:
    """(a mask's function in jnp, the tensors that it takes after the indices). Twins have one function.

    Raises TypeError, naming the function, where it uses torch and has no form.
    """
    if not callable(function):
        return function, []
    found = apart(function, "function")
    if found is not None:
        skeleton, paths = found
        return _OfIndices(skeleton, len(paths)), [reached(function, path) for path in paths]
    indices = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    try:
        jax.eval_shape(function, *indices)
        return function, []
    except Exception:
        named = _OfIndices(function)
    try:
        jax.eval_shape(named, *indices)
    except RefusedError:
        raise
    except Exception:
        return function, []  # it takes arrays, or is in jnp code, and the builder says what is wrong with it
    return named, []


@dataclasses.dataclass(frozen=True)
class _OfIndices:
    """A mask's function in torch operations, as one in jnp.

    function: the function itself, or the name of its skeleton, which reads `count` tensors.
    """

    function: Any
    count: int = 0

    def __call__(self, b: Any, h: Any, q: Any, k: Any, *arrays: Any) -> Any:
        if not isinstance(self.function, str):
            return _named("function", self.function)(b, h, q, k, *arrays)
        return filled(self.function, arrays[: self.count], "function")(b, h, q, k, *arrays[self.count :])


class RefusedError(TypeError):
    """Raised by in_jnp and filled."""


def _traces(function: Callable[..., Any]) -> bool:
    try:
        _trace(function)
    except Exception:
        return False
    return True


def _trace(function: Callable[..., Any]) -> None:
    index = jax.ShapeDtypeStruct((), jnp.int32)
    jax.eval_shape(function, jax.ShapeDtypeStruct((), jnp.float32), index, index, index, index)


def _named(name: str, function: Any) -> Callable[..., Any]:
    """The function in jnp. What has no form is refused with the function's name."""
    inner = torch_forms.in_jnp(function)
    own = getattr(function, "__qualname__", repr(function))

    def of_arrays(*args: Any) -> Any:
        try:
            return inner(*args)
        except torch_forms.NoFormError as error:
            raise RefusedError(f"{name}: {own} {error}; {_WANT}") from error

    return of_arrays


def _filled(function: Any, replace: Callable[[Any, Any], Any], outer: tuple[Any, ...] = (), path: Any = ()) -> Any:
    """The function, or a copy of it in which what it reads is replaced: cells, defaults, globals, in its functions too.

    replace: a function of a value and of its path from the function.
    """
    if function in outer or (function.__module__ or "").split(".")[0] in _LIBRARIES:
        return function

    def of(step: str, key: Any, x: Any) -> Any:
        longer = (*path, (step, key))
        if type(x) is types.FunctionType:
            return _filled(x, replace, (*outer, function), longer)
        return replace(x, longer)

    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # an empty cell
        return function
    own = function.__globals__
    read = {name: own[name] for name in twins.names_of(function.__code__) if name in own}
    defaults, by_name = function.__defaults__ or (), function.__kwdefaults__ or {}
    new_cells = [of("cell", index, x) for index, x in enumerate(cells)]
    new_defaults = [of("default", index, x) for index, x in enumerate(defaults)]
    new_by_name = {key: of("keyword default", key, x) for key, x in by_name.items()}
    new_read = {key: of("global", key, x) for key, x in read.items()}
    before = (*cells, *defaults, *by_name.values(), *read.values())
    after = (*new_cells, *new_defaults, *new_by_name.values(), *new_read.values())
    if all(x is y for x, y in zip(before, after, strict=True)):
        return function
    copy = types.FunctionType(
        function.__code__,
        {**new_read, "__builtins__": own.get("__builtins__"), "__name__": own.get("__name__")},
        function.__name__,
        tuple(new_defaults) or None,
        tuple(types.CellType(x) for x in new_cells),
    )
    copy.__kwdefaults__, copy.__qualname__ = new_by_name or None, function.__qualname__
    copy.__module__ = function.__module__
    return copy
