"""A block of the decoder: norms, attention and MLP, as an nnx module."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_kernels.models.changes import changed_state, held_arrays
from jax_kernels.models.config import TransformerConfig
from jax_kernels.models.layers.attention import KVCache, MultiHeadAttention
from jax_kernels.models.layers.delayed_scaling import recording
from jax_kernels.models.layers.linear import GatedMLP
from jax_kernels.models.layers.mixture_of_experts import MixtureOfExperts
from jax_kernels.models.layers.normalization import RMSNorm, with_input
from jax_kernels.models.layers.routing import Routing
from jax_kernels.models.parallel.sharding import ShardingRules
from jax_kernels.models.training.packing import DealtDocuments, Packed
from jax_kernels.models.training.remat import recomputed
from jax_kernels.ops.matmul.mlp import mlp
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["Block", "run_block", "stacked"]


class Block(nnx.Module):
    """A block of a decoder: x + attention(norm(x)), then x + mlp(norm(x)), with an RMSNorm before each."""

    def __init__(
        self, config: TransformerConfig, *, index: int = 0, rules: ShardingRules | None = None, rngs: nnx.Rngs
    ) -> None:
        """index: of the block, on which it depends whether it has experts."""
        rules = ShardingRules() if rules is None else rules
        norm = lambda: RMSNorm(
            config.model_dim, epsilon=config.norm_eps, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
        )
        self.attention_norm = norm()
        self.attention = self._attention(config, rules, rngs)
        self.mlp_norm = norm()
        self.mlp = _experts(config, rules, rngs) if index in config.expert_layers else _gated_mlp(config, rngs)

    def _attention(self, config: Any, rules: ShardingRules, rngs: nnx.Rngs) -> MultiHeadAttention:
        """The attention module for this config; subclasses return another one."""
        return MultiHeadAttention(
            config.model_dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope_theta,
            qk_norm_eps=config.norm_eps if config.qk_norm else None,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            implementation=config.implementation,
            projection_implementation=config.projection_implementation,
            precision=config.precision,
            scaling=config.scaling,
            fp8_scaling=config.fp8_scaling,
            amax_history_length=config.amax_history_length,
            sequence_axis=config.sequence_axis,
            sequence_strategy=config.sequence_strategy,
            sequence_layout=config.sequence_layout,
            rules=rules,
            rngs=rngs,
        )

    @under_defaults
    def __call__(
        self, x: jax.Array, cache: KVCache | None = None, documents: Packed | DealtDocuments | None = None
    ) -> tuple[jax.Array, KVCache | None, Routing | None]:
        """(x after the block, the new cache or None, the Routing of experts or None). x: [B, T, model_dim].

        cache: the keys and values of earlier tokens. documents: the ids and positions of packed documents, without a
        cache.
        """
        if cache is None:
            of_documents: dict[str, Any] = {} if documents is None else documents._asdict()
            if isinstance(documents, DealtDocuments):
                of_documents = {"segment_ids": documents}
            normed, x = with_input(self.attention_norm, x)
            attended = self.attention(normed, **of_documents)
        else:
            attended, cache = self.attention(self.attention_norm(x), cache=cache)
        normed, x = self.mlp_norm(attended, residual=x)  # and x + attended
        if isinstance(self.mlp, MixtureOfExperts):
            x, routing = self.mlp.with_routing(normed, residual=x)
            return x, cache, routing
        is_op = isinstance(self.mlp, GatedMLP) and self.mlp.is_one_op and self.mlp.gate_proj.precision is None
        if self.attention.shares_tokens and is_op and cache is None:  # with a cache the tokens are not sharded
            return self._mlp_over_devices(normed, x), cache, None
        return self.mlp(normed, residual=x), cache, None

    def _mlp_over_devices(self, normed: jax.Array, x: jax.Array) -> jax.Array:
        """x + mlp(normed), both [B, T, model_dim], in a shard_map in which each device has its own tokens.

        The rules' axis "mlp" may shard mlp_dim, over which down_proj sums. A kernel with a residual does not support
        that, so the devices add their partial sums in float32, and then x.
        """
        assert isinstance(self.mlp, GatedMLP)
        mesh, rules, axis = jax.sharding.get_abstract_mesh(), self.attention.rules, self.attention.sequence_axis
        assert axis is not None
        up, down, gate = (
            projection.kernel[...].astype(normed.dtype)
            for projection in (self.mlp.up_proj, self.mlp.down_proj, self.mlp.gate_proj)
        )
        activation, implementation = self.mlp.activation, self.mlp.gate_proj.implementation
        batch = rules.mesh_axes("batch", x.shape[0], mesh, (axis,))
        wide = rules.mesh_axes("mlp", up.shape[1], mesh, (axis, *batch))

        def local(normed: jax.Array, x: jax.Array, up: jax.Array, down: jax.Array, gate: jax.Array) -> jax.Array:
            options = {"w_gate": gate, "activation": activation, "implementation": implementation}
            if not wide:
                return mlp(normed, up, down, residual=x, **options)
            return x + jax.lax.psum(mlp(normed, up, down, **options).astype(jnp.float32), wide).astype(x.dtype)

        rows, columns = P(batch or None, axis, None), P(None, wide or None)
        specs = rows, rows, columns, P(wide or None, None), columns
        return jax.shard_map(local, in_specs=specs, out_specs=rows, check_vma=False)(normed, x, up, down, gate)


def _gated_mlp(config: TransformerConfig, rngs: nnx.Rngs) -> GatedMLP:
    return GatedMLP(
        config.model_dim,
        config.mlp_dim or 0,
        precision=config.precision,
        scaling=config.scaling,
        fp8_scaling=config.fp8_scaling,
        amax_history_length=config.amax_history_length,
        implementation=config.mlp_implementation,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rngs=rngs,
    )


def _experts(config: TransformerConfig, rules: ShardingRules, rngs: nnx.Rngs) -> MixtureOfExperts:
    of = config.experts
    assert of is not None
    return MixtureOfExperts(
        config.model_dim,
        of.mlp_dim or config.mlp_dim or 0,
        of.num_experts,
        of.experts_per_token,
        scores=of.scores,
        renormalize=of.renormalize,
        weight_scale=of.weight_scale,
        shared_experts=of.shared_experts,
        balance_bias=of.bias_rate is not None,
        exchange=of.exchange,
        precision=config.precision,
        implementation=of.implementation,
        shared_implementation=config.mlp_implementation,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        rules=rules,
        rngs=rngs,
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "remat", "target", "records"))
def run_block(
    state: Any,
    x: jax.Array,
    documents: Packed | DealtDocuments | None,
    *,
    graphdef: Any,
    remat: bool | str,
    target: Any,
    records: bool,
) -> tuple[jax.Array, Routing | None, nnx.State]:
    """(x after one block without a cache, the Routing of its experts or None, its Variables that the call changed).

    It is traced and lowered once for all blocks of a model that are alike.

    state, graphdef: the block, as nnx.split returns it. remat: as in TransformerConfig. target: (the device, whether
    kernels are interpreted), part of jit's key, since the plans depend on it. records: whether the block adds to its
    AmaxHistories.
    """

    if remat == "products":
        # before the checkpoint, so that the backward does not round them again
        state = rounded(state, matrices_rounded_to(x.dtype, graphdef, state), x.dtype)

    def block(state: Any, x: jax.Array, documents: Packed | DealtDocuments | None) -> Any:
        before, module = held_arrays(state), nnx.merge(graphdef, state)
        with recording(records):
            x, _, routing = module(x, documents=documents)
        return x, routing, changed_state(module, before)

    return recomputed(block, remat)(state, x, documents)


def stacked(graphdef: Any, states: Sequence[Any], dtype: Any) -> Any:
    """The states of all blocks as one state, whose arrays have a first axis for the blocks.

    graphdef: of each block. Matrices that the blocks' matmuls round to dtype are rounded here: stacking then costs no
    extra pass over memory.
    """
    paths = matrices_rounded_to(dtype, graphdef, states[0])
    return jax.tree.map(lambda *xs: jnp.stack(xs), *(rounded(state, paths, dtype) for state in states))


def matrices_rounded_to(dtype: Any, graphdef: Any, state: Any) -> frozenset[tuple[Any, ...]]:
    """The paths of the block's matrices that their modules round to dtype before each use.

    Others, such as a router's, a LoRA's or a user's module's, are used in their own dtype.
    """
    paths = set()
    for path, node in nnx.iter_graph(nnx.merge(graphdef, state)):
        is_linear, has_experts = isinstance(node, nnx.Linear), isinstance(node, MixtureOfExperts)
        is_known = type(node).__module__.partition(".")[0] in ("flax", "jax_kernels")  # others may use any dtype
        if is_known and (is_linear or has_experts) and node.dtype is not None and jnp.dtype(node.dtype) == dtype:
            names = [("kernel",)] if is_linear else [("gate_proj",), ("up_proj",), ("down_proj",)]
            paths |= {path + name for name in names}
    return frozenset(paths)


def rounded(state: Any, paths: frozenset[tuple[Any, ...]], dtype: Any) -> Any:
    """The state with the matrices at these paths in dtype."""
    in_dtype = lambda path, x: x.replace(x[...].astype(dtype)) if path in paths else x
    return nnx.map_state(in_dtype, state)
