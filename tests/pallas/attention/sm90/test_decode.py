"""Decoding on Hopper: its kernel in the Mosaic interpreter; and the block specs of decoding, compiled without a GPU.

As a script it compiles one call: `python tests/pallas/attention/sm90/test_decode.py GPU '{"head_dim": 128, ...}'`.
"""

import json
import sys

import pytest

from tests.support.cases import tiers
from tests.support.interpreters import kernels as cases_interpreter
from tests.tools import compile_case

# Cores, whether to detect races, and cases.
INTERPRETED = {
    "one_core": (1, True, ["plain", "short", "multi_query_two_tiles", "pages_16", "head_dim_256"]),
    "splits": (
        3,
        False,
        ["dead", "everything", "pages_128", "long_pages_128"],
    ),
    "more_splits": (3, False, ["no_lengths", "head_dim_128", "pages_32_everything"]),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", tiers.cases(INTERPRETED, {"splits"}))
def test_interpreted(group):
    cases_interpreter.check("jax_kernels.testing.decode_attention", *INTERPRETED[group])


MASKED = {
    "one_core": (1, True, ["one query: strided", "one query: none"]),
    "splits": (3, False, ["two tiles: shared", "long pages: shared", "window: keys"]),
    "more": (1, True, ["pages: keys"]),
    "more_splits": (3, False, ["grouped: keys"]),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("group", tiers.cases(MASKED, {"one_core"}))
def test_dead_blocks_are_not_read(group):
    cases_interpreter.check("tests.support.cases.decode_masks", *MASKED[group])


EVERYTHING = {"window": 1000, "softcap": 30.0, "sinks": True, "q_length": 4}
PAGES = {"page_size": 16}
COMPILED = {
    "h200_64": ("h200", {"head_dim": 64}),
    "h200_128": ("h200", {"head_dim": 128, "batch": 64}),
    "h200_64_20_rows": ("h200", {"head_dim": 64, "q_length": 5}),  # no multiple of a copy's size
    "h200_192_pages": ("h200", {"head_dim": 192} | PAGES),
    "h200_256": ("h200", {"head_dim": 256} | EVERYTHING | PAGES),
    "a100_128_pages": ("a100", {"head_dim": 128, "implementation": "triton"} | EVERYTHING | PAGES),
    "h200_128_mask": ("h200", {"head_dim": 128, "mask": (2, 1, 1)} | PAGES),
    "h200_64_mask": ("h200", {"head_dim": 64, "mask": (1, 1, 1)} | EVERYTHING),
    "h200_256_mask": ("h200", {"head_dim": 256, "mask": (2, 1, 1)} | EVERYTHING | PAGES),
    "a100_128_mask": ("a100", {"head_dim": 128, "implementation": "triton", "mask": (2, 1, 1)} | PAGES),
    "a6000_128_mask": ("a6000", {"head_dim": 128, "implementation": "triton", "mask": (2, 32, 4), "q_length": 4}),
    "a6000_64": ("a6000", {"head_dim": 64, "implementation": "triton"}),
    "a6000_256": ("a6000", {"head_dim": 256, "implementation": "triton"}),
}


def _compile(gpu: str, options: dict) -> list[str]:
    """Compiles in this process. Returns the names of the Triton kernels."""
    import jax
    import jax.numpy as jnp

    from jax_kernels import decode_attention

    batch, q_length, head_dim = options.pop("batch", 2), options.pop("q_length", 1), options.pop("head_dim")
    implementation, page_size = options.pop("implementation", "mosaic_gpu"), options.pop("page_size", None)
    heads, kv_heads, capacity = 32, 8, 16384
    array = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    arrays = {"query": array(batch, q_length, heads, head_dim), "kv_lengths": array(batch, dtype="int32")}
    if page_size is None:
        cache = array(batch, capacity, kv_heads, head_dim)
    else:
        cache = array(batch * capacity // page_size, page_size, kv_heads, head_dim)
        arrays["block_tables"] = array(batch, capacity // page_size, dtype="int32")
    if leading := options.pop("mask", None):
        arrays["mask"] = array(*leading, capacity, dtype="bool")
    if options.pop("sinks", False):
        arrays["sinks"] = array(heads, dtype="float32")
    call = lambda arrays: decode_attention(**arrays, **options, implementation=implementation)
    return compile_case.lower_and_compile(gpu, call, arrays | {"key": cache, "value": cache})[1]


@pytest.mark.compile
@pytest.mark.timeout(compile_case.TIMEOUT + 30)
@pytest.mark.parametrize(
    "case",
    tiers.cases(COMPILED, {"h200_128_mask", "h200_256", "a100_128_mask", "a6000_64"}),
)
def test_compiles(case):
    gpu, options = COMPILED[case]
    _, mosaic, others = compile_case.compile_script(__file__, gpu, json.dumps(options))
    is_mosaic = options.get("implementation") != "triton"
    kernels = {name: figures for name, figures in (mosaic | others).items() if name.startswith("attention_decode")}
    # Only the full grid of the largest batch is not split.
    assert len(kernels) == (1 if options.get("batch") == 64 else 2), list(kernels)
    assert any(name.startswith("attention_decode_sm90") for name in kernels) is is_mosaic
    for name, figures in kernels.items():
        assert (figures["spill_stores"], figures["spill_loads"], figures["notes"]) == (0, 0, []), (name, figures)


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], json.loads(sys.argv[2]))))
