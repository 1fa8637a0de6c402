"""Random calls of ring_attention and sequence_parallel_dilated_attention, compared with one device.

As a script it checks the named calls on four CPU devices, or compiles them for GPUs that are not present. It prints
each name that passes::

    python tests/support/random/rings.py cpu ring-0 ring-1 dilated-0
    python tests/support/random/rings.py h200 ring-0
"""

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from jax_kernels import (
    masks,
    ring_attention,
    sequence_parallel_dilated_attention,
    shard_sequence,
    unshard_sequence,
)
from jax_kernels.dispatch import on_device
from tests.support.random import calls as random_calls
from tests.support.random.draws import Arrays, Call, Draw, check, check_all, cotangent
from tests.tools import compile_case

AXIS, MOST = "sequence", 4
TOKENS, ROWS = jax.P(None, AXIS), jax.P(None, None, AXIS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingCall(Call):
    """A call whose results come from devices that share the sequence. ring: ring_attention's own arguments."""

    devices: int
    ring: Arrays
    check_vma: bool

    def results(self) -> Mapping[str, jax.Array]:
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((self.devices,), (AXIS,), auto, devices=jax.devices()[: self.devices])
        specs, program = self._program(mesh)
        given = self._given()
        move = functools.partial(_moved, mesh=mesh, layout=self.ring["layout"] or "zigzag")
        found = jax.jit(program)({name: move(shard_sequence, x, specs[name]) for name, x in given.items()})
        return {name: move(unshard_sequence, x, self._out_spec(name, x)) for name, x in found.items()}

    def compile(self, gpu: str) -> None:
        """Compiles the program for `devices` GPUs of one machine, without GPUs."""
        with on_device(gpu) as info:
            topology = topologies.get_topology_desc(
                platform="cuda", target_config=compile_case.target_config(info), topology=f"1x1x{self.devices}"
            )
            mesh = jax.sharding.Mesh(np.array(topology.devices), (AXIS,))
            specs, program = self._program(mesh)
            shape = lambda name, x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, specs[name])
            )
            shapes = {name: shape(name, x) for name, x in self._given().items()}
            device = compile_case.abstract_device(info)
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
                lowered = jax.jit(program).lower(shapes)
            lowered.compile()

    def _given(self) -> dict[str, jax.Array]:
        given = self.given(self.dtype)
        query, value = given["query"], given["value"]
        shape = (*query.shape[:3], value.shape[3])
        given["out_cotangent"] = jnp.asarray(cotangent(shape), query.dtype)
        given["lse_cotangent"] = jnp.asarray(cotangent((shape[0], shape[2], shape[1])))
        return given

    def _program(self, mesh: Any) -> tuple[dict[str, jax.P], Any]:
        """(the PartitionSpecs of the inputs by name, the function of all devices)."""
        specs = {name: _spec(name, x) for name, x in self._given().items()}
        out_specs = {"out": TOKENS, "lse": ROWS} | {f"d_{name}": specs[name] for name in self.moved}
        named = {"in_specs": (specs,), "out_specs": out_specs, "check_vma": self.check_vma}
        return specs, jax.shard_map(self._of_device, mesh=mesh, **named)

    def _out_spec(self, name: str, x: Any) -> jax.P:
        return {"out": TOKENS, "lse": ROWS}.get(name) or _spec(name.removeprefix("d_"), x)

    def _of_device(self, local: Arrays) -> Mapping[str, jax.Array]:
        """The results and the gradients of a device's tokens."""
        moved = {name: local[name] for name in self.moved}
        rest = {name: x for name, x in local.items() if name not in self.moved and not name.endswith("_cotangent")}
        results, vjp = jax.vjp(lambda moved: self.forward(_Ring(self.ring), rest | moved), moved)
        (gradients,) = vjp({name: local[f"{name}_cotangent"] for name in results})
        if not self.check_vma:
            whole = lambda name, x: jax.lax.psum(x, AXIS) if _spec(name, moved[name]) == jax.P() else x
            gradients = {name: whole(name, x) for name, x in gradients.items()}
        return results | {f"d_{name}": x for name, x in gradients.items()}


class _Ring:
    """The names of jax_kernels that a call of flash_attention needs, for a device's tokens."""

    masks = masks

    def __init__(self, arguments: Arrays):
        self._arguments = arguments

    def flash_attention(self, *arrays: Any, **named: Any) -> Any:
        return ring_attention(*arrays, axis_name=AXIS, **self._arguments, **named)

    def dilated_attention(self, **named: Any) -> Any:
        return sequence_parallel_dilated_attention(axis_name=AXIS, **named)


def _spec(name: str, x: Any) -> jax.P:
    if name in ("query", "key", "value", "segment_ids", "out_cotangent"):
        return TOKENS
    return ROWS if name == "lse_cotangent" or (name == "bias" and x.shape[2] > 1) else jax.P()


def _moved(function: Any, x: Any, spec: jax.P, *, mesh: Any, layout: Any) -> Any:
    if spec == jax.P():
        return x
    return function(x, mesh=mesh, axis_name=AXIS, layout=layout, axis=2 if spec == ROWS else 1)


def _score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - 0.02 * (h + 1) * jnp.abs(q - k) + jnp.where(k % 3 == 0, 0.5, 0.0)


