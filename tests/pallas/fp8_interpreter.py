"""Cases of flash_attention_fp8 by its kernel in JAX's Mosaic interpreter, as a script: see mosaic_interpreter.py.

    python tests/pallas/fp8_interpreter.py CORES RACES NAME...

CORES and RACES: as for decode_interpreter.py. Prints a JSON object by name of the case.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import mosaic_interpreter  # first: it sets the environment
from fp8_cases import CASES, arrays_of, errors, run
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device


def main(cores: int, races: bool, names: list[str]) -> dict:
    mosaic_interpreter.install()
    plgpu.InterpretGPUParams = functools.partial(plgpu.InterpretGPUParams, detect_races=races)
    found = {}
    for name in names:
        case = CASES[name]
        arrays = arrays_of(case)
        with on_device(dataclasses.replace(device_info("h200"), core_count=cores)):
            got = run(case, arrays, "mosaic_gpu")
        found[name] = {
            "errors": errors(case, arrays, got, "mosaic_gpu"),
            "races": bool(callbacks.get_races().races_found) if races else False,
        }
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2] == "1", sys.argv[3:])))
