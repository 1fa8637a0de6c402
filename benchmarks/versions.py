"""Times this library against an earlier version of itself, to see whether a change made a call slower.

    python benchmarks/versions.py --export v0.1 --base .base           # once, on a machine with git
    PYTHONPATH=. python benchmarks/versions.py --base .base --cases bias,causal --output results/versions.json
    PYTHONPATH=. python benchmarks/versions.py --base .base --table --output results/versions-table.json

--export writes a commit's package into the folder of --base under another name, so that one process imports both. The
two versions take turns. Their order changes from round to round, because at the power limit the second of two is a few
percent slower. The backward is timed without the forward. The ratio is this version's time over the other's: the median
over rounds. The results of the two versions have to agree before they are timed. With --table the cases are the 24
attentions of benchmarks/attention_table.py. The exit status is 1 if a version failed or the results disagree.
"""

import argparse
import dataclasses
import functools
import importlib
import io
import pathlib
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from harness import command_line, report
from harness.cases import alibi_mod, number_of_sets, relative_error, softcap_mod
from harness.process import prepare_process, say
from harness.table_cases import CASES as TABLE
from harness.table_cases import TableCase
from harness.timers import choose_timer, close
from harness.timing import Contender, Timer, take_turn

BASE = "jax_kernels_base"
FOLDERS = ("jax_kernels", "pallas", "bridge", "models")
MODES = ("fwd", "bwd")


