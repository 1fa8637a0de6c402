"""The plan of a ring: its strategy, its sends ahead, the residuals that a policy keeps, its kernels' blocks."""

import dataclasses
import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import pytest

from jax_kernels import explain, masks, ring_attention
from jax_kernels.dispatch import on_device
from jax_kernels.ops.attention.vjp import RESIDUALS as OF_ATTENTION
from jax_kernels.ops.ring.partial_results import BackwardInputs, Pair, Visitors
from jax_kernels.ops.ring.ring_attention import OF_HEADS, prepare, with_results
from jax_kernels.ops.ring.steps import Step
from jax_kernels.ops.ring.vjp import RESIDUALS
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs.ring_specs import RingRow
from jax_kernels.pallas.block_specs.sm90 import SM90

MESH = jax.make_mesh((1,), ("sequence",), (jax.sharding.AxisType.Auto,))
X = jnp.ones((1, 6, 4, 8))


def test_block_specs_choose_the_sends_ahead():
    """Strategy "auto" takes a strategy that supports the call. An explicit strategy or number of sends wins.

    "auto" does not gather the keys of a symbolic batch, whose memory is unknown.
    """
    costs = SM90.ring[0].costs
    rows = (
        RingRow(costs=dataclasses.replace(costs, all_gather_start=1e-9), max_tokens=4, is_windowed=False),
        RingRow(costs=costs, sends_ahead=3, max_tokens=6),
        RingRow(costs=dataclasses.replace(costs, halo_start=1e-9, all_to_all_start=1.0)),
    )
    two = jax.sharding.AbstractMesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))

    def chosen(tokens, batch=1, **options):
        arguments = {"axis_name": "sequence", "layout": None, "strategy": "auto", "scale": None, "softcap": None}
        arguments |= {"deterministic": None, "precision": None, "implementation": None} | options
        found = []
        attend = lambda x: found.append(prepare(x, x, x, is_causal=False, **arguments)[0])
        shared = jax.shard_map(attend, mesh=two, in_specs=jax.P(), out_specs=jax.P())
        jax.eval_shape(shared, jax.ShapeDtypeStruct((batch, tokens, 4, 8), jnp.float32))
        return found[0].strategy, found[0].sends_ahead

    with block_specs.replaced_tables((9, 0), ring=rows):
        assert chosen(4) == ("all_gather", 1)
        assert chosen(4, batch=jax.export.symbolic_shape("b")[0]) == ("ring", 1)
        assert chosen(6) == ("ring", 3)
        assert chosen(4, layout="striped") == ("ring", 1)
        assert chosen(8) == chosen(8, window=(5, 2)) == chosen(8, window=(-1, 2)) == ("ring", 1)
        assert chosen(8, window=(4, 2)) == chosen(8, window=(8, 2), layout="contiguous") == ("halo", 1)
        assert chosen(8, window=(4, 2), layout="striped") == ("ring", 1)
        assert chosen(8, window=(4, 2), sends_ahead=2) == ("ring", 2)
        assert chosen(8, window=(4, 2), mask=masks.global_tokens(2)) == ("ring", 1)
        assert chosen(6, strategy="all_gather")[0] == "all_gather"
        assert chosen(6, sends_ahead=2) == ("ring", 2)
    with pytest.raises(ValueError, match=r"^RingRow\.permutes_up_to=-1 must be 0 or more"):
        RingRow(costs=costs, permutes_up_to=-1)


