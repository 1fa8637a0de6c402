"""Times many block specs of one kernel, to choose the rows of jax_kernels.pallas.block_specs.

    PYTHONPATH=. python benchmarks/sweep_attention.py --head-dim 128 --causal yes --direction fwd --output sweep.json

A shape may have another head_dim for values, and a peer may be the control:

    PYTHONPATH=. python benchmarks/sweep_attention.py --shape 2,8192,16,192/128 --control fa4 --output sweep.json

Each config is compiled, checked against the control (cuDNN; "xla" without a GPU; or --control), timed and printed; the
control has a turn every few configs. The fastest configs and the control then alternate for the final figures. A config
that raises is listed; if a config hangs or crashes its process, another process continues with the rest.

--mask sweeps the Triton kernels over block lists, which are made before the calls. TFLOP/s count all pairs, dead pairs
too: only ratios mean something then.
"""

import argparse
import ast
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from harness import command_line, head_dims, report
from harness.cases import DTYPES, Case, InputSet, Oracle, as_numpy, input_sets, parse_shape, relative_error
from harness.contenders import OURS, PEERS, build, framework, from_function
from harness.mask_patterns import MaskPattern, random_blocks
from harness.process import prepare_process, say
from harness.timers import choose_timer
from harness.timing import METHODS, Call, Contender, alternate, first_line, speed_ratio, spread, take_turn, wait

from jax_kernels import flash_attention
from jax_kernels.device import device_info
from jax_kernels.dispatch import interpreting
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.pallas.attention.sm80 import forward as forward_sm80
from jax_kernels.pallas.attention.sm90.backward import launch as backward_sm90
from jax_kernels.pallas.attention.sm90.forward import launch as forward_sm90
from jax_kernels.pallas.attention.triton import backward as backward_triton
from jax_kernels.pallas.attention.triton import block_lists as lists_triton
from jax_kernels.pallas.attention.triton import forward as forward_triton
from jax_kernels.pallas.block_specs import attention_row
from jax_kernels.pallas.block_specs.candidates import backward_sm90_bytes, forward_sm90_bytes
from jax_kernels.pallas.block_specs.specs import (
    AttentionBackwardSm90,
    AttentionBackwardTriton,
    AttentionForwardSm90,
    AttentionForwardTriton,
)
from jax_kernels.reference import attention as reference
from jax_kernels.reference import chunked_attention


class Kernel(NamedTuple):
    """A kernel's function and the class of its block specs."""

    function: Callable
    config: type


# By implementation and direction.
KERNELS: dict[tuple[str, str], Kernel] = {
    ("mosaic_gpu", "fwd"): Kernel(forward_sm90.attention_forward, AttentionForwardSm90),
    ("mosaic_gpu", "bwd"): Kernel(backward_sm90.attention_backward, AttentionBackwardSm90),
    ("sm80", "fwd"): Kernel(forward_sm80.attention_forward, forward_sm80.AttentionForwardSm80),
    ("triton", "fwd"): Kernel(forward_triton.attention_forward, AttentionForwardTriton),
    ("triton", "bwd"): Kernel(backward_triton.attention_backward, AttentionBackwardTriton),
}
SHARED_MEMORY = 227 << 10  # bytes for a block on Hopper
LOST = 75  # exit status of a process whose GPU context one config has broken

# Forward on Hopper, by head_dim: (compute_warpgroups, block_kv), and stages. share_q_out and pingpong: both values.
FORWARD_SM90 = {
    64: ((3, 128), (2, 128), (3, 192), (2, 192), (2, 256), (3, 64), (2, 64)),
    128: ((2, 128), (2, 192), (2, 64), (3, 128), (3, 64)),
    256: ((2, 64), (2, 128), (3, 64)),
}
STAGES = {64: (3, 4, 2, 5), 128: (2, 3, 4), 256: (2, 1)}
# Backward on Hopper, by head_dim: the largest block_q for which the kernel has registers.
BACKWARD_SM90_BLOCK_Q = {64: 128, 128: 64, 256: 64}
BACKWARD_SM90_STAGES = ((2, 2), (2, 1), (3, 2), (1, 1), (3, 1), (3, 3))
Q_LOOP_STAGGER = (5, 0, 1, 3, 7, 11)  # full attention only: causal work starts at the diagonal
HEAD_GROUP = (1, 4, 2, 8, 16)
# By mma.sync: block_q, block_kv, warpgroups, q_in_smem.
FORWARD_SM80 = (
    *((64, 64, 1, False), (64, 64, 2, False), (128, 32, 1, True), (128, 64, 1, True), (128, 32, 2, True)),
    *((64, 64, 2, True), (64, 64, 1, True), (128, 64, 2, True), (128, 64, 1, False), (64, 32, 1, False)),
)
# Triton: (block_q, block_kv), num_warps and num_stages.
FORWARD_TRITON = ((128, 64), (128, 128), (64, 64), (128, 32), (64, 128), (64, 32))
# (block_q_dkv, block_kv_dkv, block_q_dq, block_kv_dq)
BACKWARD_TRITON = (
    (64, 64, 64, 64),
    (32, 64, 64, 32),
    (64, 128, 128, 64),
    (32, 128, 128, 32),
    (128, 128, 128, 128),
    (32, 32, 32, 32),
)
WARPS_AND_STAGES = ((4, 2), (8, 2), (4, 3), (8, 3), (4, 1), (4, 4))
# By --mask, for a number of tokens.
MASKS: dict[str, Callable[[int], MaskPattern]] = {
    "blocks": lambda seq: random_blocks(seq, 0.1, 128),
    "window-prefix": lambda seq: MaskPattern.of_window(511, 0, prefix=64),
}


