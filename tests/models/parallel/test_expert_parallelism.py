"""A mixture of experts on meshes of CPU devices, in a process of its own, against one device.

As a script it prints, for each case, the errors of results and gradients, and the shardings.
"""

import dataclasses
import json
import re
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from jax_kernels.models import (
    ExpertsConfig,
    MixtureOfExperts,
    ShardingRules,
    Trainer,
    Transformer,
    TransformerConfig,
    make_mesh,
    shard_batch,
    shard_model,
)
from jax_kernels.models.parallel.token_exchange import after
from jax_kernels.testing import rms_error
from tests.support.processes import cpu_devices
from tests.tools import compile_case

DIM, WIDTH, EXPERTS = 16, 24, 8
MESHES = {
    "expert": {"expert": 4},
    "data": {"data": 2, "expert": 4},
    "fsdp": {"fsdp": 2, "expert": 2, "tensor": 2},
    "sequence": {"expert": 2, "sequence": 2, "tensor": 2},
    "no_experts": {"data": 2, "sequence": 2, "tensor": 2},
    "indivisible": {"data": 2, "expert": 3},  # 3 devices do not divide 8 experts
}
# (mesh, batch, options of the module, router): "one" sends all tokens to the last experts.
MODULES = {
    **{name: (name, 8, {"shared_experts": 1}, "random") for name in MESHES if name != "indivisible"},
    "indivisible": ("indivisible", 6, {}, "random"),
    "to_one_device": ("data", 8, {"experts_per_token": 2, "balance_bias": True}, "one"),
    "more_than_a_device_has": ("expert", 8, {"experts_per_token": 5, "scores": "sigmoid"}, "random"),
    "same_tokens": ("expert", 3, {}, "random"),  # the devices of "expert" do not divide the batch
    "explicit": ("fsdp", 8, {}, "random"),
    "all_to_all": ("data", 8, {"exchange": "all_to_all", "shared_experts": 1}, "random"),
    "all_to_all_tensor": ("fsdp", 8, {"exchange": "all_to_all", "experts_per_token": 5}, "random"),
    "all_to_one": ("expert", 4, {"exchange": "all_to_all", "experts_per_token": 2, "balance_bias": True}, "one"),
    "all_to_all_same_tokens": ("expert", 3, {"exchange": "all_to_all"}, "random"),
    "bfloat16": ("data", 8, {"dtype": jnp.bfloat16}, "random"),
}
EXPERTS_CONFIG = ExpertsConfig(num_experts=EXPERTS, mlp_dim=WIDTH, bias_rate=0.25, balance_loss=0.5, layers=(1,))
CONFIG = TransformerConfig(
    vocab_size=32, model_dim=DIM, num_layers=2, num_heads=4, mlp_dim=32, experts=EXPERTS_CONFIG
)  # fmt: skip
SCANNED = dataclasses.replace(
    CONFIG, experts=dataclasses.replace(EXPERTS_CONFIG, layers=None), scan_layers=True, remat="products"
)
ALL_TO_ALL = dataclasses.replace(SCANNED, experts=dataclasses.replace(SCANNED.experts, exchange="all_to_all"))
STEPS = {
    "step_all_to_all": ("data", ALL_TO_ALL),
    "step_expert": ("data", CONFIG),
    "step_fsdp": ("fsdp", SCANNED),
    "step_sequence": ("sequence", CONFIG),
}


