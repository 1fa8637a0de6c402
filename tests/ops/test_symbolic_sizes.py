"""jax.export with symbolic sizes: "xla" supports them, and a named kernel raises an error with advice."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_kernels as jk
from jax_kernels import dispatch, masks
from jax_kernels.testing import rms_error
from tests.support.cases import tiers

B = 3


def attend(q, **options):
    return jk.flash_attention(q, q, q, is_causal=True, **options)


def dilated(q, **options):
    return jk.dilated_attention(q, q, q, segment_lengths=(4, 16), dilation_rates=(1, 2), **options)


def masked(q, **options):
    return jk.flash_attention(q, q, q, mask=masks.causal() & masks.dilated(2), **options)


def ring(q, axis_name="sequence", **options):
    """ring_attention of a mesh of one device: JAX 0.11 crashes in a jax.shard_map over several for a symbolic size."""
    mesh, tokens = jax.make_mesh((1,), ("sequence",), (jax.sharding.AxisType.Auto,)), jax.P(None, "sequence")
    attend = lambda q: jk.ring_attention(q, q, q, axis_name=axis_name, is_causal=True, **options)
    return jax.shard_map(attend, mesh=mesh, in_specs=tokens, out_specs=tokens)(q)


# The op, the shapes of its arrays with "b" for the symbolic size, and the dimension that the error names.
CASES = {
    "flash": (attend, ["b, 16, 2, 8"], "batch"),
    "flash_length": (attend, ["2, b, 2, 8"], "q_length"),
    "mask": (masked, ["b, 16, 2, 8"], "batch"),
    "decode": (lambda q, k, **o: jk.decode_attention(q, k, k, **o), ["b, 1, 2, 8", "b, 16, 2, 8"], "batch"),
    "dilated": (dilated, ["b, 16, 2, 8"], "batch"),
    "ring": (ring, ["b, 16, 2, 8"], "batch"),
    "matmul": (functools.partial(jk.matmul, activation="gelu"), ["b, 32", "32, 16"], "m"),
    "gated": (lambda x, w, **o: jk.gated_matmul(x, w, w, **o), ["b, 32", "32, 16"], "m"),
    "grouped gated": (
        lambda x, w, **o: jk.grouped_gated_matmul(x, w[None], w[None], jnp.ones(1, int), **o),
        ["b, 32", "32, 16"],
        "m",
    ),
    "grouped": (lambda x, w, **o: jk.grouped_matmul(x, w[None], jnp.ones(1, int), **o), ["b, 32", "32, 16"], "m"),
    "mlp": (lambda x, w, **o: jk.mlp(x, w, w.T, **o), ["b, 32", "32, 16"], "m"),
    "loss": (lambda x, w, **o: jk.linear_cross_entropy(x, w, jnp.argmax(x, -1), **o), ["b, 32", "32, 32"], "tokens"),
    "mean_loss": (
        lambda x, w, **o: jk.linear_cross_entropy(x, w, jnp.argmax(x, -1), reduction="mean", **o),
        ["b, 32", "32, 32"],
        "tokens",
    ),
    "rms_norm": (jk.rms_norm, ["b, 4, 32", "32"], "rows"),
    "layer_norm": (jk.layer_norm, ["b, 32", "32"], "rows"),
}


KERNELS = [(name, kernel) for name in CASES if "loss" not in name for kernel in ("mosaic_gpu", "triton")]


def structs(shapes):
    scope = jax.export.SymbolicScope()
    shape = lambda text: jax.export.symbolic_shape(text, scope=scope)
    return [jax.ShapeDtypeStruct(shape(text), jnp.float32) for text in shapes]


@pytest.mark.parametrize("name", tiers.cases(CASES, ["flash", "dilated", "matmul", "rms_norm"]))
def test_xla_serves_symbolic_sizes(name):
    """Planned for a GPU, forward and gradients. One program serves all sizes."""
    op, shapes, _ = CASES[name]

    def run(*arrays):
        total = lambda *arrays: (op(*arrays) ** 2).sum()
        return op(*arrays), jax.grad(total, argnums=tuple(range(len(arrays))))(*arrays)

    if name == "decode":  # it has no gradient
        run = op
    with dispatch.on_device("h200"):
        program = jax.export.export(jax.jit(run))(*structs(shapes))
    for size in (1, B):
        random = np.random.default_rng(size)
        known = [[size if x == "b" else int(x) for x in text.split(", ")] for text in shapes]
        arrays = [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in known]
        for got, want in zip(*map(jax.tree.leaves, (program.call(*arrays), run(*arrays))), strict=True):
            assert rms_error(got, want) < 1e-6


def attend_with(*names, **options):
    """flash_attention whose arrays from the fourth on have these names."""
    return lambda q, k, v, *arrays: jk.flash_attention(q, k, v, **dict(zip(names, arrays, strict=True)), **options)


def decode_with_mask(q, k, v, mask, bias):
    return jk.decode_attention(q, k, v, mask=mask, bias=bias)


def attend_to_largest(q, k, v, bias, **options):
    return jk.flash_attention(q, k, v, mask=masks.top_k(bias, 3, **options))


QKV = ["float32 b, t, 4, 8", "float32 b, s, 2, 8", "float32 b, s, 2, 8"]
SELF = ["float32 b, t, 4, 8", "float32 b, t, 2, 8", "float32 b, t, 2, 8"]

# The op, and the dtypes and shapes of its arrays.
WITH_ARRAYS = {
    "segments": (attend_with("segment_ids"), [*SELF, "int32 b, t"]),
    "segment_pair": (
        lambda q, k, v, *ids: jk.flash_attention(q, k, v, segment_ids=ids),
        [*QKV, "int32 b, t", "int32 b, s"],
    ),
    "mask": (attend_with("mask"), [*QKV, "bool b, 1, t, s"]),
    "bias": (attend_with("bias"), [*QKV, "float32 1, 4, t, s"]),
    "all": (
        attend_with("bias", "mask", "segment_ids", is_causal=True, softcap=5.0),
        [*SELF, "float32 b, 1, t, t", "bool 1, 4, t, t", "int32 b, t"],
    ),
    "dynamic_mask": (jk.dynamic_mask_attention, [*QKV, "bool b, 4, t, s", "float32 b, 4, t, s"]),
    "dynamic_mask_of_key_heads": (jk.dynamic_mask_attention, [*QKV, "bool b, 2, t, s", "float32 b, 2, t, s"]),
    "decode": (decode_with_mask, ["float32 b, 2, 4, 8", *QKV[1:], "bool b, 1, 1, s", "float32 1, 4, 1, s"]),
}

FIXED = ["float32 b, 7, 4, 8", "float32 b, 9, 2, 8", "float32 b, 9, 2, 8"]
AMONG = {"among": masks.causal(), "q_length": 7}
WITH_ARRAYS |= {
    "top_k": (attend_to_largest, [*QKV, "float32 b, 4, t, s"]),
    "top_k_of_rows": (attend_to_largest, [*FIXED, "float32 b, 4, 7, 9"]),
    "top_k_among": (functools.partial(attend_to_largest, **AMONG), [*FIXED, "float32 b, 4, 1, 9"]),
    "top_k_among_shared": (functools.partial(attend_to_largest, **AMONG), [*FIXED, "float32 1, 4, 1, 9"]),
    "top_k_among_lengths": (
        lambda *arrays: attend_to_largest(*arrays[:4], among=masks.prefix(arrays[4]), q_length=7),
        [*FIXED, "float32 1, 4, 1, 9", "int32 b"],
    ),
}


def drawn(texts, sizes):
    """Random arrays with the dtypes and shapes of the texts. sizes: the values of the symbols."""
    random, arrays = np.random.default_rng(0), []
    for dtype, _, text in (text.partition(" ") for text in texts):
        shape = [sizes.get(x) or int(x) for x in text.split(", ")]
        x = random.standard_normal(shape) if dtype == "float32" else random.integers(0, 3, shape)
        arrays.append(jnp.asarray(x, dtype))
    return arrays


@pytest.mark.parametrize(
    "name", tiers.cases(WITH_ARRAYS, ["all", "dynamic_mask_of_key_heads", "decode", "top_k_among"])
)
def test_symbolic_bias_and_segments(name):
    """Forward and gradients, for a batch and lengths of 1 and for larger sizes."""
    op, texts = WITH_ARRAYS[name]
    floats = tuple(i for i, text in enumerate(texts) if text.startswith("float32"))

    def run(*arrays):
        gradients = jax.grad(lambda *arrays: (op(*arrays) ** 2).sum(), argnums=floats)
        return op(*arrays), *(() if name == "decode" else gradients(*arrays))  # decode has none

    dtypes, shapes = zip(*(text.split(" ", 1) for text in texts), strict=True)
    given = [jax.ShapeDtypeStruct(x.shape, dtype) for x, dtype in zip(structs(shapes), dtypes, strict=True)]
    program = jax.export.export(jax.jit(run))(*given)
    for sizes in ({"b": 1, "t": 1, "s": 1}, {"b": B, "t": 7, "s": 9}):
        arrays = drawn(texts, sizes)
        for got, want in zip(program.call(*arrays), jax.jit(run)(*arrays), strict=True):
            assert rms_error(got, want) < 1e-6


@pytest.mark.parametrize(("name", "implementation"), KERNELS)
def test_named_kernel_error_names_the_fix(name, implementation):
    op, shapes, field = CASES[name]
    lower = jax.export.export(jax.jit(functools.partial(op, implementation=implementation)), platforms=["cuda"])
    said = f"implementation='{implementation}' cannot serve this .*: {field}: got the symbolic size .*b, want an int"
    with dispatch.on_device("h200"), pytest.raises(NotImplementedError, match=said) as error:
        lower(*structs(shapes))
    assert str(error.value).endswith("export with fixed sizes, or with implementation='xla'")


def test_explain_shows_why():
    with dispatch.on_device("h200"):
        plan = jk.explain(jk.flash_attention, *structs(["b, 16, 2, 64"] * 3))
    assert plan.implementation == "xla"
    assert [name for name, _ in plan.passed_over] == ["mosaic_gpu", "triton", "cudnn"]
    assert all(reason.startswith("batch: got the symbolic size b") for _, reason in plan.passed_over)


TWO = jax.sharding.AbstractMesh((2,), ("sequence",), (jax.sharding.AxisType.Auto,))
NOT_SYMBOLIC = {
    "dilated_length": (dilated, "2, b, 2, 8", "query: got the symbolic length b, want an int: segments depend on it"),
    "dilated_heads": (dilated, "2, 16, b, 8", "query: got the symbolic number of heads b, want an int: each head has"),
    "ring_length": (ring, "2, b, 2, 8", "query: got the symbolic length b, want an int: the layout depends on it"),
    "ring_heads": (ring, "2, 16, b, 8", "query: got the symbolic number of heads b, want an int: the strategy depends"),
    "shard_length": (
        lambda x: jk.shard_sequence(x, TWO, "sequence"),
        "2, 4*b",
        "x: got the symbolic length 4\\*b, want an int: the order depends on it",
    ),
}


@pytest.mark.parametrize("name", NOT_SYMBOLIC)
def test_sizes_that_must_be_known(name):
    op, shape, said = NOT_SYMBOLIC[name]
    with pytest.raises(ValueError, match=said):
        jax.export.export(jax.jit(op))(*structs([shape]))


TOP_K = {
    "queries": ("2, 4, b, 9", None, "q_length"),
    "keys": ("2, 4, 7, b", None, "kv_length"),
    "row": ("2, 4, 1, b", 7, "kv_length"),
}


@pytest.mark.parametrize("name", TOP_K)
def test_top_k_among_needs_known_lengths(name):
    shape, q_length, argument = TOP_K[name]
    lower = jax.export.export(jax.jit(lambda x: masks.top_k(x, 3, among=masks.causal(), q_length=q_length).array))
    with pytest.raises(TypeError, match=f"{argument}: got b, want an int of at least 0 that is known when tracing"):
        lower(*structs([shape]))
