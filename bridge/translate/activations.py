"""Names for activations of matmuls that are functions, in jnp code or in torch's elementwise operations.

torch.compile can make a constant of a name, and programs are cached by it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jax_kernels.bridge.interop import torch_internals
from jax_kernels.bridge.interop.bounded_dict import drop_oldest
from jax_kernels.bridge.interop.keyed_cache import unique_name
from jax_kernels.bridge.translate import score_mods, snapshots, torch_to_jnp
from jax_kernels.ops.activations import ACTIVATIONS

__all__ = ["Activation", "applied", "name_of", "with_functions"]

type Activation = Callable[[torch.Tensor], torch.Tensor] | Callable[[jax.Array], jax.Array]

_OWN: dict[Activation, str] = {
    **dict.fromkeys((torch.relu, torch.nn.functional.relu), "relu"),
    **dict.fromkeys((torch.tanh, torch.nn.functional.tanh), "tanh"),
    **dict.fromkeys((torch.sigmoid, torch.nn.functional.sigmoid), "sigmoid"),
    torch.nn.functional.gelu: "gelu",
    torch.nn.functional.silu: "silu",
}
_MOST = 4096
_FUNCTIONS: dict[str, Activation] = {}
_NAMES: dict[Activation, str] = {}  # by the snapshot
_WANT = "want a name, or an elementwise function of one tensor, or of one jax.Array"


@torch_internals.constant_in_graph
def name_of(activation: str | Activation | None) -> str | None:
    """The name by which an op finds the activation, if with_functions wraps the op. Names and None stay unchanged.

    PyTorch functions such as torch.relu get this library's names, such as "relu". Another function is stored under a
    new name. Functions that differ in identity only (same code, equal closures and defaults) have the same name. So do
    partials of one function with equal constants, and PyTorch's activation modules with equal settings.

    Raises TypeError if the activation cannot be called, has no hash, or reads a tensor in addition to its argument.
    """
    if activation is None or isinstance(activation, str):
        return activation
    if not callable(activation):
        raise TypeError(f"activation: got {type(activation).__name__}, {_WANT}, or None")
    try:
        own = _OWN.get(activation)
    except TypeError:
        raise TypeError(f"activation: got {type(activation).__name__}, which has no hash, {_WANT}") from None
    if own is not None:
        return own
    if score_mods.split_tensors(activation, "activation") is not None:
        raise TypeError(f"activation: got {_text(activation)}, which reads a torch.Tensor, {_WANT}")
    first = snapshots.snapshot(activation)
    name = _NAMES.get(first)
    if name is None or name not in _FUNCTIONS:
        name = unique_name("activation")
        _FUNCTIONS[name], _NAMES[first] = first, name
        drop_oldest(_FUNCTIONS, _MOST)
        drop_oldest(_NAMES, _MOST)
    return name


def with_functions[Result](op: Callable[..., Result]) -> Callable[..., Result]:
    """Wraps an op of JAX arrays so that its argument `activation` may also be a name from name_of.

    The wrapper has the op's attribute `plan`, wrapped in the same way.
    """

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Result:
        return op(*args, **_in_jnp(**kwargs))

    call.plan = lambda *args, **kwargs: op.plan(*args, **_in_jnp(**kwargs))  # type: ignore[attr-defined]
    return call


def applied(x: jax.Array, *, activation: str) -> jax.Array:
    """activation(x), elementwise, computed in float32, in x's dtype. activation: a name from name_of."""
    function = _in_jnp(activation)["activation"]
    function = ACTIVATIONS[function] if isinstance(function, str) else function
    return function(x.astype(jnp.float32)).astype(x.dtype)


def _in_jnp(activation: str | None, **others: Any) -> dict[str, Any]:
    """The op's keyword arguments. If `activation` is a name of a stored function, the function in jnp replaces it.

    Raises TypeError, naming the function, if its torch operations have no form in jnp.
    """
    function = _FUNCTIONS.get(activation or "")
    return others | {"activation": activation if function is None else _traceable(function)}


def _traceable(function: Activation) -> Activation:
    """The function itself if it is in jnp code, else its jnp form.

    Raises TypeError, naming the function, if a torch operation has no form in jnp, or if it raises when traced.
    """
    x = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        jax.eval_shape(function, x)
        return function
    except Exception as error:
        of_arrays, reason = torch_to_jnp.to_jnp(function, is_elementwise=True), error
    try:
        jax.eval_shape(of_arrays, x)
    except torch_to_jnp.UnsupportedTorchOpError as error:
        raise TypeError(f"activation: {_text(function)} {error}; {_WANT}") from error
    except Exception:
        kind = type(reason).__name__
        raise TypeError(f"activation: {_text(function)} raised {kind} when traced ({reason}); {_WANT}") from reason
    return of_arrays


def _text(function: Activation) -> str:
    return getattr(function, "__qualname__", repr(function))
