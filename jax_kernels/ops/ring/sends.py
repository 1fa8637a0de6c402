"""Sends of several arrays from each device of a ring to another device."""

from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import xla_metadata_call

__all__ = ["sent", "sent_together"]


def sent(tree: Any, axis_name: str, pairs: list[tuple[int, int]]) -> Any:
    """The tree of another device. tree: this device's arrays. pairs: (source, target) of lax.ppermute."""
    return jax.tree.map(lambda x: lax.ppermute(x, axis_name, pairs), tree)


def sent_together(tree: Any, axis_name: str, pairs: list[tuple[int, int]]) -> Any:
    """The same as `sent`, as one collective of XLA's scheduler. JAX cannot linearize it in part.

    The scheduler hides one collective at a time behind a kernel. Without the group, all sends but one would be
    synchronous, unless XLA joins them, which it does up to 30 MiB only.
    """
    send = lambda tree: sent(tree, axis_name, pairs)
    if len(jax.tree.leaves(tree)) < 2:
        return send(tree)
    return xla_metadata_call(send, _collectives_group="", inlineable=False)(tree)
