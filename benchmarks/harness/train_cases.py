"""One contender of benchmarks/train.py: a decoder, its training step, and the time of it."""

import contextlib
import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["LLAMA", "POLICIES", "TrainCase", "config_of", "measure"]

STRATEGIES = ("all_to_all", "ring")
SCALINGS = ("row", "block", "delayed")  # of 8-bit matmuls; else each tensor's own scale
PREFIXES = ("scan", "xla", "plain", "tokens", "cudnn", "nccl", "triton", "fp8", *SCALINGS, *STRATEGIES)
POLICIES: dict[str, Any] = {"none": False, "all": True, "attention": "attention", "products": "products"}
LLAMA = ("llama", "llama-remat")
# TFLOP/s of dense bfloat16 matmuls, by the vendor's data sheets.
PEAKS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainCase:
    """A contender by its name (see benchmarks/train.py) on a mesh, such as "data=2"; "" for one device.

    batch: of one device. A mesh of n devices has n times the batch, also along "sequence", where each device has a
    shard of each sequence: so the work per token, which depends on the sequence length, stays the same. has_profile:
    whether CUPTI records the time of each kernel in an extra turn. curve: the number of steps on real text whose losses
    are the result; 0 for times. seed: of the initial parameters and the order of the text, of curves alone.
    """

    name: str
    mesh: str
    batch: int
    seq_len: int
    layers: int
    width: int
    heads: int
    mlp: int
    vocabulary: int
    dtype: str
    param_dtype: str
    steps: int
    rounds: int
    has_profile: bool = False
    curve: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        known = self.policy in POLICIES and all(word in PREFIXES for word in self.prefixes)
        if not known and self.name not in LLAMA:
            names, words = ", ".join((*POLICIES, *LLAMA)), "-, ".join(PREFIXES)
            raise ValueError(f"contenders: got {self.name!r}, want one of {names}, or a policy after {words}-")
        if any(word in SCALINGS for word in self.prefixes) and "fp8" not in self.prefixes:
            raise ValueError(f"contenders: got {self.name!r}, want fp8- with {'-, '.join(SCALINGS)}-")
        if self.curve and (self.name in LLAMA or self.vocabulary < 256):
            raise ValueError(
                f"curve: got {self.name!r} with a vocabulary of {self.vocabulary}, want this library's contenders, and "
                "256 ids or more for bytes"
            )
        if self.mesh and self.name in LLAMA:
            raise ValueError(f"meshes: got {self.mesh!r} for {self.name}, want none")
        _ = self.axes

    @property
    def policy(self) -> str:
        return self.name.rpartition("-")[2]

    @property
    def prefixes(self) -> list[str]:
        return self.name.split("-")[:-1]

    @property
    def label(self) -> str:
        seed = f"seed {self.seed}" if self.curve else ""
        return " ".join(word for word in (self.name, self.mesh, seed) if word)

    @property
    def axes(self) -> dict[str, int]:
        try:
            return {name: int(size) for name, size in (part.split("=") for part in self.mesh.split(",") if part)}
        except ValueError:
            raise ValueError(f"meshes: got {self.mesh!r}, want axes such as data=2,sequence=2") from None

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())

    @property
    def shape(self) -> tuple[int, int]:
        """The batch and the tokens of a sequence, over all devices."""
        return self.batch * self.devices, self.seq_len

    @property
    def flops(self) -> float:
        """The FLOPs of a step, without rematerialised work."""
        batch, length = self.shape
        weights = self.layers * (4 * self.width**2 + 3 * self.width * self.mlp) + self.vocabulary * self.width
        pairs = batch * length * (length + 1) / 2
        return 6 * weights * batch * length + 12 * self.layers * self.width * pairs


