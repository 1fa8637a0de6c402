"""Compiles attention kernels for a named GPU on a machine without one, and reports ptxas' figures.

From a shell, with or without JAX_PLATFORMS=cpu:

    python tests/tools/compile_case.py GPU [SPEC...]
    python tests/tools/compile_case.py h200 implementation=mosaic_gpu head_dim=128 is_causal=1
    python tests/tools/compile_case.py rtx4090 implementation=triton head_dim=64 dtype=float32 precision=tf32 kv_heads=2
    python tests/tools/compile_case.py a100 implementation=triton row=2 head_dim=256 keep=kept

GPU is any name `jax_kernels.device.device_info` knows: a100, a6000, rtx3090, rtx4090, h200, b200, "rtx pro 6000", ...
SPEC is field=value for the fields of `Spec`, without quotes; bools are 1 and 0. The JSON on stdout is a `report`:

    {"kernels": {"attention_forward": {"registers": 168, "spill_stores": 0, "spill_loads": 0,
                                       "stack": 0, "shared_memory": 65536, "notes": []}, ...},
     "xla": {"loop_fusion": {...}, ...},      # XLA's own kernels around them
     "error": null}                           # or the last lines of the traceback, with ptxas' messages

spill_stores, spill_loads, stack and shared_memory are bytes (shared memory: the dynamic part, per block). notes are
ptxas' C75xx lines (C7510, C7514, C7519: matmuls in flight that ptxas serialised). A Mosaic kernel also has
"unseen_zeros": see _unseen_zeros. Kernels with the same name are merged: each figure is the worst.

From Python, `compile_spec(gpu, Spec(...))` gives the same dictionary. `compile_script` reports on the programs that
another script compiles by `lower_and_compile`. Every compile has a process of its own, since an instruction that the
architecture lacks can abort the process. Needs jax's CUDA plugin and pjrt wheels and NVIDIA's nvcc and nvvm wheels (the
"dev" extra), and no driver.
"""

import dataclasses
import functools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.processes import forked

TIMEOUT = 240  # seconds for one compile


@dataclasses.dataclass(frozen=True)
class Spec:
    """A program to compile: flash_attention with its gradients, or the forward only.

    row: index of a row of `attention` in the GPU's BlockSpecs. The program takes this row's blocks instead of the
    planned row's blocks; give the row's head_dim and dtype too.
    kv_lengths, q_offsets, segment_ids, sinks: pass them as arrays. lse: also pass a cotangent of the log-sum-exp.
    window: "left,right". softcap: 0 is none. bias, mask: the axes of "bhts" that are not of size 1; "" is none. The
    bias gets a gradient if bias_gradient. bias_dtype: "" for dtype. cells: the axes (of "bhts", "ts" always among them)
    of a block_sparse Mask, which is joined with a causal Mask. score_mod: the name of a mod of score_mod_cases, whose
    arrays get gradients if score_mod_gradients.
    blocks: a Python expression for the row's (forward, backward), to try blocks that no row has.
    keep: a folder for XLA's log and Mosaic's dumps (PTX among them).
    """

    implementation: str = "triton"
    head_dim: int = 128
    v_head_dim: int = 0  # 0: same as head_dim
    dtype: str = "bfloat16"
    precision: str = ""
    is_causal: bool = False
    kv_lengths: bool = False
    q_offsets: bool = False
    segment_ids: bool = False
    sinks: bool = False
    window: str = ""
    softcap: float = 0.0
    bias: str = ""
    bias_dtype: str = ""
    bias_gradient: bool = False
    mask: str = ""
    cells: str = ""
    score_mod: str = ""
    score_mod_gradients: bool = False
    deterministic: bool = False
    lse: bool = False
    backward: bool = True
    batch: int = 2
    q_length: int = 4096
    kv_length: int = 4096
    heads: int = 8
    kv_heads: int = 8
    row: int = -1
    blocks: str = ""
    keep: str = ""

    @classmethod
    def parse(cls, words: list[str]) -> "Spec":
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for word in words:
            name, found, text = word.partition("=")
            if not found or name not in fields:
                raise SystemExit(f"got {word!r}, want field=value with a field of {', '.join(fields)}")
            kind = fields[name]
            values[name] = bool(int(text)) if kind is bool else kind(text)
        return cls(**values)

    def words(self) -> list[str]:
        values = dataclasses.asdict(self).items()
        return [f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in values]


