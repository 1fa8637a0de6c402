"""From a request to a plan: choose, explain, on_device."""

import contextlib
import dataclasses
import functools
import inspect
import types

import jax
import jax.export
import jax.numpy as jnp
import pytest

import jax_kernels
from jax_kernels import Plan, device_names, dispatch, explain, flash_attention, masks, target
from jax_kernels.device import device_info
from jax_kernels.dispatch import Implementation, Request, choose, plan_of
from jax_kernels.ops.attention.implementations import IMPLEMENTATIONS
from jax_kernels.pallas.mosaic import interpreter

pytestmark = pytest.mark.usefixtures("no_interpret")


def attention_on(device, *, heads=8, kv_heads=8, head_dim=128, dtype="bfloat16", length=1024, **kwargs):
    query = jax.ShapeDtypeStruct((2, length, heads, head_dim), jnp.dtype(dtype))
    key = jax.ShapeDtypeStruct((2, length, kv_heads, head_dim), jnp.dtype(dtype))
    with dispatch.on_device(device):
        return explain(flash_attention, query, key, key, **kwargs)


def implementation(name, reason):
    return Implementation(name, lambda request: reason, lambda request: (name, "its rows, measured"), None, None)


def table(**reasons):
    return {name: implementation(name, reason) for name, reason in reasons.items()}


REQUEST = Request("an_op", device_info("h200"))


def order_of(*names):
    return lambda request: (names, "an order of this test")


def test_choose_takes_the_first_that_serves():
    given = table(fast="too old", good=None, slow=None, odd=None, none="too new")
    plan = plan_of(REQUEST, given, order_of("fast", "good", "slow"))
    assert (plan.op, plan.implementation, plan.source) == ("an_op", "good", "its rows, measured")
    assert (plan.device, plan.order) == ("NVIDIA H200", ("fast", "good", "slow"))
    assert dict(plan.passed_over) == {
        "fast": "too old",
        "odd": "the order of NVIDIA H200 leaves it out",
        "none": "too new",
    }
    assert plan.why_not == dict(plan.passed_over) | {"slow": "it comes after good in the order"}
    assert str(plan).splitlines() == [
        "an_op: good (first in this GPU's order that serves the call: fast, good, slow; an order of this test)",
        "  device: NVIDIA H200",
        f"  blocks: {plan.config} from its rows, measured",
        *(f"  not {name}: {reason}" for name, reason in plan.why_not.items()),
    ]
    choice = choose(REQUEST, given, order_of("fast", "good", "slow"))
    assert (choice.implementation, choice.config, choice.source) == (plan.implementation, plan.config, plan.source)


def test_a_choice_without_another_names_the_reasons():
    """Its position in the order is then no reason."""
    plan = plan_of(REQUEST, table(good=None, late="too old", odd="too new"), order_of("good", "late"))
    assert plan.why == "no other implementation serves this on NVIDIA H200"
    assert plan.why_not == {"late": "too old", "odd": "too new"}


def test_choose_by_name():
    plan = plan_of(REQUEST, table(fast=None, good=None), order_of("fast", "good"), "good")
    assert (plan.implementation, plan.why, plan.passed_over) == ("good", "asked for by name", ())
    assert (plan.order, plan.why_not) == ((), {})


def test_choose_by_name_that_cannot_serve():
    with pytest.raises(NotImplementedError, match="'fast' cannot serve this an_op: too old"):
        choose(REQUEST, table(fast="too old", good=None), order_of("fast", "good"), "fast")


def test_choose_unknown_name():
    with pytest.raises(ValueError, match="implementation: got 'nope' for an_op, want one of 'fast', 'good'"):
        choose(REQUEST, table(fast=None, good=None), order_of("fast", "good"), "nope")


def test_choose_gives_every_reason_if_none_serves():
    with pytest.raises(NotImplementedError, match=r"no implementation .* on NVIDIA H200: a: too old; b: too new"):
        choose(REQUEST, table(a="too old", b="too new"), order_of("a", "b"))


