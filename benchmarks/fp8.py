"""The fp8 forward against the bf16 forward on the same values, in one alternating run.

    PYTHONPATH=. python benchmarks/fp8.py --shapes "2,8192,16,128;2,8192,8,256" --output results/fp8.json

The time excludes quantization: the keys and values of a cache, and the outputs of a linear layer, are fp8 already. The
error compares the fp8 output with the bf16 output, and comes mostly from the quantization.

The exit status is 1 if a forward failed or was wrong.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from harness import command_line, report
from harness.cases import Case, InputSet, Oracle, parse_shapes, relative_error
from harness.process import prepare_process, say
from harness.timers import choose_timer, close
from harness.timing import Contender, alternate, speed_ratio, spread

from jax_kernels import explain, flash_attention, flash_attention_fp8, quantize_fp8

SHAPES = "2,8192,16,128;2,8192,8,256;2,8192,32,64"
# The rounding of e4m3, whose mantissa has 3 bits, gives 0.05. A larger error is not a rounding error.
TOLERANCE = 0.1


def measure(case: Case, timer: Any, args: argparse.Namespace) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(case.batch, case.seq, heads, case.head_dim) for heads in (case.heads, case.kv_heads, case.kv_heads)]
    # Random bfloat16 values have a mean of -0.013, and long rows do not average out the mean of their rounding.
    arrays = [jax.random.normal(k, shape).astype(jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)]
    quantized, scales = zip(*(jax.jit(quantize_fp8)(x) for x in arrays), strict=True)
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    options = {"is_causal": case.causal, "implementation": args.implementation}
    calls = {
        "bf16": (functools.partial(flash_attention, **options), arrays),
        "fp8": (functools.partial(flash_attention_fp8, **scales, **options), quantized),
    }
    contenders, outputs = [], {}
    for name, (function, given) in calls.items():
        contender = Contender(name, "jax")
        contenders.append(contender)
        with contender.attempt():
            plan = str(explain(function.func, *given, **function.keywords))
            run = jax.jit(function)
            outputs[name] = contender.start(lambda index, run=run, given=given: run(*given), plan)
    bf16, fp8 = contenders
    if bf16.status == "ok":
        bf16.judge(Oracle(case, InputSet(*arrays, arrays[0])).error((outputs["bf16"],)), "float32")
    if bf16.status == fp8.status == "ok":
        fp8.judge(relative_error([outputs["fp8"]], [outputs["bf16"]]), "bf16", TOLERANCE)
    alternate(contenders, timer, rounds=args.rounds, seconds=args.seconds)
    row = {"shape": case.numbers, "causal": case.causal, "error": fp8.error}
    row["contenders"] = [row_of(c, case) for c in contenders]
    if bf16.times and fp8.times:
        row["speed_ratio"] = speed_ratio(fp8.times, bf16.times)
        say(f"{case.label}: {row['speed_ratio']:.3f} x bf16")
    else:
        say(f"{case.label}: {bf16.status} {bf16.reason}, {fp8.status} {fp8.reason}")
    return row


def row_of(contender: Contender, case: Case) -> dict[str, Any]:
    row: dict[str, Any] = {"name": contender.name, "plan": contender.plan, "status": contender.status}
    row |= {"reason": contender.reason, "times_ms": contender.times}
    if contender.times:
        row["ms"] = spread(contender.times)["median"]
        row["tflops"] = case.tflops(row["ms"])
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.05)
    parser.add_argument("--shapes", default=SHAPES, help="batch,seq,heads,head_dim[,kv_heads], separated by ';'")
    parser.add_argument("--implementation", default=None)
    args = parser.parse_args(argv)
    try:
        cases = [
            Case.of(shape, dtype="bf16", causal=is_causal, mode="fwd")
            for shape in parse_shapes(args.shapes)
            for is_causal in (False, True)
        ]
    except ValueError as error:
        parser.error(str(error))
    prepare_process()
    name, timer = choose_timer(args.timer, ["jax"])
    results = report.header(args.commit, timer=name)
    results["rows"] = rows = []
    for case in cases:
        rows.append(measure(case, timer, args))
        report.write_json(args.output, results)
    close(timer)
    return report.exit_status(contender["status"] for row in rows for contender in row["contenders"])


if __name__ == "__main__":
    sys.exit(main())
