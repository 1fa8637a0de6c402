"""The calls of a traced function, with the number of their runs, and its matmuls outside of this library's ops."""

import contextlib
import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_kernels import dispatch
from jax_kernels.analysis import marks
from jax_kernels.analysis.costs import Cost
from jax_kernels.analysis.marks import Runs
from jax_kernels.device import DeviceInfo
from jax_kernels.ops.planned_op import PlannedCall, TunableCall, tuned_by
from jax_kernels.tracing.jaxprs import jaxprs_in_params
from jax_kernels.tuning.session import without_trace

__all__ = ["Recorder", "Trace", "of_arrays", "pure_call", "recorded_run", "replanned", "trace"]

# A new value makes JAX trace functions again that were traced under jit before.
_ANEW = jax.make_user_context(None)
_SCOPES = frozenset(
    ("flash_attention", "flash_attention_fp8", "decode_attention", "dilated_attention", "ring_attention", "matmul")
) | {"gated_matmul", "mlp", "grouped_matmul", "grouped_gated_matmul", "layer_norm", "rms_norm", "linear_cross_entropy"}


class Recorder:
    """Records the calls of the ops, and marks their arrays. It is put into `tuned_by`, as tuning's session is.

    calls: the recorded calls, without traced arrays; the index of a call is the index of its marks. skips_bridge:
    whether calls of the PyTorch bridge are left out.
    """

    lists_composed = True

    def __init__(self, *, skips_bridge: bool = False) -> None:
        self.calls: list[TunableCall] = []
        self._skips_bridge = skips_bridge

    def tuned(self, tunable: TunableCall) -> tuple[PlannedCall, Any]:
        if self._skips_bridge and dispatch.has_target():
            return tunable.call, tunable.inputs
        inputs = marks.marked(tunable.inputs, len(self.calls))
        self.calls.append(dataclasses.replace(tunable, inputs=jax.tree.map(without_trace, tunable.inputs)))
        return tunable.call, inputs

    def composed(self, tunable: TunableCall) -> Any:
        return self.tuned(tunable)[1]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """A traced function.

    calls: (call, its runs) of each call of an op. others: the work of matmuls outside of the ops, by arithmetic; and
    matmuls: their number.
    """

    calls: tuple[tuple[TunableCall, Runs], ...]
    others: tuple[Cost, ...]
    matmuls: int


