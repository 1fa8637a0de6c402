"""The program of a score_mod as a graph: the inputs of each value, and the indices along which the value varies.

A kernel evaluates the graph for the pairs of a tile. Values that vary along queries only, or keys only, are computed
once per row or column.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from jax_kernels.pallas.attention.softmax import NEAR

WHOLE = frozenset("qk")


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A value of the program, computed for each pair of a tile.

    kind: "score" (the score that the function gets), "b", "h", "q" or "k" (an index: batch entry, head, query, key),
    "operand" (a value read from an array), "literal", or the name of the JAX primitive that computes the value. axes:
    the letters of "qk" along which the value varies. inputs, params: of the primitive. bound: a limit of the magnitude
    of an integer and of all its summands; None if unknown. value: of a literal.
    """

    kind: str
    dtype: jnp.dtype
    axes: frozenset[str] = frozenset()
    inputs: "tuple[Node, ...]" = ()
    params: Any = None
    bound: int | None = None
    value: Any = None

    @property
    def is_float(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.floating)

    @property
    def may_be_infinite(self) -> bool:
        """Whether this value, a derivative, may be infinite or NaN for a masked pair, whose score is finite."""
        if not self.is_float or not self.axes or self.kind in ("score", "tanh", "logistic"):
            return False
        simple = ("add", "add_any", "sub", "mul", "neg", "square", "one_minus_square", "select_n", "sign", "copy")
        if self.kind in (*simple, "convert_element_type", "broadcast_in_dim", "max", "min", "abs"):
            return any(x.may_be_infinite for x in self.inputs)
        return True


def nodes(
    program: Jaxpr, operands: list[tuple[Any, frozenset[str]]], lengths: tuple[int, int]
) -> tuple[tuple[Node, ...], Node, Node]:
    """(operands, result, slope): the nodes of a score_mod's program, a scalar function of (score, b, h, q, k,
    *operands).

    result: the new score. slope: its derivative with respect to the score. operands: the dtype and the axes of each
    operand. lengths: the number of queries and of keys, which bound the indices.
    """
    q_length, kv_length = lengths
    index = lambda kind, axes="", bound=None: Node(kind, jnp.dtype(jnp.int32), frozenset(axes), bound=bound)
    given = [Node("score", jnp.dtype(jnp.float32), WHOLE), index("b"), index("h")]
    given += [index("q", "q", q_length), index("k", "k", kv_length)]
    leaves = tuple(Node("operand", jnp.dtype(dtype), axes) for dtype, axes in operands)
    of_variable = lambda x, variable: _bool(x) if variable.aval.dtype == bool else _converted(x, variable.aval.dtype)
    inputs = [*given, *map(of_variable, leaves, program.invars[5:])]
    run = jaxpr_as_fun(ClosedJaxpr(program, []))

    def both(score, *rest):
        return jax.jvp(lambda score: run(score, *rest)[0], (score,), (jnp.ones_like(score),))

    traced = jax.make_jaxpr(both)(*(jax.ShapeDtypeStruct((), x.dtype) for x in inputs))
    result, derivative = _traced(traced.jaxpr, traced.consts, inputs)
    return leaves, result, derivative


def _bool(x: Node) -> Node:
    return Node("ne", jnp.dtype(bool), x.axes, (x, Node("literal", x.dtype, value=x.dtype.type(0))))


def _converted(x: Node, dtype: jnp.dtype) -> Node:
    if x.dtype == dtype:
        return x
    return Node("convert_element_type", jnp.dtype(dtype), x.axes, (x,), {"new_dtype": dtype})