@dataclasses.dataclass(frozen=True)
class _Generation:
    """The facts about a GPU that XLA needs and DeviceInfo lacks. threads: of an SM. l2 in bytes, clock in GHz.

    kind: a device name of this generation that the Pallas-Triton lowering knows without the device. XLA's cost model
    reads the figures, for XLA's own fusions. A Pallas kernel does not depend on them.
    """

    kind: str
    threads: int
    l2: int
    clock: float
    fpus: int = 128


# By compute capability. One that is not here counts as the newest one below it.
_GENERATIONS = {
    (8, 0): _Generation("NVIDIA A100-SXM4-80GB", 2048, 41943040, 1.41, fpus=64),
    (8, 6): _Generation("NVIDIA A10", 1536, 6291456, 1.8),
    (8, 9): _Generation("NVIDIA L4", 1536, 75497472, 2.52),
    (9, 0): _Generation("NVIDIA H200", 2048, 62914560, 1.98),
    (10, 0): _Generation("NVIDIA B200", 2048, 132644864, 1.965),
    (12, 0): _Generation("NVIDIA RTX PRO 6000", 1536, 134217728, 2.6),
}


def generation_of(info) -> _Generation:
    return _GENERATIONS[max(known for known in _GENERATIONS if known <= info.compute_capability)]


def shared_memory_per_core(info) -> int:
    """The bytes of an SM. CUDA reserves 1 KiB of them for each CTA."""
    return info.shared_memory_per_block + 1024


def target_config(info) -> str:
    """XLA's description of a GPU, in protobuf text, for compiling without the GPU."""
    major, minor = info.compute_capability
    generation = generation_of(info)
    extension = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: {shared_memory_per_core(info)} threads_per_core_limit: {generation.threads}
      core_count: {info.core_count} fpus_per_core: {generation.fpus}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {info.memory_bandwidth} l2_cache_size: {generation.l2}
      clock_rate_ghz: {generation.clock} device_memory_size: {info.total_memory_bytes}
      shared_memory_per_block_optin: {info.shared_memory_per_block}
      cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "{info.name}"
      driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
      dnn_version: "9.19.0"
    }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 19 }} device_description_str: "{info.name}"
    """


@functools.cache
def abstract_device(info: Any) -> Any:
    """A DeviceInfo's device for an AbstractMesh. Mosaic reads the architecture there, and by default takes (9, 0)."""
    from jax.sharding import AbstractDevice

    @dataclasses.dataclass(frozen=True)
    class Device(AbstractDevice):
        compute_capability: str = ""

    return Device(
        device_kind=generation_of(info).kind,
        num_cores=info.core_count,
        platform="gpu",
        compute_capability="{}.{}".format(*info.compute_capability),
    )