def of_module(mesh_name, batch, options, router):
    """The largest error of the result, the Routing and the gradients of a MixtureOfExperts on a mesh."""
    module = MixtureOfExperts(DIM, WIDTH, EXPERTS, **{"experts_per_token": 3} | options, rngs=nnx.Rngs(0))
    if router == "one":
        module.expert_bias[...] = jnp.arange(EXPERTS) * 9.0
    x = jax.random.normal(jax.random.key(1), (batch, 6, DIM))

    @nnx.jit
    def step(module, x):
        def loss(module, x):
            out, routing = module.with_routing(x)
            weights = jnp.arange(out.size).reshape(out.shape) / out.size
            return (jnp.sin(out.astype(jnp.float32)) * weights).sum() + routing.balance_loss, (out, routing)

        return nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(module, x)

    want = jax.tree.map(np.asarray, step(module, x))
    mesh = make_mesh(MESHES[mesh_name])
    is_explicit = router == "random" and options == {} and mesh_name == "fsdp"
    if is_explicit:
        mesh = jax.make_mesh(tuple(mesh.shape.values()), tuple(mesh.shape), (AxisType.Explicit,) * 3)
    shard_model(module, mesh)
    spec = module.up_proj[...].sharding.spec
    x = shard_batch(x, mesh) if batch % (mesh.size // mesh.shape.get("tensor", 1)) == 0 else x
    with jax.set_mesh(mesh):
        got = jax.tree.map(np.asarray, step(module, x))
    pairs = zip(*map(jax.tree.leaves, (got, want)), strict=True)
    errors = [rms_error(a.astype(np.float64), b.astype(np.float64)) if b.any() else np.abs(a).max() for a, b in pairs]
    return {"error": max(map(float, errors)), "spec": ", ".join(map(str, spec))}


def of_step(mesh_name, config):
    """The metrics of two steps of a Trainer, and the parameters after them, on a mesh and on one device."""
    tokens = np.random.default_rng(0).integers(0, 32, (8, 16)).astype(np.int32)
    batch, found = (tokens, np.roll(tokens, -1, axis=1)), []
    for axes in (None, MESHES[mesh_name]):
        mesh = None if axes is None else make_mesh(axes)
        trainer = Trainer(config, optax.sgd(0.3), mesh=mesh)
        given = batch if mesh is None else shard_batch(batch, mesh)
        metrics = [{name: float(x) for name, x in trainer.train(given).items()} for _ in range(2)]
        parameters = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(trainer.model)))
        with jax.set_mesh(trainer.mesh):
            drawn = trainer.model.generate(jnp.asarray(tokens[:3, :4]), 3, temperature=0.0)
        found.append((metrics, parameters, np.asarray(drawn).tolist()))
    (want, p, of_one), (got, q, of_mesh) = found
    errors = [
        rms_error(a, b) if b.any() else float(np.abs(a).max())
        for a, b in zip(*map(jax.tree.leaves, (q, p)), strict=True)
    ]
    return {"got": got, "want": want, "error": float(max(errors)), "drawn": [of_one, of_mesh]}


QUICK = ["fsdp", "to_one_device", "all_to_all"]
SLOW = sorted(MODULES.keys() - set(QUICK))


@pytest.mark.timeout(240)
@pytest.mark.slow
@pytest.mark.parametrize("names", [QUICK, SLOW], ids=["quick", "slow"])
def test_module_on_a_mesh_equals_one_device(names):
    found = cpu_devices.results_of(__file__, names)
    for name, of_case in found.items():
        assert of_case["error"] < (2e-2 if name == "bfloat16" else 2e-5), (name, of_case)
    if "fsdp" in found:
        assert found["fsdp"]["spec"] == "expert, fsdp, tensor"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "names",
    [["step_expert"], pytest.param(["step_fsdp", "step_sequence", "step_all_to_all"], marks=pytest.mark.slow)],
    ids=["quick", "slow"],
)
def test_training_on_a_mesh_equals_one_device(names):
    """Losses, metrics, all parameters and biases after two steps, and the tokens that the model then draws."""
    for name, found in cpu_devices.results_of(__file__, names, limit=280).items():
        for got, want in zip(found["got"], found["want"], strict=True):
            np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-4, err_msg=name)
        assert found["error"] < 1e-4, (name, found)
        assert found["drawn"][0] == found["drawn"][1], name


def test_all_to_all_sends_no_padding_on_gpus():
    """A program for GPUs has a ragged all-to-all each way, and its transpose, and gathers no tokens."""
    found = cpu_devices.results_of(__file__, ["program"])["program"]
    assert found["ragged"] == 4
    assert found["gathered"] == [[1, 4, 2]], found  # the loads


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


