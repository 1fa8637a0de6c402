"""jax-kernels explain: the plan of a call, without running it."""

import dataclasses
import json
from typing import Annotated

import jax
import jax.numpy as jnp
import typer

from jax_kernels import dispatch
from jax_kernels.cli import UserError
from jax_kernels.cli.info import find_device
from jax_kernels.ops.attention.flash_attention import flash_attention

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _shape(option: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"{option}: got {text!r}, want whole numbers above 0 with commas, as in 1,4096,16,128")
    return tuple(int(part) for part in parts)


def _window(text: str) -> int | tuple[int, ...]:
    try:
        sides = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--window: got {text!r}, want left,right or one whole number, as in 512,0") from None
    return sides[0] if len(sides) == 1 else sides


def attention(
    shape: Annotated[str, typer.Option(help="query's batch,length,heads,head_dim")],
    kv_shape: Annotated[str | None, typer.Option(help="key's, where it differs")] = None,
    v_head_dim: Annotated[int | None, typer.Option(help="value's head_dim, where it differs")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 (bf16), float16 (fp16) or float32 (fp32)")] = "bfloat16",
    causal: Annotated[bool, typer.Option("--causal", help="is_causal=True")] = False,
    mask: Annotated[str | None, typer.Option(help="the shape of a dense mask, as in 1,1,4096,4096")] = None,
    bias: Annotated[str | None, typer.Option(help="the shape of a bias, as in 1,16,4096,4096")] = None,
    window: Annotated[str | None, typer.Option(help="left,right, or one number for both; -1 is no limit")] = None,
    segment_ids: Annotated[bool, typer.Option("--segment-ids", help="with packed sequences")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="with a sink for each head")] = False,
    softcap: Annotated[float | None, typer.Option(help="the softcap of the scores")] = None,
    kv_lengths: Annotated[bool, typer.Option("--kv-lengths", help="with a length for each batch entry")] = False,
    q_offset: Annotated[int, typer.Option(help="the position of query 0")] = 0,
    return_lse: Annotated[bool, typer.Option("--return-lse", help="also return the log-sum-exp")] = False,
    deterministic: Annotated[
        bool | None, typer.Option(help="the same bits on every run; left out, XLA's flag decides")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or tf32, for float32")] = None,
    implementation: Annotated[str | None, typer.Option(help="ask for this one")] = None,
    device: Annotated[str | None, typer.Option(help="a GPU that need not be here: h200, 'rtx 4090', cpu, ...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show what flash_attention would run for these shapes: implementation, blocks, and what was passed over."""
    number = DTYPES.get(dtype, dtype)
    if number not in DTYPES.values():
        raise UserError(f"--dtype: got {dtype!r}, want one of {', '.join([*DTYPES.values(), *DTYPES])}")
    q_shape = _shape("--shape", shape)
    k_shape = q_shape if kv_shape is None else _shape("--kv-shape", kv_shape)
    v_shape = k_shape if v_head_dim is None else (*k_shape[:-1], v_head_dim)
    query, key, value = (jax.ShapeDtypeStruct(s, jnp.dtype(number)) for s in (q_shape, k_shape, v_shape))
    ids = tuple(jax.ShapeDtypeStruct(s[:2], jnp.dtype(jnp.int32)) for s in (q_shape, k_shape))
    try:
        with dispatch.on_device(find_device(device)):
            plan = dispatch.explain(
                flash_attention,
                query,
                key,
                value,
                is_causal=causal,
                bias=None if bias is None else jax.ShapeDtypeStruct(_shape("--bias", bias), jnp.dtype(number)),
                mask=None if mask is None else jax.ShapeDtypeStruct(_shape("--mask", mask), jnp.dtype(bool)),
                window=None if window is None else _window(window),
                segment_ids=ids if segment_ids else None,
                sinks=jax.ShapeDtypeStruct(q_shape[2:3], jnp.dtype(jnp.float32)) if sinks else None,
                softcap=softcap,
                kv_lengths=jax.ShapeDtypeStruct(q_shape[:1], jnp.dtype(jnp.int32)) if kv_lengths else None,
                q_offset=q_offset,
                return_lse=return_lse,
                deterministic=deterministic,
                precision=precision,
                implementation=implementation,
            )
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UserError(str(error)) from None
    print(json.dumps(dataclasses.asdict(plan), indent=2) if as_json else plan)
