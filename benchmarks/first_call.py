"""The time of a process's first calls of bridge.flash_attention, with an empty cache of programs and with a full one.

    python benchmarks/first_call.py --output first-call.json

It needs a GPU. Each of the runs is a process of its own: "cold" begins with an empty folder, "warm" with the folder
that "cold" left, and "off" has JAX_KERNELS_PROGRAM_CACHE=0. A run imports the bridge, starts JAX, and calls the forward
and the backward of one shape; each part has its seconds.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
RUNS = ("cold", "warm", "warm again", "off")


def measure() -> dict[str, float]:
    """The seconds of the parts of this process's first calls."""
    found, last = {}, time.perf_counter()

    def note(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        found[name], last = round(now - last, 3), now

    import torch

    note("import torch")
    from jax_kernels import bridge

    bridge.flash_attention  # noqa: B018  imports the op
    note("import the bridge")
    query, key, value = torch.randn(3, 2, 2048, 16, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    note("start torch's CUDA")
    import jax

    jax.devices()
    note("start JAX's CUDA")
    bridge.flash_attention(query, key, value, is_causal=True)
    torch.cuda.synchronize()
    note("first forward")
    bridge.flash_attention(query, key, value, is_causal=True)
    torch.cuda.synchronize()
    note("second forward")
    for x in (query, key, value):
        x.requires_grad_()
    bridge.flash_attention(query, key, value, is_causal=True).sum().backward()
    torch.cuda.synchronize()
    note("first forward + backward")
    found["first call after import"] = round(
        found["start torch's CUDA"] + found["start JAX's CUDA"] + found["first forward"], 3
    )
    return found


def runs(names: Sequence[str]) -> dict[str, Any]:
    """The seconds of each run by name, in one folder."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            environment = os.environ | {"JAX_KERNELS_CACHE": folder, "PYTHONPATH": str(ROOT)}
            environment["JAX_KERNELS_PROGRAM_CACHE"] = "0" if name == "off" else "1"
            command = [sys.executable, __file__, "--one"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            found[name] = json.loads(done.stdout.splitlines()[-1])
            files = list((pathlib.Path(folder) / "programs").glob("*"))
            found[name] |= {"files": len(files), "kilobytes": round(sum(x.stat().st_size for x in files) / 1e3)}
            print(name, json.dumps(found[name]), flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", action="store_true", help="measure this process, and print JSON")
    parser.add_argument("--runs", default=",".join(RUNS), help="the runs, by commas")
    parser.add_argument("--output", type=pathlib.Path)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(measure()))
        return 0
    found = runs(args.runs.split(","))
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
