"""Shows whether kernels are traced as before: digests of the program of each block spec row, for the row's GPU.

    python tests/tools/program_digests.py write FILE [WORD...]     # of the rows whose name has all the words
    python tests/tools/program_digests.py compare OLD NEW

A program is JAX's input to Mosaic and Triton, and to XLA for the rest, without source locations. Equal digests mean
equal PTX by the same compilers. Nothing is compiled: a row takes a few seconds. To compare with another version of the
library, write both files with this script, one of them with that version's folder in PYTHONPATH. The exit status of
compare is 1 if a digest differs, or if one file has a row that the other lacks.
"""

import hashlib
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.processes import forked
from tests.tools import compile_case

# Source locations.
_PLACES = re.compile(r" loc\([^)]*\)|#loc.*")


def _without_places() -> None:
    """Removes the source location of every operation of this process."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    mlir.source_info_to_location = lambda *args, **kwargs: ir.Location.unknown()


def _calls(operation: Any) -> list[Any]:
    """The kernel calls in an operation and its regions."""
    inner = [op for region in operation.regions for block in region for op in block]
    own = [op for op in inner if op.name == "stablehlo.custom_call" and "mhlo.backend_config" in op.attributes]
    return own + [call for op in inner for call in _calls(op)]


def _digest(*texts: str | bytes) -> str:
    joined = hashlib.sha256()
    for text in texts:
        joined.update(text.encode() if isinstance(text, str) else text)
    return joined.hexdigest()[:16]


def digests(lowered: Any) -> dict[str, Any]:
    """{"kernels": digests of the inputs of Mosaic and Triton, in order; "xla": the digest of the rest}."""
    module = lowered.compiler_ir("stablehlo")
    calls = _calls(module.operation)
    kernels = []
    for call in calls:
        config = call.attributes["mhlo.backend_config"]
        # kernel_hash is a hash of the module. Mosaic finds compiled modules by it.
        kernels.append(_digest(*(f"{part.name}={part.attr}" for part in config if part.name != "kernel_hash")))
    for call in calls:
        del call.attributes["mhlo.backend_config"]
    return {"kernels": kernels, "xla": _digest(_PLACES.sub("", module.operation.get_asm(enable_debug_info=False)))}


def _of_row(gpu: str, words: list[str]) -> dict[str, Any]:
    _without_places()
    found: list[Any] = []

    def keep(gpu: str, function: Any, *shapes: Any) -> tuple[Any, list[str]]:
        found.append(compile_case.lower(gpu, function, *shapes))
        return None, []

    compile_case.lower_and_compile = keep
    compile_case.compile_here(gpu, compile_case.Spec.parse(words))
    return digests(found[0])


def _in_a_process(gpu: str, spec: compile_case.Spec) -> dict[str, Any]:
    done = forked.run(
        __file__, "--here", gpu, *spec.words(), env={"JAX_KERNELS_INTERPRET": None}, timeout=compile_case.TIMEOUT
    )
    if done.returncode:
        return {"error": done.stderr.splitlines()[-1:]}
    return json.loads(done.stdout.splitlines()[-1])


def write(file: Path, words: list[str]) -> int:
    from tests.tools.compile_budget import MOSAIC, ROWS

    rows = {name: (gpu, spec) for name, (gpu, _, spec) in ROWS.items()}
    for name, (options, *_) in MOSAIC.items():
        rows[f"feature {name}"] = "h200", compile_case.Spec(implementation="mosaic_gpu", **options)
    rows = {name: row for name, row in rows.items() if all(word in name for word in words)}
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(rows, pool.map(lambda row: _in_a_process(*row), rows.values()), strict=True))
    file.write_text(json.dumps(found, indent=1) + "\n")
    failed = [name for name, row in found.items() if "error" in row]
    print(f"{len(found)} rows, {sum(len(row.get('kernels', ())) for row in found.values())} kernels, failed: {failed}")
    return 1 if failed else 0


def compare(old: Path, new: Path) -> int:
    before, after = (json.loads(file.read_text()) for file in (old, new))
    differing = [name for name in before | after if before.get(name) != after.get(name)]
    for name in differing:
        print(f"{name}: was {before.get(name)}, is {after.get(name)}")
    print(f"{len(before)} rows were, {len(after)} are; {len(differing)} differ")
    return 1 if differing else 0


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--here"]:
        print(json.dumps(_of_row(arguments[1], arguments[2:])))
        return 0
    if arguments[:1] == ["write"] and len(arguments) > 1:
        return write(Path(arguments[1]), arguments[2:])
    if arguments[:1] == ["compare"] and len(arguments) == 3:
        return compare(Path(arguments[1]), Path(arguments[2]))
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
