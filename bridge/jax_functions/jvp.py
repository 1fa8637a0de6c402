"""Programs that compute forward-mode derivatives of from_jax's functions: programs of a function that calls jax.jvp.

torch.func.vmap maps these programs like all programs, so jacfwd works. Functions that use an op with only a
reverse-mode gradient (jax.custom_vjp), or an op of this library, have no such program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jax_kernels.bridge.jax_functions.programs import (
    FUNCTIONS,
    Program,
    ProgramKey,
    VmapLevel,
    display_name,
    label_in_errors,
)
from jax_kernels.bridge.jax_functions.pytree import LEAF, MASK, Structure
from jax_kernels.bridge.jax_functions.tracing import build_program, outputs_of
from jax_kernels.bridge.operators import torch_operator
from jax_kernels.tracing.derivatives import linear_p

__all__ = ["jvp_program"]

# Primitives in the tangents of a jax.custom_vjp, which has no rule, and of this library's ops. JAX could compute the
# tangents of an op's "xla" implementation, but a call must not depend on its implementation.
_REVERSE_ALONE = "custom_lin", linear_p.name


def jvp_program(request: ProgramKey, moving: tuple[bool, ...]) -> Program:
    """The program that computes the tangents of a request's floating-point and complex results.

    moving: for each tensor of the request, whether it has a tangent. The program's tensors are the request's tensors,
    then the tangents of the moving tensors. Raises NotImplementedError if the function uses a
    jax.custom_vjp or an op of this library.
    """
    of_masks = 0 if request.masks is None else len(request.masks.structure.children())
    call = request.function, request.structure, request.maps, moving, of_masks
    name, _held = FUNCTIONS.get(
        call, display_name(request.function), lambda _: _tangents(*call)
    )  # until the program holds it
    tangents = tuple(x for x, is_moving in zip(request.signatures, moving, strict=True) if is_moving)
    signatures = *request.signatures, *tangents
    leaves = ("tuple", (*[LEAF] * len(signatures), *[MASK] * of_masks))
    structure = ("tuple", (leaves, ("dict", (), ())))
    own = ProgramKey(name, structure, signatures, request.masks, request.x64)
    return build_program(own, (False,) * len(signatures))


def _tangents(
    function: str, structure: Structure, maps: tuple[VmapLevel, ...], moving: tuple[bool, ...], of_masks: int
) -> Callable[..., Any]:
    """The JAX function that computes tangents of a request's floating-point and complex results.

    It takes a flat list: an array for each tensor, a tangent for each tensor that is `moving`, then the Masks. It
    returns a tuple of tangents. function, structure, maps: from the request. of_masks: the number of Masks.
    """
    outputs, _ = outputs_of(ProgramKey(function, structure, (), None, False, maps))
    places = [at for at, is_moving in enumerate(moving) if is_moving]
    count = len(moving)
    label = label_in_errors(function)

    def tangents(*given):
        leaves, given = list(given[:count]), given[count:]
        directions, masks = given[: len(places)], given[len(places) :]
        assert len(masks) == of_masks

        def push(*directions):
            def moved(*values):
                full = list(leaves)
                for at, value in zip(places, values, strict=True):
                    full[at] = value
                return outputs(masks, *full)

            results, found = jax.jvp(moved, [leaves[at] for at in places], list(directions))
            pairs = zip(results, found, strict=True)
            return tuple(x for result, x in pairs if jnp.issubdtype(result.dtype, jnp.inexact))

        if _is_reverse_alone(jax.make_jaxpr(push)(*directions).jaxpr):
            torch_operator.refuse_tangent(label)
        return push(*directions)

    tangents.__name__ = display_name(function)
    return tangents


def _is_reverse_alone(jaxpr: core.Jaxpr) -> bool:
    """Whether a traced jax.jvp, or a jaxpr inside it, has a jax.custom_vjp or an op of this library.

    A jax.custom_vjp has only a reverse-mode derivative. The library's ops count whatever their implementation.
    """
    for equation in jaxpr.eqns:
        if str(equation.primitive) in _REVERSE_ALONE:
            return True
        if any(_is_reverse_alone(inner) for inner in core.jaxprs_in_params(equation.params)):
            return True
    return False
