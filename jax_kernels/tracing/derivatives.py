"""Derivatives: rules for both modes, and clear errors for derivatives that would be lost or have no rule.

`in_both_modes` gives a function of plain JAX a gradient of its own in reverse mode, as jax.custom_vjp does. For forward
mode and second derivatives, JAX differentiates the function itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import Primitive, unmapped_aval
from jax.interpreters import ad, batching, mlir

from jax_kernels.tracing.promotion import under_defaults

__all__ = [
    "NO_SECOND",
    "in_both_modes",
    "in_reverse_mode",
    "linear_p",
    "no_forward_mode",
    "straight_through",
    "with_plain_derivative",
    "without_derivative",
]

NO_SECOND = "second derivatives: kernels have none; implementation='xla' has them"


def without_derivative[Tree](tree: Tree, told: str) -> Tree:
    """Returns the tree. Differentiating its arrays, in either mode, raises NotImplementedError with this message.

    Leaves that are no arrays are unchanged.
    """
    # Known arrays have no tangents.
    return jax.tree.map(lambda x: _no_derivative_p.bind(x, message=told) if isinstance(x, jax.core.Tracer) else x, tree)


def no_forward_mode(op: str) -> str:
    """The message of an error that forward mode raises for an op whose kernels have reverse mode only."""
    return (
        f"{op}: its kernels have a derivative only in reverse mode; implementation='xla' has forward mode (jax.jvp, "
        "jax.linearize, jax.jacfwd, jax.hessian) and second derivatives"
    )


def in_reverse_mode[Tree](tree: Tree, message: str) -> Tree:
    """Returns the tree. Computing tangents of its arrays, in forward mode, raises NotImplementedError(message).

    Reverse mode works, as it only transposes the tangents. Apply it to an op's arguments or results.
    """
    is_moving = lambda x: isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)
    # Array by array, so that an array that is not differentiated still has no tangent afterwards.
    return jax.tree.map(lambda x: _in_reverse_mode_p.bind(x, message=message) if is_moving(x) else x, tree)


def _raised(*_: Any, message: str, **__: Any) -> Any:
    raise NotImplementedError(message)


def _mark(name: str) -> Primitive:
    """An identity on an array, with a message. vmap maps it before it is differentiated."""
    mark = Primitive(name)
    mark.def_impl(lambda x, *, message: x)
    mark.def_abstract_eval(lambda x, *, message: x)
    mlir.register_lowering(mark, lambda context, x, *, message: [x])
    batching.primitive_batchers[mark] = lambda operands, axes, *, message: (
        mark.bind(*operands, message=message),
        *axes,
    )
    return mark


# A primitive, because JAX drops the rule of a jax.custom_jvp that lies within another rule inside of a loop.
_no_derivative_p = _mark("no_derivative")
ad.primitive_jvps[_no_derivative_p] = _raised

# vmap meets the tangents of this one only in forward mode.
_in_reverse_mode_p = _mark("in_reverse_mode")


def _derivative_of_mark(primals: Any, tangents: Any, *, message: str) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    moved = tangent if isinstance(tangent, ad.Zero) else _transposed_p.bind(tangent, message=message)
    return _in_reverse_mode_p.bind(x, message=message), moved


ad.primitive_jvps[_in_reverse_mode_p] = _derivative_of_mark

# The identity on a tangent, which may be transposed but not computed.
_transposed_p = Primitive("reverse_mode_tangent")
_transposed_p.def_impl(_raised)
_transposed_p.def_abstract_eval(lambda x, *, message: x)
ad.deflinear2(_transposed_p, lambda cotangent, _, *, message: [cotangent])
batching.primitive_batchers[_transposed_p] = _raised
mlir.register_lowering(_transposed_p, _raised)


def in_both_modes(
    function: Callable[..., Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    plain: Callable[..., Any] | None = None,
    symbolic_zeros: bool = False,
) -> Callable[..., Any]:
    """Returns `function` with derivatives in both modes: a function(call, *arguments) that JAX may differentiate.

    Reverse mode uses forward and backward, in the form of jax.custom_vjp: forward(call, *arguments) returns (results,
    residuals), and backward(call, residuals, cotangents) the cotangents of the arguments. All other derivatives are
    JAX's derivatives of plain(call, *arguments), or of `function` if plain is None. For second derivatives, JAX must be
    able to differentiate forward and backward too.

    call: static and hashable. arguments: trees of arrays. symbolic_zeros: forward gets custom_vjp's CustomVJPPrimal
    objects, and backward SymbolicZero objects for cotangents of 0.
    """
    rules = _Rules(forward=forward, backward=backward, plain=plain or function, symbolic_zeros=symbolic_zeros)
    wrapped = jax.custom_jvp(function, nondiff_argnums=(0,))
    wrapped.defjvp(functools.partial(_pushed, rules), symbolic_zeros=True)

    return functools.wraps(function)(lambda call, *arguments: wrapped(call, *_of_jax(arguments)))


def _of_jax[Tree](tree: Tree) -> Tree:
    """The tree with NumPy arrays and scalars as JAX arrays: a derivative rule must not return NumPy arrays."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x, tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rules:
    """The functions that in_both_modes was given, which compute an op and its derivatives.

    plain: the function that JAX differentiates for all but first derivatives in reverse mode; in_both_modes's
    `function` if the caller gave no plain. symbolic_zeros: whether forward and backward take custom_vjp's symbolic
    zeros.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    plain: Callable[..., Any]
    symbolic_zeros: bool


def _pushed(rules: _Rules, call: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """(results, tangents of the results): the rule that in_both_modes gives jax.custom_jvp.

    The tangents are one linear equation, which forward mode computes and reverse mode transposes. primals, tangents: of
    the arguments, as JAX passes them to a custom_jvp with symbolic zeros.
    """
    leaves, arguments = jax.tree.flatten(_of_jax(primals))
    directions = jax.tree.leaves(tangents, is_leaf=_is_zero)
    moving = _moving(directions)
    given = leaves
    if rules.symbolic_zeros:
        given = [CustomVJPPrimal(x, i in moving) for i, x in enumerate(leaves)]
    results, kept = rules.forward(call, *jax.tree.unflatten(arguments, given))
    kept, of_kept = jax.tree.flatten(kept)
    out, of_out = jax.tree.flatten(results)
    linear = _Linear(
        rules=rules,
        call=call,
        arguments=arguments,
        kept=of_kept,
        results=of_out,
        moving=moving,
        avals=tuple(jax.typeof(x).to_tangent_aval() for x in out),
    )
    known = [*_of_jax(kept), *leaves]
    found = linear_p.bind(*known, *_of_jax([directions[i] for i in moving]), linear=linear)
    return results, jax.tree.unflatten(of_out, found)


def _is_zero(x: Any) -> bool:
    return isinstance(x, SymbolicZero)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Linear:
    """The linear function from the tangents of a call's arguments to the tangents of its results.

    Its operands are the residuals, i.e. the arrays that `forward` kept for `backward`, then the leaves of the
    arguments, then the tangents of the leaves that have one.

    rules, call: as in_both_modes got them. arguments, kept, results: the tree structures of the arguments, the
    residuals and the results. moving: the indices of the arguments' leaves whose tangents are not 0. avals: of the
    results' leaves.
    """

    rules: _Rules
    call: Any
    arguments: Any
    kept: Any
    results: Any
    moving: tuple[int, ...]
    avals: tuple[Any, ...]

    @property
    def known(self) -> int:
        """The number of operands that are not tangents: the residuals and the arguments' leaves."""
        return self.kept.num_leaves + self.arguments.num_leaves

    def push(self, *operands: Any) -> list[Any]:
        """The tangents of the results' leaves, by forward mode through `plain`.

        operands: the residuals, the leaves of the arguments, and the tangents of the leaves with a tangent, in this
        order.
        """
        leaves, directions = list(operands[self.kept.num_leaves : self.known]), operands[self.known :]
        plain = lambda *given: jax.tree.leaves(self.rules.plain(self.call, *jax.tree.unflatten(self.arguments, given)))
        return _pushed_through(plain, leaves, self.moving, directions)[1]

    def pull(self, known: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """The cotangents of the moving leaves, by `backward`; None for 0.

        known: the operands that are not tangents. cotangents: of the results' leaves; they may be symbolic zeros.
        """
        if not self.rules.symbolic_zeros:
            cotangents = [ad.zeros_like_aval(x.aval) if _is_zero(x) else x for x in cotangents]
        kept = jax.tree.unflatten(self.kept, known[: self.kept.num_leaves])
        found = self.rules.backward(self.call, kept, jax.tree.unflatten(self.results, cotangents))
        places = jax.tree.unflatten(self.arguments, range(self.arguments.num_leaves))
        of_places: dict[int, Any] = {}

        def place(gradient: Any, of: Any) -> None:
            of_places.update(dict.fromkeys(jax.tree.leaves(of), gradient))

        jax.tree.map(place, tuple(found), tuple(places), is_leaf=lambda x: x is None)
        return [of_places[i] for i in self.moving]


def _pushed_through(
    function: Callable[..., list[Any]], leaves: list[Any], moving: Sequence[int], directions: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """(function(*leaves), its tangents) by jax.jvp. directions: the tangents of the leaves with the indices
    `moving`.
    """

    def of_moving(*moved: Any) -> list[Any]:
        given = list(leaves)
        for i, x in zip(moving, moved, strict=True):
            given[i] = x
        return function(*given)

    return jax.jvp(of_moving, [leaves[i] for i in moving], list(directions))


def with_plain_derivative(function: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns function(call, *arguments), whose derivatives are JAX's derivatives of plain(call, *arguments).

    Both must compute the same values. Use it for functions that JAX differentiates only in part, such as
    jax.custom_batching.custom_vmap.
    """
    wrapped = jax.custom_jvp(function, nondiff_argnums=(0,))

    def rule(call: Any, primals: Any, tangents: Any) -> tuple[Any, Any]:
        leaves, arguments = jax.tree.flatten(_of_jax(primals))
        directions = jax.tree.leaves(tangents, is_leaf=_is_zero)
        moving = _moving(directions)
        structures: list[Any] = []

        def of_leaves(*given: Any) -> list[Any]:
            found, structure = jax.tree.flatten(plain(call, *jax.tree.unflatten(arguments, given)))
            structures.append(structure)
            return found

        pair = _pushed_through(of_leaves, leaves, moving, [directions[i] for i in moving])
        results, found = (jax.tree.unflatten(structures[-1], x) for x in pair)
        return results, found

    wrapped.defjvp(under_defaults(rule), symbolic_zeros=True)
    return lambda call, *arguments: wrapped(call, *_of_jax(arguments))


def straight_through(
    run: Callable[..., Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    plain: Callable[..., Any],
    plain_gradients: Callable[..., Any],
) -> Callable[..., Any]:
    """in_both_modes of a function run(call, inputs) that rounds its inputs, with the identity as rounding's derivative.

    run, forward, backward: as in_both_modes takes them. plain(call, inputs): the values of run; JAX's derivatives of it
    are derivatives of run. plain_gradients(call, inputs, cotangent): the gradients of plain.
    """
    rounded_forward = with_plain_derivative(
        forward,
        lambda call, inputs: (plain(call, inputs), forward(call, jax.tree.map(jax.lax.stop_gradient, inputs))[1]),
    )
    rounded_backward = with_plain_derivative(
        lambda call, inputs, kept, cotangent: backward(call, kept, cotangent),
        lambda call, inputs, kept, cotangent: plain_gradients(call, inputs, cotangent),
    )

    def with_inputs(call: Any, inputs: Any) -> tuple[Any, Any]:
        out, kept = rounded_forward(call, inputs)
        return out, (inputs, kept)

    return in_both_modes(run, with_inputs, lambda call, kept, x: rounded_backward(call, *kept, x), plain=plain)


def _moving(directions: Sequence[Any]) -> tuple[int, ...]:
    """The indices of the tangents that are not 0: neither symbolic zeros nor float0."""
    return tuple(i for i, x in enumerate(directions) if not _is_zero(x) and x.dtype != jax.dtypes.float0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mapped:
    """A linear function (_Linear or _Mapped) under vmap, with the same methods.

    size: the length of the mapped axis. axes: the mapped axis of each operand that is no tangent, None if it has none.
    All tangents and results have the mapped axis in front.
    """

    linear: Any
    size: int
    axes: tuple[Any, ...]

    @property
    def known(self) -> int:
        return self.linear.known

    @property
    def avals(self) -> tuple[Any, ...]:
        return tuple(unmapped_aval(self.size, 0, x) for x in self.linear.avals)

    def push(self, *operands: Any) -> list[Any]:
        axes = *self.axes, *[0] * (len(operands) - self.known)
        return jax.vmap(lambda *operands: self.linear.push(*operands), axes, axis_size=self.size)(*operands)

    def pull(self, known: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        given = [i for i, x in enumerate(cotangents) if not _is_zero(x)]

        def one(known: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
            all_of: list[Any] = [SymbolicZero(aval) for aval in self.linear.avals]
            for i, x in zip(given, moved, strict=True):
                all_of[i] = x
            return self.linear.pull(known, all_of)

        return jax.vmap(one, (list(self.axes), 0), axis_size=self.size)(list(known), [cotangents[i] for i in given])


linear_p = Primitive("both_modes_tangents")
linear_p.multiple_results = True


@under_defaults
def _push(*operands: Any, linear: Any) -> list[Any]:
    return linear.push(*operands)


def _derivative_of_push(primals: Any, tangents: Any, *, linear: Any) -> tuple[Any, Any]:
    moving = [i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero)]
    push = functools.partial(_push, linear=linear)
    return _pushed_through(push, list(primals), moving, [tangents[i] for i in moving])


def _transposed(cotangents: Any, *operands: Any, linear: Any) -> list[Any]:
    known, directions = operands[: linear.known], operands[linear.known :]
    given = [SymbolicZero(x.aval) if isinstance(x, ad.Zero) else x for x in cotangents]
    found = linear.pull(known, given)
    zero = lambda x: ad.Zero(x.aval) if ad.is_undefined_primal(x) else None
    of_directions = [zero(of) if x is None or _is_zero(x) else x for x, of in zip(found, directions, strict=True)]
    return [*[None] * len(known), *of_directions]


def _mapped(operands: Any, axes: Any, *, linear: Any) -> tuple[Any, Any]:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    known = linear.known
    in_front = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands[known:], axes[known:], strict=True)
    ]
    mapped = _Mapped(linear=linear, size=size, axes=tuple(axes[:known]))
    found = linear_p.bind(*operands[:known], *in_front, linear=mapped)
    return found, [0] * len(found)


linear_p.def_impl(_push)
linear_p.def_abstract_eval(lambda *_, linear: list(linear.avals))
ad.primitive_jvps[linear_p] = _derivative_of_push
ad.primitive_transposes[linear_p] = _transposed
batching.primitive_batchers[linear_p] = _mapped
mlir.register_lowering(linear_p, mlir.lower_fun(_push, multiple_results=True))
