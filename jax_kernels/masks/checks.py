"""The checks that masks share. Each error names the argument, the value that it got, and the wanted value."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels.plain_numbers import plain, plain_of


def is_int(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def integer(name: str, x: Any, least: int, want: str | None = None) -> int:
    """x as an int. Raises TypeError unless it is an int known when tracing, ValueError unless least <= x < 2**30.

    name: the argument's name, for errors. want: a description of the wanted value, for errors.
    """
    want = want or f"an int of at least {least} that is known when tracing"
    x = plain(x)
    if not is_int(x):
        raise TypeError(f"{name}: got {x!r}, want {want}")
    if not least <= x < 1 << 30:
        raise ValueError(f"{name}: got {x}, want {want}, below 2**30")
    return int(x)


def lengths(q_length: Any, kv_length: Any) -> tuple[int, int]:
    """(q_length, kv_length) as ints. Raises TypeError or ValueError unless they are ints known when tracing, 0 or
    more.
    """
    return integer("q_length", q_length, 0), integer("kv_length", kv_length, 0)


def block_pair(name: str, block: Any) -> tuple[int, int]:
    """The (query, key) sizes of a block, from an int for both sizes or a pair. Raises ValueError or TypeError
    otherwise.
    """
    block = plain_of("block_size", block)
    pair = block if isinstance(block, tuple | list) else (block, block)
    if len(pair) != 2:
        raise ValueError(f"{name}: got {block!r}, want an int or a (query, key) pair of ints")
    return integer(name, pair[0], 1), integer(name, pair[1], 1)


def reason_of(error: Exception) -> str:
    """The first line of an error that a traced function raised; for a NumPy array with a traced index, the remedy."""
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return "a traced index cannot index a NumPy array: pass the array through jnp.asarray"
    return str(error).split("\n")[0]


def is_array(name: str, x: Any, want: str) -> None:
    """Raises TypeError unless x is an array of JAX or NumPy. name, want: the argument and the wanted array, for the
    error.

    Call it before a check of x's dtype: for an array of another library, that check would say "got float32, want
    float32".
    """
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name}: got {type(x).__name__}, want {want}, of JAX or NumPy")


def check_integers(name: str, x: Any) -> None:
    """Raises ValueError for integers of a NumPy array that JAX does not hold: it has 32 bits without jax_enable_x64.

    name: the argument's name, for the error.
    """
    if not isinstance(x, np.ndarray) or not x.size or not np.issubdtype(x.dtype, np.integer):
        return
    held = np.iinfo(jax.dtypes.canonicalize_dtype(x.dtype))
    if x.min() < held.min or x.max() > held.max:
        raise ValueError(
            f"{name}: got {x.dtype} from {x.min()} to {x.max()}, want integers of {held.min} to {held.max}, which JAX "
            "holds, or jax_enable_x64"
        )


def array(name: str, x: Any, want: str) -> jax.Array:
    """x as a jax.Array. Raises TypeError if x is no array, ValueError if a value changes in the conversion.

    JAX turns 64-bit NumPy arrays into 32 bits, unless jax_enable_x64 is set. name, want: the argument's name and a
    description of the wanted array, for errors.
    """
    is_array(name, x, want)
    if isinstance(x, jax.Array):
        return x
    held = jnp.asarray(x)
    if held.dtype != x.dtype and (np.asarray(held) != x).any():
        raise ValueError(f"{name}: got {x.dtype} values that {held.dtype} does not hold, want {want}")
    return held


# Arrays of positions are clamped to this distance from 0, and known positions are below it, so that their sums fit an
# int32.
FARTHEST = 1 << 30
INT32 = (-(1 << 31), (1 << 31) - 1)


def int32(name: str, x: Any, want: str, *, within: tuple[int, int] = INT32) -> jax.Array:
    """An integer array as int32. Raises TypeError for other dtypes, ValueError for known values that int32 does not
    hold.

    want: a description of the wanted array, for errors. within: (least, most), both inclusive, to which values are
    clamped, because the caller treats values beyond a limit like the limit.
    """
    is_array(name, x, want)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: got dtype {x.dtype}, want {want}")
    held, is_wide = jnp.iinfo(x.dtype), _is_wide(x.dtype)
    if is_wide and not isinstance(x, jax.core.Tracer):
        known = np.asarray(x)
        if (known != known.astype(np.int32)).any():
            raise ValueError(f"{name}: got values up to {max(abs(int(known.min())), int(known.max()))}, want int32")
        x = known.astype(np.int32)
    if held.min < within[0] or held.max > within[1]:
        clip = jnp.clip if isinstance(x, jax.Array) else np.clip
        x = clip(x, max(within[0], held.min), min(within[1], held.max))
    return jnp.asarray(x, jnp.int32)


def _is_wide(dtype: Any) -> bool:
    """Whether int32 does not hold all integers of this dtype."""
    held = jnp.iinfo(dtype)
    return held.min < INT32[0] or held.max > INT32[1]


def ids(names: Sequence[str], arrays: Sequence[Any], want: str, *, axis_name: Any = None) -> list[jax.Array]:
    """Integer arrays [length] or [B or 1, length] as int32. Equal ids stay equal, and different ids stay different.

    names: the arrays' names, for errors. Traced integers of a dtype that int32 does not hold are replaced by their
    ranks among the ids of all arrays, and ids below 0 by -1. All other integers keep their values. axis_name: the mesh
    axis of shard_map over which rows are sharded, so that the ranks agree on all devices; None outside of shard_map.

    Raises TypeError for an array of another dtype, ValueError for known values that int32 does not hold. The message
    names the array.
    """
    for name, x in zip(names, arrays, strict=True):
        is_array(name, x, want)
    if not any(isinstance(x, jax.core.Tracer) and _is_wide(x.dtype) for x in arrays):
        return [int32(name, x, want) for name, x in zip(names, arrays, strict=True)]
    for name, x in zip(names, arrays, strict=True):
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name}: got dtype {x.dtype}, want {want}")
    bits = max(32, *(8 * x.dtype.itemsize for x in arrays))
    rows = [jnp.atleast_2d(jnp.where(x < 0, 0, x).astype(f"uint{bits}")) for x in arrays]
    batch = joint(", ".join(names), [x.shape[0] for x in rows], "batch entries")
    ordered = jnp.concatenate([jnp.broadcast_to(x, (batch, x.shape[1])) for x in rows], axis=1)
    if axis_name is not None:
        ordered = jax.lax.all_gather(ordered, axis_name, axis=1, tiled=True)
    ordered = jnp.sort(ordered, axis=1)
    rank = lambda x: jax.vmap(jnp.searchsorted)(ordered, jnp.broadcast_to(x, (batch, x.shape[1])))
    ranks = [rank(x) for x in rows]
    found = [jnp.where(x < 0, -1, of_rows).astype(jnp.int32) for of_rows, x in zip(ranks, arrays, strict=True)]
    return [of_rows[0] if batch == 1 and x.ndim == 1 else of_rows for of_rows, x in zip(found, arrays, strict=True)]


# Float dtypes that a mask of zeros and ones may have: Flax makes masks in its compute dtype.
MASK_FLOATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def boolean(name: str, x: Any) -> tuple[jax.Array, jax.Array | None]:
    """(x as bool, is_mask). is_mask: for traced floats a traced bool, whether all are 0 or 1; else None.

    x: bool, or float32, bfloat16 or float16 whose values are all 0 or 1. Known floats with other values raise
    ValueError. Traced floats become True where they equal 1. Raises TypeError for other dtypes.
    """
    is_array(name, x, "a bool array")
    is_boolean(name, x)
    if x.dtype == bool:
        return array(name, x, "a bool array"), None
    if isinstance(x, jax.core.Tracer):
        return x == 1, ((x == 0) | (x == 1)).all()
    # Compared in NumPy, because jit traces even a comparison of known values.
    known = np.asarray(x)
    if not ((known == 0) | (known == 1)).all():
        want = "want a bool mask; an additive one is a bias"
        raise ValueError(f"{name}: got {x.dtype} values other than 0 and 1, {want}")
    return jnp.asarray(x) != 0, None


def is_boolean(name: str, x: Any) -> None:
    """Raises TypeError unless x has dtype bool, float32, bfloat16 or float16."""
    if x.dtype != bool and x.dtype not in MASK_FLOATS:
        want = "want bool (True = attend), or float32, bfloat16 or float16 of 0 and 1"
        raise TypeError(f"{name}: got dtype {x.dtype}, {want}")


def floats(name: str, x: Any, want: str) -> jax.Array:
    """x as a jax.Array of bfloat16, float16 or float32. Raises TypeError for other dtypes, and if x is no array."""
    is_array(name, x, want)
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise TypeError(f"{name}: got dtype {x.dtype}, want {want}, bfloat16, float16 or float32")
    return array(name, x, want)


def four_axes(name: str, x: jax.Array, axes: str) -> jax.Array:
    """x with leading axes of length 1 added, up to four axes. Raises ValueError for fewer than two axes or more than
    four.

    axes: the names of the four axes, for the error.
    """
    if not 2 <= x.ndim <= 4:
        raise ValueError(f"{name}: got shape {x.shape}, want {axes}, with or without the first two axes")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def offset(q_offset: Any) -> tuple[int | None, jax.Array]:
    """(q_offset as an int if known when tracing, else None; q_offset as int32 [B or 1]).

    Raises TypeError or ValueError unless q_offset is an int, or an integer array, a scalar or [B].
    """
    want = "an int, or an int32 array, a scalar or [batch]"
    if is_int(q_offset):
        if not -FARTHEST < q_offset < FARTHEST:
            raise ValueError(f"q_offset: got {q_offset}, want a position within 2**30 of 0")
        return int(q_offset), jnp.full((1,), q_offset, jnp.int32)
    q_offset = int32("q_offset", q_offset, want, within=(-FARTHEST, FARTHEST))
    if q_offset.ndim > 1:
        raise ValueError(f"q_offset: got shape {q_offset.shape}, want {want}")
    return None, jnp.atleast_1d(q_offset)


def joint(name: str, sizes: list[int], what: str) -> int:
    """The common size of all `sizes` other than 1; 1 if all are 1. Raises ValueError if two of them differ.

    "Two of them" are two sizes other than 1. For the error, `name` is the argument's name, and the last parameter says
    which things the sizes count, such as "batch entries".
    """
    different = sorted({size for size in sizes if size != 1})
    if len(different) > 1:
        raise ValueError(f"{name}: got {different[0]} and {different[1]} {what}, want one number of them, or 1")
    return different[0] if different else 1


def is_empty_lookup(error: BaseException | None) -> bool:
    """Whether JAX raised this error for a lookup in an empty array. JAX has no error type for such a lookup."""
    words = "size 0" if isinstance(error, IndexError) else "gather op is out of range, must be within [0, 0 + 1)"
    return isinstance(error, IndexError | TypeError) and words in str(error)


def array_text(x: Any) -> str:
    """The dtype and shape of an array, as in "int32[2, 5]", for a repr. A leaf that is no array gives its own repr."""
    if not hasattr(x, "dtype"):
        return repr(x)
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"


_PREDICATE = "want an elementwise predicate of b, h, q and k in jnp code: bool, in their joint shape"


def elementwise(function: Callable[..., Any], arrays: Any, batch: int | None, heads: int | None) -> None:
    """Raises TypeError or ValueError unless the function is an elementwise predicate of (b, h, q, k, *arrays).

    It is traced, and if its arrays are known it is evaluated for a few indices: arrays of indices and single indices
    must give the same values. batch, heads: None if the function may not use b, or h.
    """
    sizes = (*(1 if size is None else min(size, 2) for size in (batch, heads)), 3, 4)
    axes = np.ix_(*(np.arange(size, dtype=np.int32) for size in sizes))
    known = not any(isinstance(x, jax.core.Tracer) for x in arrays)
    shape = jax.ShapeDtypeStruct((), jnp.int32)
    try:
        program, whole = jax.make_jaxpr(function, return_shape=True)(*axes, *arrays)
        one = jax.eval_shape(function, *[shape] * 4, *arrays)
    except Exception as error:
        if is_empty_lookup(error):
            return  # a call with an empty array has no pair
        raise TypeError(
            f"function: raised {type(error).__name__} when traced, {_PREDICATE} ({reason_of(error)})"
        ) from error
    for result, want in ((whole, sizes), (one, ())):
        if not isinstance(result, jax.ShapeDtypeStruct):
            raise TypeError(f"function: got a {type(result).__name__} from it, {_PREDICATE}")
        if result.dtype != bool:
            raise TypeError(f"function: got dtype {result.dtype} from it, {_PREDICATE}")
        if result.shape != want and not _broadcasts(result.shape, want):
            raise ValueError(f"function: got shape {result.shape} from it for indices of shape {want}, {_PREDICATE}")
    for index, name, size in ((0, "batch", batch), (1, "heads", heads)):
        if size is None and reads(program.jaxpr, index):
            raise ValueError(
                f"{name}: got None with a function that uses {'bh'[index]}, want the number that it distinguishes"
            )
    if not known:
        return
    with jax.ensure_compile_time_eval():
        flat = [jnp.asarray(np.broadcast_to(x, sizes).ravel()) for x in axes]
        together = function(*map(jnp.asarray, axes), *arrays)
        each = jax.vmap(lambda b, h, q, k: function(b, h, q, k, *arrays))(*flat)
        if any(isinstance(x, jax.core.Tracer) for x in (together, each)):
            return
        if not np.array_equal(np.broadcast_to(together, sizes).ravel(), each):
            raise ValueError(f"function: got other values for arrays of indices than for each index, {_PREDICATE}")


def reads(program: Any, index: int) -> bool:
    """Whether a jaxpr uses its argument number `index`.

    A jitted function in the program that only has the argument as an unused parameter does not count.
    """
    argument = program.invars[index]
    if any(x is argument for x in program.outvars):
        return True
    for equation in program.eqns:
        called = equation.params["jaxpr"].jaxpr if str(equation.primitive) == "jit" else None
        places = [i for i, x in enumerate(equation.invars) if x is argument]
        if any(called is None or reads(called, i) for i in places):
            return True
    return False


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(x in (1, y) for x, y in zip(shape[::-1], to[::-1], strict=False))
