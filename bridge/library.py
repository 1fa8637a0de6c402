"""PyTorch operators that are opaque to torch.compile and run a JAX function."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from jax_kernels import dispatch
from jax_kernels.bridge import dlpack

__all__ = [
    "define",
    "define_vmap",
    "distinct",
    "planning_for",
    "refuse_double_backward",
    "run",
    "transforming",
    "unwrapped",
]

_LIBRARY = torch.library.Library("jax_kernels", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


def define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator torch.ops.jax_kernels.<name>, for CPU and CUDA tensors. fake gives its empty results."""
    _LIBRARY.define(name + schema, tags=_TAGS)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"jax_kernels::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.jax_kernels, name).default


def define_vmap(name: str, rule: Callable[..., Any]) -> None:
    """What torch.func.vmap does with the operator; `rule(info, in_dims, *args)` gives (results, out_dims)."""
    torch.library.register_vmap(f"jax_kernels::{name}", rule, lib=_LIBRARY)


@functools.cache
def _device_info(device: torch.device) -> Any:
    return dispatch.device_info(dlpack.jax_device(device))


@contextlib.contextmanager
def planning_for(device: torch.device) -> Iterator[None]:
    """Traces inside the block are for this device, whatever JAX's default device is."""
    with dispatch.on_device(_device_info(device)):
        yield


def run(function: Callable[..., Any], tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Calls a jitted JAX function, whose results are a flat sequence of arrays, on tensors of one device.

    Raises RuntimeError while a CUDA graph is being captured: JAX queues its work on a stream of its own, which
    the graph would not hold.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    device = given[0].device
    dlpack.refuse_capture(device)
    arrays, owners = dlpack.import_tensors(given, device)
    filled = iter(arrays)
    with planning_for(device):
        results = function(*(None if tensor is None else next(filled) for tensor in tensors))
    exported = dlpack.export_arrays(results, device)
    del owners  # JAX reads them until the results are exported
    return exported


# Whether a torch.func transform is active. Unlike peek_interpreter_stack, torch.compile knows its answer.
transforming = torch._C._are_functorch_transforms_active


def unwrapped(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that torch.func.grad may be watching, detached."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            raise NotImplementedError(f"{name}: got a tensor that torch.func.vmap maps, want one outside of it")
        tensor = functorch.get_unwrapped(tensor)
    with torch._C._DisableFuncTorch():  # which would wrap what it gives
        return tensor.detach()


def distinct(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor, as a view where it is one of the others: torch.compile takes no autograd.Function with one twice."""
    if torch.compiler.is_compiling() and any(tensor is other for other in others):
        return tensor.view_as(tensor)
    return tensor


def refuse_double_backward(name: str) -> Callable[..., Any]:
    """The backward of a backward, which raises."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(f"{name}: double backward is not supported; its gradient cannot be differentiated again")

    return staticmethod(backward)
