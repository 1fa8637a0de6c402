"""Compiles ring_attention for the H200s of one machine, without a GPU, and prints the overlap in its schedule, as JSON.

    python tests/tools/compile_ring.py DEVICES MODE [check_vma] [SENDS_AHEAD] [halo] [sides] [masked] [documents]

MODE: "fwd" or "both". halo: with halos of neighbouring tokens, under a window of 1,024. sides: under a window of 6,000
before and after each token. masked: under a mask as data. documents: three packed documents in a DocumentLayout.
"overlaps": for each permute or group of permutes, the number of kernels that begin between its start and end; 0 if none
overlaps. "detached": arguments that a kernel changes in place, but that XLA passes as a part of another array.
"temporary": MiB.
"""

import functools
import json
import re
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jax_kernels import DocumentLayout, masks, ring_attention
from jax_kernels.dispatch import on_device
from tests.tools import compile_case

LOCAL_TOKENS = 8192


def compiled(devices: int, mode: str, words: Sequence[str], sends_ahead: int | None = None):
    """The causal program over `devices` H200s, with LOCAL_TOKENS tokens on each."""
    options = {"strategy": "ring", "is_causal": True, "sends_ahead": sends_ahead}
    if "halo" in words:
        options |= {"strategy": "halo", "layout": "contiguous", "window": (1024, 0)}
    if "sides" in words:
        options |= {"is_causal": False, "window": (6000, 6000)}
    if "masked" in words:
        options |= {"is_causal": False, "mask": masks.sliding_window(4096, 0) | masks.global_tokens(128)}
    if "documents" in words:
        ids = np.searchsorted([0.5, 0.8], np.arange(devices * LOCAL_TOKENS) / (devices * LOCAL_TOKENS), side="right")
        options |= {"layout": DocumentLayout.of(ids, devices, heads=64)}  # with 16 heads no document is cut
    attend = functools.partial(ring_attention, axis_name="sequence", **options)

    def both(query, key, value, dout, ids=None):
        out, vjp = jax.vjp(functools.partial(attend, segment_ids=ids), query, key, value)
        return out, *vjp(dout)

    forward = lambda query, key, value, dout, ids=None: (attend(query, key, value, segment_ids=ids),)
    tokens = jax.P(None, "sequence")
    with on_device("h200") as info:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=compile_case.target_config(info), topology=f"1x1x{devices}"
        )
        mesh = Mesh(np.array(topology.devices), ("sequence",))
        device = compile_case.abstract_device(info)
        shared = jax.shard_map(
            both if mode == "both" else forward,
            mesh=mesh,
            in_specs=(*[tokens] * 4, *[jax.P()] * ("documents" in words)),
            out_specs=tokens,
            check_vma="check_vma" in words,
        )
        shape = 1, devices * LOCAL_TOKENS, 16, 128
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, tokens))
        ids = (
            [jax.ShapeDtypeStruct(shape[:2], jnp.int32, sharding=NamedSharding(mesh, jax.P()))]
            if "documents" in words
            else []
        )
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            lowered = jax.jit(shared).lower(x, x, x, x, *ids)
        # The number of sends that XLA overlaps at a time. Its default is one.
        limit = {"xla_gpu_experimental_parallel_collective_overlap_limit": sends_ahead}
        return lowered.compile(compiler_options=limit if sends_ahead else None)


def detached(text: str) -> list[str]:
    """Arguments that a kernel changes in place, but that are parts of arrays: dynamic-slice fusions lose the change."""
    found = []
    for body in re.split(r"\n(?=%)", text.split("\nENTRY", 1)[0]):
        whole = set(re.findall(r"%([\w.-]+) = \S+ parameter\(", body))
        for call in re.finditer(r" custom-call\((.*?)\), .*?output_to_operand_aliasing=\{(.*?\))\}", body):
            arguments = re.findall(r"%([\w.-]+)", call[1])
            changed = (arguments[int(number)] for number in re.findall(r"\((\d+), \{\}\)", call[2]))
            found += [name for name in changed if name not in whole]
    return found


def main(devices: str, mode: str, *words: str) -> None:
    ahead = next((int(word) for word in words if word.isdecimal()), None)
    program = compiled(int(devices), mode, words, sends_ahead=ahead)
    entry = program.as_text().split("\nENTRY", 1)[1].splitlines()
    overlaps, in_flight, kernels = [], {}, 0
    for line in entry:
        if started := re.search(r"%([\w.-]+) = \(.*\) (?:collective-permute|async)-start\(", line):
            in_flight[started[1]] = kernels
        elif re.search(r"(custom-call|fusion)\(", line) and ("mosaic_gpu" in line or "dynamic_slice_fusion" in line):
            kernels += 1
        elif ended := re.search(r"(?:collective-permute|async)-done\(.*?%([\w.-]+)\)", line):
            overlaps.append(kernels - in_flight.pop(ended[1]))
        elif " collective-permute(" in line:
            overlaps.append(0)
    assert not in_flight
    temporary = program.memory_analysis().temp_size_in_bytes / 2**20
    print(json.dumps({"overlaps": overlaps, "detached": detached(program.as_text()), "temporary": temporary}))


if __name__ == "__main__":
    main(*sys.argv[1:])
