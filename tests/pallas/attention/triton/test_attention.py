"""The Triton attention kernels, interpreted on the CPU, against the textbook formula in float64."""

import dataclasses
import functools
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_kernels import masks
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.ops.attention.flash_attention import flash_attention
from jax_kernels.pallas.attention import block_ranges
from jax_kernels.pallas.attention.triton.bias_gradient import bias_gradient
from jax_kernels.pallas.attention.triton.common import block_loop
from jax_kernels.pallas.block_specs.specs import AttentionBackwardTriton
from jax_kernels.reference import attention as reference
from jax_kernels.reference import chunked_attention
from jax_kernels.testing import (
    ATTENTION_CASES,
    AttentionCase,
    attention_inputs,
    rms_error,
    run_attention,
    tolerance_of,
)
from tests.support.cases import ids, tiers
from tests.support.oracles import attention as attention_oracle

pytestmark = pytest.mark.timeout(120)
# Compiling the interpreted kernels dominates the time. Unoptimised code compiles in half of it.
jit = functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
RESULTS = ("out", "lse", "dquery", "dkey", "dvalue")


@pytest.fixture(autouse=True)
def _interpret(monkeypatch):
    monkeypatch.setenv("JAX_KERNELS_INTERPRET", "1")


@dataclasses.dataclass(frozen=True)
class Case:
    q_length: int = 70
    kv_length: int = 50
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 0  # 0: same as head_dim
    dtype: str = "float32"
    is_causal: bool = False
    q_offset: int | tuple[int, ...] = 0
    kv_lengths: tuple[int, ...] | None = None
    precision: str | None = None
    batch: int = 2

    def __str__(self):
        """The shapes, and the other fields that differ from their defaults."""
        others = ("dtype", "is_causal", "q_offset", "kv_lengths", "precision")
        changed = (f for f in dataclasses.fields(self) if f.name in others and getattr(self, f.name) != f.default)
        texts = (f"{field.name}={getattr(self, field.name)}".replace(" ", "") for field in changed)
        return "-".join([ids.attention_shape(self), *texts])

    def arrays(self):
        """query, key, value, and the cotangents of out and lse."""
        random = np.random.default_rng(7)
        v_head_dim = self.v_head_dim or self.head_dim
        shapes = (
            (self.batch, self.q_length, self.heads, self.head_dim),
            (self.batch, self.kv_length, self.kv_heads, self.head_dim),
            (self.batch, self.kv_length, self.kv_heads, v_head_dim),
            (self.batch, self.q_length, self.heads, v_head_dim),
        )
        arrays = [jnp.asarray(random.standard_normal(shape), self.dtype) for shape in shapes]
        return (*arrays, jnp.asarray(random.standard_normal(shapes[0][:1] + shapes[0][2:0:-1]), jnp.float32))

    @property
    def limits(self):
        """kv_lengths and q_offset, as arrays unless they are None or an int."""
        lengths = None if self.kv_lengths is None else jnp.asarray(self.kv_lengths, jnp.int32)
        return lengths, self.q_offset if isinstance(self.q_offset, int) else jnp.asarray(self.q_offset, jnp.int32)

    def call(self, query, key, value):
        """The call as (inputs, options) of the reference."""
        lengths, offset = self.limits
        static = isinstance(self.q_offset, int)
        inputs = AttentionInputs(query, key, value, kv_lengths=lengths, q_offset=None if static else offset)
        scale = 1 / math.sqrt(self.head_dim)
        return inputs, AttentionOptions(scale, is_causal=self.is_causal, q_offset=offset if static else None)


@jit
def kernels(case: Case, query, key, value, dout, dlse):
    """RESULTS of the Triton kernels."""
    kv_lengths, q_offset = case.limits
    attend = lambda *qkv: flash_attention(
        *qkv,
        is_causal=case.is_causal,
        q_offset=q_offset,
        kv_lengths=kv_lengths,
        precision=case.precision,
        return_lse=True,
        implementation="triton",
    )
    results, vjp = jax.vjp(attend, query, key, value)
    return *results, *vjp((dout, dlse))


