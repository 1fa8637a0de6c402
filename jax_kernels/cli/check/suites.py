"""The cases of jax-kernels check: by op, how they run and how they are judged."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Collection
from typing import Any

from jax_kernels.cli.ops import OPS
from jax_kernels.ops.attention.flash_attention import flash_attention
from jax_kernels.ops.attention.implementations import IMPLEMENTATIONS
from jax_kernels.ops.matmul.implementations import IMPLEMENTATIONS as MATMUL_IMPLEMENTATIONS
from jax_kernels.ops.normalization.implementations import IMPLEMENTATIONS as NORM_IMPLEMENTATIONS
from jax_kernels.testing import (
    ATTENTION_CASES,
    GPU_ATTENTION_CASES,
    attention_inputs,
    dilated_attention,
    errors_of_attention,
    masked_attention,
    mlp,
    ring_attention,
    run_attention,
    why_not,
)
from jax_kernels.testing import (
    matmul as testing_matmul,
)
from jax_kernels.testing import (
    normalization as testing_normalization,
)
from jax_kernels.testing.low_precision import fp8_grouped_matmul, fp8_matmul, low_bit_matmul

__all__ = ["QUICK", "SUITES", "Result", "Suite", "run_case"]

# The cases that run without --full, by op.
QUICK = {
    "flash_attention": (
        "full", "causal", "odd_causal", "gqa", "head_dim_128", "offset_negative", "kv_lengths", "fp16", "fp32", "tf32",
        "window", "segments_causal", "softcap", "sinks", "bias_heads",
    ),
    "block_sparse_attention": ("cells", "cells_causal", "global", "cells_fp32"),
    "dynamic_mask_attention": ("mask", "mask_bias", "kv_heads", "kv_heads_fp32"),
    "dilated_attention": ("longnet", "odd", "packed_fp32", "partition_fp16"),
    "ring_attention": ("causal", "packed", "halo", "striped_fp32"),
    "sequence_parallel_dilated_attention": ("longnet", "packed_fp32", "hilbert"),
    "matmul": ("plain", "odd", "one_more", "float32", "tf32", "wide_out", "transposed", "residual", "tiles_epilogue"),
    "gated_matmul": ("gated", "gated_odd", "gated_tf32", "tiles_gated"),
    "mlp": ("plain", "biases", "gated", "tf32", "tiles_gated"),
    "layer_norm": ("plain", "odd", "residual", "no_weights", "float32", "far_mean", "wide", "tiles_one_warpgroup"),
    "rms_norm": ("rms", "rms_residual", "rms_offset", "rms_no_scale", "rms_wide", "tiles_rms_one_warpgroup"),
    "fp8_matmul": ("odd_tensor", "transposed_row", "bfloat16_out_block", "tiles_row"),
    "fp8_grouped_matmul": fp8_grouped_matmul.QUICK,
    "low_bit_matmul": ("int8_plain", "int4_gated", "mxfp8_transposed", "mxfp4_wide_out", "tiles_int4"),
    "fp8_norm": ("plain", "odd", "residual", "rms_offset", "rms_wide"),
}  # fmt: skip

Errors = dict[str, tuple[float, float]]
ROOT_MEAN_SQUARE = "root mean square error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """The cases of an op, and the functions that run and judge them.

    implementations: the names of all implementations. cases: by name. gpu_cases: further cases, only for a GPU.
    why_not(case, implementation): None if it can run here, else the reason. run(case, implementation): the results by
    name. judge(case, results): (error, bound) of each result, by name; the default is for a `run` that returns these.
    error: the name of this kind of error, for a table.
    """

    implementations: Collection[str]
    cases: dict[str, Any]
    gpu_cases: dict[str, Any]
    why_not: Callable[[Any, str], str | None]
    run: Callable[[Any, str], dict[str, Any]]
    judge: Callable[[Any, dict[str, Any]], Errors] = lambda case, errors: errors
    error: str = "largest error"

    def chosen(self, quick: tuple[str, ...] | None, has_gpu: bool) -> dict[str, Any]:
        """The cases to run, by name: the cases named in `quick`; with None all cases.

        has_gpu: with None for `quick`, whether gpu_cases are added.
        """
        if quick is None:
            return self.cases | (self.gpu_cases if has_gpu else {})
        return {name: self.cases[name] for name in quick}

    def reasons(self) -> dict[str, str | None]:
        """By implementation: None if it can run any case here, else the reason for the first case."""

        def reason(name: str) -> str | None:
            found = (self.why_not(case, name) for case in self.cases.values())
            first = next(found)
            return None if first is None or None in found else first

        return {name: reason(name) for name in self.implementations}


def _attention_suite(
    op: Any,
    cases: dict[str, Any],
    gpu_cases: dict[str, Any],
    *,
    reason: Any = lambda case, implementation: why_not(case, implementation),
    judge: Any = errors_of_attention,
) -> Suite:
    """The Suite of an op whose cases are flash_attention's AttentionCases.

    op(case): returns the op as a function with the arguments of flash_attention. reason: the function why_not of the
    Suite. judge(case, results, implementation): (error, bound) of each result, by name.
    """

    def run(case: Any, implementation: str) -> Errors:
        got = run_attention(case, attention_inputs(case), implementation, op(case))
        return judge(case, got, implementation)

    return Suite(
        implementations=IMPLEMENTATIONS,
        cases=cases,
        gpu_cases=gpu_cases,
        why_not=reason,
        run=run,
        error=ROOT_MEAN_SQUARE,
    )


def _dilated_suite(run: Any, reason: Any) -> Suite:
    """The Suite of dilated_attention, or of sequence_parallel_dilated_attention: both have the same cases.

    run, reason: the functions run and why_not of the Suite, which set the op.
    """
    return Suite(
        implementations=[name for name in IMPLEMENTATIONS if name != "cudnn"],
        cases=dilated_attention.CASES,
        gpu_cases=dilated_attention.GPU,
        why_not=reason,
        run=run,
        judge=dilated_attention.errors_of,
        error=ROOT_MEAN_SQUARE,
    )


def _suite_of_runs(module: Any, implementations: Collection[str], cases: Any, gpu_cases: Any, **changes: Any) -> Suite:
    """The Suite of a module of jax_kernels.testing whose cases run themselves, and which has why_not and errors_of.

    changes: further fields of the Suite.
    """
    return Suite(
        implementations=implementations,
        cases=cases,
        gpu_cases=gpu_cases,
        why_not=module.why_not,
        run=lambda case, implementation: case.run(implementation),
        judge=module.errors_of,
        **changes,
    )


def _matmul_suite(is_gated: bool) -> Suite:
    """The Suite of matmul or gated_matmul."""
    module = testing_matmul
    these = lambda cases: {name: case for name, case in cases.items() if case.is_gated == is_gated}
    cases = these(module.CASES | module.TRITON | _tiles(module))
    return _suite_of_runs(module, MATMUL_IMPLEMENTATIONS, cases, these(module.GPU))


def _norm_suite(op: str) -> Suite:
    """The Suite of layer_norm or rms_norm (`op`)."""
    module = testing_normalization
    these = lambda cases: {name: case for name, case in cases.items() if case.op == op}
    many = {f"many_{name}": case.of_rows(1000) for name, case in these(module.CASES).items()}
    error = "largest relative error"
    cases = these(module.CASES | module.LONG | _tiles(module))
    return _suite_of_runs(module, NORM_IMPLEMENTATIONS, cases, many, error=error)


def _suite_of_errors(
    module: Any, cases: dict[str, Any], gpu_cases: dict[str, Any], *, names: Any = MATMUL_IMPLEMENTATIONS,
    **changes: Any,
) -> Suite:  # fmt: skip
    """The Suite of a module of jax_kernels.testing that has functions why_not and errors_by of (case, implementation).

    errors_by runs a case and returns (error, bound) of each result, by name. cases, gpu_cases: by name; gpu_cases run
    on a GPU only. names: of the implementations. changes: further fields of the Suite.
    """
    fields = {"implementations": names, "why_not": module.why_not, "run": module.errors_by} | changes
    return Suite(cases=cases, gpu_cases=gpu_cases, **fields)


def _own_suite(op: str, module: Any) -> Suite:
    """The Suite of an op whose cases are in a module of its own: CASES, HOPPER if there are, and LONG, for a GPU only.

    module: of jax_kernels.testing, with the functions why_not and errors_by, and ERROR, unless it is the default.
    """
    error = getattr(module, "ERROR", ROOT_MEAN_SQUARE)
    cases = module.CASES | _tiles(module)
    return _suite_of_errors(module, cases, module.LONG, names=OPS[op].implementations, error=error)


def _tiles(module: Any) -> dict[str, Any]:
    """The cases of a module of jax_kernels.testing for the tiles of the Hopper kernels, by name; {} if it has none."""
    return {f"tiles_{name}": case for name, case in getattr(module, "HOPPER", {}).items()}


def _low_bit_suite() -> Suite:
    module = low_bit_matmul
    of_kinds = lambda cases: {f"{kind}_{name}": (kind, case) for kind in module.KINDS for name, case in cases.items()}
    large = {f"large_{name}": case for name, case in of_kinds(module.LARGE).items()}
    return _suite_of_errors(module, of_kinds(module.CASES) | _tiles(module), large)


SUITES = {
    "flash_attention": _attention_suite(
        lambda case: flash_attention,
        {case.name: case for case in ATTENTION_CASES},
        {case.name: case for case in GPU_ATTENTION_CASES},
    ),
    "block_sparse_attention": _attention_suite(
        masked_attention.block_sparse, masked_attention.BLOCK_SPARSE, masked_attention.GPU_BLOCK_SPARSE
    ),
    "dynamic_mask_attention": _attention_suite(
        masked_attention.dynamic_mask, masked_attention.DYNAMIC_MASK, masked_attention.GPU_DYNAMIC_MASK
    ),
    "dilated_attention": _dilated_suite(dilated_attention.run, dilated_attention.why_not),
    "ring_attention": _attention_suite(
        ring_attention.ring,
        ring_attention.CASES,
        ring_attention.GPU,
        reason=ring_attention.why_not,
        judge=lambda case, got, implementation: ring_attention.errors_of(case, got),
    ),
    "sequence_parallel_dilated_attention": _dilated_suite(
        dilated_attention.run_sharded, dilated_attention.why_not_sharded
    ),
    "matmul": _matmul_suite(is_gated=False),
    "gated_matmul": _matmul_suite(is_gated=True),
    "mlp": _suite_of_runs(
        mlp,
        MATMUL_IMPLEMENTATIONS,
        mlp.CASES | mlp.TRITON | _tiles(mlp),
        mlp.GPU,
        error="relative error",
    ),
    "layer_norm": _norm_suite("layer_norm"),
    "rms_norm": _norm_suite("rms_norm"),
    "fp8_matmul": _suite_of_errors(fp8_matmul, fp8_matmul.CASES | _tiles(fp8_matmul), fp8_matmul.GPU),
    "fp8_grouped_matmul": _suite_of_errors(
        fp8_grouped_matmul,
        fp8_grouped_matmul.CASES | _tiles(fp8_grouped_matmul),
        fp8_grouped_matmul.GPU,
    ),
    "low_bit_matmul": _low_bit_suite(),
    "fp8_norm": Suite(
        implementations=NORM_IMPLEMENTATIONS,
        cases=testing_normalization.CASES,
        gpu_cases=testing_normalization.LONG,
        why_not=testing_normalization.quantized_why_not,
        run=testing_normalization.quantized_errors_by,
        error="largest error in steps of 8 bits",
    ),
}
# All other ops have a module of their name in jax_kernels.testing.
_MODULES = {op: importlib.import_module(f"jax_kernels.testing.{op}") for op in OPS if op not in SUITES}
SUITES |= {op: _own_suite(op, module) for op, module in _MODULES.items()}
SUITES = {op: SUITES[op] for op in dict.fromkeys([*OPS, *SUITES])}
QUICK |= {op: module.QUICK for op, module in _MODULES.items()}


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one case by one implementation.

    errors, bounds: of each result array, by name. skipped: the reason for not running it, or None. raised: the text of
    the exception, or None.
    """

    op: str
    implementation: str
    case: str
    errors: dict[str, float]
    bounds: dict[str, float]
    skipped: str | None = None
    raised: str | None = None

    @property
    def passed(self) -> bool:
        return self.raised is None and all(error <= self.bounds[name] for name, error in self.errors.items())


def run_case(op: str, name: str, case: Any, implementation: str) -> Result:
    """The Result of one case of an op by one implementation. An exception becomes a Result too."""
    suite, result = SUITES[op], functools.partial(Result, op, implementation, name)
    reason = suite.why_not(case, implementation)
    if reason is not None:
        return result({}, {}, skipped=reason)
    try:
        got = suite.run(case, implementation)
    except Exception as error:  # a kernel that does not compile or run is a result too
        return result({}, {}, raised=f"{type(error).__name__}: {error}")
    judged = suite.judge(case, got)
    return result({x: error for x, (error, _) in judged.items()}, {x: bound for x, (_, bound) in judged.items()})
