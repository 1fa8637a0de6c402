"""Exchange: permutes give the results of all-to-alls, over any number of devices, with equal gradients.

As a script it prints the names of the cases that differ, on CPU devices.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from jax_kernels.ops.ring.head_exchange import Exchange
from jax_kernels.ops.ring.layouts import LAYOUTS, Layout
from tests.support.processes.python import done_by

LENGTH = 6  # tokens of a device
DEVICES = 2, 3


def programs(layout, devices):
    """Two programs of exchanges and gradients of arrays [1, tokens, heads, 2]: by permutes, and by all-to-alls."""
    mesh = jax.make_mesh((devices,), ("s",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    arrangement = Layout(name=layout, devices=devices, length=LENGTH, left=None, right=None)
    by_tokens, by_heads = jax.P(None, "s"), jax.P(None, None, "s")

    def run(exchange, x, y):
        there = lambda x, y: exchange.to_heads(x, y)
        (x_heads, y_heads), vjp = jax.vjp(there, x, y)
        back, of_tokens = jax.vjp(exchange.to_tokens, jnp.sin(x_heads))
        return x_heads, y_heads, *vjp((jnp.cos(x_heads), y_heads)), back, *of_tokens(jnp.cos(x))

    specs = (by_heads, by_heads, by_tokens, by_tokens, by_tokens, by_heads)
    for by_permutes in (True, False):
        exchange = Exchange(layout=arrangement, axis_name="s", by_permutes=by_permutes)
        yield jax.jit(
            jax.shard_map(functools.partial(run, exchange), mesh=mesh, in_specs=(by_tokens, by_tokens), out_specs=specs)
        )


def differing():
    found = []
    for layout, devices in itertools.product(LAYOUTS, DEVICES):
        shape = lambda heads: (1, LENGTH * devices, heads, 2)  # noqa: B023
        x, y = (jax.random.normal(jax.random.key(n), shape(n * devices)) for n in (2, 1))
        permuted, exchanged = (program(x, y) for program in programs(layout, devices))
        if not all(bool((a == b).all()) for a, b in zip(permuted, exchanged, strict=True)):
            found.append(f"{layout} {devices}")
    return found


@pytest.mark.timeout(200)
def test_permutes_match_all_to_all():
    done = done_by(__file__, limit=180, JAX_PLATFORMS="cpu")
    assert done.stdout.splitlines() == ["differing: []"]


def test_sent_arrays():
    """Each permute sends another device's heads of both arrays; no other collective runs."""
    devices = 4
    mesh = jax.sharding.AbstractMesh((devices,), ("s",), (jax.sharding.AxisType.Auto,))
    layout = Layout(name="zigzag", devices=devices, length=LENGTH, left=None, right=None)
    exchange = Exchange(layout=layout, axis_name="s", by_permutes=True)
    spec = jax.P(None, "s")
    program = jax.shard_map(exchange.to_heads, mesh=mesh, in_specs=(spec, spec), out_specs=jax.P(None, None, "s"))
    given = [jax.ShapeDtypeStruct((1, devices * LENGTH, heads, 2), jnp.float32) for heads in (8, 4)]
    text = str(jax.make_jaxpr(program)(*given))
    assert text.count("ppermute[") == devices - 1
    assert text.count(f"f32[1,{LENGTH},3,2]{{V:s}} = ppermute[") == devices - 1, text
    assert "all_to_all" not in text


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    print(f"differing: {differing()}")
