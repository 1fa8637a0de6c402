"""MixtureOfExperts: a PyTorch module with this library's grouped_matmul."""

import math
from collections.abc import Callable
from typing import NamedTuple, Self

import torch

from jax_kernels.bridge.interop.arguments.autocast import autocast_dtype, without_autocast
from jax_kernels.bridge.interop.arguments.plain_numbers import plain_arguments
from jax_kernels.bridge.jax_functions.argument_checks import check_activation, check_optional_tensors
from jax_kernels.bridge.nn.gated_mlp import GatedMLP
from jax_kernels.bridge.nn.layers import check_flags, check_input, keeping_dtype, positive
from jax_kernels.bridge.ops import symbolic_trace
from jax_kernels.bridge.ops.expert_rows import PermutedRows, TokenRows
from jax_kernels.bridge.ops.grouped_matmul import grouped_gated_matmul, grouped_matmul
from jax_kernels.bridge.translate.activations import Activation

__all__ = ["MixtureOfExperts", "Routing"]

TINY = torch.finfo(torch.float32).tiny


class Routing(NamedTuple):
    """The balance of the experts over the tokens of a call.

    load: the number of tokens that chose each expert, int32 [num_experts]. balance_loss: float32 [], 1 if all loads are
    equal, with a gradient of the router; see jax_kernels.models.Routing.
    """

    load: torch.Tensor
    balance_loss: torch.Tensor


