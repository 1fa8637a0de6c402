"""Arguments of a wrong type: errors of meshes, texts and batches name the argument, its value and the wanted type."""

import jax
import numpy as np
import pytest
from flax import nnx

from jax_kernels.models import (
    GatedMLP,
    LayerNorm,
    Linear,
    LongNet,
    RMSNorm,
    TokenBatches,
    Transformer,
    TransformerConfig,
    document_positions,
    document_starts,
    flat_parameters,
    make_mesh,
    read_text,
    shard_batch,
    shard_model,
    state_shardings,
    within_documents,
)
from jax_kernels.models.parallel.distributed import initialize_distributed

RNGS = nnx.Rngs(0)
CONFIG = TransformerConfig(vocab_size=8, model_dim=4, num_layers=1, num_heads=1)
TOKENS = np.zeros(99, np.int32)
COUNT = jax.device_count()
CASES = {
    "mesh list": (lambda: make_mesh([1]), TypeError, r"axes: got \[1\], want the devices along each axis by name"),
    "mesh str": (lambda: make_mesh({"data": "2"}), TypeError, "axes: got 'data': '2', want a name and a number"),
    "mesh bool": (lambda: make_mesh({"data": True}), TypeError, "axes: got 'data': True, want a name and a number"),
    "mesh large": (
        lambda: make_mesh({"data": 4096}),
        ValueError,
        rf"axes: got \{{'data': 4096\}} for {COUNT} devices?, want at most {COUNT} in all",
    ),
    "mesh rest": (
        lambda: make_mesh({"data": 4096, "sequence": -1}),
        ValueError,
        rf"axes: got .+ for {COUNT} devices?, want the others to divide {COUNT}",
    ),
    "batch mesh": (lambda: shard_batch(TOKENS, {"data": 1}), TypeError, "mesh: got .'data': 1., want a jax.sharding"),
    "batch scalar": (lambda: shard_batch(3, make_mesh({"data": 1})), ValueError, "batch: got an array without axes"),
    "rules": (
        lambda: state_shardings({"x": TOKENS}, make_mesh({"data": 1}), {}),
        TypeError,
        r"rules: got \{\}, want ShardingRules or None",
    ),
    "config": (
        lambda: Transformer({"vocab_size": 1}, rngs=RNGS),
        TypeError,
        "config: got dict, want a TransformerConfig",
    ),
    "longnet": (lambda: LongNet(CONFIG, rngs=RNGS), TypeError, "config: got TransformerConfig, want a LongNetConfig"),
    "rngs": (lambda: Transformer(CONFIG, rngs=0), TypeError, "rngs: got int, want nnx.Rngs"),
    "model rules": (lambda: Transformer(CONFIG, rules={}, rngs=RNGS), TypeError, "rules: got dict, want ShardingRules"),
    "flat": (lambda: flat_parameters(3), TypeError, "model: got int, want an nnx.Module"),
    "shard model": (lambda: shard_model("x", make_mesh({"data": 1})), TypeError, "model: got str, want an nnx.Module"),
    "linear": (lambda: Linear("8", 4, rngs=RNGS), TypeError, "in_features: got '8', want an int"),
    "negative": (lambda: GatedMLP(4, -1, rngs=RNGS), ValueError, "hidden_features: got -1, want 0 or more"),
    "norm": (lambda: RMSNorm("4", rngs=RNGS), TypeError, "num_features: got '4', want an int"),
    "offset": (lambda: LayerNorm(4, scale_offset="a", rngs=RNGS), TypeError, "scale_offset: got 'a', want a number"),
    "name": (
        lambda: RMSNorm(4, implementation=3, rngs=RNGS),
        TypeError,
        "implementation: got int, want a name or None",
    ),
    "documents": (lambda: document_positions(TOKENS), ValueError, r"segment_ids: got shape \(99,\), want \[batch"),
    "targets": (
        lambda: within_documents(TOKENS[None], TOKENS[None, :3]),
        ValueError,
        r"targets, segment_ids: got shapes \(1, 99\) and \(1, 3\), want",
    ),
    "seed": (lambda: TokenBatches(TOKENS, 4, 2, seed=2**32), ValueError, "seed: got 4294967296, want 0 to 4294967295"),
    "step": (lambda: TokenBatches(TOKENS, 4, 2)["a"], TypeError, "step: got 'a', want an int"),
    "negative step": (lambda: TokenBatches(TOKENS, 4, 2)[-1], ValueError, "step: got -1, want 0 or more"),
    "paths": (lambda: read_text(3), TypeError, "paths: got int, want a file, a folder, or several of these"),
    "list": (lambda: document_starts([1, 2], 0), TypeError, r"tokens: got list, want an array of integers \[n\]"),
    "floats": (lambda: document_starts(TOKENS * 1.0, 0), TypeError, r"tokens: got float64 \(99,\), want an array"),
    "separator": (lambda: document_starts(TOKENS, "a"), TypeError, "separator: got 'a', want a token id, an int"),
    "coordinator": (lambda: initialize_distributed(3, 2, 0), ValueError, "coordinator: got 3, want host:port"),
    "count": (lambda: initialize_distributed("a:1", "2", 0), TypeError, "num_processes: got '2', want an int"),
    "timeout": (lambda: initialize_distributed(timeout="3"), TypeError, "timeout: got '3', want seconds, an int"),
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_are_named(case):
    call, error, message = CASES[case]
    with pytest.raises(error, match=message):
        call()


def test_numpy_scalars_are_accepted():
    assert make_mesh({"data": np.int64(1)}).shape == {"data": 1}
    tokens, _ = TokenBatches(np.arange(99), 4, 2)[np.int64(1)]
    np.testing.assert_array_equal(tokens, TokenBatches(np.arange(99), 4, 2)[1][0])
