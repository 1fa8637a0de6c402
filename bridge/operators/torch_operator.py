"""PyTorch operators that are opaque to torch.compile and run a JAX function.

An operator's derivative is its "Autograd" implementation. So the derivative also works where only the operator is
called: in an exported program, in a compiled graph, under torch.func. A call in eager mode knows whether it needs a
gradient. It skips the "Autograd" implementation (below_autograd), which would cost 20 microseconds.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch._ops import OpOverload
from torch.autograd import forward_ad

from jax_kernels.bridge.direct import route
from jax_kernels.bridge.direct.route import Operands
from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.donated_outputs import JaxFunction
from jax_kernels.bridge.operators import execute
from jax_kernels.bridge.operators.call_cache import CachedCall, CallCache, same_tensors

__all__ = [
    "JaxCall",
    "apply",
    "below_autograd",
    "call_in_backward",
    "define_operator",
    "define_vmap",
    "has_tangent",
    "inside_function",
    "loop_vmap",
    "refuse_gradient",
    "refuse_second_gradient",
    "refuse_tangent",
    "unwrapped",
]

type Argument = torch.Tensor | Sequence[torch.Tensor | None] | bool | int | float | str | None
type Results = torch.Tensor | Sequence[torch.Tensor]
type Finish = Callable[[list[torch.Tensor]], Results]
type VmapRule = Callable[..., tuple[Results, int | Sequence[int]]]

_LIBRARY = torch.library.Library("jax_kernels", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_TENSOR = torch.Tensor


class JaxCall(NamedTuple):
    """A call of an operator, as the arguments of running.run."""

    function: JaxFunction
    tensors: Sequence[torch.Tensor | None]
    operands: Operands | None = None


def define_operator(
    name: str,
    schema: str,
    program: Callable[..., JaxCall],
    finish: Callable[..., Finish],
    fake: Callable[..., Results],
    differentiate: Callable[..., Results],
    label: Callable[..., str],
    push: Callable[..., Results] | None = None,
) -> OpOverload:
    """The operator torch.ops.jax_kernels.<name>, for CPU and CUDA tensors.

    Each function takes the operator's arguments. program: returns the Program; its tensors are the operator's tensors,
    in order. finish: returns a function that makes the operator's results from the program's list, and holds no tensor.
    fake: returns empty results of the right shapes. differentiate: returns the results if they need a gradient; it
    calls the operator with inside_function. label: returns the name for the error that refuses tensors with tangents of
    forward-mode differentiation. push: returns the results of tensors with tangents, with their tangents; None if the
    operator refuses tangents.

    <name>_direct is the same operator for compiled graphs whose calls are launched directly. A CUDA graph may hold
    these calls.
    """

    @torch_internals.skip_dynamo
    def kernel(*arguments: Argument) -> Results:
        return finish(*arguments)(execute.execute(*program(*arguments)))

    def known_call(*arguments: Argument) -> CachedCall | None:
        function, tensors, operands = program(*arguments)
        read = [x for x in tensors if x is not None]
        if (operands is not None and operands.masks) or not same_tensors(read, _seen(arguments).tensors):
            return None
        return CachedCall(execute.launcher_for(function, tensors, operands), finish(*arguments))

    operator, direct = (
        _defined(full, schema, tags, kernel, known_call, fake, differentiate, label, push)
        for full, tags in ((name, (*_TAGS, torch.Tag.cudagraph_unsafe)), (f"{name}_direct", _TAGS))
    )
    _DIRECT[operator] = _Direct(operator=direct, program=program)
    return operator


def _defined(
    name: str,
    schema: str,
    tags: Sequence[torch.Tag],
    kernel: Callable[..., Results],
    known_call: Callable[..., CachedCall | None],
    fake: Callable[..., Results],
    differentiate: Callable[..., Results],
    label: Callable[..., str],
    push: Callable[..., Results] | None,
) -> OpOverload:
    _LIBRARY.define(name + schema, tags=tags)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"jax_kernels::{name}", fake, lib=_LIBRARY)
    operator = getattr(torch.ops.jax_kernels, name).default

    known = CallCache()

    @torch_internals.skip_dynamo
    def autograd(*arguments: Argument) -> Results:
        seen = _seen(arguments)
        if (call := known.lookup(*seen)) is not None:
            return call(seen.tensors)
        flat = _flat(arguments)
        if has_tangent(flat):
            return refuse_tangent(label(*arguments)) if push is None else push(*arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*flat):
            return differentiate(*arguments)
        results = below_autograd(operator, *arguments)
        if torch_internals.is_plain_eager():
            known.record(*seen, lambda: known_call(*arguments))
        return results

    _LIBRARY.impl(name, autograd, "Autograd")
    return operator


class _Seen(NamedTuple):
    """The arguments of an operator. statics: the arguments, with a marker for each tensor. tensors: in order."""

    statics: tuple[Hashable, ...]
    tensors: list[torch.Tensor]


def _seen(arguments: Sequence[Argument]) -> _Seen:
    if list in map(type, arguments):
        return _seen_in_lists(arguments)
    statics = [_TENSOR if isinstance(x, _TENSOR) else x for x in arguments]
    return _Seen(tuple(statics), [x for x in arguments if isinstance(x, _TENSOR)])


def _seen_in_lists(arguments: Sequence[Argument]) -> _Seen:
    statics: list[Hashable] = []
    tensors: list[torch.Tensor] = []
    for x in arguments:
        if isinstance(x, _TENSOR):
            tensors.append(x)
            statics.append(_TENSOR)
        elif isinstance(x, list | tuple):
            there = [y for y in x if y is not None]
            tensors += there
            statics.append(len(x) if len(there) == len(x) else tuple(y is None for y in x))
        else:
            statics.append(x)
    return _Seen(tuple(statics), tensors)


def _flat(arguments: Sequence[Argument]) -> list[torch.Tensor | bool | int | float | str | None]:
    """The arguments of an operator, with the items of lists."""
    return [x for given in arguments for x in (given if isinstance(given, list | tuple) else (given,))]


class _Direct(NamedTuple):
    """The variant of an operator for programs that are launched directly."""

    operator: OpOverload
    program: Callable[..., JaxCall]


_DIRECT: dict[OpOverload, _Direct] = {}


def _capturable(operator: OpOverload, arguments: Sequence[Argument]) -> OpOverload:
    """The operator. In a graph that torch.compile traces, its direct variant if the call has a launch chain.

    The search for the launch chain compiles the call's kernels.
    """
    direct = _DIRECT.get(operator)
    if direct is None or torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active():
        return operator
    flat = _flat(arguments)
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    if all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors):
        return operator  # a mode that observes, and traces nothing
    sizes = [size for x in tensors for size in x.shape]
    if any(isinstance(x, torch.SymInt) for x in (*flat, *sizes)) or not all(sizes):
        return operator
    with torch_internals.without_modes() as are_off:
        is_direct = are_off and route.find(*direct.program(*arguments)) is not None
        return direct.operator if is_direct else operator


def define_vmap(name: str, rule: VmapRule) -> None:
    """Defines torch.func.vmap of the operator; `rule(info, in_dims, *args)` returns (results, out_dims).

    Batches of cotangents, from torch.autograd.grad(is_grads_batched=True), use the same rule.
    """
    for full in (name, f"{name}_direct"):
        torch.library.register_vmap(f"jax_kernels::{full}", rule, lib=_LIBRARY)
        _LIBRARY.impl(full, functools.partial(_with_batches, rule), "Batched")


class _Info(NamedTuple):
    """The first argument of a vmap rule."""

    batch_size: int
    randomness: str = "error"


@torch_internals.skip_dynamo
def _with_batches(rule: Callable[..., tuple[Any, Any]], *arguments: Any) -> Results:
    """An operator's results, by its vmap rule, for tensors that PyTorch's autograd has batched."""
    level, size = torch_internals.batch_of(_flat(arguments))
    apart = lambda x: torch_internals.remove_batch_dim(x, level) if torch_internals.is_in_batch(x, level) else None
    front = [[apart(y) for y in x] if isinstance(x, list | tuple) else apart(x) for x in arguments]
    dim = lambda x: None if x is None else 0
    in_dims = tuple([dim(y) for y in x] if isinstance(x, list) else dim(x) for x in front)
    chosen = lambda own, moved: own if moved is None else moved
    given = [
        [chosen(y, moved) for y, moved in zip(x, found, strict=True)] if isinstance(found, list) else chosen(x, found)
        for x, found in zip(arguments, front, strict=True)
    ]
    results, dims = rule(_Info(size), in_dims, *given)
    if isinstance(results, torch.Tensor):
        return torch_internals.add_batch_dim(results, dims, level)
    each = dims if isinstance(dims, list | tuple) else (dims,) * len(results)
    return type(results)(torch_internals.add_batch_dim(x, at, level) for x, at in zip(results, each, strict=True))


def loop_vmap(operator: Callable[[], OpOverload]) -> VmapRule:
    """A vmap rule that calls the operator for each batch entry, and stacks the results."""

    def rule(info: _Info, in_dims: Sequence[Any], *arguments: Argument) -> tuple[list[torch.Tensor], int]:
        def entry(at: int, x: Any, dim: Any) -> Any:
            if isinstance(x, list | tuple):
                return [entry(at, y, one) for y, one in zip(x, dim, strict=True)]
            return x if dim is None else x.select(dim, at)

        pairs = list(zip(arguments, in_dims, strict=True))
        each = [operator()(*(entry(at, x, dim) for x, dim in pairs)) for at in range(info.batch_size)]
        return [torch.stack(x) for x in zip(*each, strict=True)], 0

    return rule


def below_autograd(operator: OpOverload, *arguments: Argument) -> Any:
    """The operator's results, without a gradient."""
    if torch._C._len_torch_dispatch_stack():
        operator = _capturable(operator, arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def inside_function(operator: OpOverload, *arguments: Argument) -> Any:
    """The operator's results inside a Function's forward, where PyTorch has switched gradients off.

    Gradients are off only for the Function's own level: other levels of torch.func may differentiate the operator.
    """
    if not torch._C._are_functorch_transforms_active():
        return below_autograd(operator, *arguments)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return below_autograd(operator, *arguments)


def call_in_backward(operator: OpOverload, *arguments: Argument) -> Any:
    """The operator's results, below autograd unless they may be differentiated."""
    if torch.is_grad_enabled() or torch_internals.is_forward_mode():
        return operator(*arguments)
    return below_autograd(operator, *arguments)


def apply(function: Any, *arguments: Any) -> Any:
    """function.apply inside an operator's "Autograd" implementation.

    There, torch.func differentiates one level; the operator, called below autograd, continues with the next level.
    function.apply itself would start again with all levels.
    """
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return _of_one_level(function).apply(*arguments)


@functools.cache
def _of_one_level(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """The Function as a subclass of torch.func's class for one level."""
    body = {name: vars(function)[name] for name in ("forward", "backward", "jvp")}
    return type(function.__name__, (torch.autograd.function._SingleLevelFunction,), body)


def has_tangent(arguments: Sequence[Argument]) -> bool:
    """Whether an argument has a tangent of forward-mode differentiation."""
    if not torch_internals.is_forward_mode() or not torch._C._is_fwd_grad_enabled():
        return False
    level = max(forward_ad._current_level, 0)  # PyTorch has only one level
    tensors = (x for x in arguments if isinstance(x, torch.Tensor))
    return any(forward_ad.unpack_dual(x, level=level).tangent is not None for x in tensors)


def refuse_tangent(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: forward-mode differentiation is not supported (torch.func.jvp, linearize, jacfwd and hessian, "
        "torch.autograd.forward_ad); use the reverse mode: torch.func.vjp, grad, jacrev, or backward()"
    )


def refuse_second_gradient(name: str) -> NoReturn:
    raise RuntimeError(f"{name}: double backward is not supported; its gradient cannot be differentiated again")


class _Last(torch.autograd.Function):
    """Runs a function; its gradient raises."""

    @staticmethod
    @torch_internals.skip_dynamo
    def forward(ctx, name, function, *tensors):
        ctx.name = name
        return tuple(function(*tensors))

    @staticmethod
    def backward(ctx, *gradients):
        refuse_second_gradient(ctx.name)

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_tangent(ctx.name)


def refuse_gradient(
    name: str, function: Callable[..., Results], tensors: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    """function(*tensors), a tuple of tensors. Its backward raises. For an operator's "Autograd" implementation."""
    return apply(_Last, name, function, *tensors)


def unwrapped(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The detached values of a tensor that torch.func.grad may have wrapped."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            raise NotImplementedError(f"{name}: got a tensor that torch.func.vmap maps, want a tensor outside of vmap")
        tensor = functorch.get_unwrapped(tensor)
    with torch._C._DisableFuncTorch():  # an active transform would wrap the result
        return tensor.detach()