def oracle(case: Case, *arrays):
    """RESULTS in float64, by the oracle."""
    given = dataclasses.asdict(case) | {"v_head_dim": case.v_head_dim or case.head_dim}
    return attention_oracle.attention(AttentionCase("", **given), *arrays)[: len(RESULTS)]


@jit
def plain(case: Case, query, key, value, dout, dlse):
    """RESULTS of the plain formula in the inputs' dtype: float32 sums, with matmul operands rounded to the dtype."""
    dtype, group = query.dtype, case.heads // case.kv_heads
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    spread = lambda x: jnp.repeat(x, group, axis=2)
    gather = lambda x: x.reshape(*x.shape[:2], case.kv_heads, group, -1).sum(axis=3).astype(dtype)
    inputs, options = case.call(query, key, value)
    keep = reference.live(inputs, options)
    scale = 1 / math.sqrt(case.head_dim)
    scores = jnp.where(keep, product("bthd,bshd->bhts", query, spread(key)) * scale, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.where(keep, jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0, lse)[..., None]), 0)
    out = product("bhts,bshd->bthd", p.astype(dtype), spread(value)).astype(dtype)
    delta = jnp.einsum("bthd,bthd->bht", out.astype(jnp.float32), dout.astype(jnp.float32)) - dlse
    ds = (p * (product("bthd,bshd->bhts", dout, spread(value)) - delta[..., None])).astype(dtype)
    dquery = (product("bhts,bshd->bthd", ds, spread(key)) * scale).astype(dtype)
    dkey = gather(product("bhts,bthd->bshd", ds, query) * scale)
    dvalue = gather(product("bhts,bthd->bshd", p.astype(dtype), dout))
    return out, lse, dquery, dkey, dvalue


def error(got, wanted) -> float:
    """The root mean square error. Infinite if there is a NaN, or an infinity that only one array has."""
    got = np.asarray(got, np.float64)
    difference = np.where(got == wanted, 0.0, got - np.where(np.isinf(wanted), np.nan, wanted))
    return float(np.nan_to_num(np.sqrt(np.mean(difference**2)), nan=np.inf))


def check(case: Case) -> None:
    arrays = case.arrays()
    wanted = oracle(case, *arrays)
    got = kernels(case, *arrays)
    same_dtype = wanted if case.dtype == "float32" else plain(case, *arrays)
    for name, x, y, z in zip(RESULTS, got, wanted, same_dtype, strict=True):
        assert x.shape == y.shape, name
        assert x.dtype == (jnp.float32 if name == "lse" else jnp.dtype(case.dtype)), name
        size = float(np.sqrt(np.mean(np.where(np.isinf(y), 0, y) ** 2)))
        if case.dtype == "float32" or name == "lse":
            limit = 1e-5 * size
        else:
            # Rounding to the dtype has an error of up to half an eps of each value. Its root mean square over few
            # values is at least a quarter of an eps, so no lower limit is possible.
            limit = max(1.1 * error(z, y), 0.25 * float(jnp.finfo(case.dtype).eps) * size)
        assert error(x, y) <= limit, (name, error(x, y), limit)


