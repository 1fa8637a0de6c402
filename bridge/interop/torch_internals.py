"""PyTorch's private symbols that make calls faster, each with a fallback for versions that lack the symbol.

Other private symbols and formats of the bridge: JAX's in dlpack.py, fork.py and memory.py, jax_functions/flops.py and
ops/sequence_parallel/process_mesh.py; XLA's and Mosaic's in executable.py, records.py, compile.py, mosaic_launch.py and
loaded_kernels.py of `direct`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad

from jax_kernels.bridge.interop.import_hooks import when_imported

__all__ = [
    "Check",
    "add_batch_dim",
    "as_in_dual_level",
    "batch_of",
    "break_graph",
    "constant_in_graph",
    "empty_on_gpu",
    "has_known_values",
    "is_batched",
    "is_forward_mode",
    "is_in_batch",
    "is_plain_eager",
    "node_in_graph",
    "not_in_graph",
    "remove_batch_dim",
    "size_hint",
    "skip_dynamo",
    "stream_handle",
    "tensor_guard",
    "without_modes",
]

Check = Callable[..., bool]


try:
    from torch._C._dynamo import guards as _guards
except ImportError:
    _guards = None  # type: ignore[assignment]
_GUARDS: Any = getattr(_guards, "TensorGuards", None)
# (shape, strides, dtype) -> an empty tensor on the current GPU
empty_on_gpu: Callable[..., torch.Tensor] = getattr(
    _guards,
    "_empty_strided_cuda",
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda"),
)
# (index of a GPU) -> the handle of its current stream, without the object that torch.cuda.current_stream makes
stream_handle: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda index: torch.cuda.current_stream(index).cuda_stream
)


class _Graph(threading.local):
    """The state of the torch.compile graph that runs in this thread.

    is_in_dual_level: whether the graph has entered torch.autograd.forward_ad.dual_level.
    """

    is_in_dual_level = False


_GRAPH = _Graph()


def is_forward_mode() -> bool:
    """Whether tensors may have tangents of forward-mode differentiation.

    True inside torch.autograd.forward_ad.dual_level, as_in_dual_level and torch.func.jvp. A torch.compile graph
    enters torch.func.jvp without raising PyTorch's counter of forward_ad's levels, so torch.func's stack of active
    transforms is searched too.
    """
    if forward_ad._current_level >= 0 or _GRAPH.is_in_dual_level:
        return True
    if not torch._C._are_functorch_transforms_active():
        return False
    functorch = torch._C._functorch
    return any(x.key() == functorch.TransformType.Jvp for x in functorch.get_interpreter_stack() or ())


def is_plain_eager() -> bool:
    """Whether the call runs without compilers, torch.jit.trace, torch.func and forward-mode differentiation."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or is_forward_mode()
        or torch._C._get_tracing_state() is not None
    )


def has_known_values(x: torch.Tensor) -> bool:
    """Whether the host may read the values of x, without waiting for a GPU.

    False on other devices than a CPU, in a graph or a trace, under torch.func, and for FakeTensors. torch.compile of
    torch 2.11 calls the nodes of its graph with FakeTensors while torch.compiler.is_compiling() is False.
    """
    return x.device.type == "cpu" and is_plain_eager() and detect_fake_mode((x,)) is None


@contextlib.contextmanager
def as_in_dual_level() -> Iterator[None]:
    """A context manager inside which is_forward_mode() is True for this thread.

    A graph of torch.compile also enters torch.autograd.forward_ad.dual_level without raising PyTorch's counter. All
    threads share this counter, so it stays unchanged.
    """
    before, _GRAPH.is_in_dual_level = _GRAPH.is_in_dual_level, True
    try:
        yield
    finally:
        _GRAPH.is_in_dual_level = before


