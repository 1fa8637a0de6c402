"""jax_kernels.tune, with an op of two lines, a fake device and a fake timer; then flash_attention, interpreted."""

import dataclasses
import functools
import math
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kernels
from jax_kernels import explain, tune
from jax_kernels.device import device_info
from jax_kernels.dispatch import Implementation, Request, tuning_key, without_blocks
from jax_kernels.inputs.matmul import MatmulOptions
from jax_kernels.ops.cross_entropy.implementations import LossRequest
from jax_kernels.ops.grouped.implementations import GroupedRequest
from jax_kernels.ops.matmul import implementations as matmul_implementations
from jax_kernels.ops.planned_op import Blocks, PlannedOp
from jax_kernels.tuned import cache
from jax_kernels.tuning import cost_model, measure, session, timers

DEVICE = dataclasses.replace(device_info("h200"), name="NVIDIA Test")


@dataclasses.dataclass(frozen=True)
class Spec:
    block: int

    def __post_init__(self):
        if self.block <= 0:
            raise ValueError(f"Spec.block={self.block} must be positive")


@dataclasses.dataclass(frozen=True)
class ScaleRequest(Request):
    SIZES = ("length",)

    length: int
    dtype: str


class Inputs(NamedTuple):
    x: jax.Array
    lengths: jax.Array | None = None


def _run(call, inputs):
    if call.config is not None and call.config.forward.block == 13:
        raise RuntimeError("too much shared memory\nand more")
    factor = 3.0 if call.config is not None and call.config.forward.block == 7 else 2.0  # 7: a wrong kernel
    return inputs.x * factor + (0 if inputs.lengths is None else inputs.lengths.sum())


def _candidates(request):
    return {"forward": [Spec(1), Spec(2), Spec(7), Spec(13)], "backward": [Spec(1), Spec(2)]}


def _config(request):
    return Blocks(forward=Spec(4), backward=Spec(4), core_count=1), "this test"


TABLE = {
    "fast": Implementation(
        "fast", lambda request: "it takes up to 100" if request.length > 100 else None, _config, None, None, _candidates
    ),
    "slow": Implementation("slow", lambda request: None, without_blocks, None, None),
    "never": Implementation("never", lambda request: "it is too old", without_blocks, None, None),
}  # fmt: skip
OP = PlannedOp("scale", TABLE, lambda request: (("fast", "slow"), "an order of this test"))


def _check(*, x, lengths, implementation):
    return ScaleRequest("scale", DEVICE, x.shape[0], str(x.dtype)), Inputs(x, lengths)


def scale(x, lengths=None, *, implementation=None):
    request, inputs = _check(x=x, lengths=lengths, implementation=implementation)
    call = OP.call(request, None, implementation)
    call, inputs = OP.tuned(call, request, _run, inputs, implementation, moving=("x",), lengths={"lengths": 5})
    CALLS.append(call)
    return _run(call, inputs)


OP.explained_by(_check)(scale)
CALLS = []
# The fake times, in ms: of the forward, by its block, and of the backward, by its block.
FORWARD, BACKWARD = {4: 1.4, 2: 1.0, 1: 1.6, 7: 0.1, 13: 0.1}, {4: 2.0, 2: 3.0, 1: 1.5}


def _ms(program, calls):
    if program.implementation == "slow":
        return 1.2 if program.direction == "forward" else 5.0
    program.call()
    backward = BACKWARD[program.config.backward.block] if program.direction == "gradients" else 0
    return FORWARD[program.config.forward.block] + backward


