"""from_jax: a JAX function as a PyTorch function, with its gradient.

A call consists of constants and tensors. A program is made once for each set of constants: the structure of the
arguments, their shapes and dtypes, and the arguments that need a gradient. One operator for the forward, and one for
the backward, take the program's name and the tensors.
"""

import ctypes
import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import torch

from jax_kernels.bridge.interop import dlpack, torch_internals
from jax_kernels.bridge.interop.arguments import dtensors
from jax_kernels.bridge.interop.arguments.plain_numbers import is_constant, plain_options
from jax_kernels.bridge.jax_functions import dynamic_shapes, flops, vmap
from jax_kernels.bridge.jax_functions.argument_names import leaf_names
from jax_kernels.bridge.jax_functions.mask_operands import (
    NO_MASKS,
    CallMasks,
    MaskSignature,
    WeakCallMasks,
    are_immutable,
    register_masks,
    register_weak,
)
from jax_kernels.bridge.jax_functions.program_operators import CachedFunction, CallFunction, ProgramInfo, call_op
from jax_kernels.bridge.jax_functions.programs import FUNCTIONS, ProgramKey, TensorSpec, display_name
from jax_kernels.bridge.jax_functions.pytree import LEAF, MaskById, Structure, flatten, unflatten
from jax_kernels.bridge.jax_functions.tracing import program_for
from jax_kernels.bridge.operators import execute, plan_query, torch_operator
from jax_kernels.bridge.operators.call_cache import CachedCall, CallCache, same_tensors
from jax_kernels.bridge.operators.profiler_names import NamedLauncher, label_of, named_function
from jax_kernels.masks import Mask

__all__ = ["CallKey", "JaxOp", "from_jax", "with_types"]

_CONFIG = jax.config

vmap.define_rules()
flops.define_formulas("call", "call_backward")


def from_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """A JAX function as a function of PyTorch tensors, differentiable and opaque to torch.compile.

    The results are the results of `function` on jax.Arrays with the tensors' values; autograd's backward is the
    function's jax.vjp. Call from_jax once for a function, not once for a call: JAX compiles a program for each set of
    shapes, dtypes and constants, and keeps every program. Like any function under jax.jit, `function` must be pure.

    | under | behaviour |
    |---|---|
    | torch.compile(fullgraph=True) | works; the graph serves only the Mask of its trace, while the Mask is alive |
    | torch.compile(dynamic=True) | one graph for all sizes if a result's sizes are constants or sizes of tensors |
    | torch.export, make_fx | the graph runs only in the process that traced it |
    | torch.func.vmap | jax.vmap of `function` |
    | torch.func.jvp, torch.autograd.forward_ad | jax.jvp of `function`, also twice and under reverse mode |
    | double backward | raises |
    | a CUDA graph | captures calls of the direct route, after a first call outside the graph |
    | copy, pickle | works; pickles if `function` can be pickled |

    Args:
      function: takes and returns jax.Arrays, directly or in tuples, lists and dicts. Arguments that are not tensors
        (numbers, strings, None, anything hashable) are constants, and are passed unchanged. The arrays of a masks.Mask
        are dynamic values of the call, on the tensors' device: one program serves all Masks of one structure, with
        arrays of the same shapes.

    Returns:
      A function that takes tensors where `function` takes arrays: at least one tensor, and all on one device. It
      returns tensors, which PyTorch owns. It runs on the tensors' device, in the order of PyTorch's current stream.
      Gradients flow to floating-point and complex tensors that require a gradient; integer and bool tensors, and the
      arrays of a Mask, get no gradient.

    Raises, when called:
      TypeError: JAX lacks a tensor's dtype (float64 and int64 need jax_enable_x64), or a constant is not hashable, or
        holds a tensor.
      ValueError: there is no tensor, or tensors are on several devices.
      NotImplementedError: the call is differentiated in forward mode, and `function` uses an op with reverse-mode
        derivatives only (jax.custom_vjp), as this library's ops are; or the gradient is differentiated in forward
        mode, as by torch.func.hessian.
      RuntimeError: the gradient is differentiated in reverse mode, or a graph runs that another process traced.
    """
    if not callable(function):
        raise TypeError(f"function: got {type(function).__name__}, want a function of jax.Arrays")
    return _FromJax(function)