def grid(
    implementation: str, direction: str, head_dim: int, causal: bool, value_head_dim: int | None = None
) -> list[Any]:
    """The configs to try: Hopper's row, then the lists above, likely configs first. "sm80" has no row."""
    value_head_dim = value_head_dim or head_dim
    widest = max(head_dim, value_head_dim)
    if implementation == "sm80":
        names, kind = ("block_q", "block_kv", "warpgroups", "q_in_smem"), forward_sm80.AttentionForwardSm80
        return [kind(**dict(zip(names, x, strict=True))) for x in FORWARD_SM80 if head_dim <= 64 or x[0] == 64 or x[3]]
    row, _ = attention_row(
        (9, 0), implementation, head_dim=widest, v_head_dim=value_head_dim, bits=16, is_causal=causal
    )
    blocks = row.forward if direction == "fwd" else row.backward
    listed = None
    if implementation == "mosaic_gpu":
        listed = head_dims.configs(blocks, direction, causal, (head_dim, value_head_dim))
    if listed is None:
        listed = _listed(implementation, direction, widest, causal)
    return list(dict.fromkeys([blocks, *listed]))


def _listed(implementation: str, direction: str, head_dim: int, causal: bool) -> list[Any]:
    """Every combination of the lists above with tiles that fit in shared memory."""
    width = next(w for w in FORWARD_SM90 if head_dim <= w)
    if (implementation, direction) == ("mosaic_gpu", "fwd"):
        free = itertools.product(STAGES[width], (False, True), (True, False))
        configs: list[Any] = [
            AttentionForwardSm90(wgs, block_kv, stages, share_q_out=share, pingpong=turns)
            for (stages, share, turns), (wgs, block_kv) in itertools.product(free, FORWARD_SM90[width])
        ]
        return [c for c in configs if forward_sm90_bytes(c, width) <= SHARED_MEMORY]
    if (implementation, direction) == ("mosaic_gpu", "bwd"):
        block_q = BACKWARD_SM90_BLOCK_Q[width]
        orders = [(0, h) for h in HEAD_GROUP] if causal else [(r, h) for h in (1, 4) for r in Q_LOOP_STAGGER]
        configs = [
            AttentionBackwardSm90(block_q, q, do, q_loop_stagger, heads)
            for (q, do), (q_loop_stagger, heads) in itertools.product(BACKWARD_SM90_STAGES, orders)
        ]
        return [c for c in configs if backward_sm90_bytes(c, width) <= SHARED_MEMORY]
    if direction == "fwd":
        return [AttentionForwardTriton(*b, *ws) for ws, b in itertools.product(WARPS_AND_STAGES, FORWARD_TRITON)]
    return [AttentionBackwardTriton(*b, *ws) for ws, b in itertools.product(WARPS_AND_STAGES, BACKWARD_TRITON)]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count, seconds = command_line.positive(int), command_line.positive(float)
    choices = dict.fromkeys(implementation for implementation, _ in KERNELS)
    parser.add_argument("--implementation", choices=choices, default="mosaic_gpu", help="sm80: mma.sync, in no op")
    parser.add_argument("--control", choices=(*PEERS, *OURS), help="contender that the configs are compared with")
    parser.add_argument("--direction", choices=("fwd", "bwd"), default="fwd")
    parser.add_argument("--causal", choices=("no", "yes"), default="no")
    parser.add_argument("--mask", choices=tuple(MASKS), help="a tenth of the blocks of 128; 512 keys and the first 64")
    parser.add_argument("--head-dim", type=int, default=128, help="of the shape 2, 8192, 2048 / head_dim, head_dim")
    parser.add_argument("--shape", help="batch,seq,heads,head_dim[/value_head_dim][,kv_heads] instead of --head-dim")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    scale_help = "factor of the queries: scores of 8 or more have no useful bound by norms"
    parser.add_argument("--query-scale", type=seconds, default=1.0, help=scale_help)
    parser.add_argument("--configs", help="instead of the grid, fields in order or by name: '2,128,2;3,128,stages=3'")
    parser.add_argument("--seconds", type=seconds, default=0.1, help="queued work of one turn")
    parser.add_argument("--turns", type=count, default=2, help="turns of a config when it is first timed")
    parser.add_argument("--control-every", type=count, default=4, help="configs between two turns of the control")
    parser.add_argument("--limit", type=seconds, default=60, help="seconds that one config may take in all")
    parser.add_argument("--finalists", type=int, default=4, help="configs that alternate with the control at the end")
    parser.add_argument("--rounds", type=count, default=7, help="rounds of that alternation")
    parser.add_argument("--budget", type=seconds, default=240, help="seconds after which the run ends")
    parser.add_argument("--timer", choices=tuple(METHODS), default="cupti")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="JSON file")
    parser.add_argument("--commit", help="commit to record if the tree has no .git")
    parser.add_argument("--worker-until", type=float, help=argparse.SUPPRESS)  # time.time() of the budget's end
    args = parser.parse_args(argv)
    try:
        if args.shape is None and not 0 < args.head_dim <= 256:
            raise ValueError(f"head-dim: got {args.head_dim}, want 1 to 256")
        shape = parse_shape(args.shape or f"2,8192,{max(1, 2048 // args.head_dim)},{args.head_dim}", values=True)
        args.case = Case.of(shape, dtype=args.dtype, causal=args.causal == "yes", mode=args.direction)
        if (args.implementation, args.direction) not in KERNELS:
            raise ValueError(f"direction: got {args.direction}, want fwd for implementation {args.implementation}")
        if args.mask and (args.implementation, args.causal) != ("triton", "no"):
            raise ValueError(f"mask: got {args.mask}, want none except for --implementation triton without --causal")
        if args.mask and args.control not in (None, *OURS):
            raise ValueError(f"control: got {args.control}, want one of {', '.join(OURS)} with --mask")
        kind = KERNELS[args.implementation, args.direction].config
        if args.configs is None:
            case = args.case
            args.configs = grid(args.implementation, args.direction, case.head_dim, case.causal, case.value_head_dim)
        else:
            args.configs = [_config(kind, text) for text in args.configs.split(";") if text.strip()]
    except (ValueError, TypeError, SyntaxError) as error:
        parser.error(str(error))
    return args


