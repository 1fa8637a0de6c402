"""The fp8 forward against the bf16 forward of the same values, in one alternating run.

    PYTHONPATH=. python benchmarks/fp8.py --shapes "2,8192,16,128;2,8192,8,256" --output results/fp8.json

Quantizing is not in the time: keys and values of a cache, and what a linear layer leaves, are fp8 already. error is
that of the fp8 output against the bf16 one, most of it from the quantization.
"""

import argparse
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import report
from attention import choose_timer, prepare_process, say
from cases import parse_shape
from timing import METHODS, Contender, alternate, first_line, speed_ratio, spread, wait

from jax_kernels import explain, flash_attention, flash_attention_fp8, quantize_fp8


def measure(shape: Sequence[int], is_causal: bool, timer: Any, args: argparse.Namespace) -> dict[str, Any]:
    batch, seq, heads, head_dim = shape
    keys = jax.random.split(jax.random.key(0), 3)
    # Drawn in bfloat16, they would have a mean of -0.013, and their rounding a mean that long rows do not average out.
    arrays = [jax.random.normal(k, (batch, seq, heads, head_dim)).astype(jnp.bfloat16) for k in keys]
    quantized, scales = zip(*(jax.jit(quantize_fp8)(x) for x in arrays), strict=True)
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
    options = {"is_causal": is_causal, "implementation": args.implementation}
    calls = {
        "bf16": (functools.partial(flash_attention, **options), arrays),
        "fp8": (functools.partial(flash_attention_fp8, **scales, **options), quantized),
    }
    contenders, outputs = [], {}
    for name, (function, given) in calls.items():
        contender = Contender(name, "jax")
        contenders.append(contender)
        try:
            run = jax.jit(function)
            contender.call = lambda index, run=run, given=given: run(*given)
            outputs[name] = wait_for(contender.call(0))
            contender.plan = str(explain(function.func, *given, **function.keywords))
        except Exception as error:
            contender.give_up("failed", first_line(error))
    alternate(contenders, timer, rounds=args.rounds, seconds=args.seconds)
    row = {"shape": list(shape), "causal": is_causal, "contenders": [row_of(c, shape, is_causal) for c in contenders]}
    bf16, fp8 = contenders
    if bf16.times and fp8.times:
        want, got = (outputs[name].astype(jnp.float32) for name in ("bf16", "fp8"))
        row["error"] = float(jnp.sqrt(jnp.mean(jnp.square(got - want)) / jnp.mean(jnp.square(want))))
        row["speed_ratio"] = speed_ratio(fp8.times, bf16.times)
        say(f"{'x'.join(map(str, shape))} {'causal' if is_causal else 'full'}: {row['speed_ratio']:.3f} x bf16")
    else:
        say(f"{shape}: {bf16.status} {bf16.reason}, {fp8.status} {fp8.reason}")
    return row


def wait_for(outputs: jax.Array) -> jax.Array:
    wait(outputs, "jax")
    return outputs


def row_of(contender: Contender, shape: Sequence[int], is_causal: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"name": contender.name, "plan": contender.plan, "status": contender.status}
    row |= {"reason": contender.reason, "times_ms": contender.times}
    if contender.times:
        batch, seq, heads, head_dim = shape
        row["ms"] = spread(contender.times)["median"]
        row["tflops"] = 4e-9 * batch * heads * seq**2 * head_dim / (2 if is_causal else 1) / row["ms"]
    return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="2,8192,16,128;2,8192,8,256;2,8192,32,64", help="batch,seq,heads,head_dim")
    parser.add_argument("--implementation", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.05, help="queued work of one turn")
    parser.add_argument("--timer", choices=tuple(METHODS), default="cupti")
    parser.add_argument("--output", type=pathlib.Path, help="JSON file")
    parser.add_argument("--commit", help="what to record as the commit where the tree has no .git")
    args = parser.parse_args(argv)
    prepare_process()
    name, timer = choose_timer(args.timer, ["jax"])
    results: dict[str, Any] = {"schema": report.SCHEMA, "environment": report.environment(args.commit), "timer": name}
    results["rows"] = rows = []
    for shape in args.shapes.split(";"):
        for is_causal in (False, True):
            rows.append(measure(parse_shape(shape)[:4], is_causal, timer, args))
            if args.output is not None:
                report.write_json(args.output, results)


if __name__ == "__main__":
    main()