class _FromJax:
    """The function of tensors that from_jax returns.

    It pickles as a call of from_jax on the wrapped JAX function, which pickle stores by its name.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._op = JaxOp(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._op.lookup_by_name(args, kwargs)
        if call and call.cached:
            return call.cached(call.tensors)
        return self._op.run(call, *args, **kwargs)

    def __reduce__(self) -> Any:
        return from_jax, (self.__wrapped__,)  # type: ignore[attr-defined]

    def __copy__(self) -> "_FromJax":
        return self

    def __deepcopy__(self, memo: Any) -> "_FromJax":
        return self

    def __repr__(self) -> str:
        return f"from_jax({self.__wrapped__!r})"  # type: ignore[attr-defined]


class CallKey(NamedTuple):
    """The key of a call, and the cached call of this key.

    statics: all of the call but its tensors: the other arguments, a Mask by its id, and which arguments are tensors.
    tensors: the call's tensors, in order. cached: a function of the tensors that returns the call's results; None if
    the call is not cached.
    """

    statics: Hashable
    tensors: Sequence[torch.Tensor]
    cached: CachedCall | None = None


def with_types(x: Any) -> Any:
    """A tuple or list of constants as a hashable key, which differs for 1, 1.0 and True. Other values are unchanged."""
    return (*x, *map(type, x)) if isinstance(x, tuple | list) else x


def _is_int(x: Any) -> bool:
    return type(x) is int


_EXACT = (bool, int, str, type(None))  # two values are the same constant if types and values are equal
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))


def _key_by_name(
    args: Sequence[Any], kwargs: dict[str, Any], settings: Hashable
) -> tuple[Hashable, Sequence[torch.Tensor]]:
    """(statics, tensors) of a CallKey for function(*args, **kwargs).

    The arguments may be tensors, constants, Masks and containers. The tensors are in the order in which `flatten` lists
    them. The statics of two calls are equal only if the calls differ in nothing but their tensors; they contain the ids
    of Masks.
    """
    statics: list[Hashable] = [len(args), settings]
    tensors: list[torch.Tensor] = []
    masks: list[Mask] = []
    for name, x in (*((None, x) for x in args), *kwargs.items()):
        kind = type(x)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            statics.append(name)
            tensors.append(x)
        elif kind in _EXACT:
            statics.append((name, kind, x))
        elif kind is float:
            statics.append((name, kind, x.hex()))
        elif isinstance(x, Mask):
            statics.append((name, Mask, id(x)))
        elif kind is tuple and all(map(_is_int, x)):
            statics.append((name, kind, x))
        else:  # containers, and other constants
            tensors, masks = [], []
            structure = flatten((tuple(args), kwargs), tensors, masks)
            return (structure, settings, *map(id, masks)), tensors
    return tuple(statics), tensors


class JaxOp:
    """A JAX function on PyTorch tensors, for from_jax and for the bridge's ops.

    An op looks a call up before it checks the arguments, and runs it if it is not cached:

        call = op.lookup(arguments, options)
        if call and call.cached:
            return call.cached(call.tensors)
        ...  # checks, and PyTorch's settings
        return op.run(call, *args, **kwargs)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        is_opaque: bool = False,
        settings: Callable[[], Hashable] | None = None,
    ) -> None:
        """Registers a function of jax.Arrays until the process ends.

        is_opaque: makes a call one node of a torch.compile graph, which is not traced further: each name that a trace
        sees adds to the checks before every call of the graph. Only for a function whose arguments are tensors and
        constants, and whose results are tensors. settings: returns the settings of PyTorch that a call depends on.
        """
        self._function = function
        stem = getattr(function, "__name__", "function").replace(" ", "_")  # a dynamic call's text is split at spaces
        self._name = name = FUNCTIONS.add(stem, function)
        self._cache = CallCache()
        self._settings = settings
        self._is_opaque = is_opaque
        self._numbers: tuple[str, ...] = getattr(function, "plain_numbers", ())

        def in_graph(*args: Any, **kwargs: Any) -> Any:
            kwargs |= plain_options(self._numbers, kwargs)
            tensors: list[torch.Tensor] = []
            structure = flatten((args, kwargs), tensors, None)
            _check_dense(function, structure, tensors)
            flat = _flat_call(dynamic_shapes.name_of(name, structure), tensors)
            return unflatten(flat.structure, iter(flat.results))

        self._in_graph = torch_internals.node_in_graph(in_graph) if is_opaque else in_graph

    def lookup(self, arguments: Sequence[Any], options: Sequence[Any]) -> CallKey | None:
        """The key of a call, with its cached call. None while torch.compile traces, when no call is cached.

        arguments: tensors or constants. options: constants only, with_types for tuples and lists. The key also holds
        the types of the constants, because 1, 1.0 and True are equal.
        """
        if torch.compiler.is_compiling():
            return None
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        constants = [None if isinstance(x, torch.Tensor) else (type(x), x) for x in arguments]
        settings = None if self._settings is None else self._settings()
        statics = (settings, *options, *map(type, options), *constants)
        config = _CONFIG.jax_enable_x64, _CONFIG.jax_default_matmul_precision  # _config(), without a call
        return CallKey(statics, tensors, self._cache.lookup((statics, config), tensors))

    def lookup_by_name(self, args: Sequence[Any], kwargs: dict[str, Any]) -> CallKey | None:
        """The key of the call function(*args, **kwargs), with its cached call, as `lookup` returns them.

        The arguments may be tensors, constants, Masks and containers.
        """
        if torch.compiler.is_compiling():
            return None
        settings = None if self._settings is None else self._settings()
        config = _CONFIG.jax_enable_x64, _CONFIG.jax_default_matmul_precision
        if not kwargs and settings is None:  # the shortest way for calls of tensors
            cached = self._cache.lookup((len(args), config), args)
            if cached is not None or _TENSORS.issuperset(map(type, args)):
                return CallKey(len(args), args, cached)
        statics, tensors = _key_by_name(args, kwargs, settings)
        return CallKey(statics, tensors, self._cache.lookup((statics, config), tensors))

    def find(self, statics: Hashable, tensors: Sequence[torch.Tensor]) -> CachedCall | None:
        """The cached call of CallKey(statics, tensors), or None. Code that torch.compile traces must not call it."""
        return self._cache.lookup((statics, _config()), tensors)

    def run(self, call: CallKey | None, *args: Any, **kwargs: Any) -> Any:
        """The results of the function on args and kwargs: tensors, in the function's own containers.

        call: the key under which later equal calls are found; None if the call must not be cached. The call is also not
        cached if it reads other tensors than the key's, has a Mask whose arrays may change, or runs under torch.func or
        another transform.
        """
        if self._is_opaque and torch.compiler.is_compiling():
            return self._in_graph(*args, **kwargs)
        if not torch.compiler.is_compiling() and (changed := plain_options(self._numbers, kwargs)):
            # Numbers in arrays and tensors may change: they are read in each call.
            call = call if all(is_constant(kwargs[name]) for name in changed) else None
            kwargs |= changed
        tensors: list[torch.Tensor] = []
        masks: list[Mask] = []
        structure = flatten((args, kwargs), tensors, masks)
        _check_dense(self._function, structure, tensors)
        if tensors and not torch.compiler.is_compiling():
            plan_query.raise_plan_if_asked(self._function, tensors[0].device, *args, **kwargs)
        if masks and torch.compiler.is_compiling():
            return _traced_call(self._name, structure, tensors, masks)
        if masks:
            results = _with_masks(self._name, structure, tensors, masks)
        else:
            results = _run(self._name, structure, tensors, NO_MASKS, None)
        if call is None or not torch_internals.is_plain_eager():
            return results
        if same_tensors(tensors, call.tensors) and (not masks or are_immutable(masks)):

            def make() -> CachedCall:
                operands = register_weak(masks, tensors[0].device) if masks else NO_MASKS
                signatures = tuple(_signature(x) for x in tensors)
                signature = operands.signature if masks else None
                request = ProgramKey(self._name, structure, signatures, signature, jax.config.jax_enable_x64)
                return _cached_call(request, tensors, operands)

            self._cache.record((call.statics, _config()), tensors, make, masks)
        return results


