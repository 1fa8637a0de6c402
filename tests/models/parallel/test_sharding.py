"""Models on meshes of CPU devices, in a process of its own, against one device.

As a script it prints, for each case, the errors of loss, logits and gradients, and the sharding of the parameters.
"""

import dataclasses
import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jax_kernels import masks, shard_sequence, unshard_sequence
from jax_kernels.models import (
    LongNet,
    LongNetConfig,
    MultiHeadAttention,
    ShardingRules,
    Trainer,
    Transformer,
    TransformerConfig,
    make_mesh,
    quantize_weights,
    shard_batch,
    shard_model,
)
from jax_kernels.models.parallel.sharding import batch_sharding, check_mesh
from jax_kernels.testing import rms_error
from tests.support.cases import tiers
from tests.support.processes import cpu_devices

CONFIG = TransformerConfig(vocab_size=64, model_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=48)
ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1)
DILATED = LongNetConfig(
    vocab_size=64, model_dim=32, num_layers=1, num_heads=4, mlp_dim=48, segment_lengths=(8, 32), dilation_rates=(1, 2),
)  # fmt: skip
CASES = {
    "ring": (CONFIG, {"data": 2, "sequence": 2}),
    "tensor": (ONE_LAYER, {"tensor": 2}),
    "fsdp": (ONE_LAYER, {"fsdp": 4}),
    "all": (dataclasses.replace(CONFIG, remat="attention"), {"data": 2, "sequence": 2, "tensor": 2}),
    "striped": (dataclasses.replace(CONFIG, sequence_layout="striped", tie_embeddings=False), {"sequence": 4}),
    "pipeline": (CONFIG, {"pipeline": 2, "data": 2}),
    "pipeline_ring": (dataclasses.replace(CONFIG, microbatches=4, remat=True), {"pipeline": 2, "sequence": 2}),
    "pipeline_documents": (CONFIG, {"pipeline": 2, "data": 2}),
    "documents": (dataclasses.replace(ONE_LAYER, remat="products"), {"data": 2, "sequence": 2}),
    "to_all_documents": (
        dataclasses.replace(CONFIG, sequence_strategy="all_to_all", remat="products"),
        {"data": 2, "sequence": 2},
    ),
    "documents_all": (dataclasses.replace(CONFIG, scan_layers=True), {"pipeline": 2, "sequence": 2, "tensor": 2}),
    "longnet_documents": (DILATED, {"data": 2, "sequence": 2}),
    "longnet": (DILATED, {"data": 2, "sequence": 2}),
    "longnet_tensor": (DILATED, {"sequence": 4, "tensor": 2}),
    "longnet_of_defaults": (
        LongNetConfig(vocab_size=64, model_dim=32, num_layers=1, num_heads=4, mlp_dim=48),
        {"sequence": 8},
    ),
    "longnet_partition_documents": (
        dataclasses.replace(DILATED, segment_lengths=(8, 14), dilation_rates=(2, 3), layout="partition"),
        {"data": 2, "sequence": 2},
    ),
}
# Cases with "documents" in their names have packed documents.
QUICK = ["documents", "tensor", "fsdp", "module_masked"]


@nnx.jit
def step(model, tokens, targets, segment_ids):
    def loss(model):
        losses = model.losses(tokens, targets, segment_ids=segment_ids)
        return losses.mean(), losses

    return *nnx.value_and_grad(loss, has_aux=True)(model), model(tokens, segment_ids=segment_ids)


