"""FLOP formulas of the bridge's operators, for torch.utils.flop_counter.FlopCounterMode.

Like PyTorch's formulas, they count only matmuls. For attention they count all pairs of queries and keys, also the
masked pairs.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax._src import core

from jax_kernels import dispatch
from jax_kernels.bridge.interop import dlpack
from jax_kernels.bridge.interop.import_hooks import when_imported
from jax_kernels.bridge.jax_functions.programs import find_program
from jax_kernels.bridge.jax_functions.tracing import mask_specs, outputs_of
from jax_kernels.flops import attention_flops
from jax_kernels.masks import Mask

__all__ = ["define_formulas"]


type _Ignored = torch.Size | list[torch.Size | None] | bool | int | float | str | None


def _attention(query: torch.Size, value: torch.Size, *, backward: bool) -> int:
    """The operations of an attention call's matmuls, for all pairs.

    query: the shape [batch, length, heads, head_dim]. value: the shape [batch, kv_length, kv_heads, value_dim].
    """
    batch, length, heads, head_dim = query
    _, kv_length, _, value_dim = value
    return int(attention_flops(batch * heads * length * kv_length, head_dim, value_dim, backward=backward))


def _forward(query: torch.Size, key: torch.Size, value: torch.Size, *_: _Ignored, **__: _Ignored) -> int:
    return _attention(query, value, backward=False)


def _backward(query: torch.Size, key: torch.Size, value: torch.Size, *_: _Ignored, **__: _Ignored) -> int:
    return _attention(query, value, backward=True)


@functools.lru_cache(maxsize=1024)
def _of_program(name: str, with_gradient: bool) -> int:
    """The operations of a program's matmuls, counted in its ops' "xla" implementations.

    name: the program's name. with_gradient: whether to count the backward too, in addition to the forward. Returns 0 if
    the call names another implementation.
    """
    program = find_program(name)
    outputs, _ = outputs_of(program.request)
    specs = [jax.ShapeDtypeStruct(x.shape, dlpack.jax_dtype(x.dtype)) for x in program.request.signatures]
    moving = [index for index, needed in enumerate(program.needs) if needed]

    def both(masks: tuple[Mask, ...], *leaves: jax.Array) -> tuple[jax.Array, ...]:
        def moved(*values: jax.Array) -> list[jax.Array]:
            full = list(leaves)
            for index, value in zip(moving, values, strict=True):
                full[index] = value
            return [x for x in outputs(masks, *full) if jnp.issubdtype(x.dtype, jnp.inexact)]

        results, pullback = jax.vjp(moved, *(leaves[index] for index in moving))
        return pullback([jnp.ones_like(x) for x in results])

    with dlpack.outside_of_traces(), dispatch.on_device(dispatch.device_info(jax.devices("cpu")[0])):
        try:
            traced = jax.make_jaxpr(both if with_gradient else outputs)(mask_specs(program.request.masks), *specs)
        except NotImplementedError:  # the call names an implementation other than plain JAX
            return 0
    return _products(traced.jaxpr)


def _products(jaxpr: Any) -> int:
    """The operations of the matmuls in a jaxpr and its inner jaxprs.

    A scan's body counts once per iteration, and one branch of a cond: the branch with most operations.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * math.prod(shape[axis] for axis in contracted) * equation.outvars[0].aval.size
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        together = max if equation.primitive.name == "cond" else sum
        total += times * together([_products(inner) for inner in core.jaxprs_in_params(equation.params)] or [0])
    return total


def _call(tensors: list[torch.Size], program: str, *_: _Ignored, **__: _Ignored) -> int:
    return _of_program(program, False)


def _call_backward(
    stored: list[torch.Size], cotangents: list[torch.Size | None], program: str, *_: _Ignored, **__: _Ignored
) -> int:
    return _of_program(program, True) - _of_program(program, False)


_FORMULAS = {
    "flash_attention": _forward,
    "flash_attention_inference": _forward,
    "flash_attention_backward": _backward,
    "call": _call,
    "call_backward": _call_backward,
}


def define_formulas(*names: str) -> None:
    """Registers the FLOP formulas of these operators with PyTorch, once torch.utils.flop_counter has been imported.

    names: operators with a formula, such as "flash_attention"; for each, torch.ops.jax_kernels.<name> and <name>_direct
    must exist by then. Call it only once for a name in a process.
    """

    def register() -> None:
        from torch.utils.flop_counter import register_flop_formula

        for name in names:
            for full in (name, f"{name}_direct"):
                register_flop_formula(getattr(torch.ops.jax_kernels, full))(_FORMULAS[name])

    when_imported("torch.utils.flop_counter", register)
