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
| any_shape.py | the operators of graphs for many shapes |
"""

import ctypes
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import torch

from jax_kernels.bridge import answers, any_shape, flops, library, plan_vmap
from jax_kernels.bridge.known import Known, KnownCall, same_tensors
from jax_kernels.bridge.operands import NONE, MaskSignature, Operands, kept_operands, operands_of
from jax_kernels.bridge.plan_ops import Call, KnownPlan, call_op
from jax_kernels.bridge.planning import plan_for
from jax_kernels.bridge.plans import Request, Signature, register
from jax_kernels.bridge.structure import SINGLE, flatten, rebuild
from jax_kernels.masks import Mask

__all__ = ["JaxOp", "Seen", "from_jax", "seen"]

plan_vmap.define_rules()
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
      copied, and pickled where `function` can. It cannot be differentiated twice or in forward mode. A CUDA graph
      captures calls of the direct route, after a first call outside. A graph that calls it (torch.export, make_fx) runs
      only in the process that traced it.

    Raises, when called:
      TypeError: JAX does not take a tensor's dtype (float64 and int64 need jax_enable_x64), or a constant is not
        hashable, or holds a tensor.
      ValueError: there is no tensor, or tensors are on several devices.
      NotImplementedError: it is differentiated in forward mode (torch.func.jvp, torch.autograd.forward_ad).
      RuntimeError: it is differentiated twice, or called in a graph that another process traced.
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
        if kwargs or torch.compiler.is_compiling():
            return self._op.serve(None, *args, **kwargs)
        seen = Seen(len(args), args)
        known = self._op.find(seen)
        return self._op.serve(seen, *args) if known is None else known(args)

    def __reduce__(self) -> Any:
        return from_jax, (self.__wrapped__,)  # type: ignore[attr-defined]

    def __copy__(self) -> "_FromJax":
        return self

    def __deepcopy__(self, memo: Any) -> "_FromJax":
        return self

    def __repr__(self) -> str:
        return f"from_jax({self.__wrapped__!r})"  # type: ignore[attr-defined]


class Seen(NamedTuple):
    """A call as it may be known. statics: all that is no tensor, and which tensors there are."""

    statics: Any
    tensors: Sequence[Any]


def seen(arguments: Sequence[Any], options: Sequence[Any]) -> Seen:
    """A call of these arguments, which may be tensors, and options, which are none."""
    statics = [None if isinstance(x, torch.Tensor) else (x,) for x in arguments]
    return Seen((*options, *statics), [x for x in arguments if isinstance(x, torch.Tensor)])


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

        def in_graph(*args: Any, **kwargs: Any) -> Any:
            tensors: list[torch.Tensor] = []
            structure = flatten((args, kwargs), tensors, None)
            if any_shape.is_any_shape(tensors) and (results := any_shape.call(name, structure, tensors)) is not None:
                return results
            return _traced_call(name, structure, tensors, ())

        self._in_graph = torch.compiler.allow_in_graph(in_graph) if is_whole else in_graph

    def find(self, seen: Seen) -> KnownCall | None:
        """The call that is known by that. Not for code that torch.compile traces."""
        return self._known.find((seen.statics, _config()), seen.tensors)

    def serve(self, seen: Seen | None, *args: Any, **kwargs: Any) -> Any:
        """The function's results. seen: what the call is known as from now on, if its tensors are the arguments'."""
        if self._is_whole and torch.compiler.is_compiling():
            return self._in_graph(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        masks: list[Mask] = []
        structure = flatten((args, kwargs), tensors, masks)
        if tensors and not torch.compiler.is_compiling():
            answers.answer(self._function, tensors[0].device, *args, **kwargs)
        if masks and torch.compiler.is_compiling():
            return _traced_call(self._name, structure, tensors, masks)
        if masks:
            return _with_masks(self._name, structure, tensors, masks)
        results = _run(self._name, structure, tensors, NONE, None)
        if seen is not None and library.is_plain_call() and same_tensors(tensors, seen.tensors):

            def make() -> KnownCall:
                signatures = tuple(_signature(x) for x in tensors)
                request = Request(self._name, structure, signatures, None, jax.config.jax_enable_x64)
                return _known_call(request, tensors)

            self._known.learn((seen.statics, _config()), tensors, make)
        return results


def _config() -> tuple[Any, ...]:
    """The settings of JAX's that change what a function computes."""
    return jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision


def _known_call(request: Request, tensors: Sequence[torch.Tensor]) -> KnownCall:
    grad = torch.is_grad_enabled()
    plan = plan_for(request, tuple(grad and x.requires_grad for x in tensors))
    chain = library.chain_for(plan.forward, tensors, NONE)
    is_single = plan.outputs == SINGLE
    finish = operator.itemgetter(0) if is_single else lambda results: rebuild(plan.outputs, iter(results))
    return KnownCall(chain, finish, KnownPlan if plan.has_gradient else None, plan)


def _run(
    name: str, structure: Any, tensors: list[torch.Tensor], operands: Operands, masks: MaskSignature | None
) -> Any:
    """The results of the function. masks: the signature of the operands."""
    if torch.compiler.is_compiling():
        return _traced_call(name, structure, tensors, ())
    signatures = tuple(_signature(x) for x in tensors)
    if not library.is_plain_call():
        plan = plan_for(Request(name, structure, signatures, masks, jax.config.jax_enable_x64), (False,) * len(tensors))
        return rebuild(plan.outputs, iter(call_op(tensors, plan.name, operands.name)))
    grad = torch.is_grad_enabled()
    needs = tuple(grad and x.requires_grad for x in tensors)
    plan = plan_for(Request(name, structure, signatures, masks, jax.config.jax_enable_x64), needs)
    if plan.has_gradient:
        results = Call.apply(plan, operands, *tensors)
    else:
        results = library.below_autograd(call_op, tensors, plan.name, operands.name)
    return rebuild(plan.outputs, iter(results))


def _with_masks(name: str, structure: Any, tensors: list[torch.Tensor], masks: list[Mask]) -> Any:
    if not tensors:
        return _run(name, structure, tensors, NONE, NONE.signature)
    first, *_ = tensors
    operands = operands_of(masks, first.device)
    return _run(name, structure, tensors, operands, operands.signature)


def _traced_call(name: str, structure: Any, tensors: list[torch.Tensor], masks: Sequence[Mask]) -> Any:
    """A call in a graph of torch.compile. It serves the Masks that it was traced with, and no others."""
    # torch.compile makes no constant of a frozen dataclass; of its id it does, and checks for that very object.
    traced = _traced(name, structure, tuple(_signature(x) for x in tensors), *[id(mask) for mask in masks])
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
