"""compute-sanitizer over a small call of every Hopper and Triton kernel, and a run over poisoned memory.

    python tests/tools/sanitizer.py [WORD...]                 # calls whose name has one of the words; without, all
    python tests/tools/sanitizer.py --tools racecheck [WORD...]
    python tests/tools/sanitizer.py --run NAME...             # runs calls as they are, in this process
    python tests/tools/sanitizer.py --poison NAME...          # the poison check of calls, in this process

memcheck finds accesses outside of arrays, racecheck unordered accesses of threads to shared memory, synccheck wrong
barriers, initcheck reads of unwritten device memory. initcheck does not see the stores of Mosaic kernels, so it runs on
Triton calls alone. poison is a check of this file: it fills the free device memory with a byte, runs the call, and
compares the results for two bytes. A read of unwritten memory changes them.

Needs a Hopper GPU and compute-sanitizer. Several processes run at once; a row is printed as each ends. The exit status
is 1 after an error.
"""

import dataclasses
import faulthandler
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_kernels as jk
from jax_kernels import masks
from jax_kernels.inputs.attention import AttentionInputs, AttentionOptions
from jax_kernels.ops.grouped.experts import Combination, gated_experts
from jax_kernels.ops.grouped.rows import token_rows
from jax_kernels.ops.matmul import fp8_shared
from jax_kernels.pallas.attention.passes import ranked_bits, row_norms
from jax_kernels.pallas.attention.sm80 import forward as sm80_forward

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck", "poison")
PROCESSES = 12  # that run at once
SECONDS = 120  # of a process
FOUND = 9  # the exit status of a process with errors
# initcheck takes the constants of XLA's programs, which lie in the module, for unwritten memory: it reports the copy of
# a loop's first index and the fusion that adds to it. So copies are not checked, and reads in fusions do not count.
TOOL_OPTIONS = {"initcheck": ("--check-api-memory-access", "no")}
# In a CUDA graph, initcheck misses stores of kernels of another branch: it reported the number of rows that
# copy_live_rows reads, and no error without graphs.
TOOL_FLAGS = {"initcheck": "--xla_gpu_enable_command_buffer="}
POISONS = (0xFF, 0x00)  # bytes: NaN in every float format, and zero
# Each buffer is a separate allocation, so that a tool sees its end. XLA's autotuning would run its candidates. Under
# compute-sanitizer, XLA's parallel compilation does not end in about every tenth process.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cuda",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_force_compilation_parallelism=1",
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}

