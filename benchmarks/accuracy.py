"""Error against float64 of this library's attention and of cuDNN's, on the same 16-bit inputs.

    PYTHONPATH=. python benchmarks/accuracy.py --output results/accuracy.json

Root mean square over the whole array, relative: of out, and of the gradients of query, key and value. "peaked": the
keys are the queries, so that each row has one key that stands out. "large": queries of eight times the length.
"""

import itertools
from collections.abc import Sequence

import command_line
import jax
import jax.numpy as jnp
import report
from attention import say

from jax_kernels import flash_attention
from jax_kernels.attention_inputs import AttentionInputs, AttentionOptions
from jax_kernels.reference import attention as reference

KINDS = ("normal", "peaked", "large")
RESULTS = ("out", "dq", "dk", "dv")


def right(is_causal: bool):
    """(arrays, dout) -> out and the gradients in float64."""

    @jax.jit
    def run(arrays, dout):
        options = AttentionOptions(arrays[0].shape[-1] ** -0.5, is_causal=is_causal, precision="fp32")
        forward = lambda *arrays: reference.attention(AttentionInputs(*arrays), options)[0]
        out, vjp = jax.vjp(forward, *(x.astype(jnp.float64) for x in arrays))
        return out, *vjp(dout.astype(jnp.float64))

    return run


def errors(is_causal: bool, implementation: str):
    """(arrays, dout, what is right) -> the error of each of RESULTS."""

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
    """(query, key, value), dout."""
    keys = jax.random.split(jax.random.key(sum(shape)), 4)
    query, key, value, dout = (jax.random.normal(k, shape, jnp.bfloat16) for k in keys)
    return (query * 8 if kind == "large" else query, query if kind == "peaked" else key, value), dout


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.parser(__doc__)
    parser.add_argument("--lengths", default="256,2048", help="comma list of tokens")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--implementations", default="mosaic_gpu,cudnn", help="comma list, cudnn among them")
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    numbers = lambda text: [int(word) for word in text.split(",")]
    rows = []
    for head_dim, length, is_causal in itertools.product(numbers(args.head_dims), numbers(args.lengths), (False, True)):
        ours = {name: errors(is_causal, name) for name in args.implementations.split(",")}
        oracle = right(is_causal)
        for kind in KINDS:
            arrays, dout = draw(kind, (2, length, 4, head_dim))
            want = oracle(arrays, dout)
            found = {name: run(arrays, dout, want) for name, run in ours.items()}
            rows.append({"shape": arrays[0].shape, "causal": is_causal, "inputs": kind, "errors": found})
            texts = [f"{name} " + " ".join(f"{x:.2e}" for x in e.values()) for name, e in found.items()]
            ratios = " ".join(f"{e / found['cudnn'][name]:.3f}" for name, e in next(iter(found.values())).items())
            mask = "causal" if is_causal else "full"
            say(f"{length} x {head_dim} {mask:6} {kind:6} | {' | '.join(texts)} | first over cudnn {ratios}")
    if args.output is not None:
        environment = report.environment(args.commit)
        report.write_json(args.output, {"schema": report.SCHEMA, "environment": environment, "rows": rows})


if __name__ == "__main__":
    main()