def _is_traced(x: Any) -> bool:
    """Whether an argument of the analysed function is traced: an array, but not a known array of bools, or of no axes.

    A known mask then shows its dead blocks, and a number such as q_offset stays known.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return True
    return isinstance(x, jax.Array | np.ndarray) and x.ndim > 0 and x.dtype != bool


def pure_call(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[[Any], Any], Any]:
    """(call, tree): call(tree) runs function(*args, **kwargs) with the arrays of `tree`.

    Flax nnx modules, as arguments or as the function itself, are copied: the call changes only the copies.
    """
    nnx = sys.modules.get("flax.nnx")
    given = (function, args, kwargs)
    is_module = lambda x: nnx is not None and isinstance(x, nnx.Module | nnx.Optimizer)
    if not any(map(is_module, jax.tree.leaves(given, is_leaf=is_module))):
        return lambda tree: function(*tree[0], **tree[1]), (args, kwargs)
    assert nnx is not None
    graph, state = nnx.split(given if is_module(function) else (None, args, kwargs))

    def call(state: Any) -> Any:
        own, own_args, own_kwargs = nnx.merge(graph, state)
        return (function if own is None else own)(*own_args, **own_kwargs)

    return call, state


def of_arrays(call: Callable[[Any], Any], tree: Any) -> tuple[Callable[..., Any], list[Any]]:
    """(function, arrays): function(*arrays) gives the arrays of call(tree)'s results. arrays: of `tree`, to be traced.

    call, tree: from pure_call.
    """
    leaves, structure = jax.tree.flatten(tree)
    moving = [i for i, x in enumerate(leaves) if _is_traced(x)]

    def function(*arrays: Any) -> list[Any]:
        found = dict(zip(moving, arrays, strict=True))
        out = call(jax.tree.unflatten(structure, [found.get(i, x) for i, x in enumerate(leaves)]))
        return [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]

    return function, [leaves[i] for i in moving]


@contextlib.contextmanager
def recorded_run() -> Iterator[list[Trace]]:
    """A context that yields an empty list, which gets the Trace of the calls that run inside it, once it ends.

    Functions that were traced before are traced again. Calls of the PyTorch bridge and other matmuls are not recorded.
    """
    recorder = Recorder(skips_bridge=True)
    traces: list[Trace] = []
    with marks.counted_runs() as counts, tuned_by(recorder), _ANEW(object()):
        yield traces
    runs = counts.runs()
    calls = tuple((tunable, runs[i]) for i, tunable in enumerate(recorder.calls) if i in runs)
    traces.append(Trace(calls=calls, others=(), matmuls=0))


def replanned(traced: Trace, device: DeviceInfo) -> Trace:
    """The Trace with its calls planned for another device."""

    def again(tunable: TunableCall) -> TunableCall:
        request = dataclasses.replace(tunable.request, device=device)
        parts = tuple((dataclasses.replace(part, device=device), inputs) for part, inputs in tunable.parts)
        return dataclasses.replace(tunable, request=request, parts=parts)

    return dataclasses.replace(traced, calls=tuple((again(tunable), runs) for tunable, runs in traced.calls))


def trace(call: Callable[[Any], Any], tree: Any) -> Trace:
    """The Trace of call(tree), from pure_call. Nothing is computed. Raises the function's errors."""
    function, arrays = of_arrays(call, tree)
    recorder = Recorder()
    with tuned_by(recorder), _ANEW(object()):
        jaxpr = jax.make_jaxpr(function)(*arrays).jaxpr
    runs = marks.runs_of(jaxpr)
    calls = tuple((tunable, runs[i]) for i, tunable in enumerate(recorder.calls) if i in runs)
    products = list(_products(jaxpr, 1))
    others = _summed([x for x, _ in products])
    return Trace(calls=calls, others=tuple(others), matmuls=sum(times for _, times in products))


def _products(jaxpr: Any, times: int) -> Iterator[tuple[Cost, int]]:
    """(work of all runs, runs) of each matmul in a jaxpr that is not in the scope of an op.

    A cond runs one branch: the matmuls of the branch with most operations count.
    """
    for equation in jaxpr.eqns:
        stack = str(equation.source_info.name_stack)
        if any(scope in stack for scope in _SCOPES) and _is_in_op(stack):
            continue
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            x, w = (variable.aval for variable in equation.invars)
            out = equation.outvars[0].aval
            flops = 2 * math.prod(x.shape[axis] for axis in contracted) * out.size
            moved = sum(y.size * jnp.dtype(y.dtype).itemsize for y in (x, w, out))
            yield Cost(flops=flops, bytes=moved, arithmetic=_arithmetic(x.dtype)).times(times), times
        inner = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
        within = [list(_products(found, inner)) for found in jaxprs_in_params(equation.params)]
        if equation.primitive.name == "cond":
            within = [max(within, key=lambda branch: sum(work.flops for work, _ in branch))]
        yield from itertools.chain.from_iterable(within)


def _is_in_op(stack: str) -> bool:
    """Whether a name stack, such as "transpose(jvp(matmul))", has the scope of an op."""
    words = stack.replace("(", "/").replace(")", "/").split("/")
    return not _SCOPES.isdisjoint(words)


def _arithmetic(dtype: Any) -> str:
    name = str(dtype)
    return "fp8" if name.startswith("float8") else name if name in ("bfloat16", "float16") else "float32"


def _summed(costs: list[Cost]) -> Iterator[Cost]:
    """One Cost for each arithmetic."""
    for arithmetic in dict.fromkeys(x.arithmetic for x in costs):
        alike = [x for x in costs if x.arithmetic == arithmetic]
        yield Cost(flops=sum(x.flops for x in alike), bytes=sum(x.bytes for x in alike), arithmetic=arithmetic)