def run_case(config, axes, is_packed):
    model = (LongNet if isinstance(config, LongNetConfig) else Transformer)(config, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    tokens, targets = random.integers(0, config.vocab_size, (2, 4, 32))
    targets[0, :5] = -1
    ids = None
    if is_packed:  # rows have different documents; the first are longer than a shard
        ids = np.sort(random.integers(0, 4, (4, 32)) * random.integers(0, 2, (4, 32)))
        ids[1, -3:] = -1

    want = step(model, tokens, targets, ids)
    mesh = make_mesh(axes)
    shard_model(model, mesh)
    with jax.set_mesh(mesh):
        got = step(model, *shard_batch((tokens, targets, ids), mesh))
    flat = lambda found: [np.asarray(x) for x in jax.tree.leaves(found)]
    errors = [rms_error(g, w) for g, w in zip(flat(got), flat(want), strict=True)]
    spec = lambda x: [*x[...].sharding.spec, None][:2]
    layer = model.layers[0]
    specs = {"q": spec(layer.attention.q_proj.kernel), "down": spec(layer.mlp.down_proj.kernel)}
    return {"error": max(errors), "specs": specs | {"embed": spec(model.embed)}}


def run_module(layout, is_causal, mask=None):
    """MultiHeadAttention by itself: under jax.set_mesh, inside a shard_map, and on one device."""
    options = {"num_kv_heads": 2, "is_causal": is_causal, "rngs": nnx.Rngs(0), "mask": mask}
    attention = MultiHeadAttention(32, 4, sequence_axis="sequence", sequence_layout=layout, **options)
    layout = attention.sequence_layout
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 24, 32)), jnp.float32)
    want = attention(x)
    mesh = make_mesh({"sequence": 2, "tensor": 2})
    shared = shard_sequence(x, mesh, "sequence", layout=layout)
    with jax.set_mesh(mesh):
        found = [nnx.jit(lambda attention, x: attention(x))(attention, shared)]
        tokens = jax.P(None, "sequence")
        found.append(jax.shard_map(attention, in_specs=tokens, out_specs=tokens, check_vma=False)(shared))
    errors = [rms_error(np.asarray(unshard_sequence(y, mesh, "sequence", layout=layout)), want) for y in found]
    return {"error": max(errors)}


def run_quantized(format, axes):
    """A model with low-bit weights: its losses, its logits, and its generated tokens."""
    model = quantize_weights(Transformer(CONFIG, rngs=nnx.Rngs(0)), format)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, 32))
    step = nnx.jit(lambda model, tokens: (model(tokens), model.losses(tokens, tokens)))
    want, drawn = step(model, tokens), np.asarray(model.generate(tokens[:, :5], 4, 0))
    mesh = make_mesh(axes)
    shard_model(model, mesh)
    with jax.set_mesh(mesh):
        got = step(model, shard_batch(tokens, mesh))
        again = model.generate(tokens[:, :5], 4, 0)
    assert model.layers[0].mlp.down_proj.values[...].is_fully_replicated
    np.testing.assert_array_equal(again, drawn)
    errors = [rms_error(np.asarray(g), np.asarray(w)) for g, w in zip(got, want, strict=True)]
    return {"error": max(errors)}


def run_generate(config, axes):
    """Generated tokens, and logits with a cache, for numbers of tokens that the devices do not divide."""
    model = (LongNet if isinstance(config, LongNetConfig) else Transformer)(config, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 8))

    def call():
        drawn = model.generate(tokens[:, :5], 8, 0, lengths=np.array([5, 3]))
        cached = ()
        if not isinstance(model, LongNet):
            cached, _ = model(tokens[:, :7], cache=model.init_cache(2, 8))
        return drawn, cached

    want = call()
    mesh = make_mesh(axes)
    shard_model(model, mesh)
    with jax.set_mesh(mesh):
        got = call()
    np.testing.assert_array_equal(got[0], want[0])
    return {"error": 0.0 if isinstance(model, LongNet) else rms_error(np.asarray(got[1]), np.asarray(want[1]))}


def run_explicit(config, axes):
    """On Explicit axes: a model's losses, logits and gradients, a cache, generation, and a Trainer's step."""
    model = (LongNet if isinstance(config, LongNetConfig) else Transformer)(config, rngs=nnx.Rngs(0))
    tokens, targets = np.random.default_rng(0).integers(0, config.vocab_size, (2, 4, 32)).astype(np.int32)
    is_dense = not isinstance(model, LongNet)

    @nnx.jit
    def cached(model, tokens):
        logits, cache = model(tokens[:, :7], cache=model.init_cache(4, 8))
        return [logits, model(tokens[:, 7:8], cache=cache)[0], model.embed_tokens(tokens)]

    def trained(mesh, batch):
        trainer = Trainer(config, optax.adam(1e-2), mesh=mesh, accumulate=2)
        found = [trainer.train(batch)["gradient_norm"]]
        return [*found, np.float32(trainer.evaluate(batch))]

    want = [
        step(model, tokens, targets, None),
        trained(None, (tokens, targets)),
        cached(model, tokens) if is_dense else [],
    ]
    drawn = np.asarray(model.generate(tokens[:, :5], 4, 0))
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
    shard_model(model, mesh)
    with jax.set_mesh(mesh):
        batch = shard_batch((tokens, targets), mesh)
        got = [step(model, *batch, None), trained(mesh, batch), cached(model, tokens) if is_dense else []]
        hot = nnx.jit(lambda model, heat: model.generate(tokens[:, :5], 4, heat, key=jax.random.key(0)))
        np.testing.assert_array_equal(hot(model, jnp.float32(0)), drawn)
    flat = lambda found: [np.asarray(x) for x in jax.tree.leaves(found)]
    return {"error": max(rms_error(g, w) for g, w in zip(flat(got), flat(want), strict=True))}