@pytest.mark.parametrize(
    ("device", "kwargs", "name"),
    [
        ("h200", {}, "mosaic_gpu"),
        ("h100", {"is_causal": True, "return_lse": True}, "mosaic_gpu"),
        ("h200", {"dtype": "float32"}, "triton"),
        ("h200", {"deterministic": True}, "mosaic_gpu"),
        ("a100", {}, "triton"),
        ("a100", {"head_dim": 256}, "triton"),
        ("a100", {"return_lse": True}, "triton"),
        ("rtx 4090", {"q_offset": 3}, "triton"),
        ("b200", {}, "cudnn"),
        ("t4", {"dtype": "float16"}, "xla"),
        ("cpu", {}, "xla"),
    ],
)
def test_attention_plans(device, kwargs, name):
    plan = attention_on(device, **kwargs)
    assert plan.implementation == name
    order = device_info(device).implementations
    assert plan.order == order
    tried = order[: order.index(name)]
    assert set(dict(plan.passed_over)) == {*tried, *(set(IMPLEMENTATIONS) - set(order))}
    assert tuple(other for other, _ in plan.passed_over)[: len(tried)] == tried
    assert set(plan.why_not) == set(IMPLEMENTATIONS) - {name}
    assert all(plan.why_not.values())


def test_dense_mask_implementation():
    mask = jax.ShapeDtypeStruct((1024, 1024), jnp.dtype(bool))
    plan = attention_on("a100", mask=mask)
    assert plan.implementation == "triton"


def test_plan_has_the_blocks_of_the_device():
    plan = attention_on("h200", is_causal=True)
    assert plan.source == "sm_90's rows, measured on NVIDIA H200"
    assert plan.config.core_count == 132
    assert plan.config.forward.block_kv % 64 == 0
    # A capability without rows takes the rows of the nearest older capability.
    tomorrow = dataclasses.replace(device_info("a100"), compute_capability=(9, 9))
    source = attention_on(tomorrow, return_lse=True).source
    assert source == "heuristic: sm_90's rows, for sm_99, which has none, not measured on sm_99, only on NVIDIA H200"


def test_a_plan_says_what_was_measured():
    """The order and the blocks each name their GPU. Nothing was timed on GPUs other than Hopper's."""
    assert "; sm_90's order, measured on NVIDIA H200" in attention_on("h100").why
    inherited = attention_on("4090")
    assert inherited.why.endswith("; sm_86's order, inherited by sm_89, not measured")
    assert inherited.source == "sm_86's rows, inherited by sm_89, not measured"
    elsewhere = attention_on("a100")
    assert elsewhere.why.endswith("; sm_80's order, not measured")
    assert elsewhere.source == "sm_80's rows, not measured on sm_80, only on NVIDIA H200"
    assert attention_on("b200").source == "no block spec"
    for name in device_names():
        text = str(attention_on(name))
        is_hopper = device_info(name).architecture == "Hopper"
        assert ("measured on NVIDIA H200" in text.replace("not measured", "")) == is_hopper
        assert "fastest" not in text


@pytest.mark.parametrize(("device", "version", "kind"), [("v100", "7.0", "Volta"), ("t4", "7.5", "Turing")])
def test_a_gpu_without_kernels_says_why(device, version, kind):
    name, older = device_info(device).name, f"it needs compute capability 8.0, and {device_info(device).name} has"
    plan = attention_on(device)
    assert plan.implementation == "xla"
    assert plan.why == (
        f"no other implementation serves this on {name}; "
        "it has no bfloat16 arithmetic, its dtype to train in is float16"
    )
    assert plan.why_not == {
        "mosaic_gpu": f"it needs Hopper (compute capability 9.0), and {name} is {kind}",
        "triton": f"{older} {version}",
        "cudnn": f"{older} {version}",
    }
    assert attention_on(device, dtype="float16").why == f"no other implementation serves this on {name}"


def test_a_cpu_says_why():
    plan = attention_on("cpu")
    assert plan.why == "no other implementation serves this on CPU"
    why = "it needs an NVIDIA GPU, and this runs on CPU"
    interpreted = f"{why} (JAX_KERNELS_INTERPRET=1 interprets it)"  # JAX has no interpreter of the others' kernels
    assert plan.why_not == {"mosaic_gpu": why, "cudnn": why, "triton": interpreted}


def test_explain_for_a_device_that_is_not_there():
    arrays = [jax.ShapeDtypeStruct((2, 1024, 8, 128), jnp.bfloat16)] * 3
    for name in ("h200", "NVIDIA H200", device_info("h200")):
        with dispatch.on_device("a100"):
            plan = explain(flash_attention, *arrays, device=name, is_causal=True)
        assert plan == attention_on("h200", is_causal=True)
    assert explain(functools.partial(flash_attention, *arrays), device="t4").device == "Tesla T4"
    concrete = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    assert explain(flash_attention, concrete, concrete, concrete, device="h200").implementation == "mosaic_gpu"
    assert explain(jax_kernels.layer_norm, jnp.ones((4, 512)), device="l4").device == "NVIDIA L4"


