"""from_jax: a JAX function as a PyTorch function, with its gradient.

A call is made of constants and tensors. A plan is made once for each set of constants: the structure of the arguments,
their shapes and dtypes, and which of them need a gradient. The plan's name goes with the tensors through one operator
for the forward and one for the backward.

| file | what it does |
|---|---|
| plans.py | requests and plans, and the names under which they are found |
| planning.py | traces a function, and makes the plan |
| plan_ops.py | the operators that run a plan, and their derivatives |
| plan_vmap.py | torch.func.vmap of these operators |
| tangents.py | plans of forward-mode derivatives |
| any_shape.py | the operators of graphs for many shapes |
"""

import ctypes
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import torch

from jax_kernels.bridge.interop import dlpack, dtensors, torch_internals
from jax_kernels.bridge.interop.bounded_dict import drop_oldest
from jax_kernels.bridge.interop.plain_numbers import is_constant, plain_options
from jax_kernels.bridge.jax_functions import dynamic_shapes, flops, vmap
from jax_kernels.bridge.jax_functions.argument_names import leaf_names
from jax_kernels.bridge.jax_functions.mask_operands import (
    NONE,
    KeptOperands,
    MaskSignature,
    Operands,
    kept_operands,
    may_be_known,
    operands_of,
)
from jax_kernels.bridge.jax_functions.program_operators import Call, KnownPlan, PlanFacts, call_op
from jax_kernels.bridge.jax_functions.programs import Request, Signature, register
from jax_kernels.bridge.jax_functions.pytree import SINGLE, MaskOfId, flatten, rebuild
from jax_kernels.bridge.jax_functions.tracing import plan_for
from jax_kernels.bridge.operators import execute, plan_query, torch_operator
from jax_kernels.bridge.operators.call_cache import Known, KnownCall, same_tensors
from jax_kernels.masks import Mask

__all__ = ["JaxOp", "Seen", "from_jax", "seen", "seen_by_name"]

_CONFIG = jax.config

vmap.define_rules()
flops.define_formulas("call", "call_backward")


def from_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """A JAX function as a function of PyTorch tensors, differentiable and opaque to torch.compile.

    The result is that of `function` on jax.Arrays with the tensors' values; autograd's backward is its jax.vjp. Call
    from_jax once for a function, not once for a call: JAX compiles it for each set of shapes, dtypes and constants, and
    keeps every program. Like any function under jax.jit it must be pure.

    Args:
      function: takes and returns jax.Arrays, alone or in tuples, lists and dicts. Arguments that are not tensors
        (numbers, strings, None, anything hashable) are constants, and are passed as they are. The arrays of a
        masks.Mask are data of the call, on the tensors' device: Masks of one structure, with arrays of the same shapes,
        share one program.

    Returns:
      A function that takes tensors where `function` takes arrays, at least one and all on one device. It returns
      tensors, which PyTorch owns. Gradients flow to floating-point and complex tensors that require one; integer and
      bool tensors, and the arrays of a Mask, get none. It runs on the tensors' device, in the order of PyTorch's
      current stream. It works under torch.compile(fullgraph=True), where a Mask is a constant: the graph serves the
      Mask that it was traced with, as long as that lives. torch.func.vmap of it is jax.vmap of `function`. It can be
      copied, and pickled where `function` can. Forward mode (torch.func.jvp, torch.autograd.forward_ad) is jax.jvp of
      `function`, also twice and under reverse mode. Its gradient cannot be differentiated. A CUDA graph captures calls
      of the direct route, after a first call outside. One graph of torch.compile(dynamic=True) serves all sizes, where
      each size of a result is a constant or that of a tensor. A graph that calls it (torch.export, make_fx) runs only
      in the process that traced it.

    Raises, when called:
      TypeError: JAX does not take a tensor's dtype (float64 and int64 need jax_enable_x64), or a constant is not
        hashable, or holds a tensor.
      ValueError: there is no tensor, or tensors are on several devices.
      NotImplementedError: it is differentiated in forward mode, and `function` is built on an op that has derivatives
        in reverse mode alone (jax.custom_vjp), as those of this library are; or its gradient is, as by
        torch.func.hessian.
      RuntimeError: its gradient is differentiated in reverse mode, or called in a graph that another process traced.
    """
    if not callable(function):
        raise TypeError(f"function: got {type(function).__name__}, want a function of jax.Arrays")
    return _FromJax(function)