def _traced(jaxpr: Jaxpr, consts: Any, inputs: list[Node]) -> list[Node]:
    """The nodes of a jaxpr's results, from the nodes of its inputs. Nested jaxprs are inlined."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    literal = lambda value, aval: Node("literal", jnp.dtype(aval.dtype), value=jnp.dtype(aval.dtype).type(value))
    known |= {variable: literal(x, variable.aval) for variable, x in zip(jaxpr.constvars, consts, strict=True)}
    node = lambda x: literal(x.val, x.aval) if isinstance(x, Literal) else known[x]
    for equation in jaxpr.eqns:
        given = [node(x) for x in equation.invars]
        inner = [x for x in equation.params.values() if isinstance(x, Jaxpr | ClosedJaxpr)]
        if inner:  # jit, or a custom derivative that was applied
            closed = inner[0] if isinstance(inner[0], ClosedJaxpr) else ClosedJaxpr(inner[0], [])
            outs = _traced(closed.jaxpr, closed.consts, given)
        else:
            outs = [_applied(equation, given)]
        known |= dict(zip(equation.outvars, outs, strict=True))
    return [node(x) for x in jaxpr.outvars]


def reads_large(result: Node) -> bool:
    """Whether the program has a finite float constant of magnitude above 2**13, such as the -1e9 of a mask.

    result: the node of the program's result.
    """
    seen, rest = set(), [result]
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        rest += node.inputs
        if node.kind == "literal" and node.is_float and NEAR < abs(float(node.value)) < float("inf"):
            return True
    return False


def tanh_factor(result: Node) -> float | None:
    """The number c if the program has a single tanh, whose argument is c times the score; else None.

    None is returned for no tanh, several, any other argument, and c = 0.
    """
    found, seen, rest = [], set(), [result]
    while rest:
        node = rest.pop()
        if node not in seen:
            seen.add(node)
            rest += node.inputs
            found += [node] if node.kind == "tanh" else []
    if len(found) != 1:
        return None
    factor, (node,) = 1.0, found[0].inputs
    while node.kind in ("mul", "div", "neg"):
        if node.kind == "neg":
            factor, node = -factor, node.inputs[0]
            continue
        a, b = node.inputs if node.inputs[1].kind == "literal" or node.kind == "div" else node.inputs[::-1]
        if b.kind != "literal" or not b.value:
            return None
        factor, node = (factor / float(b.value) if node.kind == "div" else factor * float(b.value)), a
    return factor if node.kind == "score" and factor else None


def interval(node: Node, known: dict[Any, tuple[Any, Any]]) -> tuple[Any, Any] | None:
    """(lowest, highest) value that a node can have; None if unknown. The bounds are floats if they depend on no array.

    known: known intervals, by Node for operands, and by the strings "score" and "q - k" for the score and for the
    difference of the query's and the key's index.
    """
    kind, inputs = node.kind, node.inputs
    if kind == "literal":
        return float(node.value), float(node.value)
    if node in known or kind in known:
        return known[node if node in known else kind]
    if is_difference(node) and "q - k" in known:
        low, high = known["q - k"]
        return (low, high) if inputs[0].kind == "q" else (-high, -low)
    inputs = inputs[1:] if kind == "select_n" else inputs
    given = [x for x in (interval(x, known) for x in inputs) if x is not None]
    if not given or len(given) < len(inputs):
        return ((0.0 if kind == "logistic" else -1.0), 1.0) if kind in ("tanh", "sign", "logistic") else None
    lows, highs = zip(*given, strict=True)
    if kind in ("add", "add_any"):
        return lows[0] + lows[1], highs[0] + highs[1]
    if kind == "sub":
        return lows[0] - highs[1], highs[0] - lows[1]
    if kind == "neg":
        return -highs[0], -lows[0]
    if kind == "mul" or (kind == "div" and inputs[1].kind == "literal"):
        corners = [a * b if kind == "mul" else a / b for a in given[0] for b in given[1]]
        return _least(corners), _largest(corners)
    if kind == "select_n":
        return _least(lows), _largest(highs)
    if kind in ("max", "min"):
        return (_largest(lows), _largest(highs)) if kind == "max" else (_least(lows), _least(highs))
    if kind == "abs":
        return 0.0, _largest((-lows[0], highs[0]))
    if kind in ("tanh", "sign", "logistic"):
        rising = {"tanh": jnp.tanh, "sign": jnp.sign, "logistic": jax.nn.sigmoid}[kind]
        return rising(lows[0]), rising(highs[0])
    return (lows[0], highs[0]) if kind == "convert_element_type" and inputs[0].dtype != bool else None


def _least(numbers: Any) -> jax.Array | float:
    return -_largest([-x for x in numbers])


def _largest(numbers: Any) -> jax.Array | float:
    return max(numbers) if all(isinstance(x, float) for x in numbers) else functools.reduce(jnp.maximum, numbers)


def is_difference(node: Node) -> bool:
    """Whether the node is the difference of a query's index and a key's index."""
    return node.kind == "sub" and {x.kind for x in node.inputs} == {"q", "k"}


def is_one(x: Node) -> bool:
    return x.kind == "literal" and x.value == 1


def _applied(equation: Any, inputs: list[Node]) -> Node:
    """The node of an equation's result. Equations on literals are evaluated, copies and multiplications by 1 are
    skipped.
    """
    kind, (out,) = str(equation.primitive), equation.outvars
    dtype = jnp.dtype(out.aval.dtype)
    if all(x.kind == "literal" for x in inputs):
        with jax.ensure_compile_time_eval():
            value = equation.primitive.bind(*(jnp.asarray(x.value, x.dtype) for x in inputs), **equation.params)
        return Node("literal", dtype, value=dtype.type(value), bound=None)
    if kind in ("copy", "stop_gradient", "broadcast_in_dim", "pvary"):
        return inputs[0]
    if kind == "mul" and any(map(is_one, inputs)):
        return inputs[1] if is_one(inputs[0]) else inputs[0]
    axes = frozenset().union(*(x.axes for x in inputs))
    return Node(kind, dtype, axes, tuple(inputs), equation.params, _bound(kind, inputs))


def _bound(kind: str, inputs: list[Node]) -> int | None:
    """An integer that bounds the magnitude of an integer result and of all its summands, from the inputs' bounds.

    It is the sum of the inputs' bounds. None for operations other than add, sub, neg, abs, max and min, and if a bound
    is unknown.
    """
    if kind not in ("add", "sub", "neg", "abs", "max", "min"):
        return None
    bounds = [abs(int(x.value)) if x.kind == "literal" and not x.is_float else x.bound for x in inputs]
    return None if None in bounds else sum(x for x in bounds if x is not None)