@pytest.fixture(autouse=True)
def readings(tmp_path, monkeypatch, no_interpret):
    """An empty cache, the fake device and the fake timer. A list of (implementation, direction) of each reading."""
    monkeypatch.setenv("JAX_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "_LOADED", {})
    monkeypatch.setattr(session, "device_info", lambda: DEVICE)
    found = []

    def read(program, calls):
        found.append((program.implementation, program.direction))
        return _ms(program, calls)

    monkeypatch.setattr(timers, "choose", lambda: timers.Timer(name="fake", read=read))
    CALLS.clear()
    return found


X = jnp.ones(10)


def test_without_tuning_nothing_is_timed(readings, tmp_path):
    scale(X)
    explain(scale, X)
    assert (readings, list(tmp_path.iterdir())) == ([], [])
    assert CALLS[0].config == _config(None)[0]


def test_a_call_with_arrays():
    """It is timed at once, runs with the winner, and so do later calls of its bucket, in other processes too."""
    with tune(gradients=False) as results:
        scale(X)
        assert len(results) == 1
        scale(X)
        scale(jnp.ones(9))
    (result,) = results
    assert result.winner.fastest == "fast"
    assert [(x.name, x.ms, x.untuned_ms) for x in result.winner.timed] == [("fast", 1.0, 1.4), ("slow", 1.2, 1.2)]
    assert result.winner.of("fast").blocks == {"forward": {"type": "Spec", "block": 2}}
    assert set(result.failed) == {"fast Spec(block=7)", "fast Spec(block=13)"}
    assert "differ from the untuned call's by" in result.failed["fast Spec(block=7)"]
    assert result.failed["fast Spec(block=13)"] == "RuntimeError: too much shared memory"
    assert [call.config.forward.block for call in CALLS] == [2, 2, 2]
    assert str(result).startswith("scale(length=10, dtype=float32): fast tuned on ")
    cache._LOADED.clear()
    scale(X)
    scale(jnp.ones(11))  # of another bucket
    scale(jnp.ones(10, jnp.bfloat16))
    assert [call.config.forward.block for call in CALLS[3:]] == [2, 4, 4]


def test_the_plan_says_what_was_tuned():
    with tune(gradients=False):
        scale(X)
    plan = explain(scale, X)
    assert (plan.implementation, plan.config.forward, plan.source) == ("fast", Spec(2), "tuning")
    assert (plan.tuned.ms, plan.tuned.untuned, plan.tuned.untuned_ms, plan.tuned.timer) == (1.0, "fast", 1.4, "fake")
    assert f"\n  tuned on {plan.tuned.date}: 1 ms, block spec 1.4 ms\n" in str(plan)
    assert plan.why == "the fastest when it was tuned; slow 1.2 ms"
    assert plan.why_not == {"slow": "it took 1.2 ms when it was tuned", "never": "it is too old"}
    named = explain(scale, X, implementation="slow")
    assert (named.why, named.tuned.ms, named.config) == ("asked for by name", 1.2, None)
    assert str(named).endswith("1.2 ms, no other candidate was faster")
    assert explain(scale, jnp.ones(11)).tuned is None


def test_another_implementation_is_the_fastest(monkeypatch):
    monkeypatch.setitem(FORWARD, 2, 1.39)
    with tune(gradients=False) as results:
        scale(X)
    assert results[0].winner.fastest == CALLS[0].implementation == "slow"
    assert str(explain(scale, X)).splitlines()[2].endswith(": 1.2 ms, fast 1.4 ms")


def test_a_small_gain_keeps_the_block_spec(monkeypatch):
    monkeypatch.setitem(FORWARD, 2, 1.395)
    monkeypatch.setitem(TABLE, "slow", TABLE["never"])
    with tune(gradients=False) as results:
        scale(X)
    assert results[0].winner.of("fast").blocks == {}
    assert CALLS[0].config == _config(None)[0]
    assert explain(scale, X).source == "this test"


def test_forward_and_backward_vary_one_after_the_other():
    """The choice is by their sum: here the block spec's forward takes 1.4 and its backward 2.0."""
    with tune() as results:
        scale(X)
    winner = results[0].winner
    assert winner.with_gradients
    assert [(x.name, x.ms, x.untuned_ms) for x in winner.timed] == [("fast", 2.5, 3.4), ("slow", 5.0, 5.0)]
    assert winner.of("fast").blocks == {
        "forward": {"type": "Spec", "block": 2},
        "backward": {"type": "Spec", "block": 1},
    }
    assert "2.5 ms with its backward, block spec 3.4 ms" in str(explain(scale, X))


def test_timed_gradients_include_the_results(monkeypatch):
    """XLA would leave out a forward whose results are not reads, and would know cotangents that are constants."""
    made, own = [], measure.program_of
    monkeypatch.setattr(measure, "program_of", lambda *given: made.append(own(*given)) or made[-1])
    with tune():
        scale(X)
    forward, gradients = (next(x for x in made if x.direction == name) for name in ("forward", "gradients"))
    out, found = gradients.call()
    np.testing.assert_array_equal(out, forward.call())
    np.testing.assert_array_equal(found[0]["x"], 2 * jnp.ones_like(X))
    stage, _ = gradients.lower()
    assert len(jax.tree.leaves(stage.in_avals)) == len(jax.tree.leaves(forward.lower()[0].in_avals)) + 1


def test_a_traced_call_is_timed_after_the_block(readings):
    with tune(gradients=False) as results:
        jax.jit(scale)(X, jnp.ones(3, jnp.int32))
        jax.eval_shape(jax.grad(lambda x: scale(x).sum()), jnp.ones(20))
        assert (results, readings) == ([], [])
    assert [result.winner.fastest for result in results] == ["fast", "fast"]
    assert [result.request.length for result in results] == [10, 20]
    assert all(call.config.forward.block == 4 for call in CALLS)


def test_known_arrays_in_a_traced_function():
    """They are timed after the block, outside of the trace."""
    with tune(gradients=False) as results:
        jax.jit(lambda y: scale(X) + y)(1.0)
        assert results == []
    assert [result.winner.fastest for result in results] == ["fast"]
    assert results[0].failed.keys() == {"fast Spec(block=7)", "fast Spec(block=13)"}


def test_a_traced_call_that_does_not_fit_the_memory(monkeypatch):
    def full(tunable):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 TiB\nand more")

    monkeypatch.setattr(session, "filled", full)
    with tune() as results:
        jax.jit(scale)(X)
    assert results[0].reason == "its arrays do not fit the memory: RESOURCE_EXHAUSTED: 3 TiB"


def test_arrays_of_a_traced_call():
    spec = lambda dtype: jax.ShapeDtypeStruct((3,), dtype)
    _, inputs = _check(x=spec(jnp.bfloat16), lengths=spec(jnp.int32), implementation=None)
    tunable = session.TunableCall(
        op=OP, request=None, call=None, named=None, run=_run, inputs=inputs, lengths={"lengths": 5}
    )
    filled = session.filled(tunable)
    assert filled.lengths.tolist() == [5, 5, 5]
    assert filled.x.dtype == jnp.bfloat16
    assert len(set(filled.x.tolist())) == 3


def test_a_named_implementation():
    """It alone is timed, so that calls without a name are planned as before."""
    with tune(gradients=False) as results:
        scale(X, implementation="fast")
    assert results[0].winner.fastest is None
    assert [x.name for x in results[0].winner.timed] == ["fast"]
    assert explain(scale, X, implementation="fast").config.forward == Spec(2)
    assert explain(scale, X).tuned is None
    with tune(gradients=False):
        scale(X)
    assert explain(scale, X).config.forward == Spec(2)


def test_a_winner_that_cannot_serve_another_call_of_its_bucket():
    with tune(gradients=False):
        scale(jnp.ones(99))
    assert explain(scale, jnp.ones(99)).tuned is not None
    plan = explain(scale, jnp.ones(101))
    assert tuning_key(ScaleRequest("scale", DEVICE, 99, "float32")) == tuning_key(
        ScaleRequest("scale", DEVICE, 101, "float32")
    )
    assert (plan.implementation, plan.tuned) == ("slow", None)


def _matmul_key(m: int, n: int, k: int, *, transpose_x: bool = False, transpose_w: bool = False) -> str:
    options = MatmulOptions(out_dtype="bfloat16", transpose_x=transpose_x, transpose_w=transpose_w)
    return tuning_key(matmul_implementations.request_of(options, "bfloat16", (m, n, k), DEVICE))


@pytest.mark.parametrize("transpose_w", [False, True])
def test_rows_of_matmuls_share_a_winner(transpose_w):
    """Rows of x are rounded up, in a gradient of the weights too. Columns are not."""
    key = functools.partial(_matmul_key, transpose_w=transpose_w)
    assert key(4000, 512, 300) == key(4096, 512, 300) != key(4097, 512, 300)
    assert key(4000, 512, 300) != key(4000, 500, 300)
    assert key(4000, 512, 300) != key(4000, 512, 299)
    gradient = functools.partial(key, transpose_x=True)
    assert gradient(300, 512, 4000) == gradient(300, 512, 4096) != gradient(300, 512, 4097)
    assert gradient(300, 512, 4000) != gradient(299, 512, 4000)
    assert gradient(300, 512, 4000) != key(300, 512, 4000)


def test_rows_of_groups_and_losses_share_a_winner():
    plain = {"dtype": "bfloat16", "device": DEVICE}
    grouped = lambda m, n, k: GroupedRequest(
        op="grouped_matmul", groups=9, m=m, n=n, k=k, source_rows=m, out_dtype="bfloat16", activation=None,
        precision=None, **plain,
    )  # fmt: skip
    loss = lambda tokens, depth, vocabulary: LossRequest(
        op="linear_cross_entropy", tokens=tokens, depth=depth, vocabulary=vocabulary, w_dtype="bfloat16",
        reduction="mean", **plain,
    )  # fmt: skip
    for request, columns in ((grouped, (500, 300)), (loss, (300, 50_257))):
        assert tuning_key(request(4000, *columns)) == tuning_key(request(4096, *columns))
        assert tuning_key(request(4000, *columns)) != tuning_key(request(4097, *columns))
        for i in range(2):
            other = [size + (i == j) for j, size in enumerate(columns)]
            assert tuning_key(request(4000, *columns)) != tuning_key(request(4000, *other))


@pytest.mark.parametrize(
    "blocks",
    [
        {"forward": {"type": "Other", "block": 2}},
        {"forward": {"type": "Spec", "size": 2}},
        {"forward": {"type": "Spec", "block": 0}},
        {"sideways": {"type": "Spec", "block": 2}},
    ],
)
def test_blocks_of_another_kernel_are_ignored(blocks):
    with tune(gradients=False) as results:
        scale(X)
    timed = dataclasses.replace(results[0].winner.timed[0], blocks=blocks)
    key = tuning_key(ScaleRequest("scale", DEVICE, 10, "float32"))
    cache.store(DEVICE.name, key, dataclasses.replace(results[0].winner, timed=(timed,)))
    assert explain(scale, X).config == _config(None)[0]
    assert explain(scale, X).tuned is None


def test_calls_that_cannot_be_tuned(monkeypatch):
    with tune() as results:
        monkeypatch.setattr(session, "device_info", lambda: device_info("cpu"))
        jax_kernels.flash_attention(*[jnp.ones((1, 0, 2, 8))] * 3)
        scale(X)
    reasons = [result.reason for result in results]
    assert reasons[0].startswith("no kernel can serve it")
    assert reasons[1] == "it is planned for NVIDIA Test, and JAX's default device is CPU"
    assert all("not tuned" in str(result) for result in results)


def test_a_call_with_a_reason_leaves_an_equal_request_to_tune():
    """The experts of a model have a request of grouped_gated_matmul, and are not tuned themselves."""
    request, inputs = _check(x=X, lengths=None, implementation=None)
    with tune() as results:
        OP.tuned(OP.call(request, None), request, _run, inputs, None, reason="tune its parts")
        scale(X)
    assert [result.reason for result in results if result.winner is None] == ["tune its parts"]
    assert [result.winner.fastest for result in results if result.winner is not None] == ["fast"]


def test_an_error_in_the_block_leaves_traced_calls_untimed(readings):
    with pytest.raises(KeyError), tune():
        {}[jax.jit(scale)(X).size]
    assert readings == []
    assert explain(scale, X).tuned is None


def test_wrong_arguments(monkeypatch):
    for seconds in (0, math.inf, math.nan, "1"):
        message = f"seconds: got {seconds!r}, want a finite number above 0"
        with pytest.raises(ValueError, match=message), tune(seconds=seconds):
            pass
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match="tune: got a program of 2 processes, want one process"), tune():
        pass