def lower(gpu: str, function, *shapes):
    """Lowers `function` of ShapeDtypeStructs, planned for `gpu`, in this process."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

    from jax_kernels.dispatch import on_device

    with on_device(gpu) as info:
        topology = topologies.get_topology_desc(platform="cuda", target_config=target_config(info), topology="1x1x1")
        device = abstract_device(info)
        replicated = NamedSharding(Mesh(np.array(topology.devices[:1]), ("x",)), PartitionSpec())
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), shapes)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            return jax.jit(function).lower(*shapes)


def lower_and_compile(gpu: str, function, *shapes):
    """(the compiled result of `lower`, the names of its Triton kernels)."""
    lowered = lower(gpu, function, *shapes)
    return lowered.compile(), re.findall(r'@__gpu\$xla\.gpu\.triton.*?name = "([^"]+)"', lowered.as_text())


def compile_here(gpu: str, spec: Spec) -> list[str]:
    """Compiles one spec in this process. Returns the names of its Triton kernels."""
    import jax
    import jax.numpy as jnp

    from jax_kernels import masks
    from jax_kernels.ops.attention import implementations as attention_table
    from jax_kernels.ops.attention.flash_attention import flash_attention
    from tests.support.cases import score_mods as score_mod_cases

    if spec.row >= 0 or spec.blocks:
        attention_table._row = lambda name, request: (_row(gpu, spec), "the command line")
    q_shape = (spec.batch, spec.q_length, spec.heads, spec.head_dim)
    k_shape = (spec.batch, spec.kv_length, spec.kv_heads, spec.head_dim)
    v_shape = (*k_shape[:3], spec.v_head_dim or spec.head_dim)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype)) for shape in (q_shape, k_shape, v_shape)]
    integers = jax.ShapeDtypeStruct((spec.batch,), jnp.int32)
    extra: dict[str, Any] = {}
    if spec.kv_lengths:
        extra["kv_lengths"] = integers
    if spec.q_offsets:
        extra["q_offset"] = integers
    if spec.segment_ids:
        lengths = spec.q_length, spec.kv_length
        extra["segment_ids"] = tuple(jax.ShapeDtypeStruct((spec.batch, length), jnp.int32) for length in lengths)
    if spec.sinks:
        extra["sinks"] = jax.ShapeDtypeStruct((spec.heads,), jnp.float32)
    sizes = {"b": spec.batch, "h": spec.heads, "t": spec.q_length, "s": spec.kv_length}
    for name, axes, dtype in (("bias", spec.bias, spec.bias_dtype or spec.dtype), ("mask", spec.mask, "bool")):
        if axes:
            shape = [size if axis in axes else 1 for axis, size in sizes.items()]
            extra[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    if spec.cells:
        sizes |= {"t": -(-spec.q_length // 128), "s": -(-spec.kv_length // 128)}
        shape = [size if axis in spec.cells else 1 for axis, size in sizes.items()]
        extra["mask"] = jax.ShapeDtypeStruct(shape, jnp.dtype(bool))

    closed: dict[str, Any] = {}
    if spec.score_mod:
        case = {name: getattr(spec, name) for name in ("batch", "q_length", "kv_length", "heads")}
        closed = score_mod_cases.closed_over(case | {"mod": spec.score_mod})

    def forward(query, key, value, extra, closed):
        if spec.score_mod:
            extra = extra | {"score_mod": functools.partial(score_mod_cases.MODS[spec.score_mod], **closed)}
        if spec.cells:
            extra = extra | {"mask": masks.block_sparse(extra["mask"], 128) & masks.causal()}
        out, lse = flash_attention(
            query,
            key,
            value,
            is_causal=spec.is_causal,
            window=tuple(int(side) for side in spec.window.split(",")) if spec.window else None,
            softcap=spec.softcap or None,
            deterministic=spec.deterministic,
            return_lse=True,
            precision=spec.precision or None,
            implementation=spec.implementation,
            **extra,
        )
        return (out, lse) if spec.lse else out

    def both(query, key, value, extra, closed, cotangents):
        of_bias = {"bias": extra["bias"]} if spec.bias_gradient else {}
        attend = lambda query, key, value, bias, moved: forward(query, key, value, extra | bias, moved or closed)
        moved = closed if spec.score_mod_gradients else None
        return jax.vjp(attend, query, key, value, of_bias, moved)[1](cotangents)

    if not spec.backward:
        return lower_and_compile(gpu, forward, *arrays, extra, closed)[1]
    cotangents = jax.ShapeDtypeStruct((*q_shape[:3], v_shape[3]), jnp.dtype(spec.dtype))
    if spec.lse:
        lse = jax.ShapeDtypeStruct((spec.batch, spec.heads, spec.q_length), jnp.float32)
        cotangents = (cotangents, lse)
    return lower_and_compile(gpu, both, *arrays, extra, closed, cotangents)[1]


def _row(gpu: str, spec: Spec):
    from jax_kernels.device import device_info
    from jax_kernels.pallas.block_specs import nearest, specs

    if spec.row >= 0:
        return nearest(device_info(gpu).compute_capability).attention[spec.row]
    names = {name: getattr(specs, name) for name in dir(specs) if name.startswith("Attention")}
    forward, backward = eval(spec.blocks, names)
    return specs.AttentionRow(spec.implementation, 256, 16, forward, backward)


_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>[^']+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def _figures(log: str, shared_memory: int, notes: list[str]) -> dict[str, dict[str, Any]]:
    return {
        entry["name"]: {
            "registers": int(entry["registers"]),
            "spill_stores": int(entry["stores"]),
            "spill_loads": int(entry["loads"]),
            "stack": int(entry["stack"]),
            "shared_memory": shared_memory,
            "notes": notes,
        }
        for entry in _ENTRY.finditer(log)
    }


def _notes(log: str) -> list[str]:
    return sorted({found[0].strip() for line in log.splitlines() if (found := re.search(r"\(?C75\d\d.*", line))})


def _merge(into: dict[str, dict[str, Any]], figures: dict[str, dict[str, Any]]) -> None:
    for name, new in figures.items():
        old = into.get(name, new)
        into[name] = {key: max(old[key], new[key]) for key in new if key != "notes"}
        into[name]["notes"] = sorted({*old["notes"], *new["notes"]})


def _read_log(log: str) -> dict[str, dict[str, Any]]:
    """Figures of every kernel that XLA gave to ptxas. XLA logs a Triton kernel's shared memory first."""
    kernels: dict[str, dict[str, Any]] = {}
    shared_memory = 0
    for record in re.split(r"^(?=[IWE]\d{4} )", log, flags=re.MULTILINE):
        if usage := re.search(r"xtile_compiler.cc:\d+\] Shared memory usage: (\d+)", record):
            shared_memory = int(usage[1])
        if "subprocess_compilation.cc" in record and "Compiling entry function" in record:
            _merge(kernels, _figures(record, shared_memory, _notes(record)))
            shared_memory = 0
    return kernels


