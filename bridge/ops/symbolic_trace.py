"""Calls inside torch.fx.symbolic_trace and torch.jit.script, which do not know tensors' values.

torch.fx keeps a call of scaled_dot_product_attention, or of a module, as one node. TorchScript runs without Python: it
compiles PyTorch's scaled_dot_product_attention, and all other functions and modules raise.
"""

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.fx import Proxy

from jax_kernels.bridge.ops.drop_in import fallback
from jax_kernels.masks import Mask

__all__ = ["Proxy", "call", "is_traced", "leaf", "no_script", "refuse_function", "sdpa_of_script"]

type Argument = torch.Tensor | Proxy | Mask | bool | int | float | str | None

_WAYS_OUT = "compile it with torch.compile, export it with torch.export, or record calls with torch.jit.trace"


def call(function: Callable[..., Any], *arguments: Argument, **options: Argument) -> Proxy:
    """Adds a call of the function as a node to the graph of torch.fx.symbolic_trace. Returns the Proxy of its result.

    arguments, options: the call's arguments; at least one of `arguments` is a Proxy.
    """
    proxy = next(x for x in arguments if isinstance(x, Proxy))
    return proxy.tracer.create_proxy("call_function", function, arguments, options)


def is_traced(*arguments: Argument) -> bool:
    """Whether one of the arguments is a torch.fx Proxy, because torch.fx.symbolic_trace makes the call."""
    for x in arguments:  # noqa: SIM110 (half the time of any)
        if isinstance(x, Proxy):
            return True
    return False


def leaf(module: torch.nn.Module, *arguments: Argument, **options: Argument) -> Any:
    """Adds a call of the module as a node to the graph of torch.fx.symbolic_trace, like calls of torch.nn's modules.

    Returns the Proxy of its result. At least one argument is a Proxy. Options that are None are omitted.

    Raises ValueError if the traced module is this module itself, not a parent of it.
    """
    proxy = next(x for x in (*arguments, *options.values()) if isinstance(x, Proxy))
    tracer: Any = proxy.tracer
    path = tracer.path_of_module(module)
    if not path:
        raise ValueError(
            f"torch.fx.symbolic_trace: got a {type(module).__name__}, which it cannot look into, want a module that "
            "has it as a submodule"
        )
    given = {name: x for name, x in options.items() if x is not None}
    return tracer.create_proxy("call_module", path, arguments, given)


def no_script(module: torch.nn.Module) -> NoReturn:
    """Raises RuntimeError: TorchScript cannot hold the module. torch.jit.script calls it as __prepare_scriptable__."""
    raise RuntimeError(
        f"torch.jit.script: got a jax_kernels {type(module).__name__}, which TorchScript cannot hold: JAX runs it; "
        f"{_WAYS_OUT}"
    )


def refuse_function(x: Any) -> None:
    """Makes torch.jit.script raise RuntimeError for x and for code that calls x, if x is a function."""
    if inspect.isfunction(x) and not hasattr(x, "__prepare_scriptable__"):
        x.__prepare_scriptable__ = _refusing(x.__name__)  # type: ignore[attr-defined]


def _refusing(name: str) -> Callable[[], NoReturn]:
    """Returns a function that raises RuntimeError: TorchScript cannot hold calls of the function called `name`."""

    def prepare() -> NoReturn:
        raise RuntimeError(
            f"torch.jit.script: got code that calls jax_kernels.bridge.{name}, which TorchScript cannot hold: JAX "
            f"runs it; {_WAYS_OUT}"
        )

    return prepare


def sdpa_of_script() -> Callable[..., torch.Tensor]:
    """Returns the function that torch.jit.script compiles for bridge.scaled_dot_product_attention.

    It calls PyTorch's scaled_dot_product_attention, since TorchScript cannot run JAX. The first call in a process warns
    of this.
    """
    fallback.warn("scaled_dot_product_attention", "torch.jit.script's programs cannot run JAX")
    return _pytorchs


def _pytorchs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    return fallback.attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
