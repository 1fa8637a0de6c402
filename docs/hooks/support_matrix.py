"""The page of the support matrix: which implementation serves which op, on which GPU, in which dtype and direction.

Every cell is the library's answer: dispatch plans a typical call for the GPU, and JAX traces its gradient.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from jax_kernels import dispatch, quantize
from jax_kernels.cli.ops import OPS
from jax_kernels.device import _GPUS, CPU, DeviceInfo, device_info
from jax_kernels.testing.typical_call import AXIS, TypicalCall, spec

URI = "reference/support_matrix.md"
DTYPES = ("bfloat16", "float16", "float32")
TITLE = """# Support matrix

This page is generated: each cell is what the library plans for a typical call of the op. A call with other options or
sizes may differ; `jax-kernels explain` tells for any call, and
[which implementation runs](../performance/implementations.md) tells for each argument of `flash_attention`.

| cell | meaning |
|---|---|
| **default** | `implementation=None` takes this implementation |
| yes | `implementation="..."` takes it |
| no | NotImplementedError; the number leads to the reason below the table |

"Backward" in the column of directions means that the op has gradients in reverse mode by this implementation.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """An op in a dtype, or in a variant, with its typical call. variant: the label that all dtypes of a call share."""

    label: str
    variant: str
    op: TypicalCall
    dtype: str


@dataclasses.dataclass(frozen=True, eq=False)
class Column:
    """GPUs of one compute capability, planned for as the first of them."""

    info: DeviceInfo
    names: tuple[str, ...]

    @property
    def title(self) -> str:
        capability = self.info.compute_capability
        return "no GPU" if capability is None else f"{self.info.architecture} {'.'.join(map(str, capability))}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the page."""
    files.append(File.generated(config, URI, content=page()))
    return files


def page() -> str:
    """The page's text."""
    columns = list(_columns())
    parts = [TITLE, *(_table_of(name, list(cases), columns) for name, cases in _cases().items()), _gpus(columns)]
    return "\n".join(parts)


def _columns() -> Iterator[Column]:
    """A column for each compute capability that has a GPU here, the newest first, and one without a GPU."""
    names: dict[tuple[int, int], list[str]] = {}
    for gpu in _GPUS:
        names.setdefault(gpu.compute_capability, []).append(gpu.name)
    for _, of_capability in sorted(names.items(), reverse=True):
        yield Column(device_info(of_capability[0]), tuple(of_capability))
    yield Column(CPU, ("a CPU",))


def _cases() -> dict[str, Iterator[Case]]:
    return {name: _cases_of(name, op) for name, op in OPS.items()}


def _cases_of(name: str, op: TypicalCall) -> Iterator[Case]:
    for dtype in [op.dtype] if op.dtype else DTYPES:
        yield Case(dtype, name, op, dtype)
    with_precision = lambda precision: dataclasses.replace(op, arguments={**op.arguments, "precision": precision})
    if name in ("flash_attention", "matmul", "gated_matmul", "mlp"):
        yield Case("float32 as tf32", f"{name} tf32", with_precision("tf32"), "float32")
    if name in ("matmul", "gated_matmul"):
        yield Case('bfloat16, `precision="fp8"`', f"{name} fp8", with_precision("fp8"), "bfloat16")
        for low_bit in ("int8", "int4", "mxfp8", "mxfp4"):
            yield Case(f"bfloat16, {low_bit} weights", f"{name} {low_bit}", _with_weights(op, low_bit), "bfloat16")


def _with_weights(op: TypicalCall, low_bit: str) -> TypicalCall:
    """The op on 16 rows, with low-bit weights."""
    (_, inner), *weights = op.shapes
    quantized = [jax.eval_shape(lambda w: quantize(w, low_bit), spec(shape, "float32")) for shape in weights]
    names = ("w",) if len(weights) == 1 else ("w_gate", "w_up")
    arguments = {**op.arguments, **dict(zip(names, quantized, strict=True))}
    return dataclasses.replace(op, shapes=((16, inner),), arguments=arguments)