def test_far_candidates_have_one_reading(readings, monkeypatch):
    """The blocks of an implementation that is far slower are not varied."""
    monkeypatch.setitem(FORWARD, 4, 9.0)
    with tune(gradients=False) as results:
        scale(X)
    assert results[0].winner.fastest == "slow"
    assert readings.count(("fast", "forward")) == measure._TURNS


def test_progress():
    told = []

    class Progress:
        def begin(self, text, steps):
            told.append((text, steps))

        def step(self, text):
            told.append(text)

        def end(self, result):
            told.append(result)

    with tune(gradients=False, progress=Progress()) as results:
        scale(X)
    assert told[0] == ("scale", 6)
    assert told[1:4] == ["fast", "slow", "fast Spec(block=1)"]
    assert told[-1] is results[0]


def test_candidates_that_the_cost_model_leaves_out(monkeypatch):
    """They are neither compiled nor timed, and the progress does not count them."""
    steps = []

    class Progress(session.Silent):
        def begin(self, text, steps_):
            steps.append(steps_)

    monkeypatch.setattr(cost_model, "slower", lambda request, blocks: {x: 2.0 for x in blocks if x.block in (2, 4, 7)})
    with tune(gradients=False, progress=Progress()) as results:
        scale(X)
    (result,) = results
    reason = "its predicted time is 2.0 times the smallest prediction"
    assert result.pruned == {f"fast Spec(block={block})": reason for block in (2, 7)}  # 4 is the block spec's
    assert result.failed.keys() == {"fast Spec(block=13)"}
    assert [x.ms for x in result.winner.timed] == [1.2, 1.4]
    assert str(result).endswith("; not timed: 2 predicted to be too slow")
    cache._LOADED.clear()
    with tune(gradients=False, prune=False, progress=Progress()) as results:
        scale(jnp.ones(11))
    assert (results[0].pruned, results[0].winner.timed[0].ms) == ({}, 1.0)
    assert steps == [4, 6]


