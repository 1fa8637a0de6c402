"""torch.nn.attention.flex_attention, which imports torch._dynamo: loaded only if a process uses it."""

import importlib
from typing import TYPE_CHECKING, Any

from jax_kernels.bridge.interop.import_hooks import when_imported

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from typing_extensions import TypeIs

__all__ = ["is_block_mask", "load", "option_names"]

_MODULE = "torch.nn.attention.flex_attention"
module: Any = None  # once it is loaded
flex_attention: Any = None  # PyTorch's own function, even if the name is reassigned later


def load() -> None:
    """Imports PyTorch's module, and sets this module's `module` to it and `flex_attention` to PyTorch's function."""
    if module is None:
        importlib.import_module(_MODULE)


def is_block_mask(x: Any) -> "TypeIs[BlockMask]":
    """Whether x is a torch.nn.attention.flex_attention.BlockMask. It does not import that module."""
    return module is not None and isinstance(x, module.BlockMask)


def option_names() -> set[str]:
    """Returns the names that flex_attention's kernel_options may have.

    They are the keys of PyTorch's FlexKernelOptions (none in a PyTorch that lacks it) and FORCE_USE_FLEX_ATTENTION.
    """
    load()
    kinds = getattr(module, "FlexKernelOptions", None)
    return {*getattr(kinds, "__annotations__", ()), "FORCE_USE_FLEX_ATTENTION"}


def _loaded() -> None:
    global module, flex_attention
    module = importlib.import_module(_MODULE)
    flex_attention = module.flex_attention


when_imported(_MODULE, _loaded)
when_imported("torch._dynamo", load)  # a graph cannot import it