def test_explain_for_a_wrong_device():
    arrays = [jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)] * 3
    with pytest.raises(ValueError, match=r"device: got 'a10o', want cpu or .*; did you mean 'a10'\?"):
        explain(flash_attention, *arrays, device="a10o")
    with pytest.raises(TypeError, match="device: got int"):
        explain(flash_attention, *arrays, device=0)
    compiled = jax_kernels.compile_attention("causal", 64, 64, num_heads=2)
    with pytest.raises(ValueError, match=r"device: got NVIDIA H200, want None: CompiledAttention.* is planned for"):
        explain(compiled, *arrays, device="h200")


def test_explain_of_a_function_with_a_parameter_device():
    def attend(x, device=None):
        return (x, device)

    attend.plan = lambda x, device=None: (x, device)
    with pytest.raises(TypeError, match=r"device: attend has a parameter of this name, want functools.partial\(attend"):
        explain(attend, 1, device="h200")
    assert explain(functools.partial(attend, device="own"), 1, device="h200") == (1, "own")
    for name in dir(jax_kernels):
        op = getattr(jax_kernels, name)
        if hasattr(op, "plan"):
            assert "device" not in inspect.signature(op).parameters


@pytest.mark.parametrize("name", [name for name in IMPLEMENTATIONS if name != "xla"])
def test_gpu_implementation_without_a_gpu(name):
    with pytest.raises(NotImplementedError, match=rf"'{name}' cannot serve .*: it needs an NVIDIA GPU.* on CPU"):
        attention_on("cpu", implementation=name)


@pytest.mark.parametrize(("name", "device"), [("mosaic_gpu", "a100"), ("mosaic_gpu", "b200"), ("triton", "v100")])
def test_generation_without_a_kernel(name, device):
    with pytest.raises(NotImplementedError, match=rf"it needs .*, and {device_info(device).name}"):
        attention_on(device, implementation=name)


def test_interpret_lets_kernels_serve_without_a_gpu(monkeypatch):
    for value, on in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("JAX_KERNELS_INTERPRET", value)
        assert dispatch.interpreting() is on
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    with pytest.raises(NotImplementedError, match="JAX's interpreter of Mosaic lacks wgmma"):
        attention_on("cpu", implementation="mosaic_gpu")
    monkeypatch.setattr(interpreter, "INTERPRETED", True)
    for name in ("mosaic_gpu", "triton"):
        assert attention_on("cpu", implementation=name).implementation == name
    assert attention_on("cpu").implementation == "xla"


def test_explain_matches_the_call():
    query = jnp.ones((1, 8, 2, 16))
    plan = explain(flash_attention, query, query, query, is_causal=True)
    assert isinstance(plan, Plan)
    assert plan.implementation == device_info().implementations[-1] or jax.default_backend() == "gpu"
    with pytest.raises(ValueError, match="key: got head_dim 8"):
        explain(flash_attention, query, query[..., :8], query)
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        explain(flash_attention, query, query, query, causal=True)
    with pytest.raises(TypeError, match="3 positional arguments"):
        explain(flash_attention, query, query, query, query)


def test_explain_of_a_partial():
    arrays = [jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)] * 3
    wanted = explain(flash_attention, *arrays, is_causal=True, implementation="xla")
    attend = functools.partial(flash_attention, arrays[0], is_causal=True, implementation="triton")
    assert explain(functools.partial(attend, implementation="xla"), *arrays[1:]) == wanted


@pytest.mark.parametrize("name", ["prefix", "segments", "block_sparse", "composed"])
def test_explain_with_mask_shapes(name):
    lengths, ids, cells = jnp.array([5, 9]), jnp.zeros((2, 64), jnp.int32), jnp.ones((1, 1), bool)
    made = {
        "prefix": lambda: masks.causal() & masks.prefix(lengths),
        "segments": lambda: masks.segments(ids),
        "block_sparse": lambda: masks.block_sparse(cells, 64),
        "composed": lambda: masks.segments(ids) | masks.prefix(lengths),
    }[name]
    arrays = [jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)] * 3
    with dispatch.on_device("h200"):
        assert explain(flash_attention, *arrays, mask=jax.eval_shape(made)) == explain(
            flash_attention, *arrays, mask=made()
        )


def test_plan_without_blocks():
    assert "blocks" not in str(attention_on("cpu"))
    assert "  blocks: " in str(attention_on("h200"))


def test_explain_of_a_non_op():
    with pytest.raises(TypeError, match=r"op: got .*, want an op of this library"):
        explain(jnp.matmul, 1, 2)
    plan = attention_on("cpu")
    with pytest.raises(TypeError, match="op: got namespace"):
        explain(types.SimpleNamespace(plan=plan), 1, 2)