def _config(kind: type, text: str) -> Any:
    """A config from its fields in order, or by name: "64, 32, q_in_smem=True"."""
    (call,) = ast.parse(f"kind({text})").body
    given = [ast.literal_eval(x) for x in call.value.args]
    return kind(*given, **{x.arg: ast.literal_eval(x.value) for x in call.value.keywords})


def inputs_of(args: argparse.Namespace, config: Any, sets: Sequence[InputSet]) -> AttentionInputs:
    """The arrays of the first call. With --mask they have the Mask and its block lists for the config's blocks."""
    inputs = AttentionInputs(*sets[0].qkv)
    if args.mask is None:
        return inputs
    inputs = inputs._replace(mask=MASKS[args.mask](args.case.seq).mask)
    if args.direction == "fwd":
        blocks = {((config.block_q, config.block_kv), "query")}
    else:
        blocks = {((config.block_q_dq, config.block_kv_dq), "query")}
        blocks |= {((q or config.block_q_dkv, config.block_kv_dkv), "key") for q in (None, config.block_q_dv)}
    lists = (lists_triton.prepared_lists(inputs, options_of(args), of, by=by) for of, by in sorted(blocks))
    return inputs._replace(lists=tuple(lists))


def options_of(args: argparse.Namespace) -> AttentionOptions:
    return AttentionOptions(scale=1 / math.sqrt(args.case.head_dim), is_causal=args.case.causal)