# The poison check needs an allocator that hands out the same memory again; PROCESSES of them share the GPU.
POISON_ENVIRONMENT = {
    "JAX_PLATFORMS": "cuda",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.04",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """function(*arrays) of arrays with these shapes. differentiated: includes the gradients of all float arrays."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    differentiated: bool = True

    def run(self, *arrays: Any) -> Any:
        if not self.differentiated:
            return self.function(*arrays)
        out, pull_back = jax.vjp(self.function, *arrays)
        return out, pull_back(out)

    def arrays(self) -> list[jax.Array]:
        random = np.random.default_rng(0)
        return [jnp.asarray(random.standard_normal(x.shape, np.float32), x.dtype) for x in self.shapes]


def _shape(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _attention(
    implementation: str,
    head_dim: int = 64,
    *,
    lengths: tuple[int, int] = (200, 333),
    heads: tuple[int, int] = (4, 2),
    v_head_dim: int | None = None,
    bias: tuple[int, ...] | None = None,
    dtype: Any = jnp.bfloat16,
    **options: Any,
) -> Call:
    q_length, kv_length = lengths
    q, k = _shape(2, q_length, heads[0], head_dim, dtype=dtype), _shape(2, kv_length, heads[1], head_dim, dtype=dtype)
    v = _shape(2, kv_length, heads[1], v_head_dim or head_dim, dtype=dtype)

    def attend(query: Any, key: Any, value: Any, *bias: Any) -> Any:
        of_bias = {"bias": bias[0]} if bias else {}
        given = {name: make() if callable(make) and name != "score_mod" else make for name, make in options.items()}
        return jk.flash_attention(query, key, value, implementation=implementation, **of_bias, **given)

    return Call(function=attend, shapes=(q, k, v, *([] if bias is None else [_shape(*bias, dtype=dtype)])))


def _decode(implementation: str, *, paged: bool = False, masked: bool = False) -> Call:
    pages = _shape(40, 64, 2, 64) if paged else _shape(3, 1024, 2, 64)
    tables = np.random.default_rng(0).permutation(39)[:36].reshape(3, 12).astype(np.int32) + 1
    keep = np.random.default_rng(1).random((3, 1, 1, 1024)) < 0.5

    def decode(query: Any, cache: Any) -> Any:
        options = {"block_tables": jnp.asarray(tables)} if paged else {}
        options |= {"mask": jnp.asarray(keep)} if masked else {}
        lengths = jnp.asarray([700, 0, 5], jnp.int32)
        return jk.decode_attention(query, cache, cache, kv_lengths=lengths, implementation=implementation, **options)

    return Call(function=decode, shapes=(_shape(3, 2, 8, 64), pages), differentiated=False)


def _fp8_attention() -> Call:
    x = _shape(2, 300, 2, 128, dtype=jnp.float8_e4m3fn)
    attend = functools.partial(jk.flash_attention_fp8, is_causal=True, implementation="mosaic_gpu")
    return Call(function=attend, shapes=(x, x, x), differentiated=False)


def _attention_sm80() -> Call:
    config = sm80_forward.AttentionForwardSm80(block_kv=32)

    def attend(query: Any, key: Any, value: Any) -> Any:
        inputs, options = AttentionInputs(query, key, value), AttentionOptions(scale=0.1, is_causal=True)
        return sm80_forward.attention_forward(inputs, options, out_dtype=query.dtype, config=config, interpret=False)

    shapes = _shape(2, 333, 4, 128), *[_shape(2, 333, 2, 128)] * 2
    return Call(function=attend, shapes=shapes, differentiated=False)


def _dilated(implementation: str, **options: Any) -> Call:
    x = _shape(1, 640, 4, 64)
    branches = {"segment_lengths": (128, 256), "dilation_rates": (1, 2)}
    function = functools.partial(jk.dilated_attention, implementation=implementation, **branches, **options)
    return Call(function=function, shapes=(x, x, x))


def _matmul(implementation: str, *sizes: int, dtype: Any = jnp.bfloat16, **options: Any) -> Call:
    m, k, n = sizes
    function = functools.partial(jk.matmul, implementation=implementation, **options)
    return Call(function=function, shapes=(_shape(m, k, dtype=dtype), _shape(k, n, dtype=dtype)))


def _grouped(implementation: str, columns: int = 320, precision: str | None = None) -> Call:
    """Groups of 0 rows, of fewer rows than a block and of more; rows past the last group; with a bias."""
    given = {"activation": "silu", "precision": precision, "implementation": implementation}

    def multiply(x: Any, w: Any, bias: Any) -> Any:
        sizes = jnp.asarray([70, 0, 13, 200], jnp.int32)
        return jk.grouped_matmul(x, w, sizes, bias=bias, **given)

    return Call(function=multiply, shapes=(_shape(304, 128), _shape(4, 128, columns), _shape(4, columns)))


def _gathered(implementation: str) -> Call:
    def multiply(x: Any, w: Any) -> Any:
        sizes, index = jnp.asarray([70, 0, 13, 200], jnp.int32), jnp.arange(304, dtype=jnp.int32) * 7 % 103 - 1
        return jk.grouped_matmul(x, w, sizes, gather_indices=index, implementation=implementation)

    return Call(function=multiply, shapes=(_shape(100, 128), _shape(4, 128, 320)))


def _grouped_gated(implementation: str, columns: int = 320, precision: str | None = None) -> Call:
    def multiply(x: Any, w_gate: Any, w_up: Any) -> Any:
        sizes = jnp.asarray([70, 0, 13, 200], jnp.int32)
        how = {"implementation": implementation, "precision": precision}
        return jk.grouped_gated_matmul(x, w_gate, w_up, sizes, **how)

    return Call(function=multiply, shapes=(_shape(304, 128), _shape(4, 128, columns), _shape(4, 128, columns)))


def _experts(implementation: str) -> Call:
    """The weighted sums of experts' rows. 60 rows belong to another device, and results leave them out."""

    def combine(x: Any, w_gate: Any, w_up: Any, w_down: Any, weights: Any) -> Any:
        # Computed at run time: initcheck takes a constant of the program for unwritten memory.
        at_run_time = lambda values: jnp.where(jnp.isfinite(x[0, 0]), values, 0)
        sizes = at_run_time(jnp.asarray([70, 0, 13, 161], jnp.int32))
        order = at_run_time(jnp.arange(304, dtype=jnp.int32) * 7 % 304)
        inverse = jnp.zeros_like(order).at[order].set(jnp.arange(304, dtype=jnp.int32))
        count = sizes.sum(dtype=jnp.int32)
        rows = token_rows(x, 2, order, inverse, count)
        combination = Combination(weights.astype(jnp.float32), order, inverse, count)
        kernels = w_gate, w_up, w_down
        return gated_experts(rows, *kernels, sizes, combination=combination, implementation=implementation)

    kernels = _shape(4, 128, 320), _shape(4, 128, 320), _shape(4, 320, 128)
    return Call(function=combine, shapes=(_shape(152, 128), *kernels, _shape(152, 2)))


def _cross_entropy(
    implementation: str, reduction: str, depth: int = 72, vocabulary: int = 333, precision: str | None = None
) -> Call:
    """Tokens and a vocabulary that fill no block; ignored tokens."""

    def loss(x: Any, w: Any) -> Any:
        targets = jnp.arange(200, dtype=jnp.int32) * 7 % vocabulary - 1
        given = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3, "precision": precision}
        return jk.linear_cross_entropy(x, w, targets, **given, implementation=implementation)

    return Call(function=loss, shapes=(_shape(200, depth), _shape(depth, vocabulary)))


def _gated(implementation: str, **options: Any) -> Call:
    function = functools.partial(jk.gated_matmul, activation="silu", implementation=implementation, **options)
    return Call(function=function, shapes=(_shape(200, 256), _shape(256, 384), _shape(256, 384)))


def _delayed(columns: int) -> Call:
    """8-bit matmuls of x with two weights, whose scales come from an empty and from other histories."""

    def multiply(x: Any, *weights: Any) -> Any:
        histories = [jnp.full(3, size, jnp.float32) for size in (0.0, 2.0, 0.5)]
        options: dict[str, Any] = {"x_history": histories[0], "w_histories": histories[1:], "implementation": HOPPER}
        found = fp8_shared.delayed_matmuls(x, weights, records=True, **options)
        assert found is not None
        return found.outs

    return Call(function=multiply, shapes=(_shape(200, 256), _shape(256, columns), _shape(256, 2 * columns)))


def _low_bit(implementation: str, format: str, rows: int, inner: int = 2048) -> Call:
    def multiply(x: Any, w: Any) -> Any:
        stored = jk.quantize(w, format, axis=-1, group_size=32 if format.startswith("mx") else 128)
        return jk.matmul(x, stored, transpose_w=True, implementation=implementation)

    return Call(function=multiply, shapes=(_shape(rows, inner), _shape(256, inner)), differentiated=False)


def _norm(name: str, implementation: str, *shape: int, dtype: Any = jnp.bfloat16, **options: Any) -> Call:
    function = functools.partial(getattr(jk, name), implementation=implementation, **options)
    weights = [_shape(shape[-1], dtype=dtype)] * (2 if name == "layer_norm" else 1)
    return Call(
        function=function, shapes=(_shape(*shape, dtype=dtype), *weights), differentiated="quantize" not in options
    )


def _ranked_bits() -> Call:
    def pack(bias: Any) -> Any:
        mask = masks.top_k(bias, 20, among=masks.causal(), q_length=200)
        return ranked_bits.packed(mask, 96, 64, transposed=False, interpret=False)

    return Call(function=pack, shapes=(_shape(2, 3, 1, 300, dtype=jnp.float32),), differentiated=False)


def _row_norms() -> Call:
    longest = functools.partial(row_norms.longest, interpret=False)
    return Call(function=longest, shapes=(_shape(2, 300, 3, 80),), differentiated=False)


def _relative(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - 0.1 * jnp.abs(q - k)


def _segments() -> jax.Array:
    return jnp.asarray(np.arange(333) // 100, jnp.int32)[None].repeat(2, 0)


def _dense() -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).random((2, 4, 200, 333)) < 0.3)


def _global_and_window() -> Any:
    return masks.sliding_window(40, 40) | masks.global_tokens(8)


def _top_k() -> Any:
    scores = np.random.default_rng(3).standard_normal((2, 4, 1, 333)).astype(np.float32)
    return masks.top_k(jnp.asarray(scores), 64, among=masks.causal(), q_length=200)


HOPPER, TRITON = "mosaic_gpu", "triton"
CALLS: dict[str, Callable[[], Call]] = {
    "hopper causal 64": lambda: _attention(HOPPER, 64, is_causal=True, lengths=(333, 333)),
    "hopper plain 128": lambda: _attention(HOPPER, 128),
    "hopper unbounded 128": lambda: _attention(HOPPER, 128, softcap=5.0, window=(60, 20)),
    "hopper 256": lambda: _attention(HOPPER, 256, is_causal=True),
    "hopper 192 and 128": lambda: _attention(HOPPER, 192, v_head_dim=128),
    "hopper 192 and 128 segments": lambda: _attention(
        HOPPER, 192, v_head_dim=128, lengths=(333, 333), segment_ids=_segments
    ),
    "hopper deterministic": lambda: _attention(HOPPER, 128, deterministic=True, is_causal=True),
    "hopper segments": lambda: _attention(HOPPER, 64, lengths=(333, 333), segment_ids=_segments, is_causal=True),
    "hopper sinks": lambda: _attention(HOPPER, 64, sinks=lambda: jnp.zeros(4, jnp.float32), return_lse=True),
    "hopper bias": lambda: _attention(HOPPER, 64, bias=(2, 4, 200, 333)),
    "hopper dense mask": lambda: _attention(HOPPER, 64, mask=_dense),
    "hopper dense mask and bias": lambda: _attention(HOPPER, 64, mask=_dense, bias=(1, 4, 200, 333)),
    "hopper block lists": lambda: _attention(HOPPER, 128, mask=_global_and_window),
    "hopper large dense mask": lambda: _attention(
        HOPPER,
        64,
        lengths=(512, 512),
        mask=lambda: jnp.asarray(np.random.default_rng(4).random((2, 1, 512, 512)) < 0.3),
    ),
    "hopper top_k": lambda: _attention(HOPPER, 64, mask=_top_k),
    "hopper ranked bits": _ranked_bits,
    "hopper row norms": _row_norms,
    "hopper score_mod": lambda: _attention(HOPPER, 64, score_mod=_relative, is_causal=True),
    "hopper decode": lambda: _decode(HOPPER),
    "hopper decode pages": lambda: _decode(HOPPER, paged=True),
    "hopper fp8 attention": _fp8_attention,
    "hopper dilated": lambda: _dilated(HOPPER, is_causal=True),
    "hopper dilated hilbert": lambda: _dilated(HOPPER, order="hilbert"),
    "hopper matmul": lambda: _matmul(HOPPER, 304, 512, 384, activation="gelu"),
    "hopper matmul fp8": lambda: _matmul(HOPPER, 256, 512, 384, precision="fp8"),
    "hopper gated fp8": lambda: _gated(HOPPER, precision="fp8"),
    "hopper delayed fp8": lambda: _delayed(128),
    "hopper matmul fp8 block": lambda: _matmul(HOPPER, 256, 512, 384, precision="fp8", scaling="block"),
    "hopper gated": lambda: _gated(HOPPER),
    "hopper grouped": lambda: _grouped(HOPPER),
    "hopper grouped fp8": lambda: _grouped(HOPPER, 384, "fp8"),
    "hopper grouped gated": lambda: _grouped_gated(HOPPER),
    "hopper experts": lambda: _experts(HOPPER),
    "hopper grouped gated fp8": lambda: _grouped_gated(HOPPER, 384, "fp8"),
    "hopper int4": lambda: _low_bit(HOPPER, "int4", 4),
    "hopper mxfp8": lambda: _low_bit(HOPPER, "mxfp8", 16),
    "hopper rms_norm 37 x 4096": lambda: _norm("rms_norm", HOPPER, 37, 4096),
    "hopper rms_norm 300 x 8192": lambda: _norm("rms_norm", HOPPER, 300, 8192),
    "hopper layer_norm 5 x 1024": lambda: _norm("layer_norm", HOPPER, 5, 1024),
    "hopper layer_norm 700 x 2048": lambda: _norm("layer_norm", HOPPER, 700, 2048),
    "hopper layer_norm 9 x 16384": lambda: _norm("layer_norm", HOPPER, 9, 16384),
    "hopper cross entropy": lambda: _cross_entropy(HOPPER, "none", 64, 320),
    "hopper cross entropy mean": lambda: _cross_entropy(HOPPER, "mean", 64, 320),
    "hopper cross entropy of 8 bits": lambda: _cross_entropy(HOPPER, "mean", 256, 320, "fp8"),
    "mma.sync causal 128": _attention_sm80,
    "triton causal 64": lambda: _attention(TRITON, 64, is_causal=True, lengths=(333, 333)),
    "triton 128": lambda: _attention(TRITON, 128, window=(60, 20), softcap=5.0),
    "triton 80": lambda: _attention(TRITON, 80),
    "triton float32": lambda: _attention(TRITON, 64, dtype=jnp.float32, segment_ids=None),
    "triton segments": lambda: _attention(TRITON, 64, lengths=(333, 333), segment_ids=_segments),
    "triton bias": lambda: _attention(TRITON, 64, bias=(1, 4, 200, 333)),
    "triton dense mask and bias": lambda: _attention(TRITON, 64, mask=_dense, bias=(1, 4, 200, 333)),
    "triton block lists": lambda: _attention(TRITON, 128, mask=_global_and_window),
    "triton block lists of segments": lambda: _attention(
        TRITON, 64, lengths=(333, 333), mask=lambda: masks.segments(_segments()) & masks.causal() | masks.prefix(16)
    ),
    "triton score_mod": lambda: _attention(TRITON, 64, score_mod=_relative),
    "triton decode": lambda: _decode(TRITON),
    "triton decode pages": lambda: _decode(TRITON, paged=True),
    "triton decode mask": lambda: _decode(TRITON, masked=True),
    "triton dilated": lambda: _dilated(TRITON, is_causal=True),
    "triton matmul": lambda: _matmul(TRITON, 100, 200, 300, activation="gelu"),
    "triton matmul few rows": lambda: _matmul(TRITON, 3, 4096, 64),
    "triton gated": lambda: _gated(TRITON),
    "triton grouped": lambda: _grouped(TRITON),
    "triton grouped gathered": lambda: _gathered(TRITON),
    "triton experts": lambda: _experts(TRITON),
    "triton grouped gated": lambda: _grouped_gated(TRITON),
    "triton cross entropy": lambda: _cross_entropy(TRITON, "none"),
    "triton cross entropy mean": lambda: _cross_entropy(TRITON, "mean"),
    "triton int4": lambda: _low_bit(TRITON, "int4", 4),
    "triton mxfp4": lambda: _low_bit(TRITON, "mxfp4", 3, inner=4096),
    "triton rms_norm 37 x 1000": lambda: _norm("rms_norm", TRITON, 37, 1000),
    "triton layer_norm 9 x 20000": lambda: _norm("layer_norm", TRITON, 9, 20000),
    "triton norm to 8 bits": lambda: _norm("rms_norm", TRITON, 37, 1000, quantize="e4m3"),
}


def run(names: list[str]) -> None:
    """Runs calls in this process."""
    for name in names:
        call = CALLS[name]()
        jax.block_until_ready(jax.jit(call.run)(*call.arrays()))
        print("ran", name, flush=True)


def _fill_free_memory(byte: int) -> None:
    """Fills most of the allocator's free memory with a byte, and frees it again."""
    stats = jax.local_devices()[0].memory_stats()
    size = int(0.8 * (stats["bytes_limit"] - stats["bytes_in_use"]))
    jax.block_until_ready(jax.jit(lambda: jnp.full(size, byte, jnp.uint8))())


def poison(names: list[str]) -> int:
    """The exit status after running calls in this process over memory of each byte of POISONS."""
    for name in names:
        call = CALLS[name]()
        function, arrays, found = jax.jit(call.run), call.arrays(), []
        jax.block_until_ready(function(*arrays))
        for byte in POISONS:
            _fill_free_memory(byte)
            results = function(*arrays)
            found.append([np.asarray(x.astype(jnp.float32)) for x in jax.tree.leaves(results)])
        for i, (x, y) in enumerate(zip(*found, strict=True)):
            largest = np.abs(np.where(np.isfinite(y), y, 0)).max(initial=0)
            if not np.allclose(x, y, rtol=2e-2, atol=2e-2 * float(largest), equal_nan=True):
                print(f"Error: result {i} of {name} depends on unwritten memory")
                return FOUND
        print("ran", name, flush=True)
    return 0


_TELLING = re.compile(r"Error|Invalid|hazard|SUMMARY| at |Uninit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A tool's report on a call. lines: the tool's own, without the backtraces of the host."""

    tool: str
    name: str
    status: int
    seconds: float
    lines: list[str]

    @property
    def is_clean(self) -> bool:
        return self.status == 0 or (self.status == FOUND and self.tool == "initcheck" and self._is_of_fusions())

    def _is_of_fusions(self) -> bool:
        """Whether the report names kernels, each a fusion of XLA's, and the tool dropped no error."""
        kernels = re.findall(r" at (\w+)\+0x", "\n".join(self.lines))
        reads = sum("Uninitialized" in line for line in self.lines)
        totals = re.findall(r"ERROR SUMMARY: (\d+) error", "\n".join(self.lines))
        is_whole = len(kernels) == reads and totals == [str(reads)]
        return is_whole and bool(kernels) and all("fusion" in kernel for kernel in kernels)

    def __str__(self) -> str:
        result = "clean" if self.is_clean else f"FOUND (status {self.status})"
        row = f"{self.tool:10} {result:6} {self.seconds:4.0f} s  {self.name}"
        return "\n".join([row, *(f"    {line[:200]}" for line in ([] if self.is_clean else self.lines[:12]))])


def _process(command: list[str], environment: dict[str, str]) -> tuple[int, list[str]]:
    """(exit status, telling lines) of a process; status 124 if it did not end within SECONDS."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:  # type: ignore
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and the program that it runs
            return 124, [f"no end after {SECONDS} s"]
    return process.returncode, [line for line in out.splitlines() if _TELLING.search(line)] or err.splitlines()[-8:]


def check(sanitizer: str, tool: str, name: str) -> Report:
    """Runs a call under a tool, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    if tool == "poison":
        command = [sys.executable, __file__, "--poison", name]
        environment |= POISON_ENVIRONMENT
    else:
        options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "40", "--show-backtrace", "no"]
        options += TOOL_OPTIONS.get(tool, ())
        command = [sanitizer, *options, sys.executable, __file__, "--run", name]
        environment |= ENVIRONMENT
        environment["XLA_FLAGS"] += " " + TOOL_FLAGS.get(tool, "")
    start = time.monotonic()
    status, lines = _process(command, environment)
    return Report(tool=tool, name=name, status=status, seconds=time.monotonic() - start, lines=lines)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--run"]:
        faulthandler.dump_traceback_later(SECONDS - 10)  # shows where a process without an end is
        run(arguments[1:])
        return 0
    if arguments[:1] == ["--poison"]:
        return poison(arguments[1:])
    tools = TOOLS
    if arguments[:1] == ["--tools"]:
        tools, arguments = tuple(arguments[1].split(",")), arguments[2:]
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if sanitizer is None:
        print("compute-sanitizer: not found in PATH or /usr/local/cuda/bin, want CUDA's tools")
        return 1
    names = [name for name in CALLS if not arguments or any(word in name for word in arguments)]
    jobs = [(tool, name) for tool in tools for name in names if tool != "initcheck" or name.startswith("triton")]
    reports = []
    with ThreadPoolExecutor(PROCESSES) as pool:
        for job in as_completed([pool.submit(check, sanitizer, tool, name) for tool, name in jobs]):
            reports.append(job.result())
            print(reports[-1], flush=True)
    found = sum(not report.is_clean for report in reports)
    print(f"{len(names)} calls, {len(tools)} tools: {found} of {len(reports)} processes with errors")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
