"""A traced program holds names of its own process: another process raises instead of returning values."""

import pytest

from tests.support.processes.python import done_by

pytestmark = pytest.mark.timeout(300)

# The start of both programs: their functions. The second process makes other functions of the same shapes, in the same
# order.
COMMON = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
from jax_kernels import bridge, masks

folder, is_first = sys.argv[1], sys.argv[2] == "first"
x = torch.linspace(-1, 1, 64).reshape(1, 8, 2, 4)
factor = 2 if is_first else 3
times = bridge.from_jax(lambda x, c: x * c)
pattern = {"segment_lengths": (4, 8), "dilation_rates": (1, 2), "is_causal": is_first}
CALLS = {
    "from_jax": lambda x: times(x, factor),
    "dilated_attention": lambda x: bridge.dilated_attention(x, x * 2, x, **pattern),
    "block_sparse": lambda x: bridge.block_sparse_attention(x, x, x, torch.ones(2, 2) > 0, block_size=4, scale=factor),
    "mask": lambda x: bridge.flash_attention(x, x, x, mask=masks.prefix(factor)),
}

class Module(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.function = CALLS[name]

    def forward(self, x):
        return self.function(x)
"""

FIRST = """
for name in CALLS:
    program = torch.export.export(Module(name), (x,), strict=False)
    torch.export.save(program, f"{folder}/{name}.pt2")
    if name != "mask":  # its call is over
        torch.testing.assert_close(torch.export.load(f"{folder}/{name}.pt2").module()(x), CALLS[name](x))
print("saved")
"""

SECOND = """
for name, function in CALLS.items():
    torch.export.export(Module(name), (x,), strict=False)
    function(x)
    for needed in (False, True):
        try:
            got = torch.export.load(f"{folder}/{name}.pt2").module()(x.clone().requires_grad_(needed))
        except RuntimeError as error:
            assert "runs only in the process that traced it" in str(error), error
            print("raised", name)
        else:
            print("numbers", name, got)

# A forked process has the plans of its parent, and gives other names.
from jax_kernels.bridge.jax_functions.programs import PROGRAMS
from jax_kernels.bridge.interop.keyed_cache import memoize, unique_name
made = memoize(lambda key: os.getpid())
before = made(1)
reader, writer = os.pipe()
if os.fork() == 0:
    names = {unique_name("x") for _ in range(100)}
    os.write(writer, f"{len(PROGRAMS)} {made(1)} {made(2) == os.getpid()} {' '.join(names)}".encode())
    os._exit(0)
os.wait()
count, kept, is_own, *names = os.read(reader, 100_000).decode().split()
assert int(count) == len(PROGRAMS) and int(kept) == before and is_own == "True"
assert not set(names) & {unique_name("x") for _ in range(200)}
print("forked")
"""


def run(code, folder, which):
    """Runs the code in a process of its own. Returns the lines that it prints."""
    return done_by("-c", COMMON + code, folder, which).stdout.splitlines()


@pytest.mark.slow
def test_exported_program_raises_in_another_process(tmp_path):
    assert run(FIRST, tmp_path, "first")[-1] == "saved"
    raised = [f"raised {name}" for name in ("from_jax", "dilated_attention", "block_sparse", "mask") for _ in range(2)]
    assert run(SECOND, tmp_path, "second") == [*raised, "forked"]


FORKED = """
import os, signal, sys, threading
import numpy as np
import torch
from jax_kernels import bridge
from jax_kernels.bridge import masks
from jax_kernels.masks.arrays import Segments

double = bridge.from_jax(lambda x: x * 2)
ids, keep = torch.zeros(1, 8, dtype=torch.int32), torch.ones(1, 8, 8, dtype=torch.bool)
heads = torch.ones(1, 8, 2, 16)
of_tensors, of_numpy = Segments(ids, ids), Segments(ids.numpy(), ids.numpy())
linear, flax = bridge.nn.Linear(4, 4), {"kernel": np.ones((4, 4), np.float32)}
CALLS = {
    "from_jax": lambda: double(torch.ones(4)),
    "segments": lambda: masks.segments(ids),
    "dense": lambda: masks.dense(keep),
    "top_k_blocks": lambda: masks.top_k_blocks(torch.rand(1, 1, 2, 2), 1, block_size=4),
    "dense of NumPy": lambda: masks.dense(keep.numpy()),
    "a Mask of NumPy": lambda: bridge.flash_attention(heads, heads, heads, mask=of_numpy),
    "a Mask of tensors": lambda: bridge.flash_attention(heads, heads, heads, mask=of_tensors),
    "to_flax": lambda: bridge.weights.to_flax(linear),
    "from_flax": lambda: bridge.weights.from_flax(flax),
}
is_tracing, is_over = threading.Event(), threading.Event()
if sys.argv[1] == "started":  # the fork copies a lock that a thread holds while it traces a function
    slow = bridge.from_jax(lambda x: is_tracing.set() or is_over.wait(60) and x)
    threading.Thread(target=slow, args=[torch.ones(3)]).start()
    is_tracing.wait()
process = os.fork()
if process == 0:
    signal.alarm(60)  # a call that waits for missing threads never ends
    for name, call in CALLS.items():
        try:
            call()
            print(f"{name}: ran", flush=True)
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
    os._exit(0)
os.waitpid(process, 0)
is_over.set()
"""


@pytest.mark.parametrize("when", ["started", pytest.param("not started", marks=pytest.mark.slow)])
def test_fork_after_jax_started_raises(when):
    done = done_by("-W", "ignore", "-c", FORKED, when)
    lines = done.stdout.splitlines()
    assert len(lines) == 9, done
    for line in lines:
        if when == "started":
            assert "which was forked" in line, done
            assert '"spawn"' in line, done
        else:
            assert line.endswith(": ran"), done