@pytest.mark.parametrize(
    ("options", "kv_heads", "permutes"),
    [
        ({}, 16, (1, 9)),
        ({}, 1, (1, 3)),
        ({"window": (1024, 0)}, 16, (2, 4)),
        ({"mask": masks.sliding_window(1024, 0)}, 16, (2, 4)),
        ({"window": (1024, 0), "strategy": "ring"}, 16, (1, 3)),
        ({"window": (4096, 0)}, 16, (2, 9)),
        ({"window": (4096, 0)}, 1, (2, 4)),
        ({"window": (8193, 0)}, 16, (4, 8)),
        ({"sends_ahead": 1}, 16, (1, 3)),
        ({"strategy": "ring"}, 16, (1, 3)),
        ({"strategy": "all_to_all"}, 16, (4, 8)),
    ],
)
def test_auto_shards_heads_of_differentiated_calls(options, kv_heads, permutes):
    """permutes: the number for a call alone, and for its gradients with a cotangent of lse."""
    mesh = jax.sharding.AbstractMesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))
    attend = functools.partial(ring_attention, axis_name="sequence", is_causal=True, implementation="xla", **options)
    loss = lambda *tensors: attend(*tensors).sum(dtype=jnp.float32)
    gradients = jax.grad(loss, argnums=(0, 1, 2))
    tokens, shapes = jax.P(None, "sequence"), [(1, 32768, heads, 128) for heads in (16, kv_heads, kv_heads)]
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    found = []
    for function in (attend, gradients):
        shared = jax.shard_map(function, mesh=mesh, in_specs=tokens, out_specs=tokens)
        found.append(str(jax.make_jaxpr(shared)(*given)).count("ppermute["))
    assert tuple(found) == permutes


@pytest.mark.parametrize(("policy", "forwards"), [("nothing_saveable", 2), ("names", 1)])
def test_names_for_checkpoint_policies(policy, forwards):
    """A policy keeps out and lse, so that the backward does not run the forward again."""
    policies = jax.checkpoint_policies
    chosen = policies.save_only_these_names(*RESIDUALS) if policy == "names" else policies.nothing_saveable
    loss = lambda x: jnp.sin(ring_attention(jnp.sin(x), x, x, axis_name="sequence", implementation="triton")).sum()
    shared = jax.shard_map(
        jax.checkpoint(loss, policy=chosen), mesh=MESH, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
    )
    with on_device("A100"):
        program = jax.make_jaxpr(jax.value_and_grad(shared))(X.astype(jnp.bfloat16))
    assert len(_kernels(program.jaxpr, "attention_forward")) == forwards


@pytest.mark.triton
@pytest.mark.parametrize(("tokens", "passes"), [(4096, 1), (512, 0)])
def test_norms_of_keys_are_computed_once(tokens, passes):
    """A device computes the norms of its own keys, if they pay, and gets the norms of other keys with the keys."""
    mesh = jax.sharding.AbstractMesh((4,), ("sequence",), (jax.sharding.AxisType.Auto,))
    attend = functools.partial(ring_attention, axis_name="sequence", is_causal=True, strategy="ring")
    spec = jax.P(None, "sequence")
    shapes = [jax.ShapeDtypeStruct((1, 4 * tokens, heads, 128), jnp.bfloat16) for heads in (8, 2, 2)]
    with on_device("h200"):
        program = jax.make_jaxpr(jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec))(*shapes)
    kernels = _kernels(program.jaxpr, "attention_row_norms")
    assert sum(kernel.outvars[0].aval.shape[-1] == 2 for kernel in kernels) == passes  # the others are of queries


