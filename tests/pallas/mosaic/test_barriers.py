"""Barriers in assembly: the compiler may neither drop nor move them. Nothing runs, and no GPU is needed."""

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir.dialects import llvm

from jax_kernels import flash_attention, layer_norm
from tests.tools import compile_case


def attend(query, key):
    return flash_attention(query, key, key, is_causal=True, implementation="mosaic_gpu")


def norm(x):
    return layer_norm(x, implementation="mosaic_gpu")


@pytest.mark.compile
@pytest.mark.parametrize(
    ("function", "shapes"),
    [(attend, [(1, 4096, 2, 128)] * 2), (norm, [(64, 5120)])],
    ids=["named", "of a group"],
)
def test_barriers_have_side_effects(function, shapes, monkeypatch):
    own, seen = llvm.inline_asm, []

    def inline_asm(*given, **options):
        seen.append((str(given[2]), options))
        return own(*given, **options)

    monkeypatch.setattr(llvm, "inline_asm", inline_asm)
    compile_case.lower("h200", function, *[jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes])
    barriers = [options for text, options in seen if text.startswith(("bar.", "barrier."))]
    assert barriers
    assert all(options["has_side_effects"] for options in barriers)
