"""Tunes common calls on this GPU, and writes the winners that are part of the library.

    PYTHONPATH=. python benchmarks/ship_winners.py --budget 180

Each call is tuned as by jax_kernels.tune. Its winner is added to jax_kernels/tuned/shipped/<GPU>.json, or to --output,
when the call is done. A call that has a winner there, or in the shipped file, is left out: a second run continues. No
call begins after the budget, and a call that the budget interrupts is lost.

Most of the time is compilation, on the host. Several processes share it, and take turns on the GPU:

    export BENCHMARK_LOCK=/tmp/gpu.lock
    for i in 1 2 3 4; do PYTHONPATH=. python benchmarks/ship_winners.py --part $i/4 & done; wait

The exit status is 1 if a call failed.
"""

import argparse
import pathlib
import sys
from collections.abc import Mapping, Sequence

from harness import command_line
from harness.parts import add_part, exclusive, part_of
from harness.process import refuse
from harness.side_by_side import gpu_alone
from harness.timing import first_line
from harness.tuned_calls import (
    Clock,
    OutOfTimeError,
    TunedCase,
    TurnsMeasurement,
    attention,
    decoding,
    matmul,
    norm,
    prepare,
)

from jax_kernels.device import device_info
from jax_kernels.dispatch import tuning_key
from jax_kernels.ops.planned_op import TunableCall
from jax_kernels.tuned import cache
from jax_kernels.tuned.winners import Winner
from jax_kernels.tuning import timers
from jax_kernels.tuning.measure import NothingToTuneError, Settings

_LONG = {2048: 8, 8192: 2, 32768: 1}  # the batch of each length
# The most common calls first: a run may end before the last ones.
CASES: tuple[TunedCase, ...] = (
    matmul(4096, 4096, 4096),
    attention(2, 8192, 16, 128, causal=True, gradients=True),
    attention(2, 4096, 32, 128, kv_heads=8, causal=True, gradients=True),
    *(decoding(batch, 32, 8, 128, 8192) for batch in (1, 16, 64)),
    matmul(8192, 14336, 4096, gated=True),
    matmul(8192, 4096, 14336),
    *(norm(op, 8192, 4096) for op in ("rms_norm", "layer_norm")),
    matmul(16384, 2048, 5632),
    attention(2, 8192, 32, 64, causal=True, gradients=True),
    *(attention(_LONG[length], length, 16, 128, causal=True, gradients=True) for length in (2048, 32768)),
    *(attention(_LONG[length], length, 32, 64, causal=True, gradients=True) for length in (2048, 32768)),
    *(attention(batch, length, 16, 128, causal=False, gradients=True) for length, batch in _LONG.items()),
    *(attention(batch, length, 32, 64, causal=False, gradients=True) for length, batch in _LONG.items()),
)


def start(path: pathlib.Path, device: str) -> dict[str, Winner]:
    """The winners of the file, and the shipped ones that it lacks."""
    shipped = cache.SHIPPED / cache.name_of(device)
    return cache.read(shipped, device) | cache.read(path, device)


def add(path: pathlib.Path, device: str, winners: Mapping[str, Winner]) -> None:
    """Adds winners to the file. Other processes may do so at the same time."""
    with exclusive(path):
        cache.write(path, device, start(path, device) | winners)


def tune(tunable: TunableCall, case: TunedCase, settings: Settings, clock: Clock) -> Winner | None:
    """The call's winner; None if it has one candidate. Prints the steps."""
    measurement = TurnsMeasurement(tunable, settings)
    count = measurement.count()
    clock.say(f"{case.name}: at most {count} candidates")
    try:
        winner = measurement.winner()
    except NothingToTuneError as error:
        clock.say(f"{case.name}: not tuned: {error}")
        return None
    for text, reason in measurement.failed.items():
        clock.say(f"  not {text}: {reason}")
    clock.say(f"{case.name}: {winner}; {len(measurement.pruned)} left out, {len(measurement.failed)} failed")
    return winner


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file; default: the shipped file of this GPU")
    parser.add_argument("--budget", type=command_line.positive(float), default=180, help="seconds")
    parser.add_argument("--seconds", type=command_line.positive(float), default=0.03, help="of a reading")
    add_part(parser)
    args = parser.parse_args(argv)
    clock = Clock(args.budget)
    prepare(args.part)
    with gpu_alone():
        device, timer = device_info().name, timers.choose()
    if timer.name != "cupti":
        refuse(f"the timer is {timer.name!r}: shipped winners need a GPU and CUPTI")
    path = args.output or cache.SHIPPED / cache.name_of(device)
    clock.say(f"{device}: {path}")
    left, failed = [], 0
    for case in part_of(CASES, args.part):
        try:
            clock.check()
            tunable = case.tunable()
            key = tuning_key(tunable.request)
            if key in start(path, device):
                clock.say(f"{case.name}: has a winner")
                continue
            settings = Settings(timer=timer, seconds=args.seconds, gradients=case.gradients, step=clock.check)
            winner = tune(tunable, case, settings, clock)
            if winner is not None:
                add(path, device, {key: winner})
        except OutOfTimeError:
            left.append(case.name)
        except Exception as error:  # the other calls may work
            failed += 1
            clock.say(f"{case.name}: failed: {first_line(error)}")
    clock.say(f"left for another run: {', '.join(left) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