def make(args: argparse.Namespace, config: Any, sets: Sequence[InputSet], saved: Sequence[tuple]) -> Call:
    """Makes the call of the kernel with this config. saved: (out, lse) of each input set, for a backward."""
    kernel, options = KERNELS[args.implementation, args.direction].function, options_of(args)
    statics = {"config": config, "core_count": device_info().core_count, "interpret": interpreting()}
    first = inputs_of(args, config, sets)
    under = {"mask": first.mask, "lists": first.lists}
    if args.direction == "fwd":
        attend = lambda under, *qkv: kernel(AttentionInputs(*qkv, **under), options, out_dtype=qkv[0].dtype, **statics)
        forward = jax.jit(lambda *given: attend(*given)[:1])
        return lambda i: forward(under, *sets[i % len(sets)].qkv)

    @jax.jit
    def backward(under, qkv, results, do):
        inputs, (out, lse) = AttentionInputs(*qkv, **under), results
        if getattr(config, "delta_in_dq", False):
            return kernel(inputs, options, lse, None, do, out=out, **statics)[:3]
        return kernel(inputs, options, *reference.row_terms(out, lse, do, None), do, **statics)[:3]

    return lambda i: backward(under, sets[i % len(sets)].qkv, saved[i % len(sets)], sets[i % len(sets)].dout)


def control_of(args: argparse.Namespace, name: str, sets: Sequence[InputSet]) -> Contender:
    """The contender that the configs are compared with, compiled and run once."""
    if args.mask is None:
        return build(name, args.case, sets, Oracle(args.case, sets[0]))
    control = Contender(name, "jax")
    with control.attempt():
        attend = lambda mask, *qkv: flash_attention(*qkv, mask=mask, implementation=name)
        built = from_function(attend, args.case, sets, name, MASKS[args.mask](args.case.seq).mask)
        control.start(built.call, built.plan)
    return control


def row_of(config: Any, **row: Any) -> dict[str, Any]:
    return {"config": repr(config), "fields": dataclasses.asdict(config), **row}


