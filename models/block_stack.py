"""All blocks of a Transformer, one after the other: in a loop, in a scan, or in stages along a mesh axis."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_kernels import dispatch
from jax_kernels.models.block import Block, run_block, stacked
from jax_kernels.models.changes import refuse_changes
from jax_kernels.models.config import TransformerConfig
from jax_kernels.models.parallel.pipeline import pipelined
from jax_kernels.models.parallel.sharding import ShardingRules
from jax_kernels.models.training.packing import DealtDocuments, Packed

__all__ = ["run_blocks"]


def run_blocks(
    layers: Sequence[Block],
    x: jax.Array,
    documents: Packed | DealtDocuments | None,
    *,
    config: TransformerConfig,
    rules: ShardingRules,
    records: bool,
) -> tuple[jax.Array, Any]:
    """(x after all blocks, routing), without a cache. Variables that the blocks change are updated in place.

    x: [B, T, model_dim] in config.dtype. records: whether the blocks add to their AmaxHistories. routing: the Routing
    of the blocks with experts, with a first axis for these blocks; None without experts.

    Raises ValueError or NotImplementedError if stages or scan_layers do not support the blocks or the documents.
    """
    target = dispatch.target_device(x), dispatch.interpreting()

    def block(graphdef: Any, state: Any, x: jax.Array, documents: Packed | DealtDocuments | None = None) -> Any:
        options: Any = {"graphdef": graphdef, "remat": config.remat, "target": target, "records": records}
        x, *others = run_block(state, x, documents, **options)
        return rules.constrain(x.astype(config.dtype), "batch", "tokens", None), others

    stages = rules.mesh_axes("stage", len(layers), jax.sharding.get_abstract_mesh())
    if stages:
        _check_stages(stages[0], config, documents, records)
        graphdef, states = _split_alike(layers)
        run = functools.partial(block, graphdef)
        return _pipelined(run, stacked(graphdef, states, x.dtype), x, documents, stages[0], config, rules), None
    if config.scan_layers:
        graphdef, states = _split_alike(layers)
        step = lambda x, state: block(graphdef, state, x, documents)
        x, (routing, changes) = jax.lax.scan(step, x, stacked(graphdef, states, x.dtype))
        for which, layer in enumerate(layers):
            nnx.update(layer, jax.tree.map(lambda y, which=which: y[which], changes))
        return x, routing
    routings = []
    for layer in layers:
        graphdef, state = nnx.split(layer)
        x, (of_block, changes) = block(graphdef, state, x, documents)
        routings += [] if of_block is None else [of_block]
        nnx.update(layer, changes)
    return x, jax.tree.map(lambda *xs: jnp.stack(xs), *routings) if routings else None


def _check_stages(axis: str, config: TransformerConfig, documents: Any, records: bool) -> None:
    """Raises ValueError or NotImplementedError if stages along the mesh axis do not support the model's call."""
    if config.expert_layers:
        raise ValueError(f"mesh: got stages along {axis!r} with experts, want a mesh without stages")
    if isinstance(documents, DealtDocuments):
        raise ValueError(f"mesh: got stages along {axis!r} with deal_documents, want a mesh without stages")
    if records:
        raise NotImplementedError(
            f"mesh: got stages along {axis!r} with fp8_scaling='delayed', want a mesh without stages"
        )


def _split_alike(layers: Sequence[Block]) -> tuple[Any, Any]:
    """(the graphdef of all blocks, the state of each). Raises ValueError for blocks that differ."""
    graphdefs, states = zip(*map(nnx.split, layers), strict=True)
    if any(other != graphdefs[0] for other in graphdefs):
        raise ValueError(
            "layers: got blocks that differ, such as one that quantize_weights skipped, with scan_layers or "
            "stages, want blocks of one kind"
        )
    return graphdefs[0], states


def _pipelined(
    block: Any,
    states: Any,
    x: jax.Array,
    documents: Packed | DealtDocuments | None,
    axis: str,
    config: TransformerConfig,
    rules: ShardingRules,
) -> jax.Array:
    """x after all blocks, with the blocks in stages along the mesh axis `axis`.

    block: block(state, x, documents) -> (x, (routing, changes)). states: of all blocks, stacked along the first axis.
    Raises NotImplementedError if a block changes its Variables.
    """

    def one(*given: Any) -> jax.Array:
        x, (_, changes) = block(*given)
        refuse_changes(changes, f"stages along {axis!r}", "a mesh without stages")
        return x

    mesh = jax.sharding.get_abstract_mesh()
    tokens = rules.mesh_axes("tokens", x.shape[1], mesh)
    return pipelined(
        one,
        states,
        x,
        axis=axis,
        microbatches=config.microbatches or mesh.shape[axis],
        batch=rules.mesh_axes("batch", x.shape[0], mesh),
        tokens=tokens[0] if tokens else None,
        beside=documents,
    )
