"""The base of every op: a checked request becomes a plan, and the planned call runs under jit and vmap.

An op is a public function and a `PlannedOp`. To write one:

1. a frozen dataclass derived from dispatch.Request: the call without its arrays. Its SIZES name the lengths of axes:
   if one of them is 0, dispatch takes "xla", whose code has to support empty arrays;
2. `check(...)`, which takes the function's arguments by name, raises for bad input, and returns (request, arrays);
3. a table of `Implementation`s, whose kernels are wrapped by `kernel`;
4. `OP = PlannedOp(name, table, order)`, `@OP.explained_by(check)` above the function, and in it

       request, arrays = check(query=query, ...)
       return batched(OP, OP.call(request, options, implementation))(*arrays)

`OP.tuned` takes the call and its arrays before they run: then jax_kernels.tune can time other implementations, and
jax_kernels.analyze count the call.

An op that calls other ops has no table of its own: `explained_as(plan)` gives it a plan that is made of their plans.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp

from jax_kernels import chunks, dispatch
from jax_kernels.chunks import Need
from jax_kernels.dispatch import Choice, Implementation, Order, Plan, Request
from jax_kernels.spelling import add_hint
from jax_kernels.tracing.derivatives import NO_SECOND, without_derivative

__all__ = [
    "MOST_CALLS",
    "Blocks",
    "PlannedCall",
    "PlannedOp",
    "TunableCall",
    "batched",
    "composed",
    "explained_as",
    "inside_composed",
    "jitted_in_eager_shard_map",
    "join_batch",
    "kernel",
    "merged_vmap",
    "named_arguments",
    "no_calls",
    "recorded_plans",
    "split_batch",
    "tuned_by",
    "with_batch",
]

# The number of last used calls whose functions are cached: a call holds its caller's functions and their closed-over
# arrays.
MOST_CALLS = 256

_TUNER: contextvars.ContextVar["Tuner | None"] = contextvars.ContextVar("jax_kernels_tuner", default=None)
_RECORD: contextvars.ContextVar[list[Plan] | None] = contextvars.ContextVar("jax_kernels_plans", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """The block sizes and other launch options of an op's kernels, from the block specs.

    forward, backward: for the kernels of each direction; backward is None for an op without gradients. core_count: the
    number of SMs that a persistent kernel fills. array_gradients: for the separate kernels that compute the gradients
    of a bias, or of the arrays of a score_mod, if the backward does not; else None.
    """

    forward: Any
    backward: Any = None
    core_count: int
    array_gradients: Any = None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PlannedCall:
    """The static half of a planned call: everything except the arrays. It is hashable, so it can key a jit cache.

    implementation: its name. config: the Blocks, None for an implementation without blocks. options: hashable constants
    of the op's kernels, of a type that the op defines. interpret: whether kernels run in Pallas' interpreter.
    """

    implementation: str
    config: Any
    options: Any
    interpret: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TunableCall:
    """A planned call with its arrays, which tuning runs again with other implementations and blocks.

    named: the implementation that the caller named, or None. run(call, inputs): the results of a PlannedCall. moving:
    the fields of `inputs` whose gradients are timed; () if only the forward is. lengths: for fields of integers whose
    values are traced, the integer by which tuning replaces them; others become 0. reason: why the call cannot be
    tuned, or None. parts: of an op that is made of calls of another op, (request, arrays without values) of each of
    these; then plan() is the op's plan, `call` is the first argument of `run`, and tuning leaves the call alone.
    axis_name: the mesh axis of the jax.shard_map in which the call must run; None if it can run alone.
    """

    op: "PlannedOp"
    request: Request
    call: Any
    named: str | None
    run: Callable[[Any, Any], Any]
    inputs: Any
    moving: tuple[str, ...] = ()
    lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    reason: str | None = None
    parts: tuple[tuple[Request, Any], ...] = ()
    plan: Callable[[], Plan] | None = None
    axis_name: str | None = None


class Tuner(Protocol):
    """The object that jax_kernels.tune, or jax_kernels.analyze, puts into `tuned_by`.

    lists_composed: whether a composed call is recorded, and not the calls that it is made of.
    """

    lists_composed: bool

    def tuned(self, tunable: TunableCall) -> tuple[PlannedCall, Any]:
        """Times or records the call. Returns its PlannedCall, in tuning with the fastest blocks, and its inputs."""

    def composed(self, tunable: TunableCall) -> Any:
        """Records a call of an op that is made of other calls. Returns its inputs."""


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedOp:
    """An op: its name in messages, its implementations by name, and the order in which they are tried.

    order(request): (names in this order, words for the source of the order). need(request, implementation): the memory
    of a call, for an op that can run in chunks.
    """

    name: str
    implementations: Mapping[str, Implementation]
    order: Order
    need: Callable[[Any, str], Need] | None = None

    def plan(self, request: Request, implementation: str | None = None) -> Plan:
        """The Plan for a request, with its reasons in words.

        implementation: the name that the user asked for, or None. Raises ValueError for an unknown name, and
        NotImplementedError if this implementation does not support the request.
        """
        plan = dispatch.plan_of(request, self.implementations, self.order, implementation)
        if self.need is None:
            return plan
        found = chunks.why(self.need(request, plan.implementation), request.device)
        return plan if found is None else dataclasses.replace(plan, chunks=found)

    def choose(self, request: Request, implementation: str | None = None) -> Choice:
        """The implementation and its blocks for a request, without reasons in words. Raises the errors of `plan`.

        Inside recorded_plans(), the whole plan is recorded too.
        """
        record = _RECORD.get()
        if record is not None:
            record.append(self.plan(request, implementation))
        return dispatch.choose(request, self.implementations, self.order, implementation)

    def call(self, request: Request, options: Any, implementation: str | None = None) -> PlannedCall:
        """The PlannedCall for a request. Raises the errors of `plan`.

        options: hashable constants of the op's kernels. Kernels are interpreted if JAX_KERNELS_INTERPRET is set now.
        """
        choice = self.choose(request, implementation)
        return PlannedCall(choice.implementation, choice.config, options, dispatch.interpreting())

    def tuned[Call: PlannedCall](
        self, call: Call, request: Request, run: Callable[[Any, Any], Any], inputs: Any, named: str | None, **more: Any
    ) -> tuple[Call, Any]:
        """Returns (call, inputs), the arguments of `run`.

        Inside jax_kernels.tune, the call has the implementation and the blocks that were the fastest. Inside
        jax_kernels.analyze, the inputs are marked. named: the implementation that the caller named, or None. run, more:
        fields of TunableCall.
        """
        tuner = _TUNER.get()
        if tuner is None:
            return call, inputs
        tunable = TunableCall(op=self, request=request, call=call, named=named, run=run, inputs=inputs, **more)
        return cast(tuple[Call, Any], tuner.tuned(tunable))

    def explained_by(self, check: Callable[..., tuple[Any, ...]]) -> Callable[[Any], Any]:
        """A decorator that gives a public function the attribute `plan`, which jax_kernels.explain calls.

        check: takes the function's arguments by name, raises for bad input, and returns a tuple that starts with the
        request. One of the arguments is `implementation`.
        """

        def plan(**arguments: Any) -> Plan:
            request, *_ = check(**arguments)
            return self.plan(request, arguments["implementation"])

        return explained_as(plan)


def explained_as(plan: Callable[..., Plan]) -> Callable[[Any], Any]:
    """A decorator that gives a public function the attribute `plan`, which jax_kernels.explain calls.

    plan: takes the function's arguments by name, with defaults filled in, and returns the Plan.
    """

    def decorate(function: Any) -> Any:
        rest = [name for name, x in inspect.signature(function).parameters.items() if x.kind is x.VAR_KEYWORD]

        def of_call(*args: Any, **kwargs: Any) -> Plan:
            arguments = named_arguments(function.__name__, function, args, kwargs)
            more = [arguments.pop(name, {}) for name in rest]
            return plan(**arguments, **dict(*more))

        function.plan = of_call
        return function

    return decorate


def composed(make: Callable[[], TunableCall], inputs: Any) -> Any:
    """The inputs of a call that is made of other calls; inside jax_kernels.analyze, they are marked.

    make: makes the TunableCall, with these inputs.
    """
    tuner = _TUNER.get()
    return inputs if tuner is None else tuner.composed(make())


@contextlib.contextmanager
def inside_composed() -> Iterator[None]:
    """A context for the parts of a composed call. jax_kernels.analyze lists only the composed call."""
    tuner = _TUNER.get()
    with tuned_by(None if tuner is None or tuner.lists_composed else tuner):
        yield


@contextlib.contextmanager
def tuned_by(tuner: Tuner | None) -> Iterator[None]:
    """A context in which PlannedOp.tuned gives its calls to the tuner; with None they are left as they are."""
    token = _TUNER.set(tuner)
    try:
        yield
    finally:
        _TUNER.reset(token)


@contextlib.contextmanager
def recorded_plans() -> Iterator[list[Plan]]:
    """A context that yields a list. Each Plan that PlannedOp.choose makes inside the context is appended to it."""
    plans: list[Plan] = []
    token = _RECORD.set(plans)
    try:
        yield plans
    finally:
        _RECORD.reset(token)


def jitted_in_eager_shard_map[Function: Callable[..., Any]](function: Function) -> Function:
    """A decorator that runs function(call, arrays) under jit if it is called in an untraced (eager) shard_map.

    Without jit, JAX does not support a custom_vjp with symbolic zeros in such a shard_map, and its error for forward
    mode has another text. All other calls are not changed. call: hashable, a static argument of the jit.
    """
    jitted = jax.jit(function, static_argnums=0)

    @functools.wraps(function)
    def run(call: Any, inputs: Any) -> Any:
        is_eager = any(map(_is_of_eager_shard_map, jax.tree.leaves(inputs)))
        return jitted(call, inputs) if is_eager else function(call, inputs)

    return cast(Function, run)


def _is_of_eager_shard_map(x: Any) -> bool:
    """Whether x is an array inside a jax.shard_map that is not under jit."""
    while hasattr(x, "primal"):  # an array under differentiation
        x = x.primal
    return type(x).__name__ == "ShardMapTracer"


def named_arguments(op: str, function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of function(*args, **kwargs) by name, with the function's defaults.

    op: the name that messages show. Raises TypeError if the function cannot be called with these arguments.
    """
    signature = inspect.signature(function)
    positional = [name for name, x in signature.parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
    if len(args) > len(positional):
        names = ", ".join(positional)
        raise TypeError(f"{op} takes {len(positional)} positional arguments ({names}), got {len(args)}")
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        renamed = TypeError(f"{op} {error}")
        add_hint(renamed, function)
        raise renamed from None
    bound.apply_defaults()
    return dict(bound.arguments)


def kernel(function: Callable[..., Any], direction: str = "forward", *, once: bool = False) -> Callable[..., Any]:
    """Wraps a kernel's function: the result takes config=Blocks and passes on the blocks of one direction.

    function: takes (*args, config=the blocks of `direction`, core_count=..., ...). direction: the field of Blocks:
    "forward", "backward" or "array_gradients". once: whether equal calls in a program are traced and lowered only once.
    Otherwise each call would be compiled again under another name, because JAX numbers the kernels of a program. With
    once=True, the positional arguments must be (arrays, options, *arrays), where options is hashable.

    Pallas has no derivative of such kernels: differentiating the result raises NotImplementedError with the reason.
    """
    if once:
        function = jax.jit(function, static_argnums=1, static_argnames=("config", "core_count", "interpret"))

    def run(*args: Any, config: Blocks, **rest: Any) -> Any:
        args, rest = without_derivative((args, rest), NO_SECOND)
        blocks = {"config": getattr(config, direction), "core_count": config.core_count}
        with jax.enable_x64(False):  # the kernels' indices are int32, and a Python int in them must not be int64
            return function(*args, **blocks, **rest)

    return run


def plain(function: Callable[..., Any], compiles: Callable[[Any], bool] = lambda options: True) -> Callable[..., Any]:
    """Wraps the "xla" function of an op: an eager call runs as one program, not as a program for each operation.

    function: takes (inputs, options, *arrays, config=, interpret=), with hashable options. compiles(options): whether
    the options may be part of a program. A function that the caller makes anew for each call would be compiled in each.
    Under jit the wrapper has no effect.
    """
    compiled = jax.jit(function, static_argnums=1, static_argnames=("config", "interpret"), inline=True)

    def run(inputs: Any, options: Any, *arrays: Any, **rest: Any) -> Any:
        return (compiled if compiles(options) else function)(inputs, options, *arrays, **rest)

    return run


def join_batch(size: int, x: jax.Array, has_axis: bool, length: int | None = None) -> jax.Array:
    """[size * batch, ...]: the array of `size` calls under a vmap, merged for one call with a larger batch.

    x: [size, batch, ...] if has_axis, else [batch, ...], which all calls share. length: the length of the batch, to
    which a batch axis of length 1 is broadcast; None is x's own.
    """
    x = x if has_axis else x[None]
    length = x.shape[1] if length is None else length
    return jnp.broadcast_to(x, (size, length, *x.shape[2:])).reshape(size * length, *x.shape[2:])


def split_batch(size: int, x: jax.Array) -> jax.Array:
    """[size * batch, ...] -> [size, batch, ...], for a size above 0: the inverse of join_batch."""
    length = x.shape[0] // size if isinstance(x.shape[0], int) else -1
    return x.reshape(size, length, *x.shape[1:])


def no_calls(function: Callable[..., Any], mapped: Any, arrays: Any) -> tuple[Any, Any]:
    """The value of a vmap rule for a mapped axis of length 0: (results [0, ...] of function(*arrays), True for each).

    arrays: the arguments under vmap. mapped: for each of their leaves, whether it has the mapped axis. Nothing is
    computed.
    """
    of_one = lambda x, has_axis: jax.ShapeDtypeStruct(x.shape[1:] if has_axis else x.shape, x.dtype)
    results = jax.eval_shape(function, *jax.tree.map(of_one, tuple(arrays), tuple(mapped)))
    return jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), results), jax.tree.map(lambda _: True, results)


