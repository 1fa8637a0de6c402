"""Counts the operations of traced functions."""

from typing import Any

import jax
import jax.extend

__all__ = ["count"]


def count(name: str, jaxpr: Any) -> int:
    """The number of operations of this name, such as dot_general, in a jaxpr and its inner jaxprs.

    A cond that asks for the platform counts as its first branch, for a CPU.
    """
    found = sum(equation.primitive.name == name for equation in jaxpr.eqns)
    for equation in jaxpr.eqns:
        inner = list(jax.extend.core.jaxprs_in_params(equation.params))
        chosen = inner[:1] if equation.params.get("branches_platforms") else inner
        found += sum(count(name, branch) for branch in chosen)
    return found
