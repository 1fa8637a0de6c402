"""Compiles several programs at once: the compilers of kernels run in threads, without Python's lock."""

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from jax_kernels.tuning.timers import Program

__all__ = ["WORKERS", "compiled"]

WORKERS = min(os.cpu_count() or 1, 16)


def compiled(programs: Sequence[Program]) -> list[Program | Exception]:
    """For each program, in order, a program whose calls compile nothing, or the error of its compilation.

    Tracing and lowering run in this thread, because JAX's settings are a thread's own. Programs that cannot be lowered
    are returned as they are.
    """

    def one(lowered: Program | tuple | Exception) -> Program | Exception:
        if not isinstance(lowered, tuple):
            return lowered
        program, stage, arguments = lowered
        try:
            executable = stage.compile()
        except Exception as error:  # it asks for more registers or shared memory than there are
            return error
        return dataclasses.replace(program, call=lambda: executable(*arguments), lower=None)

    with ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(one, (_lowered(program) for program in programs)))  # it lowers while others compile


def _lowered(program: Program) -> Program | tuple | Exception:
    if program.lower is None:
        return program
    try:
        stage, arguments = program.lower()
    except Exception as error:  # its blocks do not fit the call
        return error
    return program, stage, arguments