def _table_of(name: str, cases: list[Case], columns: list[Column]) -> str:
    """The table of an op, with its reasons below."""
    columns = _joined(cases, columns)
    titles = ["dtype", "implementation", "directions", *(title for title, _ in columns)]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    reasons: dict[str, int] = {}
    directions: dict[tuple[str, str], str] = {}  # the same for all dtypes

    def cell(answer: str) -> str:
        if answer in ("default", "yes"):
            return "**default**" if answer == "default" else answer
        return f"no <sup>{reasons.setdefault(answer, len(reasons) + 1)}</sup>"

    for case in cases:
        for implementation in case.op.implementations:
            answers = [_answer(case, implementation, column) for _, column in columns]
            serving = [column for (_, column), x in zip(columns, answers, strict=True) if x in ("default", "yes")]
            key = case.variant, implementation
            if serving and key not in directions:
                directions[key] = _directions(case, implementation, serving[0])
            row = [case.label, f"`{implementation}`", directions[key] if serving else "", *map(cell, answers)]
            lines.append(f"| {' | '.join(row)} |")
    numbered = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([f"## `{name}`\n", *lines, "", *numbered, ""])


def _joined(cases: list[Case], columns: list[Column]) -> list[tuple[str, Column]]:
    """(title, column), where neighbouring GPUs that have the same answers share a column."""
    groups: list[tuple[Any, list[Column]]] = []
    for column in columns:
        answers = [_answer(case, name, column) for case in cases for name in case.op.implementations]
        if groups and groups[-1][0] == answers and column.info is not CPU:
            groups[-1][1].append(column)
        else:
            groups.append((answers, [column]))
    return [("<br>".join(column.title for column in members), members[0]) for _, members in groups]


@functools.cache
def _answer(case: Case, implementation: str, column: Column) -> str:
    """ "default", "yes", or the reason why the implementation cannot serve the call."""
    with dispatch.on_device(column.info):
        try:
            case.op.plan(case.dtype, implementation)
        except NotImplementedError as error:
            reason = str(error).partition(": ")[2] or str(error)
            return reason.partition(f", and {column.info.name}")[0].partition(", and this runs on")[0]
        try:
            default = case.op.plan(case.dtype, None)
        except NotImplementedError:
            return "yes"
    return "default" if default.implementation == implementation else "yes"


def _directions(case: Case, implementation: str, column: Column) -> str:
    """ "forward, backward", or "forward" for an op without a gradient."""
    shapes = case.op.shapes or [(1, length, 8, 128) for length in (case.op.q_length, 1024, 1024)]
    arrays = [spec(shape, case.dtype) for shape in shapes]
    is_array = lambda x: (
        bool(jax.tree.leaves(x)) and all(isinstance(y, jax.ShapeDtypeStruct) for y in jax.tree.leaves(x))
    )
    given = {name: x for name, x in case.op.arguments.items() if is_array(x)}
    options = {name: x for name, x in case.op.arguments.items() if name not in given}

    def call(*arrays: Any, **given: Any) -> Any:
        return case.op.function(*arrays, **given, **options, implementation=implementation)

    def total(*arrays: Any, **given: Any) -> Any:
        return jnp.asarray(function(*arrays, **given), jnp.float32).sum()

    function: Any = call
    if case.op.devices is not None:
        mesh, tokens = AbstractMesh((case.op.devices,), (AXIS,), (AxisType.Auto,)), PartitionSpec(None, AXIS)
        function = jax.shard_map(call, mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=False)
        arrays = [x.update(shape=(x.shape[0], x.shape[1] * case.op.devices, *x.shape[2:])) for x in arrays]
    with dispatch.on_device(column.info):
        try:
            jax.eval_shape(jax.grad(total), *arrays, **given)
        except NotImplementedError:
            return "forward"
    return "forward, backward"


def _gpus(columns: list[Column]) -> str:
    lines = [f"| {column.title} | {', '.join(column.names)} |" for column in columns]
    return "\n".join(["## GPUs\n", "| column | GPUs |", "|---|---|", *lines, ""])