CASES = [
    Case(),
    Case(is_causal=True),
    Case(q_length=129, kv_length=129, is_causal=True),
    Case(q_length=1, kv_length=1, heads=1, kv_heads=1, batch=1),
    Case(q_length=1, kv_length=300, is_causal=True, q_offset=200),
    Case(q_length=300, kv_length=1, is_causal=True),
    Case(heads=6, kv_heads=2, is_causal=True),
    Case(heads=3, kv_heads=1),
    Case(head_dim=16, q_length=129, is_causal=True),
    Case(head_dim=40),
    Case(head_dim=96, q_length=129),
    Case(head_dim=128, is_causal=True),
    Case(head_dim=200, heads=1, kv_heads=1, batch=1),
    Case(head_dim=256, heads=1, kv_heads=1, batch=1, is_causal=True),
    Case(head_dim=3, v_head_dim=5),
    Case(head_dim=40, v_head_dim=128, is_causal=True),
    Case(head_dim=96, v_head_dim=16, heads=4, kv_heads=2),
    Case(is_causal=True, q_offset=-20),
    Case(is_causal=True, q_offset=-100),
    Case(is_causal=True, q_offset=33, kv_length=200),
    Case(is_causal=True, q_offset=(-100, 150), q_length=200, kv_length=300),
    Case(kv_lengths=(-4, 33)),
    Case(kv_lengths=(420, 130), kv_length=300, heads=4, kv_heads=2),
    Case(kv_lengths=(0, 130), kv_length=200, is_causal=True, q_offset=(7, 100)),
    Case(precision="tf32", is_causal=True),
    Case(precision="fp32", head_dim=128),
    Case(dtype="bfloat16", q_length=300, kv_length=280),
    Case(dtype="bfloat16", q_length=256, kv_length=256, is_causal=True, heads=4, kv_heads=2),
    Case(dtype="bfloat16", q_length=300, kv_length=280, head_dim=128, is_causal=True, q_offset=(-30, 40)),
    Case(dtype="bfloat16", head_dim=200, v_head_dim=96, kv_lengths=(0, 40)),
    Case(dtype="float16", q_length=300, kv_length=280, is_causal=True),
    Case(dtype="float16", head_dim=128, q_length=256, kv_length=384, kv_lengths=(500, 100), heads=3, kv_heads=1),
    Case(dtype="float16", q_length=1, kv_length=1, heads=1, kv_heads=1, batch=1),
    Case(dtype="bfloat16", head_dim=256, heads=1, kv_heads=1, is_causal=True),
]


QUICK = [CASES[i] for i in (2, 6, 12, 20, 23, 25, 28, 31)]


@pytest.mark.parametrize("case", tiers.cases(CASES, set(map(str, QUICK))))
def test_matches_float64(case):
    check(case)


def is_special(case: AttentionCase) -> bool:
    """Whether a case has a feature that the first test lacks."""
    extra = (case.window, case.softcap, case.segments, case.bias, case.mask, case.pattern)
    return any(x is not None for x in extra) or case.sinks


QUICK_SPECIAL = {
    "window_offsets_lengths", "segments_mixed", "softcap_causal",
    "sinks_fp32", "bias_full", "bias_low", "everything_else", "mask_bias", "pattern_cells_causal",
}  # fmt: skip


@pytest.mark.parametrize("case", tiers.cases([case for case in ATTENTION_CASES if is_special(case)], QUICK_SPECIAL))
def test_features(case):
    arrays = attention_inputs(case)
    want = attention_oracle.attention(case, *arrays)
    bounds, got = tolerance_of(case, arrays, want), run_attention(case, arrays, "triton")
    assert list(got) == list(want._asdict())
    for name, x in got.items():
        assert rms_error(x, getattr(want, name)) <= bounds[name], name


@st.composite
def cases(draw):
    kv_heads = draw(st.sampled_from([1, 2]))
    kv_length = draw(st.integers(1, 200))
    lengths = st.tuples(*[st.integers(0, kv_length)] * 2)
    offset = st.integers(-150, 150)
    return Case(
        q_length=draw(st.integers(1, 200)),
        kv_length=kv_length,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 80)),
        v_head_dim=draw(st.integers(1, 80)),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        is_causal=draw(st.booleans()),
        q_offset=draw(offset | st.tuples(offset, offset)),
        kv_lengths=draw(st.none() | lengths),
    )


@hypothesis.settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(cases())
def test_matches_float64_for_any_shape(case):
    check(case)


def _poison(x, where):
    return jnp.where(where[:, None, None], jnp.nan, x)


def check_that_only_these_are_read(case: AttentionCase, keys):
    """A NaN read from any other key would show in a result, even with weight 0. keys: bool [S]."""
    query, key, value, *cotangents = attention_inputs(case)
    clean = run_attention(case, (query, key, value, *cotangents), "triton")
    poisoned = (query, _poison(key, ~keys), _poison(value, ~keys), *cotangents)
    for name, x in run_attention(case, poisoned, "triton").items():
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(clean[name], np.float32), err_msg=name)
    return {name: np.asarray(clean[name], np.float32) for name in ("dk", "dv")}