def measure(case: TrainCase) -> dict[str, Any]:
    """The row of a contender."""
    if case.curve:
        from harness.train_curve import losses_of

        return losses_of(case, config_of(case))
    build = _llama_run if case.name in LLAMA else _transformer_run
    activity = _device_activity() if case.has_profile else None
    start = time.perf_counter()
    run, device, peak = build(case)
    build_s = time.perf_counter() - start
    parts = {}
    for name, part in run.first:
        start = time.perf_counter()
        part()
        parts[name] = time.perf_counter() - start
        _tell(name, parts[name])
    step = run.step
    start = time.perf_counter()
    loss = float(step()())
    parts["run"] = time.perf_counter() - start
    _tell("run", parts["run"])
    step()()
    times = []

    def turn() -> None:
        for _ in range(case.steps):
            wait = step()
        wait()

    for _ in range(case.rounds):
        start = time.perf_counter()
        turn()
        times.append((time.perf_counter() - start) / case.steps * 1e3)
    median = statistics.median(times)
    tflops = case.flops / median / 1e9 / case.devices
    best = next((value for name, value in PEAKS.items() if name in device), None)
    return {
        "device": device,
        "devices": case.devices,
        "batch": case.shape[0],
        "seq_len": case.shape[1],
        "build_s": build_s,
        "build_parts_s": run.built,
        "first_s": sum(parts.values()),
        "first_parts_s": parts,
        "loss": loss,
        "times_ms": times,
        "median_ms": median,
        "tokens_per_s": math.prod(case.shape) / median * 1e3,
        "tflops": tflops,
        "mfu": None if best is None else tflops / best,
        "peak_gb": peak(),
        "profile_ms": None if activity is None else activity.profile(turn, case.steps),
    }


def _device_activity() -> Any:
    """CUPTI's records, to be made before the GPU is used. The module imports JAX, and the import of JAX is timed."""
    from harness.device_activity import DeviceActivity

    return DeviceActivity()