def test_tokens_are_sent_in_their_dtype():
    """With exchange="gather", forward and backward: all arrays of tokens have 16 bits; devices' shares add in 32."""
    module = MixtureOfExperts(DIM, WIDTH, EXPERTS, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((4, 6, DIM), jnp.bfloat16)
    mesh = jax.sharding.AbstractMesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.make_jaxpr(lambda x: jax.vjp(module, x)[1](x))(x)
    sent, sums = [], []
    for equation in _equations(program.jaxpr):
        given = equation.invars[0].aval if equation.invars else None
        if equation.primitive.name in ("all_gather", "all_to_all", "reduce_scatter") and given.shape[-1] == DIM:
            sent.append(str(given.dtype))
        if equation.primitive.name == "reduce_sum" and given.shape == (4, 6, DIM):
            sums.append(str(given.dtype))
    assert sent == ["bfloat16"] * 4  # tokens and results, and their cotangents
    assert sums == ["float32"] * 2  # of results, and of the tokens' gradients


def test_all_to_all_needs_one_axis():
    rules = ShardingRules(axes=(("batch", ("a", "b")), ("tokens", ()), ("mlp", ()), ("expert", ("a", "b"))))
    module = MixtureOfExperts(DIM, WIDTH, EXPERTS, 2, exchange="all_to_all", rules=rules, rngs=nnx.Rngs(0))
    mesh = jax.sharding.AbstractMesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match="want one mesh axis"):
        jax.eval_shape(lambda x: module(x), jax.ShapeDtypeStruct((4, 2, DIM), jnp.float32))


def test_stages_with_experts_raise():
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    mesh = jax.sharding.AbstractMesh((2,), ("pipeline",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match="stages along 'pipeline' with experts"):
        jax.eval_shape(lambda tokens: model(tokens), jax.ShapeDtypeStruct((2, 4), jnp.int32))


def of_program():
    """The ragged all-to-alls, and the shapes of all_gathers, in a module's gradient by "all_to_all", for GPUs."""
    module = MixtureOfExperts(DIM, WIDTH, EXPERTS, 2, exchange="all_to_all", implementation="xla", rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(module)
    mesh = make_mesh({"expert": 4})
    loss = lambda state, x: nnx.merge(graphdef, state)(x).sum()
    x = jax.ShapeDtypeStruct((8, 6, DIM), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("expert")))
    check = jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")
    with jax.set_mesh(mesh):
        text = jax.export.export(jax.jit(jax.grad(loss, (0, 1))), platforms=["cuda"], disabled_checks=[check])(state, x)
        text = text.mlir_module()
    shapes = re.findall(r'"stablehlo.all_gather".*?tensor<([\dx]+)x[a-z]+\d+>\) ->', text, re.DOTALL)
    gathered = sorted({tuple(map(int, shape.split("x"))) for shape in shapes})
    return {"ragged": text.count("@ragged_all_to_all"), "gathered": gathered}


def test_after():
    """The value is unchanged, in each dtype and also after a NaN, and the derivative is the derivative of x alone."""
    for first in (jnp.array([jnp.nan, 1.0]), jnp.array([[-0.0]], jnp.bfloat16), jnp.zeros((0, 3), jnp.float16)):
        for x in (jnp.arange(3), jnp.array([-1.5, jnp.inf], jnp.bfloat16)):
            assert jnp.array_equal(after(first, x), x)
            assert after(first, x).dtype == x.dtype
    of_both = jax.grad(lambda first, x: (after(first, x) ** 2).sum(), (0, 1))(jnp.ones(2), jnp.array([2.0]))
    assert [y.tolist() for y in of_both] == [[0, 0], [4]]


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
def test_tokens_are_gathered_during_the_router():
    """On two H200s. The short gather of the router's results comes after the gather of the tokens, 4096 x 512."""
    script = compile_case.__file__.replace("compile_case.py", "compile_experts.py")
    found = json.loads(compile_case.compile_script(script).printed.splitlines()[-1])
    assert found["first"] == ["all-gather-start", 0]
    (name, size, kernels), (further, short, _), *_ = found["collectives"]
    assert (name, further) == ("all-gather", "all-gather")
    assert size == 4096 * 512 * 2 / 1e6
    assert kernels >= 1
    assert short < 0.1


if __name__ == "__main__":
    run = lambda name: (
        of_program() if name == "program" else of_step(*STEPS[name]) if name in STEPS else of_module(*MODULES[name])
    )
    print(json.dumps({name: run(name) for name in sys.argv[1:]}))
