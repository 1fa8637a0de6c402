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
from jax_kernels.bridge.operators.profiler_names import NamedLauncher, label_of, recorded

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
type Unpack = Callable[[list[torch.Tensor]], Results]
type VmapRule = Callable[..., tuple[Results, int | Sequence[int]]]

_LIBRARY = torch.library.Library("jax_kernels", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_TENSOR = torch.Tensor


class JaxCall(NamedTuple):
    """A call of a jitted JAX function, as the arguments of execute.execute.

    function: takes the tuple of Masks unless operands is None, then an array or None for each entry of tensors; returns
    a flat sequence. operands: the call's Masks.
    """

    function: JaxFunction
    tensors: Sequence[torch.Tensor | None]
    operands: Operands | None = None


def define_operator(
    name: str,
    schema: str,
    program: Callable[..., JaxCall],
    unpack: Callable[..., Unpack],
    fake: Callable[..., Results],
    differentiate: Callable[..., Results],
    label: Callable[..., str],
    push: Callable[..., Results] | None = None,
) -> OpOverload:
    """Defines the operator torch.ops.jax_kernels.<name>, for CPU and CUDA tensors, and returns it.

    schema: its arguments and results, in PyTorch's schema language. Each of the functions takes the operator's
    arguments:

    program: returns the JaxCall to execute; its tensors are the operator's tensors, in order. unpack: returns a
    function that makes the operator's results from the list of the JaxCall's results, and holds no tensor. fake:
    returns empty results of the right shapes, for tracing. differentiate: returns the results if a tensor requires a
    gradient, by a torch.autograd.Function whose forward calls the operator with inside_function. label: returns the
    operator's name for errors. push: returns the results, with their tangents, of tensors with tangents of forward-mode
    differentiation; None if the operator raises NotImplementedError for such tensors.

    Also defines <name>_direct: the same operator for compiled graphs whose calls take the direct route. A CUDA graph
    can capture these calls.
    """

    is_generic = name.startswith("call")  # torch.profiler shows other operators under the op's own name

    @torch_internals.skip_dynamo
    def kernel(*arguments: Argument) -> Results:
        call = program(*arguments)
        results = recorded(label_of(call.function), execute.execute, *call) if is_generic else execute.execute(*call)
        return unpack(*arguments)(results)

    def cached_call(*arguments: Argument) -> CachedCall | None:
        function, tensors, operands = program(*arguments)
        (_, given), read = _split(arguments), [x for x in tensors if x is not None]
        if (operands is not None and operands.masks) or not same_tensors(read, given):
            return None
        launch = execute.launcher_for(function, tensors, operands)
        return CachedCall(NamedLauncher(launch, label_of(function)) if is_generic else launch, unpack(*arguments))

    operator, direct = (
        _defined(full, schema, tags, kernel, cached_call, fake, differentiate, label, push)
        for full, tags in ((name, (*_TAGS, torch.Tag.cudagraph_unsafe)), (f"{name}_direct", _TAGS))
    )
    _DIRECT[operator] = _Direct(operator=direct, program=program)
    return operator


def _defined(
    name: str,
    schema: str,
    tags: Sequence[torch.Tag],
    kernel: Callable[..., Results],
    cached_call: Callable[..., CachedCall | None],
    fake: Callable[..., Results],
    differentiate: Callable[..., Results],
    label: Callable[..., str],
    push: Callable[..., Results] | None,
) -> OpOverload:
    """Defines one operator, with its tags, and returns it.

    kernel: computes the results without a gradient. cached_call: returns the CachedCall to cache for these arguments,
    or None. The other arguments are the arguments of define_operator.
    """
    _LIBRARY.define(name + schema, tags=tags)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"jax_kernels::{name}", fake, lib=_LIBRARY)
    operator = getattr(torch.ops.jax_kernels, name).default

    cache = CallCache()

    @torch_internals.skip_dynamo
    def autograd(*arguments: Argument) -> Results:
        statics, tensors = _split(arguments)
        if (call := cache.lookup(statics, tensors)) is not None:
            return call(tensors)
        flat = _flat(arguments)
        if has_tangent(flat):
            return refuse_tangent(label(*arguments)) if push is None else push(*arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*flat):
            return differentiate(*arguments)
        results = below_autograd(operator, *arguments)
        if torch_internals.is_plain_eager():
            cache.record(statics, tensors, lambda: cached_call(*arguments))
        return results

    _LIBRARY.impl(name, autograd, "Autograd")
    return operator


def _split(arguments: Sequence[Argument]) -> tuple[Hashable, list[torch.Tensor]]:
    """(statics, tensors) of an operator's arguments, for a look-up in a CallCache.

    The statics have a marker for each tensor and, for a list of tensors, its length and which entries are None.
    """
    if list in map(type, arguments):
        return _split_lists(arguments)
    statics = [_TENSOR if isinstance(x, _TENSOR) else x for x in arguments]
    return tuple(statics), [x for x in arguments if isinstance(x, _TENSOR)]


def _split_lists(arguments: Sequence[Argument]) -> tuple[Hashable, list[torch.Tensor]]:
    """(statics, tensors) of an operator's arguments, which include lists of tensors."""
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
    return tuple(statics), tensors


def _flat(arguments: Sequence[Argument]) -> list[torch.Tensor | bool | int | float | str | None]:
    """The arguments of an operator as one list, with the items of a list or tuple instead of it."""
    return [x for given in arguments for x in (given if isinstance(given, list | tuple) else (given,))]


class _Direct(NamedTuple):
    """The variant of an operator for compiled graphs whose calls take the direct route.

    program: returns the JaxCall for the operator's arguments.
    """

    operator: OpOverload
    program: Callable[..., JaxCall]