class _FromJax:
    """A function of tensors, as from_jax returns it. It is pickled as from_jax of its function, which has a name."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._op = JaxOp(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._op.serve(None, *args, **kwargs)
        seen = None
        if not kwargs:
            seen = Seen(len(args), args)
            if (known := self._op.find(seen)) is not None:
                return known(args)
        if seen is None or not all(isinstance(x, torch.Tensor) for x in args):
            seen = seen_by_name(args, kwargs)
            if (known := self._op.find(seen)) is not None:
                return known(seen.tensors)
        return self._op.serve(seen, *args, **kwargs)

    def __reduce__(self) -> Any:
        return from_jax, (self.__wrapped__,)  # type: ignore[attr-defined]

    def __copy__(self) -> "_FromJax":
        return self

    def __deepcopy__(self, memo: Any) -> "_FromJax":
        return self

    def __repr__(self) -> str:
        return f"from_jax({self.__wrapped__!r})"  # type: ignore[attr-defined]


class Seen(NamedTuple):
    """A call as it may be known. statics: all that is no tensor, and which tensors there are; of a Mask its id."""

    statics: Any
    tensors: Sequence[Any]


def seen(arguments: Sequence[Any], options: Sequence[Any]) -> Seen:
    """A call of these arguments, which may be tensors, and options, which are none."""
    statics = [None if isinstance(x, torch.Tensor) else (type(x), x) for x in arguments]
    kinds = map(type, options)  # 1, 1.0 and True are equal
    return Seen((*options, *kinds, *statics), [x for x in arguments if isinstance(x, torch.Tensor)])


def _is_int(x: Any) -> bool:
    return type(x) is int


_EXACT = (bool, int, str, type(None))  # values that are equal where their types and values are


def seen_by_name(args: Sequence[Any], kwargs: dict[str, Any], *settings: Any) -> Seen:
    """A call of any arguments, whose tensors stand in the order of `flatten`. settings: what else the call depends on.

    Its statics are equal where the structures are, and hold the ids of Masks.
    """
    statics: list[Any] = [len(args), *settings]
    tensors: list[Any] = []
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
        else:
            return _seen_in_trees(args, kwargs, settings)
    return Seen(tuple(statics), tensors)


def _seen_in_trees(args: Sequence[Any], kwargs: dict[str, Any], settings: Sequence[Any]) -> Seen:
    tensors: list[Any] = []
    masks: list[Mask] = []
    structure = flatten((tuple(args), kwargs), tensors, masks)
    return Seen((structure, *settings, *map(id, masks)), tensors)


class JaxOp:
    """A JAX function as from_jax gives it, for an op that tells by what its calls may be known."""

    def __init__(self, function: Callable[..., Any], *, is_whole: bool = False) -> None:
        """is_whole: its arguments are tensors and constants, and its results tensors, so that torch.compile need not
        look inside of a call: each name that it sees adds to what it checks before every call of a graph.
        """
        self._function = function
        self._name = name = register(function)
        self._known = Known()
        self._is_whole = is_whole
        self._numbers: tuple[str, ...] = getattr(function, "plain_numbers", ())

        def in_graph(*args: Any, **kwargs: Any) -> Any:
            kwargs |= plain_options(self._numbers, kwargs)
            tensors: list[torch.Tensor] = []
            structure = flatten((args, kwargs), tensors, None)
            _check_dense(function, structure, tensors)
            flat = _flat_call(dynamic_shapes.name_of(name, structure), tensors)
            return rebuild(flat.structure, iter(flat.results))

        self._in_graph = torch.compiler.allow_in_graph(in_graph) if is_whole else in_graph

    def find(self, seen: Seen) -> KnownCall | None:
        """The call that is known by that. Not for code that torch.compile traces."""
        config = _CONFIG.jax_enable_x64, _CONFIG.jax_default_matmul_precision  # _config(), without a call
        return self._known.find((seen.statics, config), seen.tensors)

    def serve(self, seen: Seen | None, *args: Any, **kwargs: Any) -> Any:
        """The function's results. seen: what the call is known as from now on, if its tensors are the arguments'."""
        if self._is_whole and torch.compiler.is_compiling():
            return self._in_graph(*args, **kwargs)
        if not torch.compiler.is_compiling() and (changed := plain_options(self._numbers, kwargs)):
            # The numbers of arrays and tensors may change, and are read in each call.
            seen = seen if all(is_constant(kwargs[name]) for name in changed) else None
            kwargs |= changed
        tensors: list[torch.Tensor] = []
        masks: list[Mask] = []
        structure = flatten((args, kwargs), tensors, masks)
        _check_dense(self._function, structure, tensors)
        if tensors and not torch.compiler.is_compiling():
            plan_query.answer(self._function, tensors[0].device, *args, **kwargs)
        if masks and torch.compiler.is_compiling():
            return _traced_call(self._name, structure, tensors, masks)
        if masks:
            results = _with_masks(self._name, structure, tensors, masks)
        else:
            results = _run(self._name, structure, tensors, NONE, None)
        is_seen = seen is not None and torch_internals.is_plain_call() and same_tensors(tensors, seen.tensors)
        if seen is not None and is_seen and (not masks or may_be_known(masks)):

            def make() -> KnownCall:
                operands = kept_operands(masks, tensors[0].device) if masks else NONE
                signatures = tuple(_signature(x) for x in tensors)
                signature = operands.signature if masks else None
                request = Request(self._name, structure, signatures, signature, jax.config.jax_enable_x64)
                return _known_call(request, tensors, operands)

            self._known.learn((seen.statics, _config()), tensors, make, masks)
        return results


def _check_dense(function: Callable[..., Any], structure: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Raises, naming the argument, for a nested tensor, which tells no shape, and for a DTensor."""
    for index, x in enumerate(tensors):
        if dtensors.is_dtensor(x):
            name = getattr(function, "__name__", repr(function))
            dtensors.refuse(name, **{leaf_names(function, structure)[index]: x})
        if x.is_nested:
            dlpack.check_dense(leaf_names(function, structure)[index], x)


