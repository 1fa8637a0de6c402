"""Compiles the bridge's programs to launch chains for a GPU that is not present.

    python tests/tools/compile_chains.py GPU CASE [FILE]

It prints a JSON object: the bytes of workspace, and the steps, each with its name, its kind and the buffers of its
arguments ("in0", "out1", "work"). FILE gets the serialized executable.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_kernels import flash_attention, masks
from jax_kernels.bridge.direct import compile
from jax_kernels.bridge.direct.chain import BufferSlice, Copy, Fill, Kernel, LaunchChain, MosaicKernel, NotDirectError
from jax_kernels.bridge.ops.attention import flash_attention_operator
from jax_kernels.bridge.ops.attention.flash_attention_operator import Options, Tensors
from jax_kernels.bridge.ops.decoding import cached_decoding
from jax_kernels.bridge.ops.quantization import on_stored
from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.ops.grouped.grouped_matmul import grouped_matmul
from jax_kernels.ops.matmul import matmul
from jax_kernels.ops.normalization import normalization
from jax_kernels.quantization.formats import LowBit
from tests.tools import compile_case

CPU = torch.device("cpu")  # only the key of a jitted function, which is lowered for the target


class Program(NamedTuple):
    """A function of arrays, and the arrays' shapes and dtypes."""

    function: Callable[..., Any]
    specs: Sequence[Any]