def _check_dense(function: Callable[..., Any], structure: Structure, tensors: Sequence[torch.Tensor]) -> None:
    """Raises, naming the argument, ValueError for a nested tensor, and NotImplementedError for a DTensor."""
    for index, x in enumerate(tensors):
        if dtensors.is_dtensor(x):
            name = getattr(function, "__name__", repr(function))
            dtensors.refuse(name, **{leaf_names(function, structure)[index]: x})
        if x.is_nested:
            dlpack.check_dense(leaf_names(function, structure)[index], x)


def _config() -> tuple[bool, str | None]:
    """The JAX settings that change a function's results: (jax_enable_x64, jax_default_matmul_precision)."""
    return _CONFIG.jax_enable_x64, _CONFIG.jax_default_matmul_precision


def _cached_call(
    request: ProgramKey, tensors: Sequence[torch.Tensor], operands: CallMasks | WeakCallMasks
) -> CachedCall:
    """A new CachedCall for a request, which CallCache.record can store.

    tensors: the tensors of the call that is now made. operands: its Masks.
    """
    grad = torch.is_grad_enabled()
    program = program_for(request, tuple(grad and x.requires_grad for x in tensors))
    chain = NamedLauncher(execute.launcher_for(program.forward, tensors, operands), label_of(program.forward))
    is_single = program.outputs == LEAF
    unpack = operator.itemgetter(0) if is_single else lambda results: unflatten(program.outputs, iter(results))
    function = named_function(CachedFunction, display_name(request.function)) if program.has_gradient else None
    return CachedCall(chain, unpack, function, ProgramInfo(program, operands))


