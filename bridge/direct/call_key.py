"""Keys of calls on disk: they find a call's launch chain without lowering its function.

A function that is part of this library is known by name and options. Its program then depends on the arrays' shapes,
the GPU, the tuned winners, this library's source code, and settings. The key has all of these. Other functions, such as
a function given to from_jax, have no key: their programs are found by their text, after lowering.
"""

import json
import os
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jax_kernels import chunks
from jax_kernels.bridge.direct import program_cache
from jax_kernels.bridge.interop.donated_outputs import JaxFunction
from jax_kernels.device import DeviceInfo
from jax_kernels.ops import planned_op
from jax_kernels.tuned import cache as winners

__all__ = ["describe", "key_of"]

_DESCRIPTIONS: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_OWN = "JAX_KERNELS_"
_WITHOUT_EFFECT = ("JAX_KERNELS_CACHE", "JAX_KERNELS_PROGRAM_CACHE")


def describe[Function: JaxFunction](function: Function, name: str, *options: Hashable) -> Function:
    """Notes that `name` and the options determine a jitted function of this library. Returns the function.

    name: not the name of another function. options: strings, numbers, None, and tuples of these.
    """
    _DESCRIPTIONS[function] = json.dumps([name, *map(repr, options)])
    return function


def key_of(
    function: JaxFunction, specs: Sequence[jax.ShapeDtypeStruct | None], target: str, info: DeviceInfo
) -> str | None:
    """The key of a call; None for a function that was not given to `describe`, and while plans are recorded or tuned.

    specs: the shape and dtype of each argument, None for an absent one. target: the text of compile.Target. info: of
    the GPU.
    """
    description = _DESCRIPTIONS.get(function)
    is_watched = planned_op._TUNER.get() is not None or planned_op._RECORD.get() is not None
    if description is None or is_watched or chunks.is_forced() or program_cache.folder() is None:
        return None
    if any(".dev" in version for version in program_cache.versions().values()):  # its code may change
        return None
    tuned = [
        {name: winner.as_json() for name, winner in sorted(found(info.name).items())}
        for found in (winners.find, winners.find_shipped)
    ]
    environment = {name: x for name, x in os.environ.items() if name.startswith(_OWN) and name not in _WITHOUT_EFFECT}
    return program_cache.key_of(
        "call",
        description,
        repr([None if x is None else (x.shape, x.dtype.name) for x in specs]),
        target,
        repr(info),
        repr(chunks.limit()),
        json.dumps(tuned, sort_keys=True, default=repr),
        repr(sorted(environment.items())),
        repr(sorted(jax.config.values.items())),
        program_cache.source_digest(),
    )
