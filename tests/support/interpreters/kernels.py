"""Runs Hopper kernels of decode, fp8 and matmul in JAX's Mosaic interpreter, as a script: see mosaic.py.

    python tests/support/interpreters/kernels.py MODULE CORES RACES NAME...

MODULE: for example jax_kernels.testing.matmul. CORES: the number of SMs to plan for. RACES: 1 to detect
races. The interpreter confuses the registers of different CTAs, so that its races are real only with one core. Prints a
JSON object by name of the case.
"""

import dataclasses
import functools
import importlib
import json
import sys

from tests.support.processes import forked


def check(module: str, cores: int, races: bool, names: list[str]) -> None:
    """Runs this script and asserts that there are no races and that no error exceeds its bound."""
    done = forked.run(__file__, module, str(cores), str(int(races)), *names, env=forked.UNOPTIMISED, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert sorted(results) == sorted(names)
    for name, result in results.items():
        assert not result["races"], name
        for what, (error, bound) in result["errors"].items():
            assert error <= bound, (name, what, error, bound)


def main(module: str, cores: int, races: bool, names: list[str]) -> dict:
    from tests.support.interpreters import mosaic as mosaic_interpreter  # first: it sets the environment

    # isort: split
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jax_kernels.device import device_info
    from jax_kernels.dispatch import on_device

    mosaic_interpreter.set_bounded(True)
    cases = importlib.import_module(module)
    mosaic_interpreter.install()
    plgpu.InterpretGPUParams = functools.partial(plgpu.InterpretGPUParams, detect_races=races)
    found = {}
    for name in names:
        with on_device(dataclasses.replace(device_info("h200"), core_count=cores)):
            errors = cases.errors_by((getattr(cases, "HOPPER", {}) or cases.CASES)[name], "mosaic_gpu")
        found[name] = {"errors": errors, "races": mosaic_interpreter.races_found()}
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4:])))