def run_placed_sequence():
    """shard_sequence and unshard_sequence of arrays that are already on Explicit axes."""
    mesh = jax.make_mesh((2, 2), ("data", "sequence"))
    x = jnp.arange(4.0 * 16).reshape(4, 16)
    placed = jax.device_put(x, jax.NamedSharding(mesh, P("data", "sequence")))
    for layout in ("zigzag", "striped", "contiguous"):
        shared = shard_sequence(placed, mesh, "sequence", layout=layout)
        np.testing.assert_array_equal(shared, shard_sequence(x, mesh, "sequence", layout=layout))
        np.testing.assert_array_equal(unshard_sequence(shared, mesh, "sequence", layout=layout), x)
        with jax.set_mesh(mesh):
            again = jax.jit(lambda x, layout=layout: unshard_sequence(x, mesh, "sequence", layout=layout))(shared)
        np.testing.assert_array_equal(again, x)
    return {"error": 0.0}


EXPLICIT = {
    "explicit": (dataclasses.replace(CONFIG, num_layers=1), {"data": 2, "sequence": 2}),
    "explicit_all": (dataclasses.replace(CONFIG, tie_embeddings=False), {"fsdp": 2, "sequence": 2, "tensor": 2}),
    "explicit_pipeline": (dataclasses.replace(CONFIG, microbatches=1), {"pipeline": 2, "data": 2}),
    "explicit_longnet": (DILATED, {"sequence": 2}),
}
GENERATE = {
    "generate": (CONFIG, {"data": 2, "sequence": 2}),
    "longnet_generate": (DILATED, {"data": 2, "sequence": 2}),
}
QUANTIZED = {
    "int4_ring": ("int4", {"data": 2, "sequence": 2}),
    "mxfp8_tensor": ("mxfp8", {"fsdp": 2, "tensor": 2}),
    "mxfp4_pipeline": ("mxfp4", {"pipeline": 2, "tensor": 2}),
}
HEADS_MASK = masks.from_function(lambda b, h, q, k: (q + h) % 4 != k % 4, heads=4)
MODULES = {
    "module": (None, True),
    "module_full": (None, False),
    "module_striped": ("striped", True),
    "module_masked": ("zigzag", True, masks.sliding_window(6, 0) | masks.global_tokens(2)),
    "module_heads_masked": ("striped", False, HEADS_MASK),
}


def main(names) -> dict:
    run = {name: functools.partial(run_module, *given) for name, given in MODULES.items()}
    run |= {name: functools.partial(run_explicit, *given) for name, given in EXPLICIT.items()}
    run["placed_sequence"] = run_placed_sequence
    run |= {name: functools.partial(run_generate, *given) for name, given in GENERATE.items()}
    run |= {name: functools.partial(run_quantized, *given) for name, given in QUANTIZED.items()}
    run |= {name: functools.partial(run_case, *given, "documents" in name) for name, given in CASES.items()}
    return {name: run[name]() for name in names}


