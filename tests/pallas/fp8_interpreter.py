"""Cases of flash_attention_fp8 by its kernel in JAX's Mosaic interpreter, as a script: see mosaic_interpreter.py.

    python tests/pallas/fp8_interpreter.py CORES RACES BLOCKS NAME...

CORES and RACES: as for decode_interpreter.py. BLOCKS: a JSON object of AttentionForwardFp8Sm90's fields, {} for the
planned ones. Prints a JSON object by name of the case.
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
from jax_kernels.pallas import block_specs
from jax_kernels.pallas.block_specs import specs


def main(cores: int, races: bool, blocks: dict, names: list[str]) -> dict:
    mosaic_interpreter.install()
    plgpu.InterpretGPUParams = functools.partial(plgpu.InterpretGPUParams, detect_races=races)
    if blocks:
        row = specs.AttentionFp8Row("mosaic_gpu", 256, specs.AttentionForwardFp8Sm90(**blocks))
        block_specs.fp8_row = lambda *_, **__: (row, "block spec")
    found = {}
    for case in CASES:
        if case.name in names:
            arrays = arrays_of(case)
            with on_device(dataclasses.replace(device_info("h200"), core_count=cores)):
                got = run(case, arrays, "mosaic_gpu")
            found[case.name] = {
                "errors": errors(case, arrays, got, "mosaic_gpu"),
                "races": bool(callbacks.get_races().races_found) if races else False,
            }
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2] == "1", json.loads(sys.argv[3]), sys.argv[4:])))