def _config() -> tuple[Any, ...]:
    """The settings of JAX's that change what a function computes."""
    return _CONFIG.jax_enable_x64, _CONFIG.jax_default_matmul_precision


def _known_call(request: Request, tensors: Sequence[torch.Tensor], operands: Operands | KeptOperands) -> KnownCall:
    grad = torch.is_grad_enabled()
    plan = plan_for(request, tuple(grad and x.requires_grad for x in tensors))
    chain = execute.chain_for(plan.forward, tensors, operands)
    is_single = plan.outputs == SINGLE
    finish = operator.itemgetter(0) if is_single else lambda results: rebuild(plan.outputs, iter(results))
    return KnownCall(chain, finish, KnownPlan if plan.has_gradient else None, PlanFacts(plan, operands))


def _run(
    name: str,
    structure: Any,
    tensors: list[torch.Tensor],
    operands: Operands | KeptOperands,
    masks: MaskSignature | None,
) -> Any:
    """The results of the function. masks: the signature of the operands."""
    if torch.compiler.is_compiling():
        recipe = _recipe(name, structure)
        call = _call_of_duals if _is_in_dual_level() else _call_in_graph
        results = call(recipe, *tensors)
        return rebuild(_outputs(recipe), iter(results))
    signatures = tuple(_signature(x) for x in tensors)
    if not torch_internals.is_plain_call():
        plan = plan_for(Request(name, structure, signatures, masks, jax.config.jax_enable_x64), (False,) * len(tensors))
        return rebuild(plan.outputs, iter(call_op(tensors, plan.name, operands.name)))
    grad = torch.is_grad_enabled()
    needs = tuple(grad and x.requires_grad for x in tensors)
    plan = plan_for(Request(name, structure, signatures, masks, jax.config.jax_enable_x64), needs)
    if plan.has_gradient:
        results = Call.apply(plan, operands, *tensors)
    else:
        results = torch_operator.below_autograd(call_op, tensors, plan.name, operands.name)
    return rebuild(plan.outputs, iter(results))


def _with_masks(name: str, structure: Any, tensors: list[torch.Tensor], masks: list[Mask]) -> Any:
    if not tensors:
        return _run(name, structure, tensors, NONE, NONE.signature)
    first, *_ = tensors
    is_recorded = torch._C._get_tracing_state() is not None  # by torch.jit.trace, whose program outlives the call
    operands = (kept_operands if is_recorded else operands_of)(masks, first.device)
    return _run(name, structure, tensors, operands, operands.signature)


