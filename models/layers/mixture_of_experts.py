"""MixtureOfExperts as an nnx module: a router, and gated MLPs by this library's grouped matmuls."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_kernels.masks.checks import is_array
from jax_kernels.models.config import check_choices, check_exchange, check_kind, check_precision, check_size
from jax_kernels.models.layers.inputs import check_promotion, checked_residual
from jax_kernels.models.layers.linear import GatedMLP
from jax_kernels.models.layers.pairs import Pairs
from jax_kernels.models.layers.routing import ExpertBias, RouterKernel, Routing, balanced, route
from jax_kernels.models.parallel.sharding import ShardingRules, has_explicit_axes, under_auto_axes
from jax_kernels.models.parallel.token_exchange import after, exchange_rows, gather_tokens, scatter_tokens
from jax_kernels.ops.checks import check_scale, checked_array
from jax_kernels.ops.grouped.experts import Combination, gated_experts
from jax_kernels.ops.grouped.grouped_matmul import grouped_gated_matmul, grouped_matmul
from jax_kernels.ops.grouped.rows import permuted_rows
from jax_kernels.ops.matmul.checks import checked_activation
from jax_kernels.ops.matmul.mlp import RESIDUALS
from jax_kernels.plain_numbers import plain_arguments
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["MixtureOfExperts"]


class MixtureOfExperts(nnx.Module):
    """A feed-forward block of many MLPs, the experts. A router chooses a few of them for each token.

    Equivalent to the following JAX code for one token x, with s, experts and weights as the router computes them::

        s = softmax(x @ router)                            # or sigmoid; in float32
        experts = top_k(s + expert_bias, experts_per_token)[1]
        weights = weight_scale * s[experts] / s[experts].sum()
        out = shared(x)                                    # 0 without shared experts
        for e, weight in zip(experts, weights):
            hidden = activation(x @ gate_proj[e]) * (x @ up_proj[e])    # or, if not gated, activation(x @ up_proj[e])
            out = out + weight * (hidden @ down_proj[e])

    No token is dropped: an expert takes all tokens that chose it, from none to all. The tokens are sorted by expert,
    and one grouped_gated_matmul and one grouped_matmul run all experts. The group sizes stay on the device. The
    weighted sum is in float32.

    Parameters: router [model_dim, num_experts] in float32; gate_proj and up_proj [num_experts, model_dim, mlp_dim];
    down_proj [num_experts, mlp_dim, model_dim]; with shared experts also the GatedMLP `shared`. With balance_bias
    also expert_bias [num_experts], an ExpertBias, which starts at 0: see update_bias.

    On a mesh (`with jax.set_mesh(mesh)`), each device works on its own tokens. A mesh axis that the rules give to
    "expert" shards the experts: its devices exchange tokens. An axis of "mlp" shards mlp_dim.

    Args:
      model_dim, mlp_dim: the width of x, and of an expert's hidden values.
      num_experts, experts_per_token: the number of experts, and of experts that a token chooses.
      activation: the name of a function, such as "silu", or an elementwise jnp function.
      gated: whether the experts have a gate_proj.
      scores: "softmax" or "sigmoid", of the router's logits.
      renormalize: whether a token's weights are divided by their sum.
      weight_scale: a factor of the weights.
      shared_experts: the number of experts that all tokens use, with weight 1. Together they are one GatedMLP of width
        shared_experts * mlp_dim.
      balance_bias: whether there is an expert_bias.
      exchange: how devices along "expert" exchange tokens. "gather": each gets all of their tokens, and sends its
        share of the results in x's dtype; the sum is in float32. "all_to_all": a token is sent to the devices of its
        experts, once for each expert, which sends less if the devices are more than experts_per_token. On GPUs it is
        many times slower than "gather".
      precision: "fp8" for 8-bit matmuls of the experts and the shared experts, as in grouped_matmul: with a scale for
        each row of x and for each column of an expert's matrix. The router keeps its precision. None for matmuls in
        dtype.
      implementation: of grouped_matmul. shared_implementation: of the shared experts, as in GatedMLP.
      kernel_init: of the experts' and the router's matrices; None for LeCun normal.
      dtype: of the computation, but for the router; None for the promoted dtype of x and the experts' parameters.
      param_dtype: of all parameters but the router.
      rules: the mesh axes that shard each array; None for ShardingRules().
      rngs: initialises the parameters, from its stream `params`.

    Raises:
      TypeError, ValueError: an argument is wrong; the error names it.

    Sources: Shazeer et al., "Outrageously Large Neural Networks" (2017), arXiv:1701.06538; Gale et al., "MegaBlocks"
    (2022), arXiv:2211.15841, for experts without a capacity.
    """

    @plain_arguments
    def __init__(
        self,
        model_dim: int,
        mlp_dim: int,
        num_experts: int,
        experts_per_token: int,
        *,
        activation: Any = "silu",
        gated: bool = True,
        scores: str = "softmax",
        renormalize: bool = True,
        weight_scale: float = 1.0,
        shared_experts: int = 0,
        balance_bias: bool = False,
        exchange: str = "gather",
        precision: str | None = None,
        implementation: str | None = None,
        shared_implementation: str | None = None,
        kernel_init: Any = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rules: ShardingRules | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        for name, size in (("model_dim", model_dim), ("mlp_dim", mlp_dim)):
            check_size(name, size)
        check_choices("", num_experts, experts_per_token, scores, weight_scale, shared_experts)
        for name, flag in (("gated", gated), ("renormalize", renormalize), ("balance_bias", balance_bias)):
            check_kind(name, flag, bool, "a bool")
        check_exchange("", exchange)
        check_precision("", precision, None)
        check_kind("implementation", implementation, str | None, "a name or None")
        check_kind("rules", rules, ShardingRules | None, "ShardingRules or None")
        check_kind("rngs", rngs, nnx.Rngs, "nnx.Rngs")
        if activation is None:
            raise TypeError("activation: got None, want a name or a function")
        checked_activation(activation)
        if shared_experts and not gated:
            raise ValueError(f"shared_experts: got {shared_experts} with gated=False, want 0: a GatedMLP has a gate")
        self.model_dim, self.mlp_dim = model_dim, mlp_dim
        self.num_experts, self.experts_per_token = num_experts, experts_per_token
        self.activation, self.gated = activation, gated
        self.scores, self.renormalize, self.weight_scale = scores, renormalize, float(weight_scale)
        self.exchange, self.precision = exchange, precision
        self.implementation, self.dtype = implementation, dtype
        self.rules = ShardingRules() if rules is None else rules

        initialize = kernel_init or nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)
        experts = lambda *shape: nnx.Param(initialize(rngs.params(), (num_experts, *shape), param_dtype))
        of_router = kernel_init or nnx.initializers.lecun_normal()
        self.router = RouterKernel(of_router(rngs.params(), (model_dim, num_experts), jnp.float32))
        self.gate_proj = experts(model_dim, mlp_dim) if gated else None
        self.up_proj = experts(model_dim, mlp_dim)
        self.down_proj = experts(mlp_dim, model_dim)
        self.expert_bias = ExpertBias(jnp.zeros(num_experts, jnp.float32)) if balance_bias else None
        options: dict[str, Any] = {} if kernel_init is None else {"kernel_init": kernel_init}
        shared = functools.partial(GatedMLP, model_dim, shared_experts * mlp_dim, activation=activation, rngs=rngs)
        options |= {"implementation": shared_implementation, "dtype": dtype, "param_dtype": param_dtype}
        if precision is not None:
            options |= {"precision": precision, "scaling": "row"}
        self.shared = shared(**options) if shared_experts else None

    def __call__(self, x: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """The experts' weighted results + residual: [..., model_dim].

        x: [..., model_dim]. residual: like x, or None. The result has the dtype of the computation, or, if the module
        has no dtype of its own, the promoted dtype of the computation and residual. Raises TypeError or ValueError for
        another shape or dtype.
        """
        return self.with_routing(x, residual=residual)[0]

    @under_defaults
    def with_routing(self, x: jax.Array, *, residual: jax.Array | None = None) -> tuple[jax.Array, Routing]:
        """(the result of a call, the Routing of x's tokens), for a load-balancing loss.

        The Routing has `load`, `probability`, `balance_loss` and `largest_load`. It counts all tokens of x, over all
        devices of a mesh, also padding. Inside a jax.shard_map it counts the device's own tokens.
        """
        x = checked_array("x", x)
        if x.ndim == 0 or x.shape[-1] != self.model_dim or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"x: got {x.dtype} {x.shape}, want floats [..., model_dim] = [..., {self.model_dim}]")
        residual = None if residual is None else checked_residual(residual, x.shape)
        check_promotion(self.dtype, x=x, param_dtype=self.up_proj.dtype)
        if has_explicit_axes():
            spec = self.rules.spec(self._names(x), x.shape, jax.sharding.get_abstract_mesh())
            call = lambda module, x, residual: module.with_routing(x, residual=residual)
            return under_auto_axes(call, self, (x, residual), (spec, Routing(load=P(), probability=P())))  # type: ignore[arg-type]
        given = (x, self.up_proj[...], self.down_proj[...], *([] if self.gate_proj is None else [self.gate_proj[...]]))
        x, *kernels = promote_dtype(given, dtype=self.dtype)
        bias = None if self.expert_bias is None else self.expert_bias[...]
        arrays = (x, self.router[...], bias, *kernels)
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
            out, routing = self._routed(*arrays, devices=_Devices())
        else:
            out, routing = self._routed_on_mesh(mesh, *arrays)
        if self.shared is not None:
            out = out + self.shared(x).astype(jnp.float32)
        dtype = x.dtype
        if residual is not None:
            dtype = dtype if self.dtype is not None else jnp.promote_types(dtype, residual.dtype)
            out = residual.astype(dtype) + out
        return out.astype(dtype), routing

    def update_bias(self, load: jax.Array, rate: float = 1e-3) -> None:
        """Adds rate * sign(mean load - load) to expert_bias, in place: experts with little load become preferred.

        load: a step's, integers [num_experts], as in the Routing of with_routing. Trainer updates its model itself.

        Raises ValueError if the module has no expert_bias, load has another shape, or rate is below 0 or not finite;
        TypeError if load is no array of integers, or rate is no number.

        Sources: as in DeepSeek-V3 (2024), arXiv:2412.19437, after Wang et al. (2024), arXiv:2408.15664.
        """
        if self.expert_bias is None:
            raise ValueError("balance_bias: got False, want True for a module with an expert_bias")
        is_array("load", load, "integers [num_experts]")
        if load.shape != (self.num_experts,):
            raise ValueError(f"load: got shape {load.shape}, want [num_experts] = {(self.num_experts,)}")
        if not jnp.issubdtype(load.dtype, jnp.integer):
            raise TypeError(f"load: got dtype {load.dtype}, want integers")
        check_scale("rate", rate)
        if rate is None or (not isinstance(rate, jax.core.Tracer) and rate < 0):
            raise ValueError(f"rate: got {rate}, want a number of 0 or more")
        self.expert_bias[...] = balanced(self.expert_bias[...], load, rate)

    def _names(self, x: jax.Array) -> tuple[str | None, ...]:
        """The rules' names of x's axes: the batch and the tokens, as far as x has them."""
        return ("batch", *(("tokens",) if x.ndim == 3 else ()), *(None,) * x.ndim)[: x.ndim - 1]

    def _routed_on_mesh(self, mesh: Any, x: Any, router: Any, bias: Any, *kernels: Any) -> tuple[jax.Array, Routing]:
        """The result of _routed over a mesh with Auto axes, in a jax.shard_map in which devices have their own tokens.

        Each device has the kernels of its own experts, with its columns of mlp_dim.
        """
        rules = self.rules
        expert = rules.mesh_axes("expert", self.num_experts, mesh)
        names = self._names(x)
        rows: list[tuple[str, ...]] = []
        for name, length in zip(names, x.shape, strict=False):
            rows.append(rules.mesh_axes(name, length, mesh, [axis for axes in rows for axis in axes]))
        of_tokens = tuple(axis for axes in rows for axis in axes)
        wide = rules.mesh_axes("mlp", self.mlp_dim, mesh, (*expert, *of_tokens))
        devices = _Devices(
            expert=expert,
            exchanged=tuple(axis for axis in expert if axis in of_tokens),
            repeated=tuple(axis for axis in expert if axis not in of_tokens),
            wide=wide,
            tokens=of_tokens,
        )
        if self.exchange == "all_to_all" and devices.exchanged and len(expert) > 1:
            raise NotImplementedError(f"exchange: got 'all_to_all' with experts along {expert}, want one mesh axis")
        spec = P(*(axes or None for axes in rows), None)
        columns, depth = P(expert or None, None, wide or None), P(expert or None, wide or None, None)
        specs = (spec, P(), P(), columns, depth, columns)[: 3 + len(kernels)]
        local = functools.partial(self._routed, devices=devices)
        out_specs = spec, Routing(load=P(), probability=P())  # type: ignore[arg-type]
        return jax.shard_map(local, in_specs=specs, out_specs=out_specs, check_vma=False)(x, router, bias, *kernels)

    def _route(self, tokens: jax.Array, router: jax.Array, bias: jax.Array | None) -> Any:
        """`route`'s result for tokens [N, model_dim], with the module's options. router, bias: as in _routed."""
        return route(
            tokens,
            router,
            bias,
            count=self.experts_per_token,
            scores=self.scores,
            renormalize=self.renormalize,
            scale=self.weight_scale,
        )

    def _routed(
        self, x: Any, router: Any, bias: Any, up: Any, down: Any, gate: Any = None, *, devices: "_Devices"
    ) -> tuple[jax.Array, Routing]:
        """(the weighted sum of the experts' results, float32 like x, the Routing), of one device's tokens and experts.

        x: [..., model_dim]. router: [model_dim, num_experts]. bias: [num_experts] or None. up, gate: [experts,
        model_dim, mlp_dim], down: [experts, mlp_dim, model_dim], of the device.
        """
        tokens = x.reshape(-1, self.model_dim)
        weights, experts, routing = self._route(tokens, router, bias)
        if devices.tokens:
            routing = lax.psum(routing, devices.tokens)
        kernels = up, down, gate
        if self.exchange == "all_to_all" and devices.exchanged:
            out = devices.summed(self._by_all_to_all(tokens, weights, experts, kernels, devices.exchanged[0]))
            return out.reshape(x.shape), routing
        gathered = devices.gathered(tokens)
        weights, experts = (devices.gathered(y) for y in devices.after(gathered, weights, experts))
        owned = up.shape[0]
        skips = bool(devices.expert) and self.implementation != "xla"
        pairs = Pairs.of(devices.local(experts, owned), owned, skips=skips)
        out = self._weighted(gathered, weights, pairs, kernels)
        return devices.summed(devices.scattered(out, x.dtype)).reshape(x.shape), routing

    def _weighted(self, tokens: jax.Array, weights: jax.Array, pairs: Pairs, kernels: Any) -> jax.Array:
        """The sum over each token's experts, times its weights [N, each]: float32 [N, model_dim].

        kernels: as in _experts.
        """
        up, down, gate = kernels
        if gate is None or self.precision is not None:
            return pairs.summed(self._experts(pairs.rows(tokens), pairs.sizes, kernels), weights)
        return gated_experts(
            pairs.rows(tokens),
            gate,
            up,
            down,
            pairs.sizes,
            combination=Combination(weights, order=pairs.order, inverse=pairs.inverse, live_count=pairs.live_count),
            activation=self.activation,
            implementation=self.implementation,
        )

    def _by_all_to_all(self, x: Any, weights: Any, experts: Any, kernels: Any, axis: str) -> jax.Array:
        """The weighted sum of the results of all devices' experts, float32 [N, model_dim], of a device's tokens.

        x: [N, model_dim]. weights, experts: [N, experts_per_token]. kernels: of the device's experts. axis: the mesh
        axis of the devices, each with the next of the experts.
        """
        owned, (count, each) = kernels[0].shape[0], experts.shape
        pairs = Pairs.of(experts, self.num_experts)
        loads = lax.all_gather(pairs.sizes.reshape(-1, owned), axis)  # [sender, receiver, expert of the receiver]
        sizes = loads.sum(-1)
        received = exchange_rows(pairs.rows(x), sizes.shape[0] * count * min(each, owned), sizes, axis)
        # Received rows come by sender, then by expert: sorted by expert, each sender's rows keep their order.
        ends = jnp.cumsum(loads[:, lax.axis_index(axis)].reshape(-1))
        source = jnp.searchsorted(ends, lax.iota(jnp.int32, received.shape[0]), side="right")
        own = Pairs.of(jnp.where(source < ends.shape[0], source % owned, owned)[:, None], owned)
        results = self._experts(permuted_rows(received, own.order, own.inverse), own.sizes, kernels)
        returned = exchange_rows(permuted_rows(results, own.inverse, own.order), count * each, sizes.T, axis)
        return pairs.summed(returned, weights)

    def _experts(self, rows: Any, sizes: Any, kernels: Any) -> jax.Array:
        """The experts' results of their rows, [rows, model_dim] in rows' dtype.

        rows: [rows, model_dim], sorted by expert. sizes: int32 [experts], the rows of each. kernels: (up_proj,
        down_proj, gate_proj or None) of the experts. Rows past the last expert give 0.
        """
        up, down, gate = kernels
        how = {"group_sizes": sizes, "implementation": self.implementation}
        if self.precision is not None:
            return self._experts_of_8_bits(rows, kernels, how | {"precision": self.precision})
        if gate is not None:
            return gated_experts(rows, gate, up, down, activation=self.activation, **how)
        activation = checked_activation(self.activation)
        assert activation is not None
        hidden = activation(checkpoint_name(grouped_matmul(rows, up, **how), RESIDUALS[1]).astype(jnp.float32))
        return grouped_matmul(hidden.astype(rows.dtype), down, **how)

    def _experts_of_8_bits(self, rows: Any, kernels: Any, how: dict[str, Any]) -> jax.Array:
        """The result of _experts by 8-bit matmuls, with the activation in the first one's epilogue.

        kernels: as in _experts. how: options of grouped_matmul.
        """
        up, down, gate = kernels
        if gate is None:
            hidden = grouped_matmul(rows, up, activation=self.activation, **how)
        else:
            hidden = grouped_gated_matmul(rows, gate, up, activation=self.activation, **how)
        return grouped_matmul(hidden, down, **how)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Devices:
    """The axes of the jax.shard_map in which a device runs its own experts; none outside of one.

    expert: the axes that shard the experts. exchanged: the axes that shard the tokens too, so that devices send
    tokens to each other. repeated: the others, along which all devices have the same tokens. wide: the axes that shard
    mlp_dim. tokens: the axes that shard the tokens.
    """

    expert: tuple[str, ...] = ()
    exchanged: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    def local(self, experts: jax.Array, owned: int) -> jax.Array:
        """The experts' indices among the device's `owned` experts; `owned` for experts of other devices."""
        if not self.expert:
            return experts
        index = experts - lax.axis_index(self.expert) * owned
        return jnp.where((index >= 0) & (index < owned), index, owned)

    def gathered(self, y: jax.Array) -> jax.Array:
        """The rows of all devices that exchange tokens: [N * devices, ...] from y [N, ...]."""
        return gather_tokens(y, self.exchanged) if self.exchanged else y

    def after(self, tokens: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
        """The arrays, for an exchange that follows the exchange of `tokens`.

        XLA has one collective in flight at a time. So the long gather of the tokens runs during the router's kernels,
        and the short gathers of its results wait for it.
        """
        return [after(tokens, x) for x in arrays] if self.exchanged else arrays

    def scattered(self, out: jax.Array, dtype: Any) -> jax.Array:
        """The rows of the device's own tokens, from the rows of `gathered` tokens, summed over the same devices.

        out: float32, as the result. Each device's share is sent in `dtype`; the sum is in float32.
        """
        return scatter_tokens(out.astype(dtype), self.exchanged) if self.exchanged else out

    def summed(self, out: jax.Array) -> jax.Array:
        """The sum over the devices that have the same tokens, and other experts or columns of mlp_dim."""
        axes = (*self.repeated, *self.wide)
        return lax.psum(out, axes) if axes else out
