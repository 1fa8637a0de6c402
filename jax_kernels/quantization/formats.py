"""Low-bit weights, 4 or 8 bits with scales in groups: the formats, their layout in memory, and their values."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["FORMATS", "LowBit", "dequantized", "numbers", "pack", "scale_of", "unpack", "unpack_scale"]

MX_BLOCK = 32
GROUPS = (32, 64, 128, 256)
# The largest magnitude that quantize writes. Integers are symmetric: -8 and -128 can be read, but are not written.
FORMATS = {"int8": 127.0, "int4": 7.0, "mxfp8": 448.0, "mxfp4": 6.0}
# The exponent of the largest power of two of an MX format's elements: 448 is 1.75 * 2**8, 6 is 1.5 * 2**2.
LARGEST_EXPONENT = {"mxfp8": 8, "mxfp4": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowBit:
    """The format of a matrix of low-bit weights, and its layout in memory.

    format: "int8", "int4", "mxfp8" or "mxfp4". group: the number of values along the inner dimension K that share a
    scale; None if a whole column shares a scale.

    The inner dimension is last, and is padded with zeros to a multiple of `unit`. Two 4-bit values share a byte: the
    first half of each unit is in the low bits of the bytes, the second half in the high bits. So a kernel separates the
    halves without moving values. Integers of 4 bits are stored as their sum with 8.
    """

    format: str
    group: int | None

    @property
    def is_packed(self) -> bool:
        return self.format in ("int4", "mxfp4")

    @property
    def is_mx(self) -> bool:
        return self.format in ("mxfp8", "mxfp4")

    @property
    def unit(self) -> int:
        """The number of values along K that are packed together, at most 128. A unit has one scale, or one for each
        half.
        """
        most = 128 if self.group is None else self.group * (2 if self.is_packed else 1)
        return min(128, most)

    @property
    def unit_bytes(self) -> int:
        return self.unit // 2 if self.is_packed else self.unit

    @property
    def scales_of_unit(self) -> int:
        """The number of group scales within one unit of a column: 1 or more; 0 if the whole column has one scale."""
        return 0 if self.group is None else max(1, self.unit // self.group)

    @property
    def dtype(self) -> Any:
        """The dtype of the stored values: int8, float8_e4m3fn, or uint8 for two 4-bit values in a byte."""
        return {"int8": jnp.int8, "mxfp8": jnp.float8_e4m3fn}.get(self.format, jnp.uint8)

    def padded(self, depth: int) -> int:
        return -(-depth // self.unit) * self.unit

    def bytes_of(self, depth: int) -> int:
        """The bytes that a column of `depth` values takes, with its padding."""
        return self.padded(depth) // (2 if self.is_packed else 1)

    def scale_shape(self, depth: int, columns: int) -> tuple[int, ...]:
        return (columns,) if self.group is None else (-(-self.padded(depth) // self.group), columns)


def pack(x: jax.Array, layout: LowBit) -> jax.Array:
    """The stored values of x, float32 [..., K] divided by its scales: rounded, saturated, and two to a byte for 4 bits.

    K must be a multiple of the layout's unit. The result is [..., K], or [..., K / 2] for 4 bits.
    """
    top = FORMATS[layout.format]
    if layout.format == "mxfp8":
        return jnp.where(jnp.isnan(x), x, jnp.clip(x, -top, top)).astype(jnp.float8_e4m3fn)
    x = jnp.clip(jnp.nan_to_num(x), -top, top)
    if layout.format == "int8":
        return jnp.round(x).astype(jnp.int8)
    codes = _e2m1(x) if layout.is_mx else (jnp.round(x) + 8).astype(jnp.uint8)
    depth = x.shape[-1]
    halves = codes.reshape(*x.shape[:-1], depth // layout.unit, 2, layout.unit // 2)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*x.shape[:-1], depth // 2)


def _e2m1(x: jax.Array) -> jax.Array:
    """The 4-bit e2m1 codes, uint8, of float32 values from -6 to 6, rounded to nearest, ties to even."""
    size = jnp.abs(x)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    size = jnp.round(size / step) * step
    code = jnp.where(size < 2, 2 * size, jnp.where(size < 4, size + 2, size / 2 + 4))
    return code.astype(jnp.uint8) | jnp.signbit(x).astype(jnp.uint8) << 3


def numbers(stored: jax.Array, layout: LowBit) -> list[jax.Array]:
    """The float32 values, without scales, of stored values [..., unit_bytes] of one unit.

    A list of one array for 8 bits; for 4 bits of two arrays, the first and the second half of the unit.
    """
    if not layout.is_packed:
        return [stored.astype(jnp.float32)]
    codes = [stored & 15, stored >> 4]
    return [_of_e2m1(code) if layout.is_mx else code.astype(jnp.float32) - 8.0 for code in codes]


def _of_e2m1(code: jax.Array) -> jax.Array:
    """The float32 values of 4-bit e2m1 codes, the inverse of _e2m1."""
    size = (code & 7).astype(jnp.float32)
    size = jnp.where(size < 4, size / 2, jnp.where(size < 6, size - 2, 2 * size - 8))
    return jnp.where(code < 8, size, -size)


def unpack(stored: jax.Array, layout: LowBit) -> jax.Array:
    """The float32 values, without scales, of stored values: [..., K], K including its padding."""
    count = stored.shape[-1] // layout.unit_bytes
    units = stored.reshape(*stored.shape[:-1], count, layout.unit_bytes)
    return jnp.concatenate(numbers(units, layout), -1).reshape(*stored.shape[:-1], count * layout.unit)


def unpack_scale(scale: jax.Array) -> jax.Array:
    """Scales of any stored dtype in float32. float8_e8m0fnu, also as its bits in uint8, is 2 ** (code - 127); 255 is
    NaN.

    It is computed from its bits: code 0 is 2**-127.
    """
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = lax.bitcast_convert_type(scale, jnp.uint8)
    if scale.dtype != jnp.uint8:
        return scale.astype(jnp.float32)
    code = scale.astype(jnp.int32)
    bits = jnp.where(code == 255, 0x7FC00000, jnp.maximum(code << 23, 0x00400000))
    return lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


def scale_of(largest: jax.Array, layout: LowBit, dtype: Any) -> jax.Array:
    """The stored scales of values of magnitude up to `largest` (float32); NaN where `largest` is not finite.

    MX: float8_e8m0fnu, 2 ** (floor(log2(largest)) - the exponent of the format's largest power of two), as in the OCP's
    specification, section 6.3, and at least 2**-126. Integers: `dtype`, with normal numbers that map `largest` to the
    format's largest value. The scale of zeros is 1.
    """
    if layout.is_mx:
        exponent = (lax.bitcast_convert_type(largest, jnp.uint32) >> 23).astype(jnp.int32)
        code = jnp.maximum(exponent - LARGEST_EXPONENT[layout.format], 1)
        code = jnp.where(largest == 0, 127, jnp.where(jnp.isfinite(largest), code, 255))
        return lax.bitcast_convert_type(code.astype(jnp.uint8), jnp.float8_e8m0fnu)
    tiny = float(jnp.finfo(jnp.float32).tiny)
    scale = jnp.where(largest == 0, 1, jnp.maximum(largest / FORMATS[layout.format], tiny))
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan).astype(dtype)


def dequantized(stored: jax.Array, scale: jax.Array, layout: LowBit, depth: int) -> jax.Array:
    """The float32 weights [..., N, K], from stored values [..., N, bytes] and their scales. depth: K without
    padding.
    """
    values, scale = unpack(stored, layout), unpack_scale(scale)
    if layout.group is None:
        return values[..., :depth] * scale[..., None]
    spread = jnp.repeat(jnp.swapaxes(scale, -1, -2), layout.group, axis=-1)
    return values[..., :depth] * spread[..., :depth]
