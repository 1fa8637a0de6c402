"""The options of `jax-kernels explain OP`: which arguments of an op are options, and how text becomes an argument.

The signature of an op says which arguments it has, in which order, and their defaults. `OPTIONS` says how each argument
is written on the command line.
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable
from typing import Annotated, Any

import jax
import numpy as np
import typer

from jax_kernels.cli import UserError
from jax_kernels.cli.ops import OPS
from jax_kernels.spelling import did_you_mean
from jax_kernels.testing.typical_call import AXIS, spec

__all__ = [
    "NOT_OPTIONS",
    "OPTIONS",
    "Call",
    "Option",
    "arguments_of",
    "arrays_of",
    "block_mask",
    "given",
    "option_of",
    "parameters_of",
    "sizes_of",
]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
E4M3 = "float8_e4m3fn"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A call to explain, while its arguments are made.

    op: its name. values: of the command's options, by the name of the op's argument. arrays: the shapes and dtypes of
    the arrays that the op cannot do without, by argument.
    """

    op: str
    values: dict[str, Any]
    arrays: dict[str, jax.ShapeDtypeStruct]

    @property
    def first(self) -> jax.ShapeDtypeStruct:
        """The shape and dtype of the first of `arrays`, such as query or x."""
        return next(iter(self.arrays.values()))


