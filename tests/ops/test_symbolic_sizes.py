"""jax.export with symbolic sizes: "xla" serves them, and a named kernel raises an error that says what to do."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import tiers

import jax_kernels as jk
from jax_kernels import dispatch, masks
from jax_kernels.testing import rms_error

B = 3


def attend(q, **options):
    return jk.flash_attention(q, q, q, is_causal=True, **options)


def dilated(q, **options):
    return jk.dilated_attention(q, q, q, segment_lengths=(4, 16), dilation_rates=(1, 2), **options)


def masked(q, **options):
    return jk.flash_attention(q, q, q, mask=masks.causal() & masks.dilated(2), **options)


# The op, the shapes of its arrays with "b" for the symbolic size, and the field that the error names.
CASES = {
    "flash": (attend, ["b, 16, 2, 8"], "batch"),
    "flash_length": (attend, ["2, b, 2, 8"], "q_length"),
    "mask": (masked, ["b, 16, 2, 8"], "batch"),
    "decode": (lambda q, k, **o: jk.decode_attention(q, k, k, **o), ["b, 1, 2, 8", "b, 16, 2, 8"], "batch"),
    "dilated": (dilated, ["b, 16, 2, 8"], "batch"),
    "matmul": (functools.partial(jk.matmul, activation="gelu"), ["b, 32", "32, 16"], "m"),
    "gated": (lambda x, w, **o: jk.gated_matmul(x, w, w, **o), ["b, 32", "32, 16"], "m"),
    "mlp": (lambda x, w, **o: jk.mlp(x, w, w.T, **o), ["b, 32", "32, 16"], "m"),
    "rms_norm": (jk.rms_norm, ["b, 4, 32", "32"], "rows"),
    "layer_norm": (jk.layer_norm, ["b, 32", "32"], "rows"),
}


def structs(shapes):
    scope = jax.export.SymbolicScope()
    shape = lambda text: jax.export.symbolic_shape(text, scope=scope)
    return [jax.ShapeDtypeStruct(shape(text), jnp.float32) for text in shapes]


@pytest.mark.parametrize("name", tiers.cases(CASES, ["flash", "dilated", "matmul", "rms_norm"]))
def test_without_a_name_xla_serves_them(name):
    """Planned for a GPU, forward and gradients, for all sizes of one program."""
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


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_a_named_kernel_says_what_to_do(name, implementation):
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


def test_the_segments_of_dilated_attention_hang_on_the_length():
    with pytest.raises(ValueError, match="query: got the symbolic length b, want an int, which tells the segments"):
        jax.export.export(jax.jit(dilated))(*structs(["2, b, 2, 8"]))