def step_on_an_h100(function, local, heads):
    """Traces function(step, visitors, query) for the second step of a causal ring of two devices. Returns the jaxpr."""

    def look(query, key, value):
        call, _ = prepare(
            query, key, value, axis_name="sequence", layout="zigzag", strategy="ring", is_causal=True,
            **dict.fromkeys(("scale", "softcap", "deterministic", "precision", "implementation")),
        )  # fmt: skip
        options = dict(call.options)
        step = Step(layout=call.layout, number=1, index=jnp.int32(0), query=query, q_ids=None, options=options)
        return function(step, Visitors(Pair((key, value)), None), query)

    mesh = jax.sharding.AbstractMesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))
    spec, whole = jax.P(None, "sequence"), jax.ShapeDtypeStruct((1, 2 * local, heads, 128), jnp.bfloat16)
    with on_device("h100"):
        return jax.make_jaxpr(jax.shard_map(look, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(
            *[whole] * 3
        )


@pytest.mark.parametrize(
    ("local", "heads", "together"),
    [(4096, 16, 16), (8192, 16, 8), (8192, 12, 12), (16384, 16, 4), (65536, 16, 1), (65536, 7, 1), (2048, 4, 4)],
)
def test_causal_step_heads_fill_the_gpu_twice(local, heads, together):
    """Half of a step's queries meet no key. The other half of 8,192 queries has 32 blocks: 8 heads have 256 blocks."""
    found = []

    def look(step, visitors, query):
        planned, _ = step._whole_call(visitors)
        found.append(planned.config.forward.head_group)
        return query

    step_on_an_h100(look, local, heads)
    assert found == [together]


def test_kernel_accumulates_into_its_own_array():
    """A barrier stops XLA from passing rows of an array in place, which would lose a kernel's additions to them."""

    def look(step, visitors, query):
        rows = jnp.zeros((1, 4, query.shape[1]))
        earlier = jnp.ones((2, *query.shape[1:]), jnp.float32)[:1]
        return step.gradients(visitors, BackwardInputs(rows, rows, query), earlier)[0]

    text = str(step_on_an_h100(look, 1024, 4))
    assert re.search(r"(\w+):f32\[1,1024,4,128\] = optimization_barrier .*\n.* = new_ref\[.*\] \1\b", text), text


@pytest.mark.parametrize(
    ("names", "permutes"), [((), 10), (OF_ATTENTION, 10), ((*OF_ATTENTION, *OF_HEADS, *RESIDUALS), 7)]
)
def test_saved_residuals_are_not_exchanged_again(names, permutes):
    """The forward has three sends, the backward four. If nothing is kept, the forward's sends run again."""
    mesh = jax.sharding.AbstractMesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))
    attend = functools.partial(ring_attention, axis_name="sequence", implementation="xla", strategy="all_to_all")
    tokens = jax.P(None, "sequence")
    shared = jax.shard_map(attend, mesh=mesh, in_specs=tokens, out_specs=tokens)
    loss = lambda *tensors: jnp.sin(shared(*(jnp.sin(x) for x in tensors))).sum(dtype=jnp.float32)
    kept = jax.checkpoint(loss, policy=jax.checkpoint_policies.save_only_these_names(*names))
    given = [jax.ShapeDtypeStruct((1, 64, 4, 8), jnp.bfloat16)] * 3
    assert str(jax.make_jaxpr(jax.grad(kept, argnums=(0, 1, 2)))(*given)).count("ppermute[") == permutes


