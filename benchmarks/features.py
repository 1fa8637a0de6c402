"""Measures the cost of masks, lengths, grouped heads and other features over plain attention.

    PYTHONPATH=. python benchmarks/features.py --shape 2,8192,16,128 --mode fwd,bwd --output results/features.json

A group is a plain attention and its variants, which take turns in one run, by device time. A variant's share is its
number of live (query, key) pairs over the plain attention's. Its cost is its time over the plain attention's time
multiplied by the share: 1.00 means that the feature itself is free. Each variant is first checked against float32.

    PYTHONPATH=. python benchmarks/features.py --variants "softcap score_mod,ALiBi score_mod,8 documents"

The exit status is 1 if a variant failed, was wrong, or was skipped because the budget was spent.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import command_line, report
from harness.cases import CAP, alibi_mod, as_numpy, parse_shape, relative_error, softcap_mod
from harness.process import prepare_process, say
from harness.side_by_side import gpu_alone
from harness.timers import choose_timer, close
from harness.timing import Contender, alternate, skipped, spread

from jax_kernels import flash_attention
from jax_kernels.inputs.attention import FlashArguments
from jax_kernels.ops.attention import vjp as attention
from jax_kernels.ops.attention.flash_attention import prepare

MODES = ("fwd", "bwd")
# Jitted once: a variant's backward uses the forward that was compiled for the timing.
forward = jax.jit(attention.attention_forward, static_argnums=0)


@jax.jit(static_argnums=0)
def backward(call, inputs, result, dout):
    return attention.attention_backward(call, inputs, result, dout, None)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One attention. arguments: the keyword arguments of flash_attention."""

    name: str
    batch: int
    seq: int
    heads: int
    head_dim: int
    kv_heads: int
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def pairs(self) -> int:
        """The number of live (query, key) pairs, over all heads."""
        window, ids = self.arguments.get("window"), self.arguments.get("segment_ids")
        position = np.arange(self.seq)
        left, right = (window, window) if isinstance(window, int) else window or (self.seq, self.seq)
        right = 0 if self.arguments.get("is_causal") else right
        count = 0
        for b in range(self.batch):
            first, last = np.maximum(position - left, 0), np.minimum(position + right, self.seq - 1)
            if ids is not None:  # sorted: a segment is a range
                row = np.asarray(ids[b])
                first = np.maximum(first, np.searchsorted(row, row, side="left"))
                last = np.minimum(last, np.searchsorted(row, row, side="right") - 1)
            count += int((last - first + 1).sum())
        return count * self.heads