def _as_it_is(call: Call, value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """A command line option for an argument of an op, or for a size of its arrays.

    type: of the option's value, bool for a flag. flag: the option's name, if it is not made from the argument's.
    minimum: of a number. value(call, text): makes the op's argument from the option's value. is_array: whether the
    option is a flag whose argument is an array.
    """

    help: str
    type: Any = str
    flag: str | None = None
    minimum: int | None = None
    value: Callable[[Call, Any], Any] = _as_it_is
    is_array: bool = False

    def name(self, argument: str) -> str:
        """The option's name on the command line, such as "--kv-lengths", for the op's argument."""
        return self.flag or f"--{argument.replace('_', '-')}"

    def parameter(self, argument: str, default: Any) -> inspect.Parameter:
        """The option as a keyword parameter of a typer command, for the op's argument `argument`.

        default: inspect.Parameter.empty for a required option.
        """
        # Typer's own "<int range>" is so wide that an option's name is cut off at 80 columns.
        given: dict[str, Any] = {} if self.minimum is None else {"min": self.minimum, "metavar": "<int>"}
        names = [] if self.type == bool | None else [self.name(argument)]  # typer adds --no-... without a name
        kind = self.type | None if default is None and self.type is not bool else self.type
        return inspect.Parameter(
            argument,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if self.is_array else default,
            annotation=Annotated[kind, typer.Option(*names, help=self.help, **given)],
        )


def numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers of a text such as "1,4096,16,128". Raises UserError, naming the option, unless all are ints above
    0.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        hint = "" if option != "--mask" else ": a mask is given by its shape, and a causal one by --causal"
        raise UserError(f"{option}: got {text!r}, want whole numbers above 0 with commas, as in 1,4096,16,128{hint}")
    return tuple(int(part) for part in parts)


def _window_sides(call: Call, text: str | None) -> int | tuple[int, ...] | None:
    """The window from "512,0" or "512": (left, right), or one int for both sides; None for None. Raises UserError."""
    if text is None:
        return None
    try:
        left, *right = (int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--window: got {text!r}, want left,right or one whole number, as in 512,0") from None
    return (left, *right) if right else left


def _of_shape(option: str, dtype: str | None = None) -> Callable[[Call, str | None], Any]:
    """Returns an Option's `value` that makes an array (shape and dtype only) of the shape that the option's text holds.

    dtype: of the array; None for the dtype of the op's first array.
    """
    return lambda call, text: None if text is None else spec(numbers(option, text), dtype or call.first.dtype.name)


def _numbers_of(option: str) -> Callable[[Call, str], tuple[int, ...]]:
    """Returns an Option's `value` that makes a tuple of ints from a text with commas."""
    return lambda call, text: numbers(option, text)


def _if_given(array: Callable[[Call], Any]) -> Callable[[Call, bool], Any]:
    """Returns an Option's `value` for a flag: array(call) if the flag is given, else None."""
    return lambda call, is_given: array(call) if is_given else None


def _segment_ids(call: Call) -> Any:
    """The argument segment_ids, as shapes and dtypes.

    int32 [B, T] for dilated_attention and the ops over sharded sequences; for other ops the pair (int32 [B, T] of the
    queries, int32 [B, S] of the keys).
    """
    query, key = (spec(call.arrays[name].shape[:2], "int32") for name in ("query", "key"))
    return query if "axis_name" in arguments_of(call.op) or call.op == "dilated_attention" else (query, key)


def _vector(of: Callable[[Call], int]) -> Callable[[Call, bool], Any]:
    """Returns an Option's `value` for a flag whose argument is a vector of length of(call), in the first array's
    dtype.
    """
    return _if_given(lambda call: spec((of(call),), call.first.dtype.name))


def _columns(call: Call) -> int:
    """The columns of the op's result: the option --columns if the op has it, else the length of x's last axis."""
    return call.values["columns"] if "columns" in call.values else call.first.shape[-1]


def _of_groups(call: Call) -> tuple[int, int]:
    """The shape of grouped_matmul's bias: (groups, columns)."""
    return call.values["groups"], call.values["columns"]


def _block_size(call: Call, text: str | None) -> tuple[int, int] | None:
    """(queries, keys) of a block from "128,64" or "128"; None for None. Raises UserError."""
    if text is None:
        return None
    sizes = numbers("--block-size", text)
    if len(sizes) > 2:
        raise UserError(f"--block-size: got {text!r}, want queries,keys or one number, as in 128,64")
    block_q, block_kv = sizes * 2 if len(sizes) == 1 else sizes
    return block_q, block_kv


def block_mask(call: Call) -> np.ndarray:
    """The argument block_mask of block_sparse_attention for the call's shapes: bool [rows, columns], all True."""
    sizes = _block_size(call, call.values["block_size"]) or (128, 128)
    # A shape without a length is the op's to refuse.
    blocks = lambda x, size: math.ceil(x.shape[1] / size) if x.ndim > 1 else 1
    query, key = (call.arrays[name] for name in ("query", "key"))
    return np.ones((blocks(query, sizes[0]), blocks(key, sizes[1])), bool)


def _flag(help: str, array: Callable[[Call], Any]) -> Option:
    return Option(help=help, type=bool, is_array=True, value=_if_given(array))


def _of_query(axes: slice, dtype: str) -> Callable[[Call], Any]:
    """Returns a function that maps a Call to an array (shape and dtype only) of this dtype.

    axes: the axes of query's shape that the array has, as a slice: slice(1) gives [B].
    """
    return lambda call: spec(call.arrays["query"].shape[axes], dtype)


_RESIDUAL = _flag("with a residual", lambda call: spec((*call.first.shape[:-1], _columns(call)), call.first.dtype.name))
_PRECISION = Option(help="fp32 or tf32, for float32; bf16, fp16 or fp8, for any dtype")
_ACTIVATION = Option(help="silu, gelu, ...")

# By argument; "op.argument" is for one op alone.
OPTIONS: dict[str, Option] = {
    "is_causal": Option(help="is_causal=True", type=bool, flag="--causal"),
    "mask": Option(help="the shape of a dense mask, as in 1,1,4096,4096", value=_of_shape("--mask", "bool")),
    "bias": Option(help="the shape of a bias, as in 1,16,4096,4096", value=_of_shape("--bias")),
    "window": Option(help="left,right, or one number for both; -1 is no limit", value=_window_sides),
    "segment_ids": _flag("with packed sequences", _segment_ids),
    "sinks": _flag("with a sink for each head", _of_query(slice(2, 3), "float32")),
    "softcap": Option(help="the softcap of the scores", type=float),
    "scale": Option(help="the factor of the scores", type=float),
    "kv_lengths": _flag("with a length for each batch entry", _of_query(slice(1), "int32")),
    "q_offset": Option(help="the position of query 0", type=int),
    "return_lse": Option(help="also return the log-sum-exp", type=bool),
    "deterministic": Option(help="the same bits on every run; left out, XLA's flag decides", type=bool | None),
    "precision": Option(help="fp32 or tf32, for float32"),
    "implementation": Option(help="ask for this one"),
    # 8 bits
    "q_scale": Option(help="query's scale", type=float),
    "k_scale": Option(help="key's scale", type=float),
    "v_scale": Option(help="value's scale", type=float),
    # decode_attention
    "decode_attention.kv_lengths": Option(
        help="without a length for each sequence",
        type=bool,
        flag="--no-kv-lengths",
        value=lambda call, is_without: None if is_without else _of_query(slice(1), "int32")(call),
        is_array=True,
    ),
    "block_tables": Option(
        help="the pages of a sequence: --kv-shape is the number of pages, page_size, heads, head_dim",
        type=int,
        flag="--pages",
        minimum=1,
        value=lambda call, pages: None if pages is None else spec((*call.first.shape[:1], pages), "int32"),
    ),
    # dilated attention
    "segment_lengths": Option(help="of each branch, as in 2048,4096", value=_numbers_of("--segment-lengths")),
    "dilation_rates": Option(help="of each branch, as in 1,2", value=_numbers_of("--dilation-rates")),
    "heads": Option(help="all or groups"),
    "combine": Option(help="lse or mean"),
    "layout": Option(help="overlap or partition"),
    "order": Option(help="hilbert, or left out"),
    "stop_gradient_weights": Option(help="no gradient through the weights of lse", type=bool),
    # masks
    "block_size": Option(help="queries,keys of a block, or one number for both; left out, 128", value=_block_size),
    "dynamic_mask_attention.mask": Option(
        help="the shape of the mask, as in 1,16,4096,4096", value=_of_shape("--mask", "bool")
    ),
    # sharded sequences
    "ring_attention.layout": Option(help="zigzag, striped or contiguous"),
    "ring_attention.bias": Option(
        help="the shape of a bias: one device's queries, and all keys, as in 1,16,512,4096", value=_of_shape("--bias")
    ),
    "strategy": Option(help="ring, halo, all_to_all, all_gather or auto"),
    "sends_ahead": Option(help="the steps by which a ring sends keys ahead", type=int),
    # products
    "activation": _ACTIVATION,
    "transpose_w": Option(help="the weights are [N, K]", type=bool),
    "scaling": Option(help="tensor, row or block: which 8-bit values share a scale"),
    "residual": _RESIDUAL,
    "out_dtype": Option(help="the result's dtype"),
    "x_scale": Option(help="x's scale", type=float),
    "w_scale": Option(help="w's scale", type=float),
    "w_gate_scale": Option(help="w_gate's scale", type=float),
    "w_up_scale": Option(help="w_up's scale", type=float),
    "w_gate": Option(
        help="with w_gate",
        type=bool,
        flag="--gated",
        is_array=True,
        value=_if_given(lambda call: call.arrays["w_up"]),
    ),
    "bias_up": Option(help="with bias_up", type=bool, is_array=True, value=_vector(lambda call: call.values["hidden"])),
    "bias_down": Option(help="with bias_down", type=bool, is_array=True, value=_vector(_columns)),
    "matmul.bias": Option(help="with a bias", type=bool, is_array=True, value=_vector(_columns)),
    "matmul.precision": _PRECISION,
    "gated_matmul.precision": _PRECISION,
    "gather_indices": _flag("with the index of each row", lambda call: spec(call.first.shape[:1], "int32")),
    "grouped_matmul.bias": _flag("with a bias", lambda call: spec(_of_groups(call), call.first.dtype.name)),
    "grouped_matmul.precision": _PRECISION,
    "grouped_gated_matmul.precision": _PRECISION,
    "mlp.precision": Option(help="fp32 or tf32, for float32"),
    # losses
    "weights": _flag("with a weight for each token", lambda call: spec(call.first.shape[:-1], "float32")),
    "reduction": Option(help="none, mean or sum"),
    "linear_cross_entropy.precision": Option(help="fp8: logits of 8-bit values"),
    # norms
    "layer_norm.scale": Option(help="with a scale", type=bool, is_array=True, value=_vector(_columns)),
    "rms_norm.scale": Option(help="with a scale", type=bool, is_array=True, value=_vector(_columns)),
    "layer_norm.bias": Option(help="with a bias", type=bool, is_array=True, value=_vector(_columns)),
    "eps": Option(help="is added to the variance", type=float),
    "scale_offset": Option(help="is added to the scale", type=float),
    "quantize": Option(help="e4m3 or e5m2: an 8-bit result"),
}
# Arguments that are no options, with the reason. Keys as in OPTIONS.
NOT_OPTIONS = {
    "group_sizes": "--groups gives its length",
    "targets": "of the rows of --shape",
    "ring_attention.mask": "a masks.Mask, which has no short text",
    "score_mod": "a function",
    "axis_name": "--devices gives the size of the axis",
    "block_mask": "made of --block-size",
}

# The sizes of an op's arrays, which are no arguments.
SIZES: dict[str, Option] = {
    "shape": Option(help="query's batch, length, heads, head_dim, as in 2,4096,16,128"),
    "kv_shape": Option(help="key's, where it differs"),
    "v_head_dim": Option(help="value's head_dim, where it differs", type=int, minimum=1),
    "dtype": Option(help="bfloat16 (bf16), float16 (fp16) or float32 (fp32)"),
    "rows.shape": Option(help="x's shape, as in 8192,4096"),
    "columns": Option(help="of the weights, N", type=int, minimum=1),
    "groups": Option(help="of rows, each with its own weights, G", type=int, minimum=1),
    "hidden": Option(help="columns of w_up, H", type=int, minimum=1),
    "decode_attention.kv_shape": Option(help="the cache's batch, length, heads, head_dim; see --pages"),
    "sharded.shape": Option(help="one device's batch, length, heads, head_dim of query"),
    "devices": Option(help="over which the sequence is sharded", type=int, minimum=1),
}


def option_of(op: str, argument: str) -> Option | None:
    """The Option for an argument of an op; None if the command line has no option for it.

    A float, int, bool or str without an entry in OPTIONS has an option made from its annotation and docstring.
    """
    if {argument, f"{op}.{argument}"} & NOT_OPTIONS.keys():
        return None
    found = OPTIONS.get(f"{op}.{argument}") or OPTIONS.get(argument)
    kind = arguments_of(op)[argument].annotation
    if found is not None or kind not in (float, int, bool, str):
        return found
    line = re.search(rf"^ *{argument}: (.*)$", OPS[op].function.__doc__ or "", re.MULTILINE)
    return Option(help=line[1] if line else "", type=kind)


def arguments_of(op: str) -> dict[str, inspect.Parameter]:
    """The parameters of an op's function, by name.

    If the function takes **arguments, which it gives to flash_attention, they are replaced by flash_attention's
    parameters. An op with the parameter block_mask has no mask.
    """
    found = dict(inspect.signature(OPS[op].function).parameters)
    rest = [name for name, x in found.items() if x.kind is x.VAR_KEYWORD]
    for name in rest:
        del found[name]
        others = inspect.signature(OPS["flash_attention"].function).parameters
        found |= {name: x for name, x in others.items() if name not in found}
    if "block_mask" in found:
        del found["mask"]  # the op takes block_mask in its place
    return found


def sizes_of(op: str) -> dict[str, inspect.Parameter]:
    """The command line's parameters for the sizes of an op's arrays (--shape, --dtype, ...), by name."""
    arguments, required = arguments_of(op), inspect.Parameter.empty
    found: list[tuple[str, str, Any]]
    if "query" in arguments:
        is_sharded = "axis_name" in arguments
        is_decode = op == "decode_attention"
        found = [("shape", "sharded.shape" if is_sharded else "shape", required)]
        found += [("devices", "devices", required)] if is_sharded else []
        found.append(("kv_shape", "decode_attention.kv_shape", required) if is_decode else ("kv_shape",) * 2 + (None,))
        found.append(("v_head_dim", "v_head_dim", None))
    else:
        found = [("shape", "rows.shape", required)]
        found += [("hidden", "hidden", required)] if "w_down" in arguments else []
        found += [("groups", "groups", required)] if "group_sizes" in arguments else []
        found += [("columns", "columns", required)] if "transpose_w" in arguments else []
    found += [] if op == "flash_attention_fp8" else [("dtype", "dtype", "bfloat16")]
    return {name: SIZES[key].parameter(name, default) for name, key, default in found}


def parameters_of(op: str) -> dict[str, inspect.Parameter]:
    """The command line's parameters for a call of an op, by name: the sizes of its arrays, and its arguments."""
    parameters = sizes_of(op)
    for name, x in arguments_of(op).items():
        option = option_of(op, name)
        if option is not None and not (option.is_array and x.default is inspect.Parameter.empty):
            parameters[name] = option.parameter(name, x.default)
    return parameters


def given(op: str, values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the op's function, by name, with arrays as jax.ShapeDtypeStructs.

    values: of the options of `parameters_of`, by name. Raises UserError for text that cannot be read.
    """
    call, arguments = Call(op=op, values=values, arrays=arrays_of(op, values)), arguments_of(op)
    found: dict[str, Any] = dict(call.arrays)
    for name in arguments:
        option = option_of(op, name)
        if name in values and option is not None:
            found[name] = option.value(call, values[name])
    if "block_mask" in arguments:
        found["block_mask"] = block_mask(call)
    if "axis_name" in arguments:
        found["axis_name"] = AXIS
    return found


def arrays_of(op: str, values: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the arrays that an op cannot do without, by argument.

    values: of the options, by name. Raises UserError for a shape or dtype that cannot be read.
    """
    dtype = _dtype(values["dtype"]) if "dtype" in values else E4M3
    shape = numbers("--shape", values["shape"])
    arguments = arguments_of(op)
    if "query" in arguments:
        k_shape = shape if values["kv_shape"] is None else numbers("--kv-shape", values["kv_shape"])
        v_shape = k_shape if values["v_head_dim"] is None else (*k_shape[:-1], values["v_head_dim"])
        return {"query": spec(shape, dtype), "key": spec(k_shape, dtype), "value": spec(v_shape, dtype)}
    weight = lambda *sizes: spec(sizes[::-1] if values["transpose_w"] else sizes, dtype)
    found = {"x": spec(shape, dtype)}
    columns = values.get("hidden", values.get("columns"))
    for name in ("w", "w_gate", "w_up"):
        if name in arguments and arguments[name].default is inspect.Parameter.empty:
            found[name] = weight(shape[-1], columns)
    if "group_sizes" in arguments:
        groups = values["groups"]
        for name in found.keys() & {"w", "w_gate", "w_up"}:
            found[name] = spec((groups, *found[name].shape), dtype)
        found["group_sizes"] = spec((groups,), "int32")
    if "targets" in arguments:
        found["targets"] = spec(shape[:-1], "int32")
    if "w_down" in arguments:
        found["w_down"] = weight(values["hidden"], values["columns"])
    return found


def _dtype(name: str) -> str:
    """JAX's name of a dtype, from this or from "bf16", "fp16" or "fp32". Raises UserError for another name."""
    found = DTYPES.get(name, name)
    if found not in (*DTYPES.values(), E4M3):
        names = [*DTYPES.values(), *DTYPES]
        raise UserError(f"--dtype: got {name!r}, want one of {', '.join(names)}{did_you_mean(name, names)}")
    return found