def spec(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def options(**given: Any) -> Options:
    defaults = dict.fromkeys(Options._fields)
    return Options(**defaults | {"window_left": -1, "window_right": -1, "q_offset": 0, "return_lse": False} | given)


def attention(kind: str, *, length: int = 512, head_dim: int = 128, has_drows: bool = False, **given: Any) -> Program:
    """flash_attention's operator of a kind, with query (2, length, 4, head_dim). has_drows: the backward gets drows."""
    of_call, others = options(is_causal=True, **given), [None] * (len(Tensors._fields) - 3)
    x = spec(2, length, 4, head_dim)
    if kind == "backward":
        backward = flash_attention_operator._backward.__wrapped__(
            CPU, of_call, flash_attention_operator.gradient_bits([True] * 3)
        )
        rows = spec(2, 4, length, dtype="float32")
        function = lambda q, k, v, out, rows, dout, drows=None: backward(q, k, v, *others, out, rows, dout, drows)
        return Program(function=function, specs=[x, x, x, x, rows, x, *[rows] * has_drows])
    make = {"forward": flash_attention_operator._forward, "inference": flash_attention_operator._inference}[kind]
    forward = make.__wrapped__(CPU, of_call)
    return Program(function=lambda q, k, v: forward(q, k, v, *others), specs=[x, x, x])


def with_constants() -> Program:
    """flash_attention with a Mask whose arrays (int32 and bool) are constants of the program."""
    blocks = np.arange(64).reshape(2, 2, 4, 4) % 3 == 0
    mask = masks.prefix(jnp.array([-7, 400], jnp.int32)) | masks.block_sparse(jnp.array(blocks[:, :1]), 128)
    x = spec(2, 512, 4, 128)
    return Program(function=lambda q, k, v: (flash_attention(q, k, v, mask=mask),), specs=[x, x, x])


def token() -> Program:
    """Decodes one token of grouped heads with a padded cache, as a Hugging Face model does."""
    cache = spec(1, 8, 8192, 64)
    function = lambda *given: (cached_decoding._decode(*given, None, None, None, scale=None, softcap=None),)
    return Program(function=function, specs=[spec(1, 32, 1, 64), cache, cache, spec(8, dtype="int32")])


def norm(name: str, *, with_gradient: bool = False) -> Program:
    x, weights = spec(4096, 1024), spec(1024)
    function: Any = getattr(normalization, name)
    specs = [x, weights] if name == "rms_norm" else [x, weights, weights]
    return _program(function, specs, with_gradient, x)


def product(*, with_gradient: bool = False, **given: Any) -> Program:
    function = lambda x, w: matmul.matmul(x, w, **given)
    return _program(function, [spec(4096, 1024), spec(1024, 2048)], with_gradient, spec(4096, 2048))


def grouped(*, with_gradient: bool = False) -> Program:
    """A grouped matmul of 4096 rows, whose group sizes are an array."""
    function = lambda x, w, sizes: grouped_matmul(x, w, sizes, activation="silu")
    call = lambda dout, x, w, sizes: jax.vjp(lambda x, w: function(x, w, sizes), x, w)[1](dout)
    specs = [spec(4096, 1024), spec(8, 1024, 2048), spec(8, dtype="int32")]
    if with_gradient:
        return Program(function=call, specs=[spec(4096, 2048), *specs])
    return Program(function=lambda *given: (function(*given),), specs=specs)


def few_bits(format: str, group: int, *, rows: int = 1, is_gated: bool = False) -> Program:
    """A matmul with low-bit weights [2048, 1024], as the bridge passes them to JAX."""
    layout = LowBit(format=format, group=group)
    facts = {"format": format, "group_size": group, "axis": -1, "length": 1024}
    values = spec(2048, layout.bytes_of(1024), dtype=str(jnp.dtype(layout.dtype)))
    scale = spec(1024 // group, 2048, dtype="uint8" if layout.is_mx else "float32")
    op = on_stored(matmul.gated_matmul if is_gated else matmul.matmul)

    def function(x: Any, *tensors: Any) -> Any:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        weights = [{"values": values, "scale": scale} | facts for values, scale in pairs]
        return (op(x, *weights, transpose_w=True),)

    return Program(function=function, specs=[spec(rows, 1024), *[values, scale] * (2 if is_gated else 1)])


def _program(function: Any, specs: list[Any], with_gradient: bool, out: Any) -> Program:
    if not with_gradient:
        return Program(function=lambda *arrays: (function(*arrays),), specs=specs)
    return Program(function=lambda dout, *arrays: jax.vjp(function, *arrays)[1](dout), specs=[out, *specs])


CASES: dict[str, Callable[[], Program]] = {
    "inference": lambda: attention("inference"),
    "inference 1002": lambda: attention("inference", length=1002),
    "forward": lambda: attention("forward"),
    "forward bounded": lambda: attention("forward", length=8192),
    "forward odd": lambda: attention("forward", length=1000, head_dim=64),
    "forward 1002": lambda: attention("forward", length=1002),
    "backward": lambda: attention("backward"),
    "backward rows": lambda: attention("backward", has_drows=True),
    "backward deterministic": lambda: attention("backward", length=1000, deterministic=True),
    "backward odd": lambda: attention("backward", length=1000, head_dim=64),
    "forward triton": lambda: attention("forward", implementation="triton"),
    "backward triton": lambda: attention("backward", implementation="triton"),
    "forward xla": lambda: attention("forward", implementation="xla"),
    "constants": with_constants,
    "elementwise": lambda: Program(function=lambda x: (x * 2,), specs=[spec(1000)]),
    "token": token,
    "layer_norm": lambda: norm("layer_norm"),
    "layer_norm backward": lambda: norm("layer_norm", with_gradient=True),
    "rms_norm": lambda: norm("rms_norm"),
    "rms_norm backward": lambda: norm("rms_norm", with_gradient=True),
    "grouped_matmul": grouped,
    "grouped_matmul backward": lambda: grouped(with_gradient=True),
    "matmul": lambda: product(),
    "matmul backward": lambda: product(with_gradient=True),
    "int4": lambda: few_bits("int4", 128),
    "mxfp8": lambda: few_bits("mxfp8", 32, rows=16),
    "mxfp4 gated": lambda: few_bits("mxfp4", 32, is_gated=True),
    "matmul xla": lambda: product(implementation="xla"),
}


def target_of(gpu: str) -> compile.Target:
    """The target that is a GPU by its name."""
    info = device_info(gpu)
    generation = compile_case.generation_of(info)
    return compile.Target(
        kind=generation.kind,
        compute_capability=info.compute_capability,
        core_count=info.core_count,
        shared_memory_per_block=info.shared_memory_per_block,
        shared_memory_per_core=compile_case.shared_memory_per_core(info),
        threads_per_core=generation.threads,
        registers_per_core=65536,
        l2_cache=generation.l2,
        total_memory=info.total_memory_bytes,
        memory_bandwidth=info.memory_bandwidth,
        clock_ghz=generation.clock,
    )


def chain_for(gpu: str, case: str) -> LaunchChain:
    program = CASES[case]()
    with on_device(gpu):
        return compile.compile_chain(target_of(gpu), *program)


def described(chain: LaunchChain) -> dict[str, Any]:
    names = [f"in{index}" for index in range(len(chain.inputs))]
    names += [f"out{index}" for index in range(len(chain.outputs))]
    names += ["work", *(f"constant{index}" for index in range(len(chain.constants)))]
    buffers = lambda slices: [names[part.buffer] for part in slices]
    steps: list[dict[str, Any]] = []
    for step in chain.steps:
        match step:
            case Kernel():
                sizes = {"shared_memory": step.shared_memory, "cubin": len(step.cubin)}
                steps.append({"kind": "kernel", "name": step.name, "buffers": buffers(step.arguments)} | sizes)
            case MosaicKernel():
                steps.append({"kind": "mosaic", "name": step.name, "buffers": buffers(step.arguments)})
            case Fill():
                steps.append({"kind": "fill", "name": str(step.value), "buffers": buffers([step.target])})
            case Copy():
                steps.append({"kind": "copy", "name": "", "buffers": buffers([step.target, step.source])})
    constants = [x.value.hex() for x in chain.constants]
    return {"workspace": chain.workspace, "work_used": _used(chain), "steps": steps, "constants": constants}


def _used(chain: LaunchChain) -> int:
    """The end of the workspace bytes that the steps use."""
    work = len(chain.inputs) + len(chain.outputs)
    slices: list[BufferSlice] = []
    for step in chain.steps:
        slices += step.arguments if isinstance(step, Kernel | MosaicKernel) else [step.target]
    return max((part.offset + part.size for part in slices if part.buffer == work), default=0)


def main(gpu: str, case: str, file: str = "") -> None:
    if file:
        keep(Path(file))
    try:
        print(json.dumps(described(chain_for(gpu, case))))
    except NotDirectError as error:
        print(json.dumps({"reason": str(error)}))


def keep(file: Path) -> None:
    """Makes this process write each executable that it reads to a file."""
    from jax_kernels.bridge.direct import executable

    read = executable.read_chain

    def read_and_keep(data: bytes, *arrays: Any) -> LaunchChain:
        file.write_bytes(data)
        return read(data, *arrays)

    executable.read_chain = read_and_keep


if __name__ == "__main__":
    main(*sys.argv[1:])
