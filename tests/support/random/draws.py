"""Calls of an op that are compared with XLA in float32, and random choices of their inputs."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_kernels

Arrays = Mapping[str, Any]
# Root mean square of the error, relative to the right values. Gradients have twice the tolerance.
TOLERANCE = {"bfloat16": 0.015, "float16": 0.004, "float32": 1e-4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call of an op.

    forward(ops, arrays, **how) returns results by name. ops: jax_kernels, or an object with the same names for other
    arrays. how: implementation, and precision if the op has it. arrays: float32 values that `dtype` can represent,
    integers and bools. moved: names of the arrays to differentiate. keeps: names of the float arrays that stay float32
    in every call. options: the choices drawn, for messages. implementation_is_free: whether `forward` takes
    implementation.
    """

    forward: Callable[..., Mapping[str, Any]]
    arrays: Arrays
    moved: Sequence[str] = ()
    dtype: str
    options: Arrays
    keeps: frozenset[str] = frozenset()
    has_precision: bool = True
    tolerance: float | None = None
    implementation_is_free: bool = True

    def given(self, dtype: str) -> dict[str, jax.Array]:
        """The arrays in a dtype."""
        is_cast = lambda name, x: x.dtype == np.float32 and name not in self.keeps
        return {name: jnp.asarray(x, dtype if is_cast(name, x) else x.dtype) for name, x in self.arrays.items()}

    def run(self, arrays: Arrays, **how: Any) -> Mapping[str, jax.Array]:
        """The results, and as d_name the gradients of the arrays in `moved`."""
        rest = {name: x for name, x in arrays.items() if name not in self.moved}
        moved = {name: arrays[name] for name in self.moved}
        results, vjp = jax.vjp(lambda moved: self.forward(jax_kernels, rest | moved, **how), moved)
        cotangents = {name: _placed_as(x, jnp.asarray(cotangent(x.shape), x.dtype)) for name, x in results.items()}
        return results | {f"d_{name}": x for name, x in vjp(cotangents)[0].items()}

    def results(self) -> Mapping[str, jax.Array]:
        """The results of the implementation that dispatch chooses."""
        return jax.jit(self.run)(self.given(self.dtype))

    def wanted(self) -> Mapping[str, jax.Array]:
        """The results of XLA in float32."""
        how = {"implementation": "xla"} | ({"precision": "fp32"} if self.has_precision else {})
        with jax.default_matmul_precision("highest"):
            return jax.jit(lambda arrays: self.run(arrays, **how))(self.given("float32"))


def cotangent(shape: Sequence[int]) -> np.ndarray:
    """The cotangent of a result: -0.75 to 1.25, exact in every dtype. It does not cancel in a sum over rows."""
    return ((np.arange(math.prod(shape)) * 7 % 17 - 6) / 8).reshape(shape).astype(np.float32)


def _placed_as(x: jax.Array, other: jax.Array) -> jax.Array:
    """The other array, resharded like x if x's type has Explicit axes."""
    sharding = jax.typeof(x).sharding
    return (
        jax.sharding.reshard(other, sharding) if jax.sharding.AxisType.Explicit in sharding.mesh.axis_types else other
    )


def check(call: Call, got: Mapping[str, Any] | None = None, wanted: Mapping[str, Any] | None = None) -> None:
    """Asserts that `got` (None: call.results()) is `wanted` (None: call.wanted()), up to the roundings of its dtype."""
    got = call.results() if got is None else got
    for name, right in (call.wanted() if wanted is None else wanted).items():
        x, right = (np.asarray(y).astype(np.float64) for y in (got[name], right))
        assert x.shape == right.shape, (name, call.options)
        assert (np.isfinite(x) == np.isfinite(right)).all(), (name, call.options)
        where = np.isfinite(right)
        if not where.any():
            continue
        size = np.sqrt(np.square(right[where]).mean())
        error = np.sqrt(np.square(x[where] - right[where]).mean()) / max(size, 1.0 if name == "lse" else 1e-3)
        allowed = (call.tolerance or TOLERANCE[call.dtype]) * (2 if name.startswith("d_") else 1)
        assert error <= allowed, (name, error, allowed, call.options)


class Draw:
    """Random choices. The same seed draws the same call.

    The sizes are likely to break kernels: one past a block, a multiple of a part of a block, a single row.
    """

    longest_whole = 1280

    def __init__(self, *seed: int):
        self.random = np.random.default_rng(seed)

    def one(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def chance(self, probability: float) -> bool:
        return bool(self.random.random() < probability)

    def integer(self, low: int, high: int) -> int:
        return int(self.random.integers(low, high))

    def size(self) -> int:
        """The length of an axis, 1 to 1279."""
        blocks = 64 * self.integer(1, 20)
        return self.one(
            self.integer(1, 40), self.integer(40, 300), 8 * self.integer(1, 130), blocks, blocks + 1, 128, 256
        )

    def sizes(self, count: int, block: int = 64) -> list[int]:
        """The lengths of some axes; in half of the draws, multiples of `block`, which kernels for Hopper GPUs need."""
        is_whole = self.chance(0.5)
        return [self.whole(block) if is_whole else self.size() for _ in range(count)]

    def whole(self, block: int) -> int:
        """A multiple of `block` of up to longest_whole."""
        return block * self.integer(1, self.longest_whole // block + 1)

    def normal(self, *shape: int, dtype: str = "float32") -> np.ndarray:
        """Normal values that a dtype can represent, in float32."""
        x = self.random.standard_normal(shape, np.float32)
        return np.asarray(jnp.asarray(x, dtype), np.float32)

    def attention_arrays(
        self, batch: int, length: int, heads: int, kv_heads: int, head_dim: int, *v_head_dims: int, dtype: str
    ) -> dict[str, np.ndarray]:
        """query, key and value of one length. v_head_dims: choices."""
        return {
            "query": self.normal(batch, length, heads, head_dim, dtype=dtype),
            "key": self.normal(batch, length, kv_heads, head_dim, dtype=dtype),
            "value": self.normal(batch, length, kv_heads, self.one(*v_head_dims), dtype=dtype),
        }


class SmallDraw(Draw):
    """A Draw with lengths up to 160, for a CPU."""

    longest_whole = 160

    def size(self) -> int:
        return self.one(self.integer(1, 20), self.integer(20, 150), 8 * self.integer(1, 20), 64, 65, 128, 129)


def check_all(names: Sequence[str], drawn: Callable[[str], Any], check_one: Callable[[Any], None]) -> None:
    """Checks the call drawn for each name, and prints names that pass. Raises RuntimeError(name) on failure."""
    for name in names:
        try:
            check_one(drawn(name))
        except Exception as error:
            raise RuntimeError(name) from error
        print(name, flush=True)
        jax.clear_caches()