class MixtureOfExperts(torch.nn.Module):
    """jax_kernels.models.MixtureOfExperts in PyTorch: its equations, on one GPU, with bridge.grouped_matmul.

    No token is dropped. The numbers of tokens of the experts stay on the device, without a synchronisation.

    Parameters, as in Flax: router [model_dim, num_experts] in float32; gate_proj and up_proj [num_experts, model_dim,
    mlp_dim]; down_proj [num_experts, mlp_dim, model_dim]; with shared experts also the GatedMLP `shared`. With
    balance_bias also the buffer expert_bias [num_experts], float32. bridge.weights converts all of them. A cast of the
    module, such as module.bfloat16(), casts all but the router and expert_bias.

    Args:
      model_dim, mlp_dim: the width of x, and of an expert's hidden values.
      num_experts, experts_per_token: the number of experts, and of experts that a token chooses.
      activation: as in bridge.nn.Linear; it may not be None.
      gated: whether the experts have a gate_proj.
      scores: "softmax" or "sigmoid", of the router's logits.
      renormalize: whether a token's weights are divided by their sum.
      weight_scale: a factor of the weights.
      shared_experts: the number of experts that all tokens use, with weight 1.
      balance_bias: whether there is an expert_bias, which is added to the scores for the choice of experts only.
      precision: "fp8" for 8-bit matmuls of the experts and the shared experts, as in bridge.grouped_matmul, with a
        scale for each row of x; None for matmuls in the parameters' dtype. The router stays in float32.
      implementation: of grouped_matmul.
      device, dtype: of the parameters; the router and expert_bias are in float32.

    Raises:
      TypeError, ValueError: an argument is wrong; the error names it.
    """

    @plain_arguments
    def __init__(
        self,
        model_dim: int,
        mlp_dim: int,
        num_experts: int,
        experts_per_token: int,
        *,
        activation: str | Activation = "silu",
        gated: bool = True,
        scores: str = "softmax",
        renormalize: bool = True,
        weight_scale: float = 1.0,
        shared_experts: int = 0,
        balance_bias: bool = False,
        precision: str | None = None,
        implementation: str | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("model_dim", model_dim), ("mlp_dim", mlp_dim), ("num_experts", num_experts)):
            positive(name, size)
        if positive("experts_per_token", experts_per_token) > num_experts:
            raise ValueError(f"experts_per_token: got {experts_per_token}, want at most num_experts={num_experts}")
        if shared_experts != 0:
            positive("shared_experts", shared_experts)
        if shared_experts and not gated:
            raise ValueError(f"shared_experts: got {shared_experts} with gated=False, want 0: a GatedMLP has a gate")
        if scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores: got {scores!r}, want 'softmax' or 'sigmoid'")
        if isinstance(weight_scale, bool) or not isinstance(weight_scale, int | float):
            raise TypeError(f"weight_scale: got {weight_scale!r}, want a number")
        if not 0 < weight_scale < math.inf:
            raise ValueError(f"weight_scale: got {weight_scale}, want a positive finite number")
        check_flags(gated=gated, renormalize=renormalize, balance_bias=balance_bias)
        if precision not in (None, "fp8"):
            raise ValueError(f"precision: got {precision!r}, want 'fp8' or None")
        check_activation(activation, is_optional=False)
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.activation, self.scores = activation, scores
        self.renormalize, self.weight_scale = renormalize, float(weight_scale)
        self.precision, self.implementation = precision, implementation

        def parameter(*shape: int, dtype: torch.dtype | None = dtype) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.router = parameter(model_dim, num_experts, dtype=torch.float32)
        self.gate_proj = parameter(num_experts, model_dim, mlp_dim) if gated else None
        self.up_proj = parameter(num_experts, model_dim, mlp_dim)
        self.down_proj = parameter(num_experts, mlp_dim, model_dim)
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32) if balance_bias else None
        self.register_buffer("expert_bias", bias)
        self.shared = None
        if shared_experts:
            width = shared_experts * mlp_dim
            of_8_bits = {} if precision is None else {"precision": precision, "scaling": "row"}
            self.shared = GatedMLP(model_dim, width, activation=activation, device=device, dtype=dtype, **of_8_bits)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new matrices of the router and the experts, normal with variance 1 / (rows of a matrix).

        expert_bias becomes 0.
        """
        for matrix in (self.router, self.gate_proj, self.up_proj, self.down_proj):
            if matrix is not None:
                torch.nn.init.normal_(matrix, std=matrix.shape[-2] ** -0.5)
        if self.expert_bias is not None:
            torch.nn.init.zeros_(self.expert_bias)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the experts' weighted results + residual, [..., model_dim] in x's dtype.

        x: [..., model_dim], in the parameters' dtype. residual: x's shape and dtype, under autocast any float dtype.
        Raises TypeError or ValueError for another one.
        """
        if isinstance(x, symbolic_trace.Proxy):
            return symbolic_trace.leaf(self, x, residual=residual)
        check_optional_tensors(residual=residual)
        if residual is not None:
            casts = residual.is_floating_point() and autocast_dtype(x.device) is not None
            if residual.shape != x.shape or (residual.dtype != x.dtype and not casts):
                got, want = (f"{z.dtype} {tuple(z.shape)}" for z in (residual, x))
                raise ValueError(f"residual: got {got}, want x's {want}")
        out = self.with_routing(x)[0]
        return out if residual is None else residual + out

    __prepare_scriptable__ = symbolic_trace.no_script

    def with_routing(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """Returns (the result of a call, the Routing of x's tokens), for a load-balancing loss."""
        router, gate_proj, up_proj = self.router, self.gate_proj, self.up_proj  # a read computes a parametrized one
        check_input("x", x, up_proj)
        if x.shape[-1] != router.shape[0]:
            raise ValueError(f"x: got shape {tuple(x.shape)}, want [..., {router.shape[0]}]")
        tokens, each = x.reshape(-1, x.shape[-1]), self.experts_per_token
        weights, experts, routing = self._route(tokens, router)
        pairs = experts.flatten()
        order = pairs.argsort(stable=True)
        of_all = {
            "group_sizes": routing.load,
            "precision": self.precision,
            "implementation": self.implementation,
        }
        inverse = order.argsort()
        rows = TokenRows.apply(tokens, order, inverse, each)
        if gate_proj is None:
            hidden = grouped_matmul(rows, up_proj, activation=self.activation, **of_all)
        else:
            hidden = grouped_gated_matmul(rows, gate_proj, up_proj, activation=self.activation, **of_all)
        out = (
            PermutedRows.apply(grouped_matmul(hidden, self.down_proj, **of_all), inverse, order)
            .float()
            .unflatten(0, (-1, each))
        )
        out = (weights[..., None] * out).sum(1).view(x.shape)
        if self.shared is not None:
            out = out + self.shared(x).float()
        return out.to(x.dtype), routing

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves or casts the module as torch.nn.Module._apply does; the router and expert_bias stay in float32."""
        kept = (self.router, self.router.grad, self.expert_bias)
        return super()._apply(keeping_dtype(fn, kept, torch.float32), recurse)

    @torch.no_grad()
    def update_bias(self, load: torch.Tensor, rate: float = 1e-3) -> None:
        """Adds rate * sign(mean load - load) to expert_bias; see jax_kernels.models.MixtureOfExperts.update_bias.

        load: integers [num_experts], from with_routing, summed over the processes of a data-parallel run.
        """
        if self.expert_bias is None:
            raise ValueError("balance_bias: got False, want True for a module with an expert_bias")
        if load.shape != self.expert_bias.shape:
            raise ValueError(f"load: got shape {tuple(load.shape)}, want [num_experts] = {(self.num_experts,)}")
        self.expert_bias += rate * torch.sign(load.float().mean() - load)

    def _route(self, x: torch.Tensor, router: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        """Returns (weights [N, experts_per_token], experts, the Routing), of tokens x [N, model_dim], in float32.

        router: [model_dim, num_experts].
        """
        with without_autocast(x.device):
            logits = x.float() @ router.float()  # FSDP may give the router another dtype
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        preferred = scores.detach() if self.expert_bias is None else scores.detach() + self.expert_bias
        experts = preferred.sort(dim=-1, descending=True, stable=True).indices[:, : self.experts_per_token]
        # Scores are divided by their sum as a softmax of their logarithms, which is right also if all scores are 0.
        logs = logits.clamp(min=torch.finfo(torch.float32).min)
        logs = logs if self.scores == "softmax" else torch.nn.functional.logsigmoid(logs)
        weights = (logs if self.renormalize else scores).gather(-1, experts)
        weights = weights.softmax(-1) if self.renormalize else weights
        # Not bincount, for which the host waits.
        load = torch.zeros(self.num_experts, device=x.device, dtype=torch.int32)
        load = load.scatter_add(0, experts.flatten(), torch.ones_like(experts.flatten(), dtype=torch.int32))
        probability = (scores if self.scores == "softmax" else logs.softmax(-1)).sum(0)
        fraction = load.float() / load.sum().clamp(min=1)
        mean = probability / probability.sum().detach().clamp(min=TINY)
        return self.weight_scale * weights, experts, Routing(load, self.num_experts * (fraction * mean).sum())
