"""Runs scripts in forked processes that have JAX imported already. Importing dominates the start of a process.

The server process has the modules imported and no backend started. It forks for each script.
"""

import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path

# XLA's flags with which it compiles for a CPU in half the time. Each fusion's emitter would load all dialects of MLIR,
# and a program of a few loops would be split into 32 modules.
QUICK_COMPILES = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
_MODULES = (
    "jax", "jax.numpy", "jax.experimental.topologies", "jax.experimental.pallas.mosaic_gpu",
    "jax_kernels.pallas.triton.backend", "jax._src.pallas.mosaic_gpu.interpret.jaxpr_interpret", "numpy", "pytest",
    "jax_kernels", "jax_kernels.testing", "jax_kernels.ops.attention.flash_attention", "jax_kernels.pallas.block_specs",
)  # fmt: skip
# Compiling by XLA dominates the time of an interpreted kernel.
UNOPTIMISED = {"XLA_FLAGS": QUICK_COMPILES}
_OF_THREAD = threading.local()
ROOT = Path(__file__).parents[3]


def run(
    script: str | Path, *words: str, env: dict[str, str | None], timeout: float, modules: Sequence[str] = ()
) -> subprocess.CompletedProcess:
    """Like subprocess.run of this Python, with its output as text.

    env: variables that differ from this process; None removes a variable. XLA reads them when it starts. JAX has read
    its variables already: it runs on the CPU, without a compilation cache. modules: to import before, once for all
    scripts.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "stdout"), Path(folder, "stderr")
        request = {"argv": [str(script), *words], "env": env, "timeout": timeout, "outputs": [str(out), str(log)]}
        request["modules"] = list(modules)
        server = _server()
        print(json.dumps(request), file=server.stdin, flush=True)
        answer = server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server of {script} ended with {server.wait()}")
        if (status := json.loads(answer)) is None:
            raise subprocess.TimeoutExpired(request["argv"], timeout, out.read_text(), log.read_text())
        return subprocess.CompletedProcess(
            request["argv"], status, out.read_text(errors="replace"), log.read_text(errors="replace")
        )


def _server() -> subprocess.Popen:
    """A server for each thread, as each thread waits for its answers."""
    if not hasattr(_OF_THREAD, "server"):
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": "",
        }
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        _OF_THREAD.server = subprocess.Popen([sys.executable, __file__], env=env, **pipes)
    return _OF_THREAD.server


def _serve() -> None:
    """Reads requests, and answers each with the exit status, or with None after a timeout."""
    for name in _MODULES:
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        for name in request.pop("modules"):
            importlib.import_module(name)
        child = os.fork()
        if child == 0:
            _become(**request)
        descriptor = os.pidfd_open(child)
        in_time, _, _ = select.select([descriptor], [], [], request["timeout"])
        os.close(descriptor)
        if not in_time:
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps(status if in_time else None), flush=True)


def _become(argv: list[str], env: dict[str, str | None], outputs: list[str], timeout: float) -> None:
    status = 1
    try:
        for name, value in env.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