class Sweep:
    """One process of a sweep. It skips configs that an earlier process wrote to the output file."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.deadline = time.monotonic() + 0.95 * (args.worker_until - time.time())
        self.rows: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {"rows": self.rows, "control": [], "finals": []}
        if args.output.exists():
            self.results = json.loads(args.output.read_text())
            self.rows = self.results["rows"]
        self.contenders: dict[str, Contender] = {}

    def everything(self) -> None:
        args, case = self.args, self.args.case
        ours = "mosaic_gpu" if args.mask else "jax-cudnn"
        named = args.control or (ours if jax.default_backend() == "gpu" else "xla")
        name, self.timer = choose_timer(args.timer, sorted({"jax", framework(named)}))
        facts = {"case": dataclasses.asdict(case), "implementation": args.implementation, "mask": args.mask}
        facts |= {"query_scale": args.query_scale}
        self.results |= report.header(args.commit, **facts, timer=name, method=METHODS[name]["jax"])
        sets = [dataclasses.replace(of, query=of.query * args.query_scale) for of in input_sets(case)]
        control = control_of(args, named, sets)
        if control.status != "ok":
            raise RuntimeError(f"the control {control.name} does not run: {control.reason}")
        self.wanted = control.call(0)  # type: ignore[misc]
        if control.framework == "torch":
            self.wanted = tuple(map(as_numpy, self.wanted))
        saved: list = []
        if args.direction == "bwd":  # from the reference: every config gets the same, correct residuals
            options = dataclasses.replace(options_of(args), precision="fp32")
            mask = MASKS[args.mask](case.seq).mask if args.mask else None
            forward = jax.jit(
                functools.partial(chunked_attention.forward, options=options, out_dtype=DTYPES[case.dtype])
            )
            saved = [forward(AttentionInputs(*s.qkv, mask=mask)) for s in sets]
        say(f"{case.label}: {len(args.configs)} configs of {args.implementation}, control {control.name}")
        tried = {row["config"] for row in self.rows}
        left = [config for config in args.configs if repr(config) not in tried]
        for number, config in enumerate(left):
            if time.monotonic() > self.deadline:
                say(f"  the time budget is spent: {len(left) - number} configs were not tried")
                self.rows += [row_of(c, status="skipped", reason="the time budget was spent") for c in left[number:]]
                break
            if number % args.control_every == 0:
                self.turn_of(control)
            self.try_one(config, sets, saved, control)
        self.save()
        self.finals(control)

    def turn_of(self, control: Contender) -> None:
        take_turn(control, self.timer, self.args.seconds)
        self.results["control"] = control.times
        say(f"  control {control.name}: {self.figures(control.times[-1])}")

    def figures(self, ms: float) -> str:
        return f"{ms:.4f} ms, {report.figure(self.args.case.tflops(ms))} TFLOP/s"

    def try_one(self, config: Any, sets: Sequence[InputSet], saved: Sequence[tuple], control: Contender) -> None:
        contender = Contender(repr(config), "jax", plan=repr(config))
        self.rows.append(row_of(config, status="crashed", reason="the process ended with it"))  # until it has returned
        self.save()
        watchdog = threading.Timer(self.args.limit, self.hung, [config])
        watchdog.daemon = True
        watchdog.start()
        row: dict[str, Any] = {}
        try:
            contender.call = make(self.args, config, sets, saved)
            outputs = contender.call(0)
            wait(outputs, "jax")
            contender.judge(relative_error(outputs, self.wanted), control.name)
            row |= {"status": contender.status, "reason": contender.reason, "error": contender.error}
            if contender.status == "ok":
                for _ in range(self.args.turns):
                    take_turn(contender, self.timer, self.args.seconds)
                ms = spread(contender.times)["median"]
                row |= {"times_ms": contender.times, "ms": ms, "tflops": self.args.case.tflops(ms)}
                row["ratio"] = control.times[-1] / ms
                self.contenders[contender.name] = contender
        except Exception as error:
            row |= {"status": "failed", "reason": first_line(error)}
        finally:
            watchdog.cancel()
        self.finish(config, **row)
        if row["status"] == "failed":
            self.check_device(control)

    def finish(self, config: Any, **row: Any) -> None:
        self.rows[-1] = row_of(config, **row)
        if row["status"] == "ok":
            told = f"{self.figures(row['ms'])}, {row['ratio']:.3f} x control, error {row['error']:.1e}"
        else:
            told = f"{row['status']}: {row['reason']}"
        say(f"  {config!r}: {told}")
        self.save()

    def hung(self, config: Any) -> None:
        self.finish(config, status="timeout", reason=f"it did not come back within {self.args.limit:.0f} s")
        os._exit(LOST)

    def check_device(self, control: Contender) -> None:
        """Ends the process after a failure that broke its GPU context, such as an illegal access."""
        try:
            wait(control.call(0), control.framework)  # type: ignore[misc]
        except Exception as error:
            say(f"  the device is lost to this process ({first_line(error)}): going on in another")
            os._exit(LOST)

    def finals(self, control: Contender) -> None:
        """Times the fastest configs of this process and the control, round after round."""
        best = sorted(self.contenders.values(), key=lambda c: spread(c.times)["median"])[: self.args.finalists]
        trials = [dataclasses.replace(c, times=[]) for c in (control, *best)]
        end = time.monotonic() + self.args.worker_until - time.time() - 2  # the process has to end by then
        alternate(trials, self.timer, rounds=self.args.rounds, seconds=self.args.seconds, deadline=end)
        say(f"alternating, {self.args.case.label}:")
        self.results["finals"] = []
        for trial in trials:
            if trial.status != "ok" or not trial.times:
                say(f"  {trial.name}: {trial.status}: {trial.reason}")
                continue
            ms, ratio = spread(trial.times)["median"], speed_ratio(trial.times, trials[0].times)
            entry = {"name": trial.name, "times_ms": trial.times, "ms": ms, "tflops": self.args.case.tflops(ms)}
            self.results["finals"].append(entry | {"ratio": ratio})
            say(f"  {trial.name}: {self.figures(ms)}, {ratio:.3f} x control, {len(trial.times)} rounds")
        self.save()

    def save(self) -> None:
        report.write_json(self.args.output, self.results)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = arguments(argv)
    prepare_process()
    if args.worker_until is not None:
        Sweep(args).everything()
        return 0
    args.output.unlink(missing_ok=True)
    until = time.time() + args.budget
    tried = 0
    while True:  # a worker that hangs or crashes loses its GPU context
        command = [sys.executable, __file__, *argv, "--worker-until", str(until)]
        try:
            status = subprocess.run(command, check=False, timeout=max(until - time.time(), 1)).returncode
        except subprocess.TimeoutExpired:
            say(f"the budget of {args.budget:.0f} s is spent: stopping")
            return 2
        before, tried = tried, len(json.loads(args.output.read_text())["rows"]) if args.output.exists() else 0
        if tried == before or (status >= 0 and status != LOST):
            return abs(status)


if __name__ == "__main__":
    sys.exit(main())