@pytest.mark.triton
@pytest.mark.parametrize("values", ["normal", "equal"])
def test_flash_attention_in_the_interpreter(values, monkeypatch):
    """Plain calls, and calls under jit and grad, get the blocks of the fake timer's choice, and the right results.

    Where all values are equal, the gradients of query and key are 0, up to roundings, which differ between candidates.
    """
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    monkeypatch.setattr(session, "device_info", lambda: device_info("cpu"))
    few = lambda blocks, call: tuple(dataclasses.replace(blocks, num_warps=warps) for warps in (4, 2))
    monkeypatch.setattr("jax_kernels.ops.attention.implementations.attention_candidates", few)

    def read(program, calls):
        if program.implementation == "xla":
            return 20.0
        forward, backward = program.config.forward, program.config.backward
        return forward.num_warps + (backward.num_warps if program.direction == "gradients" else 0)

    monkeypatch.setattr(timers, "choose", lambda: timers.Timer(name="fake", read=read))
    query = jax.random.normal(jax.random.key(0), (1, 16, 2, 16))
    value = query if values == "normal" else jnp.broadcast_to(query[:, :1], query.shape)
    call = lambda x, **more: jax_kernels.flash_attention(x, x, value, is_causal=True, **more)
    want = call(query)
    with warnings.catch_warnings(), tune() as results:
        warnings.simplefilter("error")
        got = call(query)
    assert [(x.winner.fastest, x.failed) for x in results] == [("triton", {})]
    plan = explain(jax_kernels.flash_attention, query, query, value, is_causal=True)
    assert (plan.implementation, plan.config.forward.num_warps, plan.config.backward.num_warps) == ("triton", 2, 2)
    assert (plan.tuned.ms, plan.tuned.untuned, plan.tuned.untuned_ms) == (4.0, "xla", 20.0)
    assert jnp.allclose(got, want, atol=1e-5)
    assert jnp.allclose(
        jax.grad(lambda x: call(x).sum())(query),
        jax.grad(lambda x: call(x, implementation="xla").sum())(query),
        atol=1e-4,
    )