def not_in_graph[Function: Callable[..., Any]](function: Function, reason: str) -> Function:
    """Makes torch.compile break its graph at calls of the function, and run it as it is. Returns the same function.

    It is torch.compiler.disable without the import of torch._dynamo, which takes 2 seconds. reason: for torch.compile's
    messages.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    return skip_dynamo(function)


def constant_in_graph[Function: Callable[..., Any]](function: Function) -> Function:
    """Makes torch.compile call the function in its trace, and use the result as a constant. Returns the same function.

    It is torch.compiler.assume_constant_result without the import of torch._dynamo, which takes 2 seconds.
    """
    when_imported("torch._dynamo", lambda: torch.compiler.assume_constant_result(function))
    return function


def node_in_graph[Function: Callable[..., Any]](function: Function) -> Function:
    """Makes a call of the function one node of torch.compile's graph, not traced further. Returns the same function.

    It is torch.compiler.allow_in_graph without the import of torch._dynamo, which takes 2 seconds.
    """
    when_imported("torch._dynamo", lambda: torch.compiler.allow_in_graph(function))
    return function


def skip_dynamo[Function: Callable[..., Any]](function: Function) -> Function:
    """Keeps torch.compile from rewriting the frames of a function and of all its callees. Returns the function.

    It is for functions that PyTorch calls by itself, such as a backward: torch.compile also intercepts their frames,
    and JAX's frames fail then. The function is as fast as before. torch.compile still traces calls of the function
    inside traced code.
    """
    try:
        # torch._dynamo has these as public names, but its import takes 2 seconds.
        from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
        from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
        from torch._C._dynamo.eval_frame import set_code_exec_strategy
    except ImportError:
        return torch.compiler.disable(function)
    set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    return function


def size_hint(size: torch.SymInt | int) -> int | None:
    """The example value of a size in a trace, without making the size a constant; None if it has no example value."""
    if not isinstance(size, torch.SymInt):
        return size
    try:
        found = size.node.hint
    except (AttributeError, RuntimeError, ValueError):
        return None
    return found if isinstance(found, int) else None


_MOST_LEVELS = 64
_is_legacy_batched: Callable[[torch.Tensor], bool] = getattr(
    torch._C._functorch, "is_legacy_batchedtensor", lambda x: False
)


class Batch(NamedTuple):
    """A batch that torch.autograd.grad(is_grads_batched=True) made: a hidden axis of some tensors.

    level: PyTorch's number of the batch; an inner batch has a higher one. size: the number of its entries.
    """

    level: int
    size: int


def is_batched(x: Any) -> bool:
    """Whether x is a tensor with the hidden axis of a Batch."""
    return isinstance(x, torch.Tensor) and _is_legacy_batched(x)


def is_in_batch(x: Any, level: int) -> bool:
    """Whether x is a tensor with the hidden axis of the Batch of this level."""
    return is_batched(x) and _size_of_batch(x, level) > 0


def _size_of_batch(x: torch.Tensor, level: int) -> int:
    """The size of the batched tensor x along the hidden axis of the Batch of this level; 0 if x lacks this axis."""
    return torch._remove_batch_dim(x, level, 0, 0).shape[0]


def batch_of(arguments: Sequence[Any]) -> Batch:
    """The innermost Batch of any of the arguments. Raises ValueError if none is batched."""
    return max(_innermost(x) for x in arguments if is_batched(x))


def _innermost(x: torch.Tensor) -> Batch:
    """The innermost Batch of a batched tensor."""
    found = Batch(0, 0)
    for level in range(1, _MOST_LEVELS + 1):
        if size := _size_of_batch(x, level):
            found, x = Batch(level, size), remove_batch_dim(x, level)
            if not is_batched(x):
                break
    return found


def remove_batch_dim(x: torch.Tensor, level: int) -> torch.Tensor:
    """The tensor x with the hidden axis of the Batch of this level as its first axis."""
    return torch._remove_batch_dim(x, level, 0, 0)


def add_batch_dim(x: torch.Tensor, dim: int | None, level: int) -> torch.Tensor:
    """The tensor x with axis `dim` as the hidden axis of the Batch of this level; x itself if dim is None."""
    return x if dim is None else torch._add_batch_dim(x, dim, level)


def break_graph(*packages: str) -> None:
    """Makes torch.compile break its graph at calls of functions of these packages, which then run as they are."""

    def add_all() -> None:
        try:
            from torch._dynamo.trace_rules import add
        except ImportError:
            return
        for package in packages:
            add(package)

    when_imported("torch._dynamo.trace_rules", add_all)


@contextlib.contextmanager
def without_modes() -> Iterator[bool]:
    """A context manager that turns off PyTorch's dispatch modes, such as a trace's, inside its block.

    Its `as` value is True; False if this version of PyTorch cannot turn them off, and they stay on.
    """
    try:
        from torch.utils._python_dispatch import _disable_current_modes
    except ImportError:
        yield False
        return
    with _disable_current_modes():
        yield True


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Check | None:
    """A function (*tensors) that returns whether a later call's tensors have the properties of these tensors.

    It returns None if this version of PyTorch lacks the internal class for it, or if the class refuses the tensors.

    The function compares type, dtype, device, shape, strides and requires_grad of each tensor, which arguments are one
    tensor object, and PyTorch's state: autocast, torch.func's transforms, inference mode and dispatch modes.
    """
    if _GUARDS is None:
        return None
    first = {id(x): index for index, x in reversed(list(enumerate(tensors)))}
    places = [first[id(x)] for x in tensors]
    unique = [x for index, x in enumerate(tensors) if places[index] == index]
    try:
        sizes, strides = [list(x.shape) for x in unique], [list(x.stride()) for x in unique]
        guards = _GUARDS(*unique, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        if guards.check(*unique) is not True:
            return None
    except (TypeError, RuntimeError, AttributeError):
        return None
    if len(unique) == len(tensors):
        return guards.check

    def check(*given: torch.Tensor) -> bool:  # PyTorch's check returns False if a tensor occurs twice
        return all(given[at] is x for at, x in zip(places, given, strict=True)) and guards.check(
            *(x for index, x in enumerate(given) if places[index] == index)
        )

    return check
