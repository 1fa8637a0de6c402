"""Error against float64 of this library's attention and of cuDNN's, on the same 16-bit inputs.

    PYTHONPATH=. python benchmarks/accuracy.py --output results/accuracy.json

The error of an array is the root mean square of the difference over the root mean square of the float64 array. Each row
of results has the errors of out and of the gradients of query, key and value. In "peaked" inputs the keys equal the
queries, so one key outweighs the others in each row; the queries of "large" are eight times as long.

The exit status is 1 if an implementation failed or gave a NaN, or if an error is larger than rounding explains; the
errors of "peaked" inputs have no limit.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import command_line, report
from harness.cases import TOLERANCE
from harness.contenders import OURS
from harness.process import say
from harness.timing import Contender

from jax_kernels import flash_attention
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.reference import attention as reference

KINDS = ("normal", "peaked", "large")
RESULTS = ("out", "dq", "dk", "dv")


def right(is_causal: bool):
    """Makes run((query, key, value), dout), which returns out and the three gradients in float64."""

    @jax.jit
    def run(arrays, dout):
        options = AttentionOptions(arrays[0].shape[-1] ** -0.5, is_causal=is_causal, precision="fp32")
        forward = lambda *arrays: reference.attention(AttentionInputs(*arrays), options)[0]
        out, vjp = jax.vjp(forward, *(x.astype(jnp.float64) for x in arrays))
        return out, *vjp(dout.astype(jnp.float64))

    return run


def errors(is_causal: bool, implementation: str):
    """Makes run(arrays, dout, want), which returns the error of each of RESULTS. want: the result of `right`."""

    @jax.jit
    def run(arrays, dout, want):
        function = lambda *qkv: flash_attention(*qkv, is_causal=is_causal, implementation=implementation)
        out, vjp = jax.vjp(function, *arrays)
        norm = lambda x: jnp.linalg.norm(x.astype(jnp.float64).reshape(-1))
        return [
            norm(got.astype(jnp.float64) - right) / norm(right)
            for got, right in zip((out, *vjp(dout)), want, strict=True)
        ]

    return lambda *inputs: dict(zip(RESULTS, (float(x) for x in run(*inputs)), strict=True))


def draw(kind: str, shape: tuple[int, ...]):
    """The inputs of a kind: (query, key, value) and dout."""
    keys = jax.random.split(jax.random.key(sum(shape)), 4)
    query, key, value, dout = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys)
    return (query * 8 if kind == "large" else query, query if kind == "peaked" else key, value), dout


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--lengths", default="256,2048", help="comma list of tokens")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--implementations", default="mosaic_gpu,cudnn", help="comma list with cudnn")
    args = parser.parse_args(argv)
    try:
        lengths, head_dims = (command_line.numbers(text) for text in (args.lengths, args.head_dims))
        names = command_line.names("implementations", args.implementations, OURS)
        if "cudnn" not in names:
            raise ValueError(f"implementations: got {args.implementations!r}, want cudnn among them")
    except ValueError as error:
        parser.error(str(error))
    jax.config.update("jax_enable_x64", True)
    results = report.header(args.commit)
    rows: list[dict[str, Any]] = []
    for head_dim, length, is_causal in itertools.product(head_dims, lengths, (False, True)):
        ours = {name: errors(is_causal, name) for name in names}
        oracle = right(is_causal)
        for kind in KINDS:
            arrays, dout = draw(kind, (2, length, 4, head_dim))
            want = oracle(arrays, dout)
            found, told = {}, {}
            for name, run in ours.items():
                contender = Contender(name, "jax")
                with contender.attempt():
                    found[name] = run(arrays, dout, want)
                    # If one key outweighs the others, the rounding errors grow with the length and with head_dim.
                    tolerance = math.inf if kind == "peaked" else TOLERANCE
                    contender.judge(float(np.max(list(found[name].values()))), "float64", tolerance)
                told[name] = {"status": contender.status, "reason": contender.reason}
            row = {"shape": arrays[0].shape, "causal": is_causal, "inputs": kind, "errors": found, "contenders": told}
            rows.append(row)
            texts = [f"{name} " + " ".join(f"{x:.2e}" for x in e.values()) for name, e in found.items()]
            texts += [f"{name} {how['status']}: {how['reason']}" for name, how in told.items() if how["reason"]]
            if names[0] in found and "cudnn" in found:
                ratios = (f"{e / found['cudnn'][result]:.3f}" for result, e in found[names[0]].items())
                texts.append(f"first over cudnn {' '.join(ratios)}")
            say(f"{length} x {head_dim} {'causal' if is_causal else 'full':6} {kind:6} | {' | '.join(texts)}")
            report.write_json(args.output, results | {"rows": rows})
    return report.exit_status(how["status"] for row in rows for how in row["contenders"].values())


if __name__ == "__main__":
    sys.exit(main())