@dataclasses.dataclass(frozen=True)
class Case:
    """One flash_attention. arguments(case, library) makes its arguments, with masks of that library.

    kv_length, v_head_dim: None for seq and head_dim. query_scale: the factor of the normal queries.
    """

    name: str
    batch: int = 2
    seq: int = 8192
    heads: int = 16
    head_dim: int = 128
    kv_heads: int = 16
    kv_length: int | None = None
    v_head_dim: int | None = None
    query_scale: float = 1.0
    arguments: Callable[["Case", Any], dict[str, Any]] = lambda case, library: {}
    implementation: str | None = None
    frozen: bool = False  # only query, key and value have gradients

    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of query, key, value and dout."""
        keys, features = self.kv_length or self.seq, self.v_head_dim or self.head_dim
        return (
            (self.batch, self.seq, self.heads, self.head_dim),
            (self.batch, keys, self.kv_heads, self.head_dim),
            (self.batch, keys, self.kv_heads, features),
            (self.batch, self.seq, self.heads, features),
        )

    def inputs(self, index: int = 0) -> tuple[jax.Array, ...]:
        """Standard normal query, key, value and dout, of one of the sets."""
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), index), 4)
        query, *others = (jax.random.normal(k, x, jnp.bfloat16) for k, x in zip(keys, self.shapes(), strict=True))
        return (query * self.query_scale, *others)

    @property
    def sets(self) -> int:
        """The number of input sets, which overflow the L2 cache if 8 suffice."""
        return number_of_sets(self.shapes(), most=8)


def bias(*dimensions: str, **more: Any) -> Callable[[Case, Any], dict[str, Any]]:
    """The `arguments` of a Case with a normal bias over some of "b", "h", "t" and "s"; its other dimensions are 1.

    mask: "dense" for a bool array that keeps 0.9 of the pairs, "blocks" for a Mask that keeps 0.2. segment_ids: True
    for eight documents.
    """

    def arguments(case: Case, library: Any) -> dict[str, Any]:
        sizes = {"b": case.batch, "h": case.heads, "t": case.seq, "s": case.seq}
        shape = [sizes[name] if name in dimensions else 1 for name in "bhts"]
        made = {"bias": jax.random.normal(jax.random.key(1), shape, jnp.float32)} | more
        if more.get("mask") == "dense":
            made["mask"] = jax.random.bernoulli(jax.random.key(2), 0.9, (1, 1, case.seq, case.seq))
        if more.get("mask") == "blocks":
            cells = jax.random.bernoulli(jax.random.key(2), 0.2, (case.seq // 128,) * 2)
            made["mask"] = library.masks.block_sparse(cells, 128)
        if "segment_ids" in more:  # eight documents
            ids = jnp.arange(case.seq, dtype=jnp.int32) * 8 // case.seq
            made["segment_ids"] = jnp.broadcast_to(ids, (case.batch, case.seq))
        return made

    return arguments


def lengths(case: Case, library: Any) -> dict[str, Any]:
    return {"kv_lengths": jnp.arange(case.batch, 0, -1, dtype=jnp.int32) * (case.seq // case.batch) - case.seq // 100}


def masking_mod(score, b, h, q_idx, kv_idx):
    return jnp.where(kv_idx - q_idx > 512, -1e9, score)


def _cases() -> list[Case]:
    wide, narrow = {"heads": 16, "kv_heads": 16}, {"head_dim": 64, "heads": 32, "kv_heads": 32}
    always = lambda **given: lambda *_: given
    short = {"batch": 2, "seq": 4096}
    return [
        Case("full", **wide),
        Case("causal", arguments=always(is_causal=True)),
        Case("full 64", **narrow),
        Case("causal 64", **narrow, arguments=always(is_causal=True)),
        Case("full 256", head_dim=256, heads=8, kv_heads=8),
        Case("causal 256", head_dim=256, heads=8, kv_heads=8, arguments=always(is_causal=True)),
        Case("full 8x2048", batch=8, seq=2048),
        Case("causal 8x2048", batch=8, seq=2048, arguments=always(is_causal=True)),
        Case("causal 32/8", heads=32, kv_heads=8, arguments=always(is_causal=True)),
        Case("window", arguments=always(window=1024, is_causal=True)),
        Case("softcap", arguments=always(softcap=30.0)),
        Case("deterministic", arguments=always(deterministic=True)),
        Case("lengths", arguments=lengths),
        Case("lengths deterministic", arguments=lambda *given: lengths(*given) | {"deterministic": True}),
        Case("sinks", arguments=lambda case, _: {"sinks": jnp.zeros(case.heads)}),
        Case("softcap score_mod", arguments=always(score_mod=softcap_mod)),
        # Lazy, because the slopes are an array, and an array made here would start JAX's backend before
        # prepare_process.
        Case("ALiBi score_mod", arguments=lambda case, _: {"score_mod": alibi_mod(case.heads), "is_causal": True}),
        Case("masking score_mod", arguments=always(score_mod=masking_mod)),
        Case("bias hts", **short, arguments=bias("h", "t", "s")),
        Case("bias ts causal", arguments=bias("t", "s", is_causal=True)),
        Case("bias ts 64", **narrow, arguments=bias("t", "s")),
        Case("bias ts 256", **short, head_dim=256, heads=8, kv_heads=8, arguments=bias("t", "s")),
        Case("bias bs", arguments=bias("b", "s")),
        Case("bias ts deterministic", **short, arguments=bias("t", "s", deterministic=True)),
        Case("bias ts frozen", **short, arguments=bias("t", "s"), frozen=True),
        Case("bias ts frozen documents", **short, arguments=bias("t", "s", segment_ids=True), frozen=True),
        Case("bias ts frozen dense mask", **short, arguments=bias("t", "s", mask="dense"), frozen=True),
        Case("bias bs frozen blocks", arguments=bias("b", "s", mask="blocks"), frozen=True),
        Case("bias ts triton", **short, arguments=bias("t", "s"), implementation="triton"),
        Case("bias bs triton", **short, arguments=bias("b", "s"), implementation="triton"),
        Case("causal triton", **short, arguments=always(is_causal=True), implementation="triton"),
        Case("softcap score_mod triton", **short, arguments=always(score_mod=softcap_mod), implementation="triton"),
        Case("masking score_mod triton", **short, arguments=always(score_mod=masking_mod), implementation="triton"),
    ]


CASES = {case.name: case for case in _cases()}


def of_table(case: TableCase) -> Case:
    return Case(
        case.label,
        batch=case.batch,
        seq=case.q_length,
        heads=case.heads,
        head_dim=case.head_dim,
        kv_heads=case.kv_heads,
        kv_length=case.kv_length,
        v_head_dim=case.v_head_dim,
        query_scale=case.query_scale,
        arguments=lambda *_: case.arguments(case.batch),
    )


def export(commit: str, folder: pathlib.Path) -> None:
    """Writes the package of a commit as BASE into the folder, and the commit into its file COMMIT."""
    archive = subprocess.run(["git", "archive", commit, *FOLDERS], cwd=report.ROOT, capture_output=True, check=True)
    target = folder / BASE
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        for member in files:
            first, _, rest = member.name.partition("/")
            if not member.isfile():
                continue
            place = target / rest if first == "jax_kernels" else target / first / rest
            place.parent.mkdir(parents=True, exist_ok=True)
            content = files.extractfile(member)
            assert content is not None
            data = content.read()
            place.write_bytes(data.replace(b"jax_kernels", BASE.encode()) if place.suffix == ".py" else data)
    found = subprocess.run(["git", "rev-parse", commit], cwd=report.ROOT, capture_output=True, check=True, text=True)
    (folder / "COMMIT").write_text(found.stdout)


def prepare(case: Case, mode: str, library: Any) -> Callable[[], Callable[[int], Any]]:
    """Compiles a case. Returns start(), which puts the inputs on the GPU and returns call(index)."""
    arguments = jax.eval_shape(
        lambda: {k: x for k, x in case.arguments(case, library).items() if isinstance(x, jax.Array)}
    )
    plain = {name: x for name, x in case.arguments(case, library).items() if name not in arguments}
    run = functools.partial(library.flash_attention, **plain, implementation=case.implementation)
    attend = lambda query, key, value, arrays: run(query, key, value, **arrays)
    *qkv, dout = jax.eval_shape(case.inputs)
    arrays = lambda: {name: x for name, x in case.arguments(case, library).items() if name in arguments}
    if mode == "fwd":
        forward = jax.jit(attend).lower(*qkv, arguments).compile()

        def start():
            sets = [case.inputs(index)[:3] for index in range(case.sets)]
            given = arrays()
            return lambda index: forward(*sets[index % len(sets)], given)

        return start

    def with_vjp(query, key, value, arrays):
        if case.frozen:
            return jax.vjp(lambda *qkv: attend(*qkv, arrays), query, key, value)[1]
        return jax.vjp(attend, query, key, value, arrays)[1]

    lowered = jax.jit(with_vjp).lower(*qkv, arguments)
    backward = jax.jit(lambda vjp, dout: vjp(dout)).lower(lowered.out_info, dout).compile()
    forward = lowered.compile()

    def start_backward():
        sets = [case.inputs(index) for index in range(case.sets)]
        given = arrays()
        saved = [(forward(*inputs, given), dout) for *inputs, dout in sets]
        return lambda index: backward(*saved[index % len(saved)])

    return start_backward


def compare(
    case: Case, mode: str, prepared: Sequence[Future], timer: Timer, args: argparse.Namespace
) -> dict[str, Any]:
    """Checks and times the two versions of a case. Returns a row of the results."""
    contenders, outputs = [], []
    for name, future in zip(("jax_kernels", BASE), prepared, strict=True):
        contender = Contender(name, "jax")
        with contender.attempt():
            outputs.append(jax.tree.leaves(contender.start(future.result()())))
        contenders.append(contender)
    ours, other = contenders
    if len(outputs) == 2:
        numbers = [[x for x in found if jnp.issubdtype(x.dtype, jnp.floating)] for found in outputs]
        ours.judge(relative_error(*numbers), "the other version")
    del outputs[:]
    if ours.status == other.status == "ok":
        for number in range(args.rounds):
            for contender in (other, ours) if number % 2 else (ours, other):
                take_turn(contender, timer, args.seconds)
    row = {"case": case.name, "mode": mode, "ours": ours.findings, "base": other.findings}
    told = f"{mode} {case.name:24}"
    if ours.times and other.times:
        row["ratio"] = statistics.median(a / b for a, b in zip(ours.times, other.times, strict=True))
        now, was = (statistics.median(x.times) for x in (ours, other))
        say(f"{told} {now:8.4f} ms, was {was:8.4f} ms, ratio {row['ratio']:.3f}, error {ours.error:.2g}")
    else:
        say(f"{told} {ours.status} {ours.reason} | {other.status} {other.reason}")
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line.timing_parser(__doc__, rounds=6, seconds=0.05, budget=540)
    parser.add_argument("--base", type=pathlib.Path, required=True, help="folder of the other version")
    parser.add_argument("--export", help="a commit: write its package into --base, and end")
    parser.add_argument("--mode", default=",".join(MODES))
    parser.add_argument("--cases", default=",".join(CASES), help="comma list of names; default all")
    parser.add_argument("--table", action="store_true", help="time the cases of attention_table.py instead of --cases")
    parser.add_argument("--seq", type=command_line.positive(int), help="length of every case; default each case's own")
    parser.add_argument("--threads", type=command_line.positive(int), default=12, help="cases that compile at once")
    args = parser.parse_args(argv)
    if args.export is not None:
        export(args.export, args.base)
        return 0
    prepare_process()
    try:
        modes = command_line.names("mode", args.mode, MODES)
        cases = [CASES[name] for name in command_line.names("cases", args.cases, list(CASES))]
        if args.table and args.seq is not None:
            raise ValueError(
                f"seq: got {args.seq} with --table, whose cases have lengths of their own, want one of the two"
            )
        if not (args.base / BASE).is_dir():
            raise ValueError(f"base: got {args.base}, want a folder with {BASE} in it, as --export COMMIT writes it")
    except ValueError as error:
        parser.error(str(error))
    if args.table:
        cases = [of_table(case) for case in TABLE]
    if args.seq is not None:
        cases = [dataclasses.replace(case, seq=args.seq) for case in cases]
    deadline = time.monotonic() + args.budget
    sys.path.insert(0, str(args.base))
    libraries = [importlib.import_module(name) for name in ("jax_kernels", BASE)]
    name, timer = choose_timer(args.timer, ["jax"])
    results = report.header(args.commit, timer=name)
    commit = args.base / "COMMIT"
    results["base_commit"] = commit.read_text().strip() if commit.exists() else None
    results["rows"] = rows = []
    chosen = [(case, mode) for mode in modes for case in cases]
    with ThreadPoolExecutor(args.threads) as pool:
        prepared = {x: [pool.submit(prepare, *x, library) for library in libraries] for x in chosen}
        for case, mode in chosen:
            if time.monotonic() > deadline:
                say(f"{mode} {case.name}: skipped: the time budget was spent")
                rows.append({"case": case.name, "mode": mode, "ours": {"status": "skipped"}, "base": {}})
                continue
            rows.append(compare(case, mode, prepared.pop((case, mode)), timer, args))
            report.write_json(args.output, results)
        pool.shutdown(cancel_futures=True)
    close(timer)
    return report.exit_status(row[which]["status"] for row in rows for which in ("ours", "base") if row[which])


if __name__ == "__main__":
    sys.exit(main())
