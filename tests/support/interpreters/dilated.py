"""Runs dilated_attention by the Hopper kernels in JAX's Mosaic interpreter, as a script: see mosaic.py.

python tests/support/interpreters/dilated.py '{"num_heads": 4, "kv_heads": 2, "length": 64, "head_dim": 64, ...}'
"""

import dataclasses
import functools
import importlib
import json
import sys

from tests.support.interpreters import mosaic as mosaic_interpreter  # first: it sets the environment

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels import dilated_attention
from jax_kernels.device import device_info
from jax_kernels.dispatch import on_device
from jax_kernels.testing import rms_error
from tests.support.oracles import dilated as dilated_oracle

module = importlib.import_module("jax_kernels.ops.dilated.dilated_attention")


def main(case: dict) -> dict:
    mosaic_interpreter.install()
    if case.pop("bounded", False):  # short lists of keys do without bounds
        mosaic_interpreter.set_bounded(True)
    # The default bandwidth is so low that no launch is worth a copy.
    device = dataclasses.replace(device_info("h200"), memory_bandwidth=case.pop("bandwidth", 1))
    device = dataclasses.replace(device, core_count=case.pop("cores", device.core_count))
    batch = case.pop("batch", 1)
    heads, kv_heads, length, head_dim = (case.pop(name) for name in ("num_heads", "kv_heads", "length", "head_dim"))
    random = np.random.default_rng(0)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    query, dout = (jnp.asarray(normal(batch, length, heads, head_dim), jnp.bfloat16) for _ in range(2))
    key, value = (jnp.asarray(normal(batch, length, kv_heads, head_dim), jnp.bfloat16) for _ in range(2))
    dlse = jnp.asarray(normal(batch, heads, length))
    strided = []
    prepare = module.prepare

    def recorded(**keywords):
        call, arrays = prepare(**keywords)
        both = call.attentions, call.differentiated
        strided[:] = [[views.is_strided for views, _ in attentions] for attentions in both]
        return call, arrays

    module.prepare = recorded

    attend = functools.partial(dilated_attention, return_lse=True, implementation="mosaic_gpu", **case)
    with on_device(device):
        results, vjp = jax.vjp(attend, query, key, value)
        got = jax.block_until_ready((*results, *vjp((dout, dlse))))
        same = jax.tree.map(lambda x: x[0], jax.vmap(attend)(*(x[None] for x in (query, key, value))))
    for without, differentiated in zip(same, results, strict=True):
        np.testing.assert_array_equal(np.asarray(without, np.float32), np.asarray(differentiated, np.float32))
    want = dilated_oracle.dilated_attention(query, key, value, dout, dlse, **case)
    errors = (rms_error(g, w) for g, w in zip(got, want, strict=True))
    bounded = zip(errors, dilated_oracle.BFLOAT16_BOUNDS, strict=True)
    return {"errors": dict(zip(dilated_oracle.NAMES, bounded, strict=True)), "strided": strided}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