def _run(
    name: str,
    structure: Structure,
    tensors: list[torch.Tensor],
    operands: CallMasks | WeakCallMasks,
    masks: MaskSignature | None,
) -> Any:
    """The results of a function's call, in the function's own containers.

    name: the function's name in FUNCTIONS. structure: `flatten` of (args, kwargs). tensors: the call's tensors.
    operands: the call's Masks. masks: their signature, or None.
    """
    if torch.compiler.is_compiling():
        call = dynamic_shapes.name_of(name, structure)
        run = _call_of_duals if _is_in_dual_level() else _call_in_graph
        results = run(call, *tensors)
        return unflatten(_outputs(call), iter(results))
    is_eager = torch_internals.is_plain_eager()
    grad = is_eager and torch.is_grad_enabled()
    signatures = tuple(_signature(x) for x in tensors)
    request = ProgramKey(name, structure, signatures, masks, jax.config.jax_enable_x64)
    program = program_for(request, tuple(grad and x.requires_grad for x in tensors))
    if not is_eager:
        results = call_op(tensors, program.name, operands.name)
    elif program.has_gradient:
        results = named_function(CallFunction, display_name(name)).apply(program, operands, *tensors)
    else:
        results = torch_operator.below_autograd(call_op, tensors, program.name, operands.name)
    return unflatten(program.outputs, iter(results))


def _with_masks(name: str, structure: Structure, tensors: list[torch.Tensor], masks: list[Mask]) -> Any:
    """The results of a call with Masks, outside of torch.compile."""
    if not tensors:
        return _run(name, structure, tensors, NO_MASKS, NO_MASKS.signature)
    first, *_ = tensors
    is_recorded = torch._C._get_tracing_state() is not None  # by torch.jit.trace, whose program outlives the call
    operands = (register_weak if is_recorded else register_masks)(masks, first.device)
    return _run(name, structure, tensors, operands, operands.signature)


def _flat_call(name: str, tensors: list[torch.Tensor]) -> dynamic_shapes.Flat:
    """Adds a dynamic call to a traced graph, and returns its results. name: the call's.

    The call serves many shapes if the tensors have symbolic sizes and the sizes of the results can be expressed by
    these; otherwise it serves only the traced shapes.
    """
    flat = dynamic_shapes.call(name, tensors) if dynamic_shapes.is_any_shape(tensors) else None
    if flat is not None:
        return flat
    call = dynamic_shapes.find(name)
    traced = _traced(call.function, call.structure, tuple(_signature(x) for x in tensors))
    return dynamic_shapes.Flat(call_op(tensors, traced.program, traced.operands), traced.outputs)


