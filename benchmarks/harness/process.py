"""The process of a benchmark: its settings, its output, and its end if it cannot run."""

import functools
import os
import sys
from typing import NoReturn

say = functools.partial(print, flush=True)


def prepare_process() -> None:
    """Sets the environment variables that JAX and PyTorch read when they first use the GPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.45")  # the other half is PyTorch's
    os.environ.setdefault("TEARDOWN_CUPTI", "1")  # torch.profiler gives CUPTI back after each session
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_gpu_enable_command_buffer" not in flags:  # CUPTI sees single kernels only outside CUDA graphs
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer=".strip()


def refuse(reason: str) -> NoReturn:
    """Ends the process like argparse for wrong arguments: the reason in one line, and exit status 2."""
    print(f"{os.path.basename(sys.argv[0])}: error: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2)
