"""jax-kernels explain: the plan of a call of a public op, without running it."""

import math
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer
from typer.core import TyperGroup

from jax_kernels.cli import UserError
from jax_kernels.cli import explain_options as options
from jax_kernels.cli.ops import OPS, spec
from jax_kernels.spelling import did_you_mean

__all__ = ["COMMANDS", "OpGroup"]


def attention(
    shape: options.Shape,
    kv_shape: options.KeyShape = None,
    v_head_dim: options.ValueHeadDim = None,
    dtype: options.Dtype = "bfloat16",
    causal: options.Causal = False,
    mask: Annotated[str | None, typer.Option(help="the shape of a dense mask, as in 1,1,4096,4096")] = None,
    bias: options.Bias = None,
    window: options.Window = None,
    segment_ids: options.SegmentIds = False,
    sinks: options.Sinks = False,
    softcap: options.Softcap = None,
    kv_lengths: options.Lengths = False,
    q_offset: options.Offset = 0,
    return_lse: options.ReturnLse = False,
    deterministic: options.Deterministic = None,
    precision: options.Precision = None,
    implementation: options.Implementation = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show the plan of flash_attention for these shapes: implementation, blocks, and implementations passed over."""
    query, key, value = options.arrays(shape, kv_shape, v_head_dim, dtype)
    options.show_plan(
        device,
        as_json,
        OPS["flash_attention"].function,
        query,
        key,
        value,
        is_causal=causal,
        bias=options.optional_spec("--bias", bias, query.dtype.name),
        mask=options.optional_spec("--mask", mask, "bool"),
        window=options.window_sides(window),
        segment_ids=(spec(query.shape[:2], "int32"), spec(key.shape[:2], "int32")) if segment_ids else None,
        sinks=spec(query.shape[2:3], "float32") if sinks else None,
        softcap=softcap,
        kv_lengths=spec(query.shape[:1], "int32") if kv_lengths else None,
        q_offset=q_offset,
        return_lse=return_lse,
        deterministic=deterministic,
        precision=precision,
        implementation=implementation,
    )


def flash_attention_fp8(
    shape: options.Shape,
    kv_shape: options.KeyShape = None,
    v_head_dim: options.ValueHeadDim = None,
    causal: options.Causal = False,
    kv_lengths: options.Lengths = False,
    q_offset: options.Offset = 0,
    return_lse: options.ReturnLse = False,
    implementation: options.Implementation = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show the plan of flash_attention_fp8 for float8_e4m3fn arrays of these shapes."""
    query, key, value = options.arrays(shape, kv_shape, v_head_dim, "float8_e4m3fn")
    options.show_plan(
        device,
        as_json,
        OPS["flash_attention_fp8"].function,
        query,
        key,
        value,
        is_causal=causal,
        kv_lengths=spec(query.shape[:1], "int32") if kv_lengths else None,
        q_offset=q_offset,
        return_lse=return_lse,
        implementation=implementation,
    )


def decode_attention(
    shape: options.Shape,
    kv_shape: Annotated[str, typer.Option(help="the cache's batch,length,heads,head_dim; see --pages")],
    v_head_dim: options.ValueHeadDim = None,
    dtype: options.Dtype = "bfloat16",
    pages: Annotated[
        int | None, typer.Option(min=1, help="the pages of a sequence: --kv-shape is pages,page_size,heads,head_dim")
    ] = None,
    window: options.Window = None,
    sinks: options.Sinks = False,
    softcap: options.Softcap = None,
    return_lse: options.ReturnLse = False,
    implementation: options.Implementation = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show the plan of decode_attention for the newest tokens (--shape) and a cache (--kv-shape)."""
    query, key, value = options.arrays(shape, kv_shape, v_head_dim, dtype)
    options.show_plan(
        device,
        as_json,
        OPS["decode_attention"].function,
        query,
        key,
        value,
        kv_lengths=spec(query.shape[:1], "int32"),
        block_tables=None if pages is None else spec((*query.shape[:1], pages), "int32"),
        window=options.window_sides(window),
        sinks=spec(query.shape[2:3], "float32") if sinks else None,
        softcap=softcap,
        return_lse=return_lse,
        implementation=implementation,
    )


def dilated_attention(
    shape: options.Shape,
    segment_lengths: Annotated[str, typer.Option(help="a length for each branch, as in 2048,4096")],
    dilation_rates: Annotated[str, typer.Option(help="a rate for each branch, as in 1,2")],
    kv_shape: options.KeyShape = None,
    v_head_dim: options.ValueHeadDim = None,
    dtype: options.Dtype = "bfloat16",
    causal: options.Causal = False,
    heads: Annotated[str, typer.Option(help="all or groups")] = "all",
    combine: Annotated[str, typer.Option(help="lse or mean")] = "lse",
    layout: Annotated[str, typer.Option(help="overlap or partition")] = "overlap",
    order: Annotated[str | None, typer.Option(help="hilbert, or left out")] = None,
    segment_ids: options.SegmentIds = False,
    return_lse: options.ReturnLse = False,
    deterministic: options.Deterministic = None,
    precision: options.Precision = None,
    implementation: options.Implementation = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show the plan of dilated_attention for these shapes, branch by branch."""
    query, key, value = options.arrays(shape, kv_shape, v_head_dim, dtype)
    options.show_plan(
        device,
        as_json,
        OPS["dilated_attention"].function,
        query,
        key,
        value,
        segment_lengths=options.numbers("--segment-lengths", segment_lengths),
        dilation_rates=options.numbers("--dilation-rates", dilation_rates),
        is_causal=causal,
        heads=heads,
        combine=combine,
        layout=layout,
        order=order,
        segment_ids=spec(query.shape[:2], "int32") if segment_ids else None,
        return_lse=return_lse,
        deterministic=deterministic,
        precision=precision,
        implementation=implementation,
    )


def dynamic_mask_attention(
    shape: options.Shape,
    mask: Annotated[str, typer.Option(help="the shape of the mask, as in 1,16,4096,4096")],
    kv_shape: options.KeyShape = None,
    v_head_dim: options.ValueHeadDim = None,
    dtype: options.Dtype = "bfloat16",
    bias: options.Bias = None,
    causal: options.Causal = False,
    sinks: options.Sinks = False,
    return_lse: options.ReturnLse = False,
    deterministic: options.Deterministic = None,
    precision: options.Precision = None,
    implementation: options.Implementation = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show the plan of dynamic_mask_attention for these shapes: the plan of its call of flash_attention."""
    query, key, value = options.arrays(shape, kv_shape, v_head_dim, dtype)
    options.show_plan(
        device,
        as_json,
        OPS["dynamic_mask_attention"].function,
        query,
        key,
        value,
        options.optional_spec("--mask", mask, "bool"),
        options.optional_spec("--bias", bias, query.dtype.name),
        is_causal=causal,
        sinks=spec(query.shape[2:3], "float32") if sinks else None,
        return_lse=return_lse,
        deterministic=deterministic,
        precision=precision,
        implementation=implementation,
    )


def block_sparse_attention(
    shape: options.Shape,
    kv_shape: options.KeyShape = None,
    v_head_dim: options.ValueHeadDim = None,
    dtype: options.Dtype = "bfloat16",
    block_size: Annotated[str, typer.Option(help="queries,keys of a block, or one number for both")] = "128",
    bias: options.Bias = None,
    causal: options.Causal = False,
    sinks: options.Sinks = False,
    return_lse: options.ReturnLse = False,
    deterministic: options.Deterministic = None,
    precision: options.Precision = None,
    implementation: options.Implementation = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show the plan of block_sparse_attention for these shapes: the plan of its call of flash_attention."""
    query, key, value = options.arrays(shape, kv_shape, v_head_dim, dtype)
    sizes = options.numbers("--block-size", block_size)
    if len(sizes) > 2:
        raise UserError(f"--block-size: got {block_size!r}, want queries,keys or one number, as in 128,64")
    block_q, block_kv = sizes * 2 if len(sizes) == 1 else sizes
    # The op itself refuses a shape without a length.
    blocks = lambda x, size: math.ceil(x.shape[1] / size) if x.ndim > 1 else 1
    options.show_plan(
        device,
        as_json,
        OPS["block_sparse_attention"].function,
        query,
        key,
        value,
        np.ones((blocks(query, block_q), blocks(key, block_kv)), bool),
        block_size=(block_q, block_kv),
        bias=options.optional_spec("--bias", bias, query.dtype.name),
        is_causal=causal,
        sinks=spec(query.shape[2:3], "float32") if sinks else None,
        return_lse=return_lse,
        deterministic=deterministic,
        precision=precision,
        implementation=implementation,
    )


def matmul(
    shape: options.RowsShape,
    columns: options.Columns,
    dtype: options.Dtype = "bfloat16",
    activation: Annotated[str | None, typer.Option(help="silu, gelu, ...")] = None,
    transpose_w: Annotated[bool, typer.Option("--transpose-w", help="w is [N, K]")] = False,
    precision: options.ProductPrecision = None,
    scaling: options.Scaling = None,
    implementation: options.Implementation = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show the plan of matmul for x of this shape and w with this number of columns."""
    x, w = options.product_arrays(shape, columns, dtype, transpose_w)
    arguments = {"activation": activation, "transpose_w": transpose_w, "precision": precision, "scaling": scaling}
    options.show_plan(device, as_json, OPS["matmul"].function, x, w, **arguments, implementation=implementation)


def gated_matmul(
    shape: options.RowsShape,
    columns: options.Columns,
    dtype: options.Dtype = "bfloat16",
    activation: Annotated[str, typer.Option(help="silu, gelu, ...")] = "silu",
    transpose_w: Annotated[bool, typer.Option("--transpose-w", help="the weights are [N, K]")] = False,
    precision: options.ProductPrecision = None,
    scaling: options.Scaling = None,
    implementation: options.Implementation = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show the plan of gated_matmul for x of this shape and weights with this number of columns."""
    x, w = options.product_arrays(shape, columns, dtype, transpose_w)
    arguments = {"activation": activation, "transpose_w": transpose_w, "precision": precision, "scaling": scaling}
    options.show_plan(
        device, as_json, OPS["gated_matmul"].function, x, w, w, **arguments, implementation=implementation
    )


def mlp(
    shape: options.RowsShape,
    hidden: options.Hidden,
    columns: options.Columns,
    dtype: options.Dtype = "bfloat16",
    activation: Annotated[str, typer.Option(help="silu, gelu, ...")] = "silu",
    gated: Annotated[bool, typer.Option("--gated", help="with w_gate")] = False,
    precision: options.ProductPrecision = None,
    implementation: options.Implementation = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show the plan of mlp's first matmuls, for x of this shape and weights with these numbers of columns."""
    x, w_up = options.product_arrays(shape, hidden, dtype, False)
    arguments = {"activation": activation, "precision": precision, "implementation": implementation}
    options.show_plan(
        device,
        as_json,
        OPS["mlp"].function,
        x,
        w_up,
        spec((hidden, columns), x.dtype.name),
        w_gate=w_up if gated else None,
        **arguments,
    )


def layer_norm(
    shape: options.RowsShape,
    dtype: options.Dtype = "bfloat16",
    implementation: options.Implementation = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show the plan of layer_norm for this shape."""
    x = options.one_array(shape, dtype)
    options.show_plan(device, as_json, OPS["layer_norm"].function, x, implementation=implementation)


def rms_norm(
    shape: options.RowsShape,
    dtype: options.Dtype = "bfloat16",
    implementation: options.Implementation = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Show the plan of rms_norm for this shape."""
    x = options.one_array(shape, dtype)
    options.show_plan(device, as_json, OPS["rms_norm"].function, x, implementation=implementation)


# The first command is the default; "flash_attention" is the op's own name for it.
COMMANDS: dict[str, Callable[..., None]] = {
    "attention": attention,
    "flash_attention": attention,
    "flash_attention_fp8": flash_attention_fp8,
    "decode_attention": decode_attention,
    "dilated_attention": dilated_attention,
    "dynamic_mask_attention": dynamic_mask_attention,
    "block_sparse_attention": block_sparse_attention,
    "matmul": matmul,
    "gated_matmul": gated_matmul,
    "mlp": mlp,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
}


class OpGroup(TyperGroup):
    """The ops as commands. Options without an op belong to `attention`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_option = bool(args) and args[0].startswith("-") and args[0] != "--help"
        return super().parse_args(ctx, ["attention", *args] if is_option else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        of_shares = {
            "sequence_parallel_dilated_attention": "dilated_attention",
            "ring_attention": "flash_attention",
        }
        if name in of_shares:
            raise UserError(
                f"op: got {name}, whose plan needs a jax.shard_map; want {of_shares[name]}, with one device's tokens"
            )
        if name not in COMMANDS:
            raise UserError(f"op: got {name!r}, want one of {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}")
        return super().resolve_command(ctx, args)
