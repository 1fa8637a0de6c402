"""Deals the packed documents of a batch out to the devices of the sequence axis, so that all have equal work."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_kernels.models.config import TransformerConfig
from jax_kernels.models.layers.dilated_attention import LongNetConfig
from jax_kernels.models.parallel.sharding import ShardingRules
from jax_kernels.models.training.next_token import is_next_token_loss
from jax_kernels.models.training.packing import DealtDocuments, document_positions, run_ids, within_documents
from jax_kernels.ops.ring.planning.documents import DocumentLayout

__all__ = ["check_dealing", "dealt"]


def check_dealing(config: TransformerConfig, loss: Any) -> None:
    """Raises ValueError if a Trainer with this config and loss cannot deal documents."""
    if isinstance(config, LongNetConfig):
        raise ValueError("deal_documents: got True with a LongNetConfig, want a TransformerConfig")
    if config.sequence_strategy not in ("auto", "ring"):
        got = config.sequence_strategy
        raise ValueError(f"deal_documents: got True with sequence_strategy={got!r}, want 'auto' or 'ring'")
    if not is_next_token_loss(loss):
        raise ValueError("deal_documents: got True with another loss, want next_token_loss")


def dealt(batch: Any, mesh: Mesh, rules: ShardingRules, config: TransformerConfig) -> Any:
    """The batch (tokens, targets, DealtDocuments[, weights]) in the order of a DocumentLayout, on the mesh.

    Targets in another document than their token become -1. On a mesh with one device along the sequence axis, the batch
    itself.

    batch: as next_token_loss takes it, with segment_ids. Raises ValueError without them, and for arrays with shards on
    other processes: the layout needs all ids.
    """
    devices = 1 if config.sequence_axis is None else mesh.shape.get(config.sequence_axis, 1)
    if devices == 1:
        return batch
    tokens, targets, segment_ids, *weights = batch
    if segment_ids is None:
        raise ValueError("batch: got None for item 2, segment_ids, with deal_documents=True, want integers")
    if not all(getattr(x, "is_fully_addressable", True) for x in batch if x is not None):
        raise ValueError("batch: got arrays with shards on other processes with deal_documents=True, want one process")
    ids = np.asarray(segment_ids)
    with jax.default_device(mesh.local_devices[0]):
        positions = np.asarray(document_positions(jnp.asarray(ids)))
        targets = np.asarray(within_documents(jnp.asarray(np.asarray(targets)), jnp.asarray(ids)))
        ids = np.asarray(run_ids(jnp.asarray(ids)))
    layout = DocumentLayout.of(ids, devices, heads=max(1, config.num_heads), head_dim=config.head_dim or 128)

    def placed(x: Any) -> jax.Array:
        """x on the mesh, with its tokens in the layout's order."""
        x = np.take_along_axis(np.asarray(x), layout.order, 1)
        names = rules.mesh_axes("batch", x.shape[0], mesh), rules.mesh_axes("tokens", x.shape[1], mesh)
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*(axes or None for axes in names))))

    documents = DealtDocuments(placed(layout.segment_ids), placed(positions))
    return (placed(tokens), placed(targets), documents, *(None if x is None else placed(x) for x in weights))