@torch_internals.constant_in_graph
def _is_in_dual_level() -> bool:
    """Whether the code is under forward-mode differentiation, for code that torch.compile traces."""
    return torch_internals.is_forward_mode()


@torch_internals.node_in_graph
def _call_in_graph(name: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The flat results of a dynamic call that is one node of a graph: torch.compile does not trace into it."""
    return _results_of(name, tensors)


@torch_internals.node_in_graph
def _call_of_duals(name: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The flat results of a dynamic call that is one node of a graph, for tensors that may have tangents.

    In the node, is_forward_mode() is True, so the results have tangents.
    """
    with torch_internals.as_in_dual_level():
        return _results_of(name, tensors)


@torch_internals.node_in_graph
def _op_of_duals(program: str, operands: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The flat results of a program as one node of a graph, for tensors that may have tangents of forward mode.

    program: the program's name. operands: the name of the call's Masks, or "". In the node, is_forward_mode() is True.
    """
    with torch_internals.as_in_dual_level():
        return tuple(call_op(list(tensors), program, operands))


def _results_of(name: str, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The flat results of a dynamic call in a traced graph. `_outputs` then returns their structure."""
    flat = _flat_call(name, list(tensors))
    dynamic_shapes.find(name).outputs[:] = [flat.structure]
    return tuple(flat.results)


@torch_internals.constant_in_graph
def _outputs(name: str) -> Structure:
    """The structure of the results of the dynamic call when it was last traced, for `unflatten`."""
    (structure,) = dynamic_shapes.find(name).outputs
    return structure


def _traced_call(name: str, structure: Structure, tensors: list[torch.Tensor], masks: Sequence[Mask | MaskById]) -> Any:
    """The results of a call with Masks, in code that torch.compile traces. The graph serves only these Mask objects.

    name: the function's name in FUNCTIONS. structure: `flatten` of (args, kwargs).
    """
    # torch.compile cannot make a frozen dataclass a constant. It can for the id, and then checks for the same object.
    ids = [mask.number if isinstance(mask, MaskById) else id(mask) for mask in masks]
    traced = _traced(name, structure, tuple(_signature(x) for x in tensors), *ids)
    if _is_in_dual_level():
        return unflatten(traced.outputs, iter(_op_of_duals(traced.program, traced.operands, *tensors)))
    return unflatten(traced.outputs, iter(call_op(tensors, traced.program, traced.operands)))


def _signature(tensor: torch.Tensor) -> TensorSpec:
    """The tensor's shape, dtype, device and layout. It makes symbolic sizes constants of the graph."""
    # index() makes a constant of a symbolic size: JAX compiles for each shape.
    shape = tuple(operator.index(size) for size in tensor.shape)
    return TensorSpec(shape, tensor.dtype, tensor.device, tensor.layout)


class _Traced(NamedTuple):
    """A program without a gradient, described by constants for torch.compile.

    program: its name. outputs: the structure of the function's results. operands: the name of the call's Masks, or "".
    """

    program: str
    outputs: Structure
    operands: str


@torch_internals.constant_in_graph
def _traced(name: str, structure: Structure, signatures: tuple[TensorSpec, ...], *ids: int) -> _Traced:
    """The program of a call in a torch.compile graph. ids: id() of each Mask, which the caller keeps alive.

    name: the function's name in FUNCTIONS. structure: `flatten` of (args, kwargs). signatures: the call's tensors.
    """
    operands: CallMasks | WeakCallMasks = NO_MASKS
    masks: list[Mask] = [ctypes.cast(number, ctypes.py_object).value for number in ids]
    if masks and signatures:
        first, *_ = signatures
        operands = register_weak(masks, first.device)
    request = ProgramKey(name, structure, signatures, operands.signature if masks else None, jax.config.jax_enable_x64)
    program = program_for(request, (False,) * len(signatures))
    return _Traced(program.name, program.outputs, operands.name)
