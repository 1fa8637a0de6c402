"""The library in a JAX that lacks Pallas-Triton: imports, plans, results on a CPU, and the programs of a Hopper GPU."""

import importlib
import pkgutil
import sys
from collections.abc import Collection

from tests.support.processes import python, without_triton  # first: it may block Pallas-Triton

# isort: split
import jax
import jax.numpy as jnp
import pytest

import jax_kernels
from jax_kernels import masks
from jax_kernels.cli import check
from jax_kernels.cli.ops import OPS
from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.pallas.triton import backend

REASON = "this JAX has no Pallas-Triton"


def imports() -> None:
    """Imports every module of the library."""
    assert not backend.AVAILABLE
    names = [module.name for module in pkgutil.walk_packages(jax_kernels.__path__, "jax_kernels.")]
    assert {"jax_kernels.bridge.nn", "jax_kernels.pallas.attention.triton.forward"} <= set(names)
    for name in names:
        importlib.import_module(name)


def plans() -> None:
    """Each op passes over "triton" with the reason, and refuses it by name."""
    passed_over = 0
    for name, op in OPS.items():
        if "triton" not in op.implementations:
            continue
        for device in ("a100", "h200"):
            with on_device(device):
                plan = op.plan("bfloat16", None)
                with pytest.raises(NotImplementedError, match=REASON):
                    op.plan("bfloat16", "triton")
            tried = plan.order[: plan.order.index(plan.implementation)]
            # Later implementations have reasons only if none of them serves the call.
            is_passed_over = "triton" in tried or plan.why.startswith("no other implementation")
            assert plan.passed_over.count(("triton", REASON)) == is_passed_over, (name, plan)
            passed_over += tried.count("triton")
    assert passed_over >= 7  # attention and norms on an A100


def results() -> None:
    """Each op has the results and gradients of its first quick case, by "xla" on this CPU."""
    for op in check.SUITES:
        name = check.QUICK[op][0]
        result = check.run_case(op, name, check.SUITES[op].cases[name], "xla")
        assert result.passed, result
        assert result.errors or result.skipped, result


def spec(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def gradients(op, **options):
    """A function of arrays to (the op's result, the gradients of all arrays)."""

    def run(*arrays):
        out, vjp = jax.vjp(lambda *arrays: op(*arrays, **options), *arrays)
        return out, vjp(jnp.ones_like(out))

    return run


QUERY, KEY = spec(2, 256, 4, 64), spec(2, 256, 2, 64)
EIGHT_BITS = spec(2, 200, 2, 64, dtype="float8_e4m3fn")


def of_attention(*more: jax.ShapeDtypeStruct, name: str = "", **options):
    """(a Hopper call of flash_attention with gradients, its arrays). more: the array of the argument `name`."""

    def call(query, key, value, *more):
        return jax_kernels.flash_attention(query, key, value, **dict.fromkeys((name,) * len(more), *more), **options)

    return gradients(call), (QUERY, KEY, KEY, *more)


def slopes(query, key, value, slope):
    return jax_kernels.flash_attention(query, key, value, score_mod=lambda s, b, h, q, k: s + slope[h] * (q - k))


def low_bit(x, w):
    return jax_kernels.matmul(x, jax_kernels.quantize(w, "int4"), implementation="mosaic_gpu")


def hopper_calls():
    """By name: (function, its arrays, a kernel of its program), as planned for an H200."""
    return {
        "plain": (*of_attention(), "attention_backward_sm90"),
        "causal": (*of_attention(is_causal=True, window=(64, 0)), "attention_backward_sm90"),
        "deterministic": (*of_attention(deterministic=True), "attention_backward_dq_sm90"),
        "softcap": (*of_attention(softcap=20.0), "attention_backward_sm90"),
        "mask": (*of_attention(mask=masks.causal() | masks.prefix(jnp.array([9, 30]))), "attention_backward_sm90"),
        "dense_mask": (
            lambda mask, *arrays: gradients(jax_kernels.flash_attention, mask=mask)(*arrays),
            (spec(2, 4, 256, 256, dtype="bool"), QUERY, KEY, KEY),
            "attention_backward_sm90",
        ),
        "top_k": (
            *of_attention(mask=masks.top_k(jnp.arange(256.0)[None], 7, among=masks.causal(), q_length=256)),
            "attention_backward_sm90",
        ),
        "bias_of_keys": (*of_attention(spec(2, 4, 1, 256), name="bias"), "attention_backward_sm90"),
        "bias": (*of_attention(spec(1, 4, 256, 256), name="bias"), "attention_backward_sm90"),
        "score_mod": (gradients(slopes), (QUERY, KEY, KEY, spec(4, dtype="float32")), "attention_backward_sm90"),
        "decode": (
            jax_kernels.decode_attention,
            (spec(2, 1, 4, 64), spec(2, 8192, 2, 64), spec(2, 8192, 2, 64)),
            "attention_decode_sm90",
        ),
        "fp8": (jax_kernels.flash_attention_fp8, (EIGHT_BITS,) * 3, "attention_forward_fp8_sm90"),
        "dilated": (
            gradients(jax_kernels.dilated_attention, segment_lengths=(64, 200), dilation_rates=(1, 3)),
            (QUERY, KEY, KEY),
            "attention_backward_sm90",
        ),
        **{
            f"fp8_matmul_{scaling}": (
                gradients(jax_kernels.matmul, precision="fp8", scaling=scaling, implementation="mosaic_gpu"),
                (spec(256, 512), spec(512, 384)),
                "matmul_sm90",
            )
            for scaling in ("tensor", "row", "block")
        },
        "low_bit": (low_bit, (spec(3, 1024), spec(1024, 512)), "matmul_low_bit_sm90"),
        "wide_norm": (gradients(jax_kernels.rms_norm), (spec(256, 16384), spec(16384)), "norm_forward_sm90"),
    }


def programs(names: Collection[str]) -> None:
    """Each call of these names is traced for Hopper kernels, and without another kernel."""
    calls = hopper_calls()
    for name, (function, arrays, kernel) in ((name, calls[name]) for name in names):
        with on_device(device_info("h200")):
            program = str(jax.make_jaxpr(function)(*arrays))
        assert kernel in program, name
        assert "_triton" not in program, name


QUICK = ("plain", "mask", "decode", "fp8", "low_bit", "wide_norm")


@pytest.mark.parametrize("tier", ["quick", pytest.param("slow", marks=pytest.mark.slow)])
def test_without_triton(tier):
    """The script runs in a process of its own: this one may have imported Pallas-Triton."""
    python.done_by(__file__, tier, limit=480, JAX_PLATFORMS="cpu", **{without_triton.VARIABLE: "1"})


if __name__ == "__main__":
    if sys.argv[1] == "quick":
        imports()
        plans()
        results()
        programs(QUICK)
    else:
        programs(hopper_calls().keys() - set(QUICK))
