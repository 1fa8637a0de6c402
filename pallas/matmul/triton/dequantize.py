"""Unpacks low-bit weights to 16-bit values, in PTX on the two values of a register at once.

Triton's own conversions take one value at a time, and more instructions than there are cycles until memory delivers the
next weights. jax_kernels.quantization.formats.numbers does the same in jnp, for the interpreter.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_kernels.pallas.triton.backend import plgpu
from jax_kernels.quantization import formats
from jax_kernels.quantization.formats import LowBit

__all__ = ["assembly", "unpacked"]

# Selectors of prmt: bytes 0 and 1, or 2 and 3, of a register go to the two 16-bit halves of the result, each below or
# above a byte of a second register.
BELOW, ABOVE = ("0x4140", "0x4342"), ("0x1404", "0x3424")


def unpacked(stored: jax.Array, layout: LowBit, dtype: jnp.dtype, interpret: bool) -> list[jax.Array]:
    """Unpacks a unit of low-bit weights: a list of one array of values, or of two if a byte has two values.

    stored: the unit's bytes, [columns, unit_bytes] uint8 or int8. Each array of the result is [columns, unit_bytes] in
    the 16- or 32-bit `dtype`. With two values in a byte, the first array has the first half of the unit along the inner
    dimension, the second array the second half. interpret: computes in jnp, for Pallas's interpreter.
    """
    if interpret:
        return [x.astype(dtype) for x in formats.numbers(_typed(stored, layout), layout)]
    if layout.format == "int8":
        return [stored.astype(dtype)]
    # float16 holds every value exactly too. Pallas takes one result per piece of assembly, so halves need two pieces.
    dtype_of_half = jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float16)
    found: list[Any] = []
    for half in range(2 if layout.is_packed else 1):
        found += plgpu.elementwise_inline_asm(
            assembly(layout.format, str(dtype_of_half), half),
            args=[stored],
            constraints="=r,=r,r",
            pack=4,
            result_shape_dtypes=[jax.ShapeDtypeStruct(stored.shape, dtype_of_half)],
        )
    return [x.astype(dtype) for x in found]


def _typed(stored: jax.Array, layout: LowBit) -> jax.Array:
    """The stored bytes as the format's own dtype: float8_e4m3fn for mxfp8; other formats are unchanged."""
    return jax.lax.bitcast_convert_type(stored, layout.dtype) if layout.format == "mxfp8" else stored


@functools.cache
def assembly(format: str, dtype: str, half: int = 0) -> str:
    """Returns PTX that unpacks the four bytes of register $2 to four 16-bit values, in the registers $0 and $1.

    format: "int4", "int8", "mxfp4" or "mxfp8". dtype: "bfloat16", or any other for float16. half: for the formats with
    two values in a byte, 0 for the low 4 bits of each byte, 1 for the high 4 bits; otherwise not used.
    """
    body = {"int4": _of_int4, "int8": _of_int8, "mxfp4": _of_e2m1, "mxfp8": _of_e4m3}[format](dtype == "bfloat16", half)
    kind = "bf16x2" if dtype == "bfloat16" else "f16x2"
    lines = [".reg .b32 x, y, s, m, n, one, add;", *body]
    return "{ " + " ".join(line.replace("fma", f"fma.rn.{kind}") for line in lines) + " }"


def _of_int4(is_bf16: bool, half: int) -> list[str]:
    """The PTX lines that unpack int4, which is stored as u = value + 8.

    They put the 4 bits u below a fixed exponent, which gives 128 + u in bfloat16 and 1024 + u in float16. Subtracting
    136 or 1032 gives u - 8. All steps are exact, also in the functions below.
    """
    high, one, less = (
        ("0x43434343", "0x3f803f80", "0xc308c308") if is_bf16 else ("0x64646464", "0x3c003c00", "0xe408e408")
    )
    lines = [f"mov.b32 n, {high};", f"mov.b32 one, {one};", f"mov.b32 add, {less};"]
    lines += [f"shr.u32 x, $2, {4 * half};", "and.b32 x, x, 0x0f0f0f0f;"]
    for i, bytes in enumerate(BELOW):
        lines += [f"prmt.b32 m, x, n, {bytes};", f"fma ${i}, m, one, add;"]
    return lines