# Blocks of 128 keys are dead beyond a border. A length is exact to the key.
UNSEEN = {
    "causal": ({"is_causal": True, "q_offset": 36}, (0, 100), (0, 128)),
    "kv_lengths": ({"kv_lengths": (100, 100)}, (0, 100), (0, 100)),
    "window": ({"window": (40, 30), "q_offset": 200}, (160, 294), (128, 384)),
    "window_left": ({"window": (40, -1), "q_offset": 300}, (260, 400), (256, 400)),
}


@pytest.mark.parametrize("limit", UNSEEN)
def test_unseen_keys_are_not_read(limit):
    shown, seen, read = UNSEEN[limit]
    case = AttentionCase(limit, q_length=64, kv_length=400, **shown)
    keys = np.arange(400)
    for gradient in check_that_only_these_are_read(case, (keys >= read[0]) & (keys < read[1])).values():
        np.testing.assert_array_equal(gradient.any(axis=(0, 2, 3)), (keys >= seen[0]) & (keys < seen[1]))


def test_keys_of_other_segments_are_not_read(monkeypatch):
    """All queries are in segment 1, which is in the middle of the keys: from 170 to 299."""
    keys = np.arange(400)
    kv_ids = np.where(keys < 170, 0, np.where(keys < 300, 1, 2)).astype(np.int32)
    ids = (np.ones((2, 64), np.int32), np.broadcast_to(kv_ids, (2, 400)))
    monkeypatch.setattr(AttentionCase, "_segment_ids", lambda case: ids)
    case = AttentionCase("segments", q_length=64, kv_length=400, segments="packed")
    for gradient in check_that_only_these_are_read(case, (keys >= 128) & (keys < 384)).values():
        np.testing.assert_array_equal(gradient.any(axis=(0, 2, 3)), kv_ids == 1)


def test_key_pass_skips_queries_of_other_segments(monkeypatch):
    """All keys are in segment 1. Blocks of 64 queries below 128 and from 320 on belong to other segments."""
    queries = np.arange(400)
    q_ids = np.where(queries < 170, 0, np.where(queries < 300, 1, 2)).astype(np.int32)
    ids = (np.broadcast_to(q_ids, (2, 400)), np.ones((2, 64), np.int32))
    monkeypatch.setattr(AttentionCase, "_segment_ids", lambda case: ids)
    case = AttentionCase("segments", q_length=400, kv_length=64, segments="packed")
    query, *rest = attention_inputs(case)
    clean, poisoned = (
        run_attention(case, (x, *rest), "triton")
        for x in (query, _poison(query, jnp.asarray((queries < 128) | (queries >= 320))))
    )
    for name in ("dk", "dv"):
        np.testing.assert_array_equal(*(np.asarray(x[name], np.float32) for x in (clean, poisoned)), err_msg=name)


def test_only_partial_blocks_are_masked():
    """A visit has its number, and the block that the range has there."""

    def step(visit, sums, *, partial):
        of_partial, of_full = sums
        term = 100 * visit.block + visit.step
        return (of_partial + term, of_full) if partial else (of_partial, of_full + term)

    for count, partial in ((5, 2), (5, 0), (5, 5), (0, 0)):
        blocks = block_ranges.BlockRange(jnp.int32(count), jnp.int32(partial), lambda index: 7 - index)
        sums = block_loop(blocks, step, (jnp.int32(0), jnp.int32(0)))
        terms = [100 * (7 - i) + i for i in range(count)]
        assert sums == (sum(terms[:partial]), sum(terms[partial:]))


