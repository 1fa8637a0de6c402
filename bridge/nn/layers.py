"""Parts of the PyTorch modules other than attention: linear layers, norms, rotary embedding, checks of arguments.

They use PyTorch's own operators: a call through the bridge takes more host time.
"""

import numbers
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional

from jax_kernels.bridge.interop.arguments.autocast import autocast_dtype
from jax_kernels.bridge.jax_functions.argument_checks import check_float, check_tensors
from jax_kernels.bridge.ops.matmul import EIGHT_BITS

__all__ = [
    "PlainLayerNorm",
    "PlainLinear",
    "PlainRMSNorm",
    "TokenEmbedding",
    "check_flags",
    "check_input",
    "computes_its_weight",
    "empty_attention",
    "has_global_hooks",
    "has_hooks",
    "keeping_dtype",
    "positive",
    "rotary_embedding",
    "uncomputed_weight",
]


def positive(name: str, x: Any) -> int:
    """Returns x, a module's argument. Raises TypeError unless it is an int, ValueError unless it is above 0."""
    if isinstance(x, bool) or not isinstance(x, numbers.Integral):
        raise TypeError(f"{name}: got {x!r}, want an int")
    if x < 1:
        raise ValueError(f"{name}: got {x}, want a positive one")
    return int(x)


def check_flags(**flags: Any) -> None:
    """Raises TypeError, naming the argument, for a module's argument that is not a bool."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {flag!r}, want a bool")


def check_input(name: str, x: Any, parameter: torch.Tensor | None = None) -> None:
    """Raises TypeError, naming the argument, unless x is a tensor of a dtype that a module's call takes.

    These are float dtypes of 8 to 32 bits. parameter: x's dtype must be this tensor's, except under autocast, and
    except if one of them has 8 bits; None allows any.
    """
    check_tensors(**{name: x})
    if x.dtype in EIGHT_BITS:
        return
    check_float(name, x)
    if parameter is None or x.dtype == parameter.dtype or parameter.dtype in EIGHT_BITS:
        return
    if autocast_dtype(x.device) is None:
        raise TypeError(f"{name}: got dtype {x.dtype}, want the parameters' {parameter.dtype}, or autocast")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(layer: torch.nn.Module) -> bool:
    """Whether a call of the layer does more than its class's forward: it has hooks, or a forward of its own."""
    return any(getattr(layer, name, None) for name in _HOOKS) or "forward" in vars(layer)


def has_global_hooks() -> bool:
    """Whether hooks run in the calls of all modules, as torch.nn.modules.module.register_module_forward_hook adds."""
    return any(getattr(torch.nn.modules.module, f"_global{name}", None) for name in _HOOKS)


def computes_its_weight(layer: Any, *classes: type[torch.nn.Module]) -> bool:
    """Whether a call of a linear layer is only a matmul with layer.weight, so that the call may be left out.

    classes: the classes whose forward is such a matmul; a subclass counts if it inherits this forward, as a
    parametrized layer does. False with a bias, an activation or hooks (of pruning, FSDP, ..., or of all modules), and
    for another forward, such as a LoRA layer's.
    """
    if getattr(type(layer), "forward", None) not in [kind.forward for kind in classes]:
        return False
    if has_hooks(layer) or has_global_hooks():
        return False
    return layer.bias is None and getattr(layer, "activation", None) is None


def uncomputed_weight(layer: torch.nn.Module) -> torch.Tensor | None:
    """Returns a tensor with the dtype of a layer's weight: the weight, or if it is parametrized, a parameter.

    A read of a parametrized weight computes it, and in training it moves the vectors of a spectral_norm. So a call
    reads each weight once.
    """
    return next(layer.parameters(), None) if "parametrizations" in layer._modules else layer.weight


def keeping_dtype(
    fn: Callable[[torch.Tensor], torch.Tensor],
    tensors: Iterable[torch.Tensor | None],
    dtype: torch.dtype | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns fn, the argument of torch.nn.Module._apply, without its casts of some tensors; it still moves them.

    tensors: a module's parameters, their gradients, or buffers. dtype: the dtype that they get; None keeps their own.
    """
    kept = [x for x in tensors if x is not None]

    def apply(x: torch.Tensor) -> torch.Tensor:
        moved, want = fn(x), dtype or x.dtype
        if moved.dtype == want or not any(x is y for y in kept):
            return moved
        if x.is_meta or moved.is_meta:
            return torch.empty_like(x, dtype=want, device=moved.device)
        return x.to(moved.device, want)

    return apply


class PlainLinear(torch.nn.Linear):
    """torch.nn.Linear without bias, [..., in_features] to [..., out_features]. Each call casts weight to x's dtype.

    xavier_gain: the gain of a Xavier normal weight; None for variance 1 / in_features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        xavier_gain: float | None = None,
    ) -> None:
        self.xavier_gain = xavier_gain
        super().__init__(in_features, out_features, bias=False, dtype=dtype, device=device)

    def reset_parameters(self) -> None:
        """Draws a new weight, normal with mean 0 and the variance of the class's docstring."""
        if self.xavier_gain is not None:
            torch.nn.init.xavier_normal_(self.weight, gain=self.xavier_gain)
        else:
            torch.nn.init.normal_(self.weight, std=self.in_features**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class TokenEmbedding(torch.nn.Embedding):
    """torch.nn.Embedding with normal weights of mean 0 and variance 1 / embedding_dim."""

    def reset_parameters(self) -> None:
        """Draws new weights."""
        torch.nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)


class PlainRMSNorm(torch.nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last axis, computed in float32, returned in x's dtype."""

    def __init__(self, dim: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.empty(dim, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1."""
        torch.nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (inverse * self.weight.float())).to(x.dtype)


class PlainLayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm, computed in float32, returned in x's dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return functional.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def empty_attention(query: torch.Tensor, key: torch.Tensor, *others: torch.Tensor) -> torch.Tensor | None:
    """Returns the empty attention [B, T, H, D] if B or T is 0; None if there is attention to compute.

    None also if query and key have different B: the op then raises its error. With this result a call need not run
    the op, which would compile a program first. The result depends on all the given tensors, so that each gets a
    gradient of zeros instead of None.

    query: [B, T, H, D]. key: [B, S, Hkv, D]. others: further tensors that need gradients, such as value or a bias.
    """
    if 0 not in query.shape[:2] or query.shape[0] != key.shape[0]:
        return None
    return query + sum(0 * x.sum() for x in (key, *others))


def rotary_embedding(x: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """Rotates the features of queries or keys by their positions. Returns x's shape and dtype.

    It is rotary position embedding in the rotate_half convention: feature i of the first half is paired with feature i
    of the second half. jax_kernels.models.rotary_embedding computes the same.

    x: [..., T, H, D] with D even. positions: [T] or [..., T]. theta: the base of the frequencies theta**(-2 i / D).
    Computed in float32. Raises ValueError if D is odd.
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"x: got head_dim {head_dim}, want an even one: rotary embedding turns pairs")
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=x.device) / head_dim)
    angles = (positions.float()[..., None] * frequencies)[..., None, :]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
