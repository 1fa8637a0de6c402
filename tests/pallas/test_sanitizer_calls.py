"""`make test-sanitizer` runs every kernel: its calls lower to all kernels of the library, for a Hopper GPU."""

import re
import sys
from pathlib import Path

import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.tools import compile_case, sanitizer

ROOT = Path(__file__).parents[2]


def launching_files() -> set[str]:
    files = (ROOT / "pallas").rglob("*.py")
    return {
        x.name + "/" + x.parent.name for x in files if re.search(r"pl\.pallas_call\(|[ =]launch\(\n", x.read_text())
    }


@pytest.mark.slow
def test_calls_reach_every_kernel(monkeypatch):
    """Each file that launches kernels does so in some call."""
    reached: set[str] = set()

    def noting(launch):
        def noted(*args, **kwargs):
            frame = sys._getframe(1)
            while frame is not None:
                path = Path(frame.f_code.co_filename)
                reached.add(path.name + "/" + path.parent.name)
                frame = frame.f_back
            return launch(*args, **kwargs)

        return noted

    monkeypatch.setattr(pl, "pallas_call", noting(pl.pallas_call))
    monkeypatch.setattr(plgpu, "kernel", noting(plgpu.kernel))
    for make in sanitizer.CALLS.values():
        call = make()
        compile_case.lower("h200", call.run, *call.shapes)
    assert launching_files() - {"launch.py/mosaic"} <= reached


READ = "========= Uninitialized __global__ memory read of size 4 bytes"
FUSION, KERNEL = "=========     at loop_add_fusion_1+0x40", "=========     at attention_forward_triton+0x40"


@pytest.mark.parametrize(
    ("lines", "is_clean"),
    [
        ([READ, FUSION, "========= ERROR SUMMARY: 1 error"], True),
        ([READ, FUSION, "========= ERROR SUMMARY: 2 errors"], False),
        ([READ, FUSION, READ, KERNEL, "========= ERROR SUMMARY: 2 errors"], False),
        ([], False),
    ],
    ids=["fusion", "dropped error", "kernel", "no line"],
)
def test_reads_in_fusions_do_not_count(lines, is_clean):
    """initcheck's errors in XLA's fusions pass, if the report has all errors; errors of other tools do not."""
    report = lambda tool: sanitizer.Report(tool=tool, name="call", status=sanitizer.FOUND, seconds=1, lines=lines)
    assert report("initcheck").is_clean == is_clean
    assert not report("memcheck").is_clean
