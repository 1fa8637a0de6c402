"""What masks, lengths, grouped heads and the other features cost, as time over their share of a plain attention's time.

    PYTHONPATH=. python benchmarks/features.py --shape 2,8192,16,128 --mode fwd,bwd --output results/features.json

A group is a plain attention and its variants; they take turns in one run, by device time. A variant's share is its
number of (query, key) pairs that may attend, over the plain one's. A cost of 1.00 is time exactly in that share.
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np
import report
from attention import choose_timer, prepare_process, say
from cases import parse_shape
from timing import Contender, alternate, first_line, spread, wait

from jax_kernels.ops import attention


@dataclasses.dataclass(frozen=True)
class Variant:
    """One attention. arguments: those of flash_attention, as they are."""

    name: str
    batch: int
    seq: int
    heads: int
    head_dim: int
    kv_heads: int
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def pairs(self) -> int:
        """How many (query, key) pairs of all heads may attend."""
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
    """Each group: what it is measured against, then the variants."""
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
    return [
        [
            plain,
            dataclasses.replace(plain, name=f"length {seq - 1}", seq=seq - 1),
            dataclasses.replace(plain, name=f"length {seq + 1}", seq=seq + 1),
            of(plain, f"window {window}", window=window),
            of(plain, "softcap", softcap=30.0),
            of(plain, "deterministic", deterministic=True),
        ],
        [
            causal,
            dataclasses.replace(causal, name=f"length {seq - 1}", seq=seq - 1),
            of(causal, f"window {window}", window=window),
            of(causal, "8 documents", segment_ids=ids),
            of(causal, "sinks", sinks=jnp.zeros(heads)),
            of(causal, "deterministic", deterministic=True),
        ],
        *(list(pair) for pair in zip(both(mha), both(gqa), strict=True)),
    ]


def build(variant: Variant, mode: str, implementation: str | None) -> Contender:
    contender = Contender(variant.name, "jax")
    shape = lambda heads: (variant.batch, variant.seq, heads, variant.head_dim)
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (variant.heads, variant.kv_heads, variant.kv_heads, variant.heads)
    query, key, value, dout = (jax.random.normal(k, shape(n), jnp.bfloat16) for k, n in zip(keys, heads, strict=True))
    try:
        arguments = variant.arguments | {"implementation": implementation}
        call, inputs = attention.prepare(query=query, key=key, value=value, **arguments)
        contender.plan = f"{call.implementation} {call.config}"
        forward = jax.jit(functools.partial(attention.attention_forward, call))
        results = forward(inputs)
        run = functools.partial(forward, inputs)
        if mode == "bwd":
            backward = jax.jit(
                lambda inputs, results, dout: attention.attention_backward(call, inputs, *results, dout, None)
            )
            run = functools.partial(backward, inputs, results, dout)
        contender.call = lambda index: run()
        wait(contender.call(0), "jax")
    except Exception as error:
        contender.give_up("failed", first_line(error))
    return contender


def measure(group: Sequence[Variant], mode: str, timer: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    contenders = [build(variant, mode, args.implementation) for variant in group]
    alternate(contenders, timer, rounds=args.rounds, seconds=args.seconds)
    rows = []
    for variant, contender in zip(group, contenders, strict=True):
        described = dataclasses.asdict(variant) | {"arguments": sorted(variant.arguments)}
        row = described | {"base": group[0].name, "mode": mode, "plan": contender.plan, "status": contender.status}
        row |= {"reason": contender.reason, "times_ms": contender.times}
        base = contenders[0]
        if contender.times and base.times:
            share = variant.pairs / group[0].pairs
            ms, plain = (spread(c.times)["median"] for c in (contender, base))
            row |= {"ms": ms, "share": share, "cost": ms / (share * plain)}
            say(
                f"{mode} {group[0].name:>8} | {variant.name:16} {ms:8.4f} ms, share {share:.3f}, cost {row['cost']:.3f}"
            )
        else:
            say(f"{mode} {group[0].name:>8} | {variant.name:16} {contender.status}: {contender.reason}")
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_line.timing_parser(__doc__, rounds=5, seconds=0.05)
    parser.add_argument("--shape", default="2,8192,16,128", help="batch,seq,heads,head_dim")
    parser.add_argument("--mode", default="fwd,bwd")
    parser.add_argument("--implementation", default=None)
    args = parser.parse_args(argv)
    try:
        modes = command_line.names("mode", args.mode, ("fwd", "bwd"))
    except ValueError as error:
        parser.error(str(error))
    prepare_process()
    name, timer = choose_timer(args.timer, ["jax"])
    results: dict[str, Any] = {"schema": report.SCHEMA, "environment": report.environment(args.commit), "timer": name}
    results["rows"] = rows = []
    for mode in modes:
        for group in groups(*parse_shape(args.shape)[:4]):
            rows += measure(group, mode, timer, args)
            if args.output is not None:
                report.write_json(args.output, results)


if __name__ == "__main__":
    main()