def _mask(draw: Draw, length: int, heads: int) -> tuple[str, Any]:
    """The name of a kind, and a masks.Mask of this kind for the whole sequence."""
    kind = draw.one("window", "blocks", "function", "dense", "segments")
    if kind == "window":
        return kind, masks.sliding_window(draw.integer(0, length), 3) | masks.global_tokens(draw.integer(1, 80))
    if kind == "blocks":
        cells = -(-length // 64)
        return kind, masks.block_sparse(draw.random.random((draw.one(1, heads), cells, cells)) < 0.5, 64)
    if kind == "function":
        return kind, masks.from_function(lambda b, h, q, k: ((q + k + h) % 3 != 0) | (q == k), heads=heads)
    if kind == "dense":
        return kind, masks.dense(draw.random.random((1, draw.one(1, heads), length, length)) < 0.6)
    return kind, masks.segments(jnp.asarray(np.sort(draw.random.integers(0, 4, (1, length))), jnp.int32))


def drawn_dilated(seed: int, most: int = MOST) -> RingCall:
    """Draws call number `seed` of sequence_parallel_dilated_attention, on at most `most` devices."""
    draw = Draw(seed, most, 1)
    devices, batch, kv_heads = draw.integer(2, most + 1), draw.integer(1, 3), draw.integer(1, 4)
    heads, head_dim = kv_heads * draw.one(1, 2), draw.one(64, 128, 32, 96)
    length, dtype = devices * draw.one(draw.integer(1, 100), 64, 128, 192), draw.one("bfloat16", "float16", "float32")
    options = random_calls.dilated_pattern(draw, length, heads)
    arrays = draw.attention_arrays(batch, length, heads, kv_heads, head_dim, head_dim, 64, dtype=dtype)
    moved, check_vma = list(arrays), draw.chance(0.3)
    if draw.chance(0.3):
        arrays["segment_ids"] = np.sort(draw.random.integers(-1, 4, (batch, length))).astype(np.int32)

    def forward(ops: Any, arrays: Arrays, **how: Any) -> Mapping[str, Any]:
        out, lse = ops.dilated_attention(**arrays, **options, return_lse=True, **how)
        return {"out": out, "lse": lse}

    shapes = {name: x.shape for name, x in arrays.items()} | {"devices": devices, "check_vma": check_vma}
    return RingCall(
        forward=forward,
        arrays=arrays,
        moved=moved,
        dtype=dtype,
        options=shapes | options | {"dtype": dtype},
        devices=devices,
        ring={"layout": "contiguous"},
        check_vma=check_vma,
    )


def drawn(seed: int, most: int = MOST, least: int = 8) -> RingCall:
    """Draws call number `seed` of ring_attention, on `most` devices or fewer. least: tokens of a run."""
    draw = Draw(seed, most)
    devices, batch, kv_heads = draw.integer(2, most + 1), draw.integer(1, 3), draw.one(1, 2, 4)
    heads, head_dim = kv_heads * draw.one(1, 2), draw.one(64, 128, 32, 96, 40)
    run = draw.one(least * draw.integer(1, 20), 64, 128, 1 + least)
    length, dtype = 2 * devices * run, draw.one("bfloat16", "float16", "float32")
    normal = lambda *shape: draw.normal(*shape, dtype=dtype)
    arrays = draw.attention_arrays(batch, length, heads, kv_heads, head_dim, head_dim, head_dim, 64, dtype=dtype)
    moved = list(arrays)
    layout = draw.one("zigzag", "striped", "contiguous", None)
    options: dict[str, Any] = {"is_causal": draw.chance(0.5)}
    if draw.chance(0.3):
        options["window"] = (draw.integer(-1, length), draw.integer(-1, length))
    strategies = ["ring", "auto", *(["all_gather"] if layout != "striped" else [])]
    strategies += ["all_to_all"] if kv_heads % devices == 0 else []
    if layout in ("zigzag", "contiguous") and draw.chance(0.4):
        options["window"], strategies = (draw.integer(0, run + 1), draw.integer(0, run + 1)), ["halo"]
    strategy = draw.one(*strategies)
    mask_name = None
    if strategy != "halo":
        if draw.chance(0.3):
            mask_name, options["mask"] = _mask(draw, length, heads)
        if draw.chance(0.2):
            options["score_mod"] = _score_mod
        if draw.chance(0.2):
            arrays["bias"] = normal(draw.one(1, batch), draw.one(1, heads), draw.one(1, length), draw.one(1, length))
            moved += ["bias"] * draw.chance(0.7)
    if draw.chance(0.3):
        arrays["sinks"] = draw.normal(heads)
        moved.append("sinks")
    if draw.chance(0.3):
        arrays["segment_ids"] = np.sort(draw.random.integers(-1, 4, (batch, length))).astype(np.int32)
    if "score_mod" not in options and draw.chance(0.2):
        options["softcap"] = 10.0
    ring = {"strategy": strategy, "layout": layout}
    if strategy == "ring" and draw.chance(0.3):
        ring["sends_ahead"] = draw.integer(1, 4)

    def forward(ops: Any, arrays: Arrays, **how: Any) -> Mapping[str, Any]:
        out, lse = ops.flash_attention(**arrays, **options, return_lse=True, **how)
        return {"out": out, "lse": lse}

    check_vma = draw.chance(0.5)
    shapes = {name: x.shape for name, x in arrays.items()} | {"devices": devices, "check_vma": check_vma}
    return RingCall(
        forward=forward,
        arrays=arrays,
        moved=moved,
        dtype=dtype,
        keeps=frozenset({"sinks"}),
        options=shapes | options | ring | {"dtype": dtype, "mask": mask_name, "moved": moved},
        devices=devices,
        ring=ring,
        check_vma=check_vma,
    )


KINDS = {"ring": drawn, "dilated": drawn_dilated}


def main(gpu: str, *names: str) -> None:
    def of_name(name: str) -> RingCall:
        kind, number = name.split("-")
        return KINDS[kind](int(number))

    check_all(names, of_name, check if gpu == "cpu" else lambda call: call.compile(gpu))


if __name__ == "__main__":
    main(*sys.argv[1:])