ALL = [*CASES, *MODULES, *QUANTIZED, *GENERATE, *EXPLICIT, "placed_sequence"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("names", tiers.groups(ALL, QUICK, 4))
def test_mesh_changes_no_result(names):
    results = cpu_devices.results_of(__file__, names)
    for name, found in results.items():
        assert found["error"] < 3e-6, name
    if "fsdp" in results:
        assert results["fsdp"]["specs"]["q"] == ["fsdp", None]
        assert results["tensor"]["specs"]["down"] == ["tensor", None]


MESH = AbstractMesh((2, 3, 2, 2), ("data", "fsdp", "sequence", "tensor"))


@pytest.mark.parametrize(
    ("name", "shape", "want"),
    [
        ("embed", (64, 12), P("tensor", "fsdp")),
        ("layers.3.attention.q_proj.kernel", (12, 16), P("fsdp", "tensor")),
        ("0.mu.layers.3.attention.out_proj.kernel", (16, 12), P("tensor", "fsdp")),
        ("layers.0.mlp.down_proj.kernel", (7, 12), P(None, "fsdp")),  # 2 devices do not divide 7
        ("layers.0.mlp.down_proj.kernel", (12,), P()),
        ("final_norm.scale", (12,), P()),
        ("head.kernel", (12, 64), P("fsdp", "tensor")),
    ],
)
def test_parameters_by_name(name, shape, want):
    assert ShardingRules().parameter_spec(name, shape, MESH) == want


def test_mask_of_a_sharded_batch_is_refused():
    attention = MultiHeadAttention(
        8, 2, sequence_axis="sequence", mask=masks.prefix(jnp.asarray([2, 3])), rngs=nnx.Rngs(0)
    )
    x = jax.ShapeDtypeStruct((2, 8, 8), jnp.float32)
    told = "mask: got 2 batch entries with the batch sharded along"
    mesh = AbstractMesh((2, 2), ("data", "sequence"), (jax.sharding.AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match=told):
        jax.eval_shape(lambda x: attention(x), x)


@pytest.mark.parametrize("own", [None, masks.causal()], ids=["alone", "beside_the_module_s"])
def test_call_mask_covers_the_whole_sequence(own):
    """Its shape covers all tokens, also in a shard_map around the call. An error names the mask."""
    attention = MultiHeadAttention(8, 2, sequence_axis="sequence", mask=own, rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((2, 8, 8), jnp.float32)
    mesh = AbstractMesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))
    spec = P(None, "sequence")
    for is_local in (False, True):
        with jax.sharding.use_abstract_mesh(mesh):

            def shape_of(mask, is_local=is_local):
                call = lambda x: attention(x, mask=mask)
                return jax.eval_shape(jax.shard_map(call, in_specs=spec, out_specs=spec) if is_local else call, x)

            assert shape_of(jnp.ones((8, 8), bool)).shape == x.shape
            with pytest.raises(ValueError, match=r"^mask: got shape \(4, 4\), want a shape broadcastable to .* 8, 8\]"):
                shape_of(jnp.ones((4, 4), bool))


def test_rules_are_data():
    rules = ShardingRules(axes=(("batch", ("data", "tensor")), ("tokens", ("tensor",))), parameters=())
    assert rules.spec(("batch", "tokens", None), (8, 8, 8), MESH) == P(("data", "tensor"), None, None)
    assert rules.spec(("batch", "tokens"), (2, 8), MESH) == P("data", "tensor")
    assert rules.parameter_spec("embed", (64, 12), MESH) == P()
    with pytest.raises(ValueError, match="axes: got 'rows', want one of 'batch', 'tokens'"):
        rules.spec(("rows",), (8,), MESH)
    assert hash(rules) == hash(dataclasses.replace(rules))


def test_bad_meshes_and_batches_are_named():
    count = len(jax.devices())
    assert make_mesh({"data": -1}).shape == {"data": count}
    for axes in ({"data": 0}, {"data": count + 1}, {"data": -1, "fsdp": -1}, {}, {"data": -1, "fsdp": 2 * count}):
        with pytest.raises(ValueError, match=f"axes: got {axes}"):
            make_mesh(axes)
    with pytest.raises(ValueError, match=r"batch: got 3 rows for 6 devices \(data, fsdp\), want a multiple"):
        batch_sharding((3, 8), MESH)


def test_unused_mesh_axes_are_named():
    mesh = AbstractMesh((4, 2, 1), ("seq", "data", "more"))
    known = "data, expert, fsdp, pipeline, sequence, tensor"
    with pytest.raises(ValueError, match=f"mesh: got seq=4, along which .* want axes that the rules use: {known}"):
        check_mesh(mesh, ShardingRules(), "sequence")
    check_mesh(make_mesh({"more": 1}), ShardingRules())


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