def test_key_pass_skips_queries_without_keys():
    """With q_offset=-128 the first 128 queries see no key and contribute nothing, even if they are NaN."""
    case = Case(q_length=300, kv_length=150, dtype="bfloat16", is_causal=True, q_offset=-128)
    query, key, value, dout, dlse = case.arrays()
    blind = jnp.arange(300) < 128
    clean = kernels(case, query, key, value, dout, dlse)
    out, lse, dquery, *others = kernels(case, _poison(query, blind), key, value, dout, dlse)
    assert not np.any(np.asarray(out[:, :128], np.float32))
    assert np.all(np.isneginf(np.asarray(lse[:, :, :128])))
    assert not np.any(np.asarray(clean[2][:, :128], np.float32))
    for x, y in zip((out, lse, dquery[:, 128:], *others), (*clean[:2], clean[2][:, 128:], *clean[3:]), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def _equations(jaxpr) -> Any:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _trace(case: Case):
    return list(_equations(jax.make_jaxpr(functools.partial(kernels.__wrapped__, case))(*case.arrays()).jaxpr))


@pytest.mark.parametrize(
    ("precision", "wanted"), [("fp32", jax.lax.Precision.HIGHEST), ("tf32", jax.lax.Precision.DEFAULT)]
)
def test_float32_matmuls_have_the_given_precision(precision, wanted):
    """The interpreter's matmuls are exact either way, so this reads the compiler's precision from the program."""
    products = [e for e in _trace(Case(precision=precision)) if e.primitive.name == "dot_general"]
    assert len(products) >= 9  # two in the forward, four and three in the backward
    assert {e.params["precision"] for e in products} == {(wanted, wanted)}


def test_no_array_of_all_pairs():
    case = Case(q_length=2048, kv_length=2048, heads=1, kv_heads=1, batch=1, head_dim=16, is_causal=True)
    sizes = [math.prod(v.aval.shape) for e in _trace(case) for v in e.outvars if hasattr(v.aval, "shape")]
    assert max(sizes) == 2048 * 16


@pytest.mark.parametrize("wanted", [True, False])
def test_bias_gradient_only_on_request(wanted):
    """The gradient takes only memory of its own size: the bias [1, H, 1, S] is never broadcast."""
    case = AttentionCase("", q_length=1024, kv_length=1024, heads=4, kv_heads=4, head_dim=16, bias="hs")
    query, key, value, dout, _ = attention_inputs(case)
    bias = case.arguments["bias"]

    def loss(query, bias):
        out = flash_attention(query, key, value, bias=bias, implementation="triton")
        return (out * dout).sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1) if wanted else 0))(query, bias)
    equations = list(_equations(jaxpr.jaxpr))
    names = [str(e.params["name"]) for e in equations if e.primitive.name == "pallas_call"]
    assert ("attention_backward_dbias_triton" in names) == wanted, names
    sizes = [math.prod(v.aval.shape) for e in equations for v in e.outvars if hasattr(v.aval, "shape")]
    assert max(sizes) < 1024 * 1024


UNDER = {
    "array": jax.random.bernoulli(jax.random.key(4), 0.7, (1, 1, 70, 75)),
    # No head has a live pair in most blocks of 32 x 32 left of the diagonal.
    "dead_blocks": jnp.pad(jnp.ones((2, 2, 20, 75), bool), ((0, 0), (0, 0), (50, 0), (0, 0))),
    "window": masks.sliding_window(5, 2),
    "heads": masks.block_sparse(jax.random.bernoulli(jax.random.key(5), 0.4, (2, 2, 5, 5)), 16) | masks.prefix(3),
    "function": masks.from_function(lambda b, h, q, k: (q + k) % 3 > 0),
}


SHAPES = [(1, 2, 70, 1), (1, 1, 1, 1), (1, 2, 70, 75), (2, 2, 1, 75)]


@pytest.mark.parametrize(
    ("shape", "under"), tiers.some_pairs(SHAPES, UNDER, [(SHAPES[2], under) for under in list(UNDER)[:2]])
)
def test_bias_gradient_with_a_mask(shape, under):
    """The mask has an axis of keys, which the bias may lack."""
    case = AttentionCase("", batch=2, q_length=70, kv_length=75, heads=2, kv_heads=2, head_dim=16, dtype="float32")
    query, key, value, dout, dlse = attention_inputs(case)
    bias = jax.random.normal(jax.random.key(0), shape)
    inputs = AttentionInputs(query, key, value, bias=bias, mask=UNDER[under])
    options, blocks = AttentionOptions(0.25, precision="fp32"), AttentionBackwardTriton(32, 32, 32, 64, 4, 2)
    out, lse, _ = chunked_attention.forward(inputs, options, out_dtype=jnp.float32)
    rows = *reference.row_terms(out, lse, dout, dlse), dout
    got = bias_gradient(inputs, options, *rows, config=blocks, core_count=1, interpret=True)
    assert error(got, chunked_attention.backward(inputs, options, *rows).bias) < 1e-4  # sums of up to 21,000