@pytest.mark.parametrize(("strategy", "forwards"), [("ring", 0), ("halo", 0), ("all_to_all", 0), ("all_gather", 1)])
def test_saved_results_are_not_recomputed(strategy, forwards):
    """Only the call of all keys and values runs again."""

    def gradients(x, lse):
        arguments = {"axis_name": "sequence", "layout": None, "scale": None, "softcap": None, "deterministic": None}
        arguments |= {"precision": None, "implementation": "triton", "is_causal": True, "strategy": strategy}
        arguments |= {"window": (2, 0)}
        known = lambda x: with_results(*prepare(x, x, x, **arguments), x, lse)
        return jax.vjp(known, x)[1]((x, lse))

    shared = jax.shard_map(gradients, mesh=MESH, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    x = X.astype(jnp.bfloat16)
    with on_device("A100"):
        program = jax.make_jaxpr(shared)(x, jnp.zeros((x.shape[0], x.shape[2], x.shape[1]), jnp.float32))
    assert len(_kernels(program.jaxpr, "attention_forward")) == forwards


def _kernels(jaxpr, name: str) -> list:
    """The kernels with this name in a program. A printed program may show equal parts only once."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found += [equation] if name in str(equation.params["name"]) else []
            continue
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(part, "jaxpr", part)
            found += _kernels(inner, name) if hasattr(inner, "eqns") else []
    return found


def plan_on(devices, tokens=4096, *, kv_heads=16, gpu="h200", **arguments):
    """The plan of a call on an abstract mesh. tokens: of one device."""
    of = lambda heads: jax.ShapeDtypeStruct((1, tokens, heads, 128), jnp.bfloat16)
    mesh = jax.sharding.AbstractMesh((devices,), ("sequence",), (jax.sharding.AxisType.Auto,))
    with on_device(gpu), jax.sharding.use_abstract_mesh(mesh):
        return explain(ring_attention, of(16), of(kv_heads), of(kv_heads), axis_name="sequence", **arguments)


@pytest.mark.parametrize(
    ("arguments", "strategies", "steps"),
    [
        ({"is_causal": True}, ("ring", "all_to_all"), [f"step {i}" for i in range(4)]),
        ({"is_causal": True, "kv_heads": 2, "tokens": 16384}, ("ring", "ring"), [f"step {i}" for i in range(4)]),
        ({"window": (100, 0)}, ("halo", "halo"), ["own keys", "128 keys before each run"]),
        (
            {"window": (300, 7), "strategy": "halo"},
            ("halo", "halo"),
            ["own keys", "384 keys before each run", "128 keys after each run"],
        ),
        (
            {"window": (5000, 0), "kv_heads": 2, "sends_ahead": 1},
            ("ring", "ring"),
            ["step 0", "step 1", "step 2", "step 3"],
        ),
        ({"strategy": "all_to_all"}, ("all_to_all", "all_to_all"), ["all keys of a device's heads"]),
        (
            {"strategy": "all_gather", "is_causal": True},
            ("all_gather", "all_gather"),
            ["all keys for chunk 0", "all keys for chunk 1"],
        ),
    ],
)
def test_explain_tells_the_strategy_and_the_steps(arguments, strategies, steps):
    plan = plan_on(4, **arguments)
    assert (plan.op, plan.implementation, plan.devices) == ("ring_attention", "mosaic_gpu", 4)
    assert (plan.strategy, plan.differentiated) == strategies
    assert [name for name, _ in plan.steps] == steps
    assert {step.op for _, step in plan.steps} == {"flash_attention"}
    assert plan.config == plan.steps[0][1].config
    assert f"strategy {strategies[0]}: 4 devices, layout {plan.layout}" in str(plan)
    assert ("with gradients strategy all_to_all" in str(plan)) == (strategies == ("ring", "all_to_all"))


@pytest.mark.triton
def test_the_plan_of_a_step_is_its_call():
    """The plan has the blocks of the step's reach, which the block specs alone do not give."""
    first, second, *rest = (step for _, step in plan_on(4, is_causal=True).steps)
    assert rest == [second] * 2
    assert first.config.forward.head_group != second.config.forward.head_group == 16
    assert "    step 1, 2, 3: mosaic_gpu, Blocks(" in str(plan_on(4, is_causal=True))
    assert plan_on(4, gpu="a100").implementation == "triton"
    named = plan_on(1, implementation="xla")
    assert (named.why, named.layout, str(named).count("step 0: xla")) == ("asked for by name", "contiguous", 1)


def test_explain_inside_and_outside_a_shard_map():
    """Inside, the arrays are traced, and planning adds nothing to the program. Outside, one device's shapes do."""
    x, plans = jnp.ones((1, 8, 4, 8)), []
    ids = jax.ShapeDtypeStruct((1, 8), jnp.int32)

    def look(x):
        plans.append(explain(ring_attention, x, x, x, axis_name="sequence", is_causal=True))
        return x

    spec = jax.P(None, "sequence")
    program = jax.make_jaxpr(jax.shard_map(look, mesh=MESH, in_specs=spec, out_specs=spec))(x)
    assert not next(equation.params["jaxpr"].eqns for equation in program.jaxpr.eqns)
    with jax.set_mesh(MESH):
        assert explain(ring_attention, x, x, x, axis_name="sequence", is_causal=True) == plans[0]
        packed = explain(ring_attention, x, x, x, axis_name="sequence", segment_ids=ids, mask=masks.causal())
        empty = explain(ring_attention, *[x[:, :0]] * 3, axis_name="sequence")
    assert packed.implementation == "xla"
    assert (empty.implementation, empty.steps) == ("xla", ())
    with pytest.raises(ValueError, match=r"axis_name: got 'sequence', want an axis of the jax.shard_map around this c"):
        explain(ring_attention, x, x, x, axis_name="sequence")
    with pytest.raises(TypeError, match="axis_name: got int, want the name of a mesh axis"):
        explain(ring_attention, x, x, x, axis_name=1)


def test_explain_raises_the_errors_of_the_call():
    with pytest.raises(ValueError, match="key: got 2 heads on 4 devices with strategy='all_to_all', want a multiple"):
        plan_on(4, kv_heads=2, strategy="all_to_all")
    with pytest.raises(NotImplementedError, match="gradient of the log-sum-exp"):
        plan_on(4, implementation="cudnn")
    with pytest.raises(ValueError, match="layout: got 'zig', want one of"):
        plan_on(4, layout="zig")
