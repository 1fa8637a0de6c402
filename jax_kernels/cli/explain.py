"""jax-kernels explain: the plan of a call of a public op, without running it.

Each op of `OPS` is a command, whose options come from the op's signature: see explain_options.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jax_kernels import dispatch
from jax_kernels.cli import UserError
from jax_kernels.cli import explain_options as options
from jax_kernels.cli.info import find_device
from jax_kernels.cli.ops import OPS
from jax_kernels.cli.outputs import json_text
from jax_kernels.spelling import did_you_mean
from jax_kernels.testing.typical_call import on_devices

__all__ = ["COMMANDS", "OpGroup", "with_option"]

DEVICE = Annotated[str | None, typer.Option(help="a GPU that need not be here: h200, 'rtx 4090', cpu, ...")]
JSON = Annotated[bool, typer.Option("--json", help="print JSON")]

_HELP = {
    "flash_attention_fp8": "for float8_e4m3fn arrays of these shapes.",
    "decode_attention": "for the newest tokens (--shape) and a cache (--kv-shape).",
    "dilated_attention": "for these shapes, branch by branch.",
    "dynamic_mask_attention": "for these shapes. It is the plan of the inner flash_attention call.",
    "block_sparse_attention": "for these shapes. It is the plan of the inner flash_attention call.",
    "ring_attention": "for one device's tokens (--shape): the strategy, and each step.",
    "sequence_parallel_dilated_attention": "for one device's tokens (--shape), branch by branch.",
    "matmul": "for x of this shape and weights with --columns columns.",
    "gated_matmul": "for x of this shape and weights with --columns columns.",
    "grouped_matmul": "for x of this shape and the weights of --groups groups, with --columns columns.",
    "grouped_gated_matmul": "for x of this shape and the weights of --groups groups, with --columns columns.",
    "linear_cross_entropy": "for x of this shape and a vocabulary of --columns entries.",
    "mlp": "for its first matmuls, of x of this shape and weights with --columns columns.",
    "layer_norm": "for this shape.",
    "rms_norm": "for this shape.",
}


def _command(op: str) -> Callable[..., None]:
    """The typer command `jax-kernels explain OP`, a function whose signature has the op's options."""
    parameters = options.parameters_of(op)
    parameters["device"] = inspect.Parameter("device", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=DEVICE)
    parameters["as_json"] = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JSON)

    def command(device: str | None, as_json: bool, **values: Any) -> None:
        given = options.given(op, values)
        with on_devices(values.get("devices")):
            _show_plan(op, device, as_json, given)

    command.__doc__ = f"Show the plan of {op} {_HELP.get(op, _DEFAULT_HELP)}"
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: x.annotation for name, x in parameters.items()}
    return command


_DEFAULT_HELP = "for these shapes: implementation, blocks, and the implementations passed over."


def _show_plan(op: str, device: str | None, as_json: bool, arguments: dict[str, Any]) -> None:
    """Prints the plan of a call on the device, as text or JSON. Raises UserError if the op refuses the call.

    device: a name, None for this machine's. arguments: of the op, by name.
    """
    try:
        with dispatch.on_device(find_device(device)):
            plan = dispatch.explain(OPS[op].function, **arguments)
    except (TypeError, ValueError, NotImplementedError, OverflowError) as error:
        raise UserError(with_option(op, str(error))) from None
    print(json_text(dataclasses.asdict(plan)) if as_json else plan)


def with_option(op: str, text: str) -> str:
    """The text of an op's error, with the command's option instead of the op's argument, with which the text begins.

    For an array whose sizes are options, such as query with --shape, the option is put before the argument's name. The
    text is unchanged if it does not begin with an argument's name, or if the command has no option for the argument.
    """
    name = re.match(r"\w+(?=[:,=])", text)
    if name is None:
        return text
    of_shapes = {"query": "--shape", "x": "--shape", "key": "--kv-shape", "value": "--v-head-dim", "w": "--columns"}
    if name[0] in of_shapes:
        return f"{of_shapes[name[0]]}: {text}"
    if name[0] == "dtype":
        return f"--dtype{text[name.end() :]}"
    option = options.option_of(op, name[0]) if name[0] in options.arguments_of(op) else None
    return text if option is None else f"{option.name(name[0])}{text[name.end() :]}"


# The first command is the default; "flash_attention" is the op's own name for it.
COMMANDS: dict[str, Callable[..., None]] = {
    "attention": _command("flash_attention"),
    **{op: _command(op) for op in OPS},
}


class OpGroup(TyperGroup):
    """The typer group whose commands are the ops. Without an op, the options belong to `attention`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_option = bool(args) and args[0].startswith("-") and args[0] != "--help"
        return super().parse_args(ctx, ["attention", *args] if is_option else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS:
            raise UserError(f"op: got {name!r}, want one of {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}")
        return super().resolve_command(ctx, args)
