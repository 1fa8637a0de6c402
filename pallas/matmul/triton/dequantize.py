"""Weights of few bits to 16-bit numbers, in PTX on two numbers of a register at once.

Triton's own conversions take a number at a time, and more instructions than there are cycles while memory gives the
next weights. jax_kernels.quantization.formats.numbers says the same in jnp, for the interpreter.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from jax_kernels.quantization import formats
from jax_kernels.quantization.formats import LowBit

__all__ = ["assembly", "decoded"]

# The bytes 0 and 1, and 2 and 3, of a register into two halves of 16 bits, each below or above a byte of a second one.
BELOW, ABOVE = ("0x4140", "0x4342"), ("0x1404", "0x3424")


def decoded(stored: jax.Array, layout: LowBit, dtype: Any, interpret: bool) -> list[jax.Array]:
    """The numbers of stored values [columns, unit_bytes]: one array, or the two halves of a unit."""
    if interpret:
        return [x.astype(dtype) for x in formats.numbers(_typed(stored, layout), layout)]
    if layout.format == "int8":
        return [stored.astype(dtype)]
    # float16 holds every number, too. Pallas takes one result of a piece of assembly, so that halves are two pieces.
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
    """The stored values in their dtype; kernels are given bytes of float8_e4m3fn."""
    return jax.lax.bitcast_convert_type(stored, layout.dtype) if layout.format == "mxfp8" else stored


@functools.cache
def assembly(format: str, dtype: str, half: int = 0) -> str:
    """The PTX from four bytes, $2, to 4 numbers in two registers. half: 0 for the low 4 bits of each byte, 1 for the
    high ones."""
    body = {"int4": _of_int4, "int8": _of_int8, "mxfp4": _of_e2m1, "mxfp8": _of_e4m3}[format](dtype == "bfloat16", half)
    kind = "bf16x2" if dtype == "bfloat16" else "f16x2"
    lines = [".reg .b32 x, y, s, m, n, one, add;", *body]
    return "{ " + " ".join(line.replace("fma", f"fma.rn.{kind}") for line in lines) + " }"


def _of_int4(is_bf16: bool, half: int) -> list[str]:
    """Below an exponent, the 4 bits u are the number 128 + u, or 1024 + u in float16.

    Less 136, or 1032, they are u - 8. All is exact, as below.
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
    """As bfloat16: 128 and the low 7 bits, less 128 or, where the sign is set, 256. As float16: like int4."""
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
    """The sign to the highest bit, and the rest below the lowest bits of a larger exponent, whose bias is made up for.

    In bfloat16 that is 2**126, in float16 2**14. The same of subnormal numbers.
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
    """As of e2m1, by 2**120 or 2**8. The largest magnitude, 127, is NaN: its exponent gets all bits."""
    shift, power = (4, "0x7b807b80") if is_bf16 else (1, "0x5c005c00")
    # From the bit 15 to the bits of the exponent that 127 lacks.
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