def with_batch(size: int, x: jax.Array, has_axis: bool) -> jax.Array:
    """[size, ...]: the array of `size` calls under a vmap. x: [size, ...] if has_axis, else [...], which all share."""
    return x if has_axis else jnp.broadcast_to(x, (size, *x.shape))


def _join_all(size: int, batched: Any, arrays: Any) -> Any:
    return jax.tree.map(functools.partial(join_batch, size), arrays, batched)


def merged_vmap(function: Callable[..., Any], join: Callable[[int, Any, Any], Any] = _join_all) -> Callable[..., Any]:
    """The function of arrays, with a rule that merges a vmap into the batch, the first axis of each array and result.

    join(size, mapped, arrays): merges the arrays of `size` calls into the arrays of one call. mapped: for each array,
    whether it has the mapped axis, which is then the first.
    """
    wrapped = jax.custom_batching.custom_vmap(function)

    @wrapped.def_vmap
    def _(size: int, mapped: Any, *arrays: Any) -> Any:
        if size == 0:
            return no_calls(wrapped, mapped, arrays)
        results = wrapped(*join(size, tuple(mapped), arrays))
        return jax.tree.map(functools.partial(split_batch, size), results), jax.tree.map(lambda _: True, results)

    return wrapped


@functools.lru_cache(maxsize=MOST_CALLS)
def batched(
    op: PlannedOp,
    call: PlannedCall,
    join: Callable[[int, Any, Any], Any] = _join_all,
    share: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> Callable[..., Any]:
    """A function from a call's arrays to the results of its implementation's forward. A vmap is merged into the batch.

    The function takes the op's arrays in the op's order; an array that the call lacks is None. join: of merged_vmap.
    share: wraps a kernel's function so that devices shard its work; the function of "xla" is not wrapped.
    """
    forward = op.implementations[call.implementation].forward

    def run(*arrays: Any) -> Any:
        return forward(*arrays, options=call.options, config=call.config, interpret=call.interpret)

    return merged_vmap(run if call.implementation == "xla" else share(run), join)