def test_layer_norm_with_a_scale_of_ones(monkeypatch):
    """For cotangents of 1, its gradient of x is 0, up to roundings."""
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")
    monkeypatch.setattr(session, "device_info", lambda: device_info("cpu"))
    monkeypatch.setattr(timers, "choose", lambda: timers.Timer(name="fake", read=lambda program, calls: 1.0))
    x = jax.random.normal(jax.random.key(0), (8, 1000), jnp.bfloat16)
    with tune() as results:
        jax_kernels.layer_norm(x, jnp.ones(1000), jnp.zeros(1000))
    assert (len(results), results[0].failed) == (1, {})


def test_lengths_of_traced_calls(monkeypatch):
    """Integers that count keys become the full length; the pages of a cache have to be known."""
    monkeypatch.setattr(session, "device_info", lambda: device_info("cpu"))
    found = []
    monkeypatch.setattr(session._Session, "_measure", lambda self, tunable: found.append(tunable.inputs))
    query, cache = jnp.ones((2, 1, 4, 16)), jnp.ones((2, 32, 4, 16))
    lengths, eight_bits = jnp.ones(2, jnp.int32), cache.astype(jnp.float8_e4m3fn)
    with tune() as results:
        jax.jit(lambda n: jax_kernels.flash_attention(cache, cache, cache, kv_lengths=n))(lengths)
        jax.jit(lambda n: jax_kernels.decode_attention(query, cache, cache, kv_lengths=n))(lengths)
        jax.jit(lambda n: jax_kernels.flash_attention_fp8(*[eight_bits] * 3, kv_lengths=n))(lengths)
        tables = jnp.zeros((2, 1), jnp.int32)
        pages = lambda tables: jax_kernels.decode_attention(
            query, cache, cache, kv_lengths=lengths, block_tables=tables
        )
        jax.jit(pages)(tables)
    attention, decoding, fp8 = found
    assert attention.kv_lengths.tolist() == decoding.kv_lengths.tolist() == fp8[-1].tolist() == [32, 32]
    assert [result.reason for result in results] == ["block_tables: got a traced array, want a known one"]
