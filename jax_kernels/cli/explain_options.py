"""The options that the commands of `jax-kernels explain` share, and how their text becomes arguments."""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Annotated, Any

import jax
import typer

from jax_kernels import dispatch
from jax_kernels.cli import UserError
from jax_kernels.cli.info import find_device
from jax_kernels.cli.ops import spec
from jax_kernels.spelling import did_you_mean

__all__ = ["arrays", "numbers", "one_array", "optional_spec", "product_arrays", "show_plan", "window_sides"]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

Shape = Annotated[str, typer.Option(help="query's batch,length,heads,head_dim")]
RowsShape = Annotated[str, typer.Option(help="x's shape, as in 8192,4096")]
KeyShape = Annotated[str | None, typer.Option(help="key's, where it differs")]
ValueHeadDim = Annotated[int | None, typer.Option(min=1, help="value's head_dim, where it differs")]
Dtype = Annotated[str, typer.Option(help="bfloat16 (bf16), float16 (fp16) or float32 (fp32)")]
Columns = Annotated[int, typer.Option(min=1, help="of the weights, N")]
Hidden = Annotated[int, typer.Option(min=1, help="columns of w_up, H")]
Causal = Annotated[bool, typer.Option("--causal", help="is_causal=True")]
Bias = Annotated[str | None, typer.Option(help="the shape of a bias, as in 1,16,4096,4096")]
Window = Annotated[str | None, typer.Option(help="left,right, or one number for both; -1 is no limit")]
SegmentIds = Annotated[bool, typer.Option("--segment-ids", help="with packed sequences")]
Sinks = Annotated[bool, typer.Option("--sinks", help="with a sink for each head")]
Softcap = Annotated[float | None, typer.Option(help="the softcap of the scores")]
Lengths = Annotated[bool, typer.Option("--kv-lengths", help="with a length for each batch entry")]
Offset = Annotated[int, typer.Option(help="the position of query 0")]
ReturnLse = Annotated[bool, typer.Option("--return-lse", help="also return the log-sum-exp")]
Deterministic = Annotated[bool | None, typer.Option(help="the same bits on every run; left out, XLA's flag decides")]
Precision = Annotated[str | None, typer.Option(help="fp32 or tf32, for float32")]
ProductPrecision = Annotated[str | None, typer.Option(help="fp32 or tf32, for float32; fp8, for any dtype")]
Scaling = Annotated[str | None, typer.Option(help="tensor, row or block: which numbers of 8 bits share a scale")]
Implementation = Annotated[str | None, typer.Option(help="ask for this one")]
Device = Annotated[str | None, typer.Option(help="a GPU that need not be here: h200, 'rtx 4090', cpu, ...")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers of "1,4096,16,128". Raises UserError unless all are whole numbers above 0."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"{option}: got {text!r}, want whole numbers above 0 with commas, as in 1,4096,16,128")
    return tuple(int(part) for part in parts)


def window_sides(text: str | None) -> int | tuple[int, ...] | None:
    """The argument `window` of an op. Raises UserError."""
    if text is None:
        return None
    try:
        left, *right = (int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--window: got {text!r}, want left,right or one whole number, as in 512,0") from None
    return (left, *right) if right else left


def arrays(
    shape: str, kv_shape: str | None, v_head_dim: int | None, dtype: str
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """query, key and value. dtype: a name of `Dtype`, or "float8_e4m3fn". Raises UserError."""
    number = _dtype(dtype)
    q_shape = numbers("--shape", shape)
    k_shape = q_shape if kv_shape is None else numbers("--kv-shape", kv_shape)
    v_shape = k_shape if v_head_dim is None else (*k_shape[:-1], v_head_dim)
    return spec(q_shape, number), spec(k_shape, number), spec(v_shape, number)


def one_array(shape: str, dtype: str) -> jax.ShapeDtypeStruct:
    """The array of an op that has one. Raises UserError."""
    return spec(numbers("--shape", shape), _dtype(dtype))


def product_arrays(
    shape: str, columns: int, dtype: str, transpose_w: bool
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """x and w of a product. Raises UserError."""
    x = one_array(shape, dtype)
    return x, spec((columns, x.shape[-1]) if transpose_w else (x.shape[-1], columns), x.dtype.name)


def _dtype(name: str) -> str:
    """JAX's name of a dtype. Raises UserError."""
    found = DTYPES.get(name, name)
    if found not in (*DTYPES.values(), "float8_e4m3fn"):
        names = [*DTYPES.values(), *DTYPES]
        raise UserError(f"--dtype: got {name!r}, want one of {', '.join(names)}{did_you_mean(name, names)}")
    return found


def optional_spec(option: str, shape: str | None, dtype: str) -> jax.ShapeDtypeStruct | None:
    """The array of an option that holds its shape, or None where the option was left out. Raises UserError."""
    return None if shape is None else spec(numbers(option, shape), dtype)


def _with_option(text: str) -> str:
    """An op's error, with the option that its argument came from."""
    name = re.match(r"\w+(?=[:,=])", text)
    if name is None:
        return text
    of_shapes = {"query": "--shape", "x": "--shape", "key": "--kv-shape", "value": "--v-head-dim", "w": "--columns"}
    if name[0] in of_shapes:
        return f"{of_shapes[name[0]]}: {text}"
    return f"--{name[0].replace('_', '-')}{text[name.end() :]}" if name[0] in _ARGUMENTS else text


# The ops' arguments that have an option of the same name.
_ARGUMENTS = (
    "activation",
    "bias",
    "block_size",
    "combine",
    "dilation_rates",
    "dtype",
    "heads",
    "implementation",
    "kv_lengths",
    "layout",
    "mask",
    "order",
    "precision",
    "q_offset",
    "scaling",
    "segment_lengths",
    "softcap",
    "window",
)


def show_plan(device: str | None, as_json: bool, function: Callable[..., Any], *given: Any, **arguments: Any) -> None:
    """Prints the plan of function(*given, **arguments) on the device. Raises UserError for a call that has none."""
    try:
        plan = dispatch.explain(function, *given, device=find_device(device), **arguments)
    except (TypeError, ValueError, NotImplementedError, OverflowError) as error:
        raise UserError(_with_option(str(error))) from None
    print(json.dumps(dataclasses.asdict(plan), indent=2) if as_json else plan)