def _unseen_zeros(ptx: str) -> int:
    """The number of matmuls whose zero accumulator is set before a branch (a wait, for example).

    ptxas looks for these zeros only in the basic block of the matmul. If it finds them, it tells the tensor cores to
    start from zero; otherwise it writes a zero to each register.
    """
    copy = re.compile(r"\s*mov\.b32\s+%\w+, (%\w+);")
    found, run, source, is_behind = 0, 0, "", False
    for line in ptx.splitlines():
        if copied := copy.match(line):
            run = run + 1 if copied[1] == source else 1
            source, is_behind = copied[1], False
        elif "wgmma.mma_async" in line:
            found += run >= 32 and is_behind
            run = 0
        elif re.search(r"\bbra\b|^\$L\w+:", line):
            is_behind = True
    return found


def _read_dump(folder: Path) -> dict[str, dict[str, Any]]:
    """Figures of every Mosaic kernel. Mosaic calls ptxas itself and keeps its log with the planned resources."""
    kernels: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.ptxas")):
        log = path.read_text()
        resources = path.with_suffix(".resources.txt")
        found = re.search(r"smem_scratch_bytes=(\d+)", resources.read_text()) if resources.exists() else None
        figures = _figures(log, int(found[1]) if found else 0, _notes(log))
        zeros = _unseen_zeros(path.with_suffix(".ptx").read_text())
        _merge(kernels, {name: of_kernel | {"unseen_zeros": zeros} for name, of_kernel in figures.items()})
    return kernels


def _run(dump: Path, script: str, *words: str) -> subprocess.CompletedProcess:
    """Runs a script that compiles. Its stderr is the input of _read_log, `dump` the input of _read_dump."""
    env = {
        "JAX_KERNELS_INTERPRET": None,
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "TF_CPP_VMODULE": "subprocess_compilation=5,xtile_compiler=2",
        "MOSAIC_GPU_DUMP_TO": str(dump),
        "XLA_FLAGS": "--xla_gpu_force_compilation_parallelism=1",  # otherwise the log mixes kernels
    }
    return forked.run(script, *words, env=env, timeout=TIMEOUT)


class Compiled(NamedTuple):
    """The output of a script, and figures by kernel name. others: XLA's and Triton's kernels."""

    printed: str
    mosaic: dict[str, dict[str, Any]]
    others: dict[str, dict[str, Any]]


def compile_script(script: str, *words: str) -> Compiled:
    """Runs a script that calls lower_and_compile in a process of its own. The script must exit with status 0."""
    with tempfile.TemporaryDirectory() as folder:
        done = _run(Path(folder), script, *words)
        assert done.returncode == 0, done.stderr[-2000:]
        return Compiled(done.stdout, _read_dump(Path(folder)), _read_log(done.stderr))


def compile_spec(gpu: str, spec: Spec) -> dict[str, Any]:
    """Compiles in a process of its own. Returns the report described at the top of this file."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(spec.keep) if spec.keep else Path(folder)
        dump.mkdir(parents=True, exist_ok=True)
        try:
            done = _run(dump, __file__, "--here", gpu, *spec.words())
        except subprocess.TimeoutExpired:
            return {"kernels": {}, "xla": {}, "error": f"no result after {TIMEOUT} s"}
        error = None
        if done.returncode:
            error = "\n".join([f"exit status {done.returncode}", *done.stderr.splitlines()[-25:]])
        mosaic, rest = _read_dump(dump), _read_log(done.stderr)
        if spec.keep:
            (dump / "log.txt").write_text(done.stderr)
    pallas = tuple(json.loads(done.stdout)) if not done.returncode else ()
    triton = {name: rest.pop(name) for name in list(rest) if name.startswith(pallas)} if pallas else {}
    rest = {name: figures for name, figures in rest.items() if name not in mosaic}
    return {"kernels": mosaic | triton, "xla": rest, "error": error}


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        raise SystemExit(__doc__)
    if arguments[0] == "--here":
        print(json.dumps(compile_here(arguments[1], Spec.parse(arguments[2:]))))
        return
    report = compile_spec(arguments[0], Spec.parse(arguments[1:]))
    print(json.dumps(report, indent=2))
    if report["error"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