def _tell(part: str, seconds: float) -> None:
    """Reports on standard error that a part has ended: the lines show the progress of a process that was stopped."""
    print(f"{part}: {seconds:.1f} s", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A contender that is ready to run.

    built: seconds of each part before the first step, by name. first: seconds of each part of the first step except its
    run, by name. step: queues a step, and returns a function that waits for the step and returns its loss.
    """

    first: Sequence[tuple[str, Callable[[], Any]]]
    step: Callable[[], Callable[[], Any]]
    built: dict[str, float] = dataclasses.field(default_factory=dict)


def config_of(case: TrainCase) -> Any:
    """The TransformerConfig of one of this library's contenders."""
    from jax_kernels.models import TransformerConfig

    is_fp8, by_xla = "fp8" in case.prefixes, "xla" if "xla" in case.prefixes else None
    return TransformerConfig(
        vocab_size=case.vocabulary,
        model_dim=case.width,
        num_layers=case.layers,
        num_heads=case.heads,
        mlp_dim=case.mlp,
        dtype=case.dtype,
        param_dtype=case.param_dtype,
        remat=POLICIES[case.policy],
        scan_layers="scan" in case.prefixes,
        implementation="cudnn" if "cudnn" in case.prefixes else None,
        mlp_implementation=by_xla,
        projection_implementation=by_xla if is_fp8 else None,
        precision="fp8" if is_fp8 else None,
        scaling=next((word for word in case.prefixes if word in ("row", "block")), None),
        fp8_scaling="delayed" if "delayed" in case.prefixes else "dynamic",
        sequence_strategy=next((x for x in case.prefixes if x in STRATEGIES), "auto"),
    )


def _transformer_run(case: TrainCase) -> tuple[Run, str, Callable[[], float | None]]:
    built: dict[str, float] = {}
    since = [time.perf_counter()]

    def part(name: str) -> None:
        built[name], since[0] = time.perf_counter() - since[0], time.perf_counter()
        _tell(name, built[name])

    import jax
    import optax
    from flax import nnx

    from jax_kernels import compile_kernels
    from jax_kernels.compilation import paused_collections
    from jax_kernels.models import AmaxHistory, Transformer, make_mesh, shard_batch, state_shardings
    from jax_kernels.models.layers.delayed_scaling import without_histories

    part("import")
    jax.block_until_ready(jax.numpy.zeros(1) + 1)
    part("start of the backend")
    mesh = make_mesh(case.axes or {"data": 1})
    graphdef, params = nnx.split(Transformer(config_of(case), rngs=nnx.Rngs(0)))
    optimizer = optax.adamw(1e-4)
    places = state_shardings(params, mesh)
    params = jax.block_until_ready(jax.device_put(params, places))
    part("model")
    trained = without_histories(params)
    of_moments = state_shardings(jax.eval_shape(optimizer.init, trained), mesh)
    moments = jax.jit(optimizer.init, out_shardings=of_moments)(trained)
    del trained
    tokens = jax.random.randint(jax.random.key(1), case.shape, 0, case.vocabulary)
    tokens = shard_batch(tokens, mesh)

    def loss_of(params: Any, tokens: Any) -> Any:
        model, targets = nnx.merge(graphdef, params), jax.numpy.roll(tokens, -1, 1)
        if "plain" in case.prefixes:
            loss = optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()
        elif "tokens" in case.prefixes:
            loss = model.losses(tokens, targets).mean()
        else:
            loss = model.losses(tokens, targets, reduction="mean")
        return loss, nnx.state(model, AmaxHistory)

    @functools.partial(
        jax.jit,
        donate_argnums=(0, 1),
        out_shardings=(places, of_moments, None),
        compiler_options=_options(case, mesh),
    )
    def train(params: Any, moments: Any, tokens: Any) -> Any:
        (loss, histories), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, tokens)
        gradients, params = without_histories(gradients), without_histories(params)
        updates, moments = optimizer.update(gradients, moments, params)
        params = optax.apply_updates(params, updates)
        return nnx.merge_state(params, histories) if histories else params, moments, loss

    jax.block_until_ready((params, moments, tokens))
    part("moments and tokens")
    state: list[Any] = [params, moments]
    del params, moments
    stage: list[Any] = [train]

    def advance(method: str, *arguments: Any) -> None:
        rests = contextlib.nullcontext() if method == "compile" else paused_collections()  # as Trainer does
        with jax.set_mesh(mesh), rests:
            stage[0] = getattr(stage[0], method)(*arguments)

    first = (
        ("trace", lambda: advance("trace", *state, tokens)),
        ("lower", lambda: advance("lower")),
        ("kernels", lambda: compile_kernels(stage[0], wait=False)),
        ("compile", lambda: advance("compile")),
    )

    def step() -> Callable[[], Any]:
        state[0], state[1], loss = stage[0](*state, tokens)
        return functools.partial(jax.block_until_ready, loss)

    device = jax.devices()[0]
    statistics_of = lambda: (device.memory_stats() or {}).get("peak_bytes_in_use")
    peak = lambda: None if statistics_of() is None else statistics_of() / 1e9
    return Run(first=first, step=step, built=built), device.device_kind, peak


def _options(case: TrainCase, mesh: Any) -> dict[str, Any]:
    """XLA's options, as in Trainer."""
    import jax

    from jax_kernels import compiler_options

    of_one = jax.sharding.Mesh(mesh.devices.flat[:1], ("data",)) if "nccl" in case.prefixes else mesh
    return compiler_options(of_one, triton_products="triton" in case.prefixes)


def _llama_run(case: TrainCase) -> tuple[Run, str, Callable[[], float | None]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    there = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=case.vocabulary,
        hidden_size=case.width,
        intermediate_size=case.mlp,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        max_position_embeddings=case.seq_len,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(there):
        model = LlamaForCausalLM(config).to(getattr(torch, case.param_dtype))
    if case.name == "llama-remat":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=there == "cuda")
    tokens = torch.randint(0, case.vocabulary, case.shape, device=there)
    casts = case.dtype == "bfloat16" and case.param_dtype == "float32"

    def step() -> Callable[[], Any]:
        with torch.autocast(there, torch.bfloat16, enabled=casts):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item

    if there == "cpu":
        return Run(first=(), step=step), "cpu", lambda: None
    torch.cuda.synchronize()
    return Run(first=(), step=step), torch.cuda.get_device_name(), lambda: torch.cuda.max_memory_allocated() / 1e9