def _of_int8(is_bf16: bool, half: int) -> list[str]:
    """The PTX lines that unpack int8. half is not used.

    bfloat16: 128 plus the low 7 bits, minus 128, or minus 256 if the sign is set. float16: the byte with its sign bit
    flipped goes below a fixed exponent, which gives 1152 + value; then 1152 is subtracted.
    """
    if is_bf16:
        lines = ["mov.b32 n, 0x43434343;", "mov.b32 one, 0xbf80bf80;"]
        for i, bytes in enumerate(BELOW):
            lines += [
                f"prmt.b32 y, $2, n, {bytes};",
                "and.b32 m, y, 0xff7fff7f;",
                "and.b32 s, y, 0xff80ff80;",
                f"fma ${i}, s, one, m;",
            ]
        return lines
    lines = ["mov.b32 n, 0x64646464;", "mov.b32 one, 0x3c003c00;", "mov.b32 add, 0xe480e480;"]
    lines += ["xor.b32 x, $2, 0x80808080;"]
    for i, bytes in enumerate(BELOW):
        lines += [f"prmt.b32 m, x, n, {bytes};", f"fma ${i}, m, one, add;"]
    return lines


def _of_e2m1(is_bf16: bool, half: int) -> list[str]:
    """The PTX lines that unpack mxfp4 values: 1 sign bit, 2 exponent bits and 1 mantissa bit.

    The sign moves to the highest bit of the result, and the other bits to its low exponent and high mantissa bits. A
    factor corrects the exponent's bias: 2**126 in bfloat16, 2**14 in float16. Subnormal values are exact too.
    """
    shift, mask, power = (6, "0x01c001c0", "0x7e807e80") if is_bf16 else (3, "0x0e000e00", "0x74007400")
    lines = [f"mov.b32 one, {power};", "mov.b32 add, 0x80008000;", "mov.b32 n, 0;"]
    lines += [f"shl.b32 x, $2, {4 - 4 * half};"]
    for i, bytes in enumerate(ABOVE):
        lines += [
            f"prmt.b32 y, x, n, {bytes};",
            "and.b32 s, y, 0x80008000;",
            f"shr.u32 m, y, {shift};",
            f"and.b32 m, m, {mask};",
            "or.b32 m, m, s;",
            f"fma ${i}, m, one, add;",
        ]
    return lines


def _of_e4m3(is_bf16: bool, half: int) -> list[str]:
    """The PTX lines that unpack mxfp8 values: 1 sign bit, 4 exponent bits and 3 mantissa bits. half is not used.

    The sign moves to the highest bit of the result, and the other bits to its low exponent and high mantissa bits. A
    factor corrects the exponent's bias: 2**120 in bfloat16, 2**8 in float16. The largest code without sign, 127, is
    NaN: the result gets all exponent bits.
    """
    shift, power = (4, "0x7b807b80") if is_bf16 else (1, "0x5c005c00")
    # Spreads bit 15 to the exponent bits that 127 lacks.
    spread = ["shr.u32 y, n, 4;", "sub.u32 n, n, y;"] if is_bf16 else ["shr.u32 n, n, 1;"]
    lines = [f"mov.b32 one, {power};", "mov.b32 add, 0x80008000;", "mov.b32 x, 0;"]
    for i, bytes in enumerate(ABOVE):
        lines += [
            f"prmt.b32 y, $2, x, {bytes};",
            "and.b32 s, y, 0x80008000;",
            "and.b32 m, y, 0x7f007f00;",
            "add.u32 n, m, 0x01000100;",
            "and.b32 n, n, 0x80008000;",
            *spread,
            f"shr.u32 m, m, {shift};",
            "or.b32 m, m, s;",
            "or.b32 m, m, n;",
            f"fma ${i}, m, one, add;",
        ]
    return lines