@torch.compiler.assume_constant_result
def _recipe(name: str, structure: Any) -> str:
    """The name of a call's recipe, a constant for torch.compile."""
    return dynamic_shapes.name_of(name, structure)


def _flat_call(recipe: str, tensors: list[torch.Tensor]) -> dynamic_shapes.Flat:
    """A call of a graph: for many shapes where it is, and its results' sizes are known; else for these shapes alone."""
    flat = dynamic_shapes.call(recipe, tensors) if dynamic_shapes.is_any_shape(tensors) else None
    if flat is not None:
        return flat
    function, structure, _ = dynamic_shapes.find(recipe)
    traced = _traced(function, structure, tuple(_signature(x) for x in tensors))
    return dynamic_shapes.Flat(call_op(tensors, traced.plan, traced.operands), traced.outputs)


_OUTPUTS: dict[str, Any] = {}  # by recipe: the structure of the results of its call that is being traced
_MOST_OUTPUTS = 1024


@torch.compiler.assume_constant_result
def _is_in_dual_level() -> bool:
    """Whether torch.compile traces code inside of torch.autograd.forward_ad.dual_level, which it enters itself, too."""
    return torch_internals.is_forward_mode()


@torch.compiler.allow_in_graph
def _call_in_graph(recipe: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results of a call that is a node of a graph: torch.compile does not look inside."""
    return _results_of(recipe, tensors)


@torch.compiler.allow_in_graph
def _call_of_duals(recipe: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """_call_in_graph of tensors that may have tangents."""
    with torch_internals.as_in_dual_level():
        return _results_of(recipe, tensors)


@torch.compiler.allow_in_graph
def _op_of_duals(plan: str, operands: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operator of a plan, as a node of a graph, of tensors that may have tangents."""
    with torch_internals.as_in_dual_level():
        return tuple(call_op(list(tensors), plan, operands))


def _results_of(recipe: str, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    flat = _flat_call(recipe, list(tensors))
    _OUTPUTS[recipe] = flat.structure
    drop_oldest(_OUTPUTS, _MOST_OUTPUTS)
    return tuple(flat.results)


@torch.compiler.assume_constant_result
def _outputs(recipe: str) -> Any:
    """The structure of the results of the call that was traced last."""
    return _OUTPUTS[recipe]


def _traced_call(name: str, structure: Any, tensors: list[torch.Tensor], masks: Sequence[Mask | MaskOfId]) -> Any:
    """A call in a graph of torch.compile. It serves the Masks that it was traced with, and no others."""
    # torch.compile makes no constant of a frozen dataclass; of its id it does, and checks for that very object.
    ids = [mask.number if isinstance(mask, MaskOfId) else id(mask) for mask in masks]
    traced = _traced(name, structure, tuple(_signature(x) for x in tensors), *ids)
    if _is_in_dual_level():
        return rebuild(traced.outputs, iter(_op_of_duals(traced.plan, traced.operands, *tensors)))
    return rebuild(traced.outputs, iter(call_op(tensors, traced.plan, traced.operands)))


def _signature(tensor: torch.Tensor) -> Signature:
    # index() makes a constant of a symbolic size: JAX compiles for each shape.
    shape = tuple(operator.index(size) for size in tensor.shape)
    return Signature(shape, tensor.dtype, tensor.device, tensor.layout)


class _Traced(NamedTuple):
    """A plan without a gradient, in constants for torch.compile: its name, its outputs' structure, the Masks' name."""

    plan: str
    outputs: Any
    operands: str


@torch.compiler.assume_constant_result
def _traced(name: str, structure: Any, signatures: tuple[Signature, ...], *ids: int) -> _Traced:
    """ids: of the Masks, which the function that is traced holds."""
    operands: Any = NONE
    masks: list[Mask] = [ctypes.cast(number, ctypes.py_object).value for number in ids]
    if masks and signatures:
        first, *_ = signatures
        operands = kept_operands(masks, first.device)
    request = Request(name, structure, signatures, operands.signature if masks else None, jax.config.jax_enable_x64)
    plan = plan_for(request, (False,) * len(signatures))
    return _Traced(plan.name, plan.outputs, operands.name)