def test_on_device_ends_with_its_block():
    before = dispatch.target_device()
    with dispatch.on_device("h200") as outer:
        assert dispatch.target_device() is outer
        with dispatch.on_device("a100") as inner:
            assert dispatch.target_device() is inner
        assert dispatch.target_device() is outer
    with contextlib.suppress(RuntimeError), dispatch.on_device("h200"):
        raise RuntimeError
    assert dispatch.target_device() == before


def test_target_device_follows_the_arrays():
    cpu = jax.devices("cpu")[0]
    array = jax.device_put(jnp.ones(3), cpu)
    assert dispatch.target_device(array) == device_info(cpu)
    with jax.default_device(cpu):
        assert dispatch.target_device() == device_info(cpu)


def test_cpu_mesh_on_a_gpu_machine(monkeypatch):
    """Arrays on the mesh, inside and outside of shard_map, and other arrays under jax.set_mesh."""
    gpu = device_info("h200")
    monkeypatch.setattr(target, "device_info", lambda device=None: gpu if device is None else device_info(device))
    mesh = jax.make_mesh((1,), ("data",))
    plain = jax.random.normal(jax.random.key(0), (1, 16, 2, 64), jnp.bfloat16)
    placed = jax.device_put(plain, jax.NamedSharding(mesh, jax.P("data")))
    attend = lambda x: flash_attention(x, x, x, is_causal=True).astype(jnp.float32)
    want = attend(plain)  # concrete: the array's device is known
    with pytest.raises(Exception, match=r"(?i)cpu"):
        jax.jit(attend)(plain)
    found = [
        jax.jit(attend)(placed),
        jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data")))(placed),
    ]
    gradient = jax.jit(jax.grad(lambda x: attend(x).sum()))
    assert jnp.isfinite(gradient(placed)).all()
    with jax.set_mesh(mesh):
        found.append(jax.jit(attend)(jnp.asarray(plain)))
    for out in found:
        assert jnp.abs(out - want).max() < 1e-2


def test_program_for_cpus_and_gpus():
    """Without a GPU the plan is "xla", which CPUs and GPUs can run."""
    attend = lambda x: flash_attention(x, x, x, is_causal=True)
    x = jax.random.normal(jax.random.key(0), (1, 16, 2, 64), jnp.bfloat16)
    both = jax.export.export(jax.jit(attend), platforms=["cpu", "cuda"])(x)
    assert both.platforms == ("cpu", "cuda")
    assert jnp.array_equal(both.call(x), jax.jit(attend)(x))


X, W = jnp.ones((64, 128), jnp.bfloat16), jnp.ones((128, 64), jnp.bfloat16)
MATMULS = {
    "matmul": lambda x: jax_kernels.matmul(x, W),
    "gated_matmul": lambda x: jax_kernels.gated_matmul(x, W, W),
    "mlp": lambda x: jax_kernels.mlp(x, W, W.T),
    "grouped_matmul": lambda x: jax_kernels.grouped_matmul(x, jnp.stack([W, W]), jnp.array([30, 34])),
    "linear_cross_entropy": lambda x: jax_kernels.linear_cross_entropy(x, W, jnp.zeros(64, jnp.int32)),
    "matmul tf32": lambda x: jax_kernels.matmul(x.astype(jnp.float32), W.astype(jnp.float32), precision="tf32"),
    "grouped_matmul tf32": lambda x: jax_kernels.grouped_matmul(
        x.astype(jnp.float32), jnp.ones((2, 128, 64)), jnp.array([30, 34]), precision="tf32"
    ),
}


@pytest.mark.parametrize("name", MATMULS)
def test_matmuls_of_programs_for_gpus(name):
    """A CPU multiplies bfloat16 in float32, and tf32 as float32. The programs that it exports for a GPU do neither."""
    gradient = jax.jit(jax.grad(lambda x: MATMULS[name](x).astype(jnp.float32).sum()))
    matmuls = lambda *platforms: [
        line
        for line in jax.export.export(gradient, platforms=platforms)(X).mlir_module().splitlines()
        if "stablehlo.dot_general" in line
    ]
    is_tf32 = name.endswith("tf32")
    for_gpu = ["HIGHEST" not in line if is_tf32 else "bf16>" in line for line in matmuls("cuda")]
    for_cpu = ["HIGHEST" in line if is_tf32 else "bf16" not in line for line in matmuls("cpu")]
    assert any(for_gpu)
    assert for_gpu == [True] * len(for_cpu)
    assert for_cpu == [True] * len(for_gpu)
    both = jax.export.export(gradient, platforms=("cpu", "cuda"))(X)
    assert jnp.array_equal(both.call(X), gradient(X))