_DIRECT: dict[OpOverload, _Direct] = {}


def _capturable(operator: OpOverload, arguments: Sequence[Argument]) -> OpOverload:
    """The operator to put into a graph that torch.compile traces: <name>_direct if the call has a launch chain.

    Otherwise it is the operator itself, which a CUDA graph cannot capture. So it is, too, while torch.export traces,
    under torch.func's transforms, and for tensors that are empty or have symbolic sizes.

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
    """Defines torch.func.vmap of the operators <name> and <name>_direct.

    rule(info, in_dims, *args) returns (results, out_dims), as in torch.library.register_vmap. It calls the operator on
    tensors with a normal axis for the mapped one.

    Batches of cotangents, from torch.autograd.grad(is_grads_batched=True), use the same rule.
    """
    for full in (name, f"{name}_direct"):
        torch.library.register_vmap(f"jax_kernels::{full}", rule, lib=_LIBRARY)
        _LIBRARY.impl(full, functools.partial(_with_batches, rule), "Batched")


class _Info(NamedTuple):
    """The first argument of a vmap rule, with the fields of PyTorch's own. batch_size: the size of the mapped axis."""

    batch_size: int
    randomness: str = "error"


@torch_internals.skip_dynamo
def _with_batches(rule: Callable[..., tuple[Any, Any]], *arguments: Any) -> Results:
    """An operator's results for tensors that torch.autograd.grad(is_grads_batched=True) has batched.

    rule: the operator's vmap rule, which gets the innermost batch as the first axis of each tensor. The results are
    batched again.
    """
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
    """A vmap rule that calls the operator for each entry of the mapped axis, and stacks the results along axis 0.

    operator: a function that returns the operator, whose results are a list.
    """

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
    """Calls the operator without autograd, and returns its results, which require no gradient.

    It skips the operator's "Autograd" implementation. While torch.compile traces, the graph gets the operator's direct
    variant if the call has a launch chain.
    """
    if torch._C._len_torch_dispatch_stack():
        operator = _capturable(operator, arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def inside_function(operator: OpOverload, *arguments: Argument) -> Any:
    """Calls the operator in the forward of a torch.autograd.Function, and returns its results.

    The Function's own level of torch.func gets no gradient from this call, as its backward gives the gradient. Under
    nested transforms, the other levels can still differentiate the call.
    """
    if not torch._C._are_functorch_transforms_active():
        return below_autograd(operator, *arguments)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return below_autograd(operator, *arguments)


def call_in_backward(operator: OpOverload, *arguments: Argument) -> Any:
    """Calls the operator in the backward of a torch.autograd.Function, and returns its results.

    They can be differentiated only if gradients or forward mode are on, as by backward(create_graph=True).
    """
    if torch.is_grad_enabled() or torch_internals.is_forward_mode():
        return operator(*arguments)
    return below_autograd(operator, *arguments)


def apply(function: Any, *arguments: Any) -> Any:
    """function.apply(*arguments), for a call in an operator's "Autograd" implementation.

    function: a torch.autograd.Function whose forward calls the operator with inside_function.

    There, torch.func differentiates one level; the operator, called below autograd, continues with the next level.
    function.apply itself would start again with all levels.
    """
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return _of_one_level(function).apply(*arguments)


@functools.cache
def _of_one_level(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """A copy of a torch.autograd.Function that differentiates one level of torch.func's nested transforms only."""
    body = {name: vars(function)[name] for name in ("forward", "backward", "jvp")}
    return type(function.__name__, (torch.autograd.function._SingleLevelFunction,), body)


def has_tangent(arguments: Sequence[Argument]) -> bool:
    """Whether a tensor among the arguments has a tangent of forward-mode differentiation. Lists are not searched."""
    if not torch_internals.is_forward_mode() or not torch._C._is_fwd_grad_enabled():
        return False
    level = max(forward_ad._current_level, 0)  # PyTorch has only one level
    tensors = (x for x in arguments if isinstance(x, torch.Tensor))
    return any(forward_ad.unpack_dual(x, level=level).tangent is not None for x in tensors)


def refuse_tangent(name: str) -> NoReturn:
    """Raises NotImplementedError: the function `name` does not support forward-mode differentiation."""
    raise NotImplementedError(
        f"{name}: forward-mode differentiation is not supported (torch.func.jvp, linearize, jacfwd and hessian, "
        "torch.autograd.forward_ad); use the reverse mode: torch.func.vjp, grad, jacrev, or backward()"
    )


def refuse_second_gradient(name: str) -> NoReturn:
    """Raises RuntimeError: the gradient of the function `name` cannot be differentiated again."""
    raise RuntimeError(f"{name}: double backward is not supported; its gradient cannot be differentiated again")


class _Last(torch.autograd.Function):
    """apply(name, function, *tensors) returns function(*tensors) as a tuple; its derivatives raise.

    The backward raises RuntimeError, forward mode NotImplementedError. name: the function's name in these errors.
    """

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
    """function(*tensors) as a tuple of tensors, whose derivatives raise. For an operator's "Autograd" implementation.

    The backward raises RuntimeError, forward mode NotImplementedError. name: the name in these errors.
    """
    return apply(_Last, name, function, *tensors)


def unwrapped(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A detached tensor of the same values, without the wrappers of torch.func.grad and the like.

    Raises NotImplementedError, with the argument's name, for a tensor that torch.func.vmap maps.
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            raise NotImplementedError(f"{name}: got a tensor that torch.func.vmap maps, want a tensor outside of vmap")
        tensor = functorch.get_unwrapped(tensor)
    with torch._C._DisableFuncTorch():  # an active transform would wrap the result
        return tensor.detach()