def groups(batch: int, seq: int, heads: int, head_dim: int) -> list[list[Variant]]:
    """The groups. The first member of each is the plain attention that the others are measured against."""
    plain = Variant("full", batch, seq, heads, head_dim, heads)
    causal = dataclasses.replace(plain, name="causal", arguments={"is_causal": True})
    of = lambda base, name, **kwargs: dataclasses.replace(base, name=name, arguments=base.arguments | kwargs)
    # Eight documents of uneven length.
    borders = np.cumsum(np.array([0.02, 0.05, 0.3, 0.08, 0.2, 0.04, 0.16]) * seq).astype(int)
    ids = jnp.asarray(np.tile((np.arange(seq)[:, None] >= borders).sum(-1), (batch, 1)), jnp.int32)
    window = seq // 8
    mha = Variant(f"{2 * heads} heads", max(1, batch // 2), seq, 2 * heads, head_dim, 2 * heads)
    gqa = dataclasses.replace(mha, name=f"{2 * heads} / {heads // 2} heads", kv_heads=heads // 2)
    both = lambda variant: [variant, of(variant, f"{variant.name} causal", is_causal=True)]
    alibi = alibi_mod(heads)
    mods = lambda base: [
        of(base, "softcap score_mod", score_mod=softcap_mod),
        of(base, "ALiBi score_mod", score_mod=alibi),
    ]
    return [
        [
            plain,
            dataclasses.replace(plain, name=f"length {seq - 1}", seq=seq - 1),
            dataclasses.replace(plain, name=f"length {seq + 1}", seq=seq + 1),
            of(plain, f"window {window}", window=window),
            of(plain, "softcap", softcap=CAP),
            *mods(plain),
            of(plain, "deterministic", deterministic=True),
        ],
        [
            causal,
            dataclasses.replace(causal, name=f"length {seq - 1}", seq=seq - 1),
            of(causal, f"window {window}", window=window),
            of(causal, "8 documents", segment_ids=ids),
            *mods(causal),
            of(causal, "sinks", sinks=jnp.zeros(heads)),
            of(causal, "deterministic", deterministic=True),
        ],
        *(list(pair) for pair in zip(both(mha), both(gqa), strict=True)),
    ]


def chosen(found: Sequence[list[Variant]], names: Sequence[str]) -> list[list[Variant]]:
    """The groups that have variants of these names, without their other variants."""
    picked = [[group[0], *(variant for variant in group[1:] if variant.name in names)] for group in found]
    return [group for group in picked if len(group) > 1]


def build(variant: Variant, mode: str, implementation: str | None) -> Contender:
    """A contender, compiled, run once and checked against float32."""
    contender = Contender(variant.name, "jax")
    shape = lambda heads: (variant.batch, variant.seq, heads, variant.head_dim)
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (variant.heads, variant.kv_heads, variant.kv_heads, variant.heads)
    arrays = tuple(jax.random.normal(k, shape(n), jnp.bfloat16) for k, n in zip(keys, heads, strict=True))
    with contender.attempt():
        named = dict(zip(("query", "key", "value"), arrays[:3], strict=True))
        call, inputs = prepare(FlashArguments(**named, **variant.arguments, implementation=implementation))
        # The slopes are constants here: their gradients would add kernels to the backward.
        call = dataclasses.replace(call, options=dataclasses.replace(call.options, score_mod_gradient=False))
        run = lambda index: forward(call, inputs)
        forward.lower(call, inputs).compile()
        if mode == "bwd":
            with gpu_alone():
                results = jax.block_until_ready(run(0))
            run = lambda index: backward(call, inputs, results, arrays[3])
            backward.lower(call, inputs, results, arrays[3]).compile()
        outputs = contender.start(run, f"{call.implementation} {call.config}")
        want = right(variant, mode, arrays)
        with gpu_alone():
            got = [as_numpy(x[:1, :, : w.shape[2]]) for x, w in zip(outputs, want, strict=False)]
            contender.judge(relative_error(got, want), "float32")
    return contender


def right(variant: Variant, mode: str, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """Float32 results of the first batch entry, for the first head of the keys: (out,) or (dq, dk, dv)."""
    group = variant.heads // variant.kv_heads
    heads = (group, 1, 1, group)
    query, key, value, dout = (x[:1, :, :n].astype(jnp.float32) for x, n in zip(arrays, heads, strict=True))
    cut = {"segment_ids": lambda ids: ids[:1], "sinks": lambda sinks: sinks[:group]}
    arguments = {name: cut.get(name, lambda x: x)(value) for name, value in variant.arguments.items()}
    attend = lambda *qkv: flash_attention(*qkv, **arguments, implementation="xla")
    of_mode = (
        (lambda dout, *qkv: [attend(*qkv)]) if mode == "fwd" else lambda dout, *qkv: jax.vjp(attend, *qkv)[1](dout)
    )
    compiled = jax.jit(of_mode).lower(dout, query, key, value).compile()
    with gpu_alone():
        return [np.asarray(x) for x in compiled(dout, query, key, value)]


def measure(
    group: Sequence[Variant], mode: str, timer: Any, args: argparse.Namespace, deadline: float
) -> list[dict[str, Any]]:
    contenders = [
        skipped(variant.name, "jax") if time.monotonic() > deadline else build(variant, mode, args.implementation)
        for variant in group
    ]
    alternate(contenders, timer, rounds=args.rounds, seconds=args.seconds, deadline=deadline)
    rows = []
    for variant, contender in zip(group, contenders, strict=True):
        described = dataclasses.asdict(variant) | {"arguments": sorted(variant.arguments)}
        row = described | {"base": group[0].name, "mode": mode, "plan": contender.plan, "status": contender.status}
        row |= {"reason": contender.reason, "error": contender.error, "times_ms": contender.times}
        base = contenders[0]
        told = f"{mode} {group[0].name:>8} | {variant.name:17}"
        if contender.status == base.status == "ok":
            share = variant.pairs / group[0].pairs
            ms, plain = (spread(c.times)["median"] for c in (contender, base))
            row |= {"ms": ms, "share": share, "cost": ms / (share * plain)}
            say(f"{told} {ms:8.4f} ms, share {share:.3f}, cost {row['cost']:.3f}")
        else:
            say(f"{told} {contender.status}: {contender.reason}")
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.05, budget=540)
    parser.add_argument("--shape", default="2,8192,16,128", help="batch,seq,heads,head_dim")
    parser.add_argument("--mode", default=",".join(MODES))
    parser.add_argument("--variants", help="comma list of printed names; default: all")
    parser.add_argument("--implementation", default=None)
    args = parser.parse_args(argv)
    prepare_process()
    try:
        modes = command_line.names("mode", args.mode, MODES)
        if args.shape.count(",") != 3:
            raise ValueError(f"shape: got {args.shape!r}, want batch,seq,heads,head_dim; some variants group the heads")
        shape = parse_shape(args.shape)
        if min(shape.seq, shape.heads) < 2:
            raise ValueError(f"shape: got {args.shape!r}, want two heads and two tokens at least")
        found = groups(shape.batch, shape.seq, shape.heads, shape.head_dim)
        if args.variants is not None:
            known = list(dict.fromkeys(variant.name for group in found for variant in group[1:]))
            found = chosen(found, command_line.names("variants", args.variants, known))
    except ValueError as error:
        parser.error(str(error))
    deadline = time.monotonic() + args.budget
    name, timer = choose_timer(args.timer, ["jax"])
    results = report.header(args.commit, timer=name)
    results["rows"] = rows = []
    for mode in modes:
        for group in found:
            rows += measure(group, mode, timer, args, deadline)
            report.write_json(args.output, results)
    close(timer)
    return report.exit_status(row["status"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
