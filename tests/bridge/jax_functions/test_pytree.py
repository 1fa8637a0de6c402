"""Constants of from_jax: a function sees each constant as given, whatever other constants it equals."""

import collections
import dataclasses
import enum
import math

import numpy as np
import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge.jax_functions import programs as module
from jax_kernels.bridge.jax_functions.pytree import flatten, unflatten


class Mode(enum.IntEnum):
    ON = 1


class Other(enum.IntEnum):
    ON = 1


class Name(enum.StrEnum):
    ON = "on"


@dataclasses.dataclass(frozen=True)
class Box:
    value: object


class Whole(int):
    pass


# In each group, all members are equal, or NaN.
EQUALS = {
    "one": (
        1,
        True,
        1.0,
        np.float32(1),
        np.float64(1),
        np.int32(1),
        np.bool_(True),
        Mode.ON,
        Other.ON,
        Whole(1),
        1 + 0j,
    ),
    "zero": (0, False, 0.0, -0.0, np.float32(0), np.float32(-0.0), complex(0, -0.0), complex(-0.0, 0)),
    "nan": (math.nan, np.float32("nan"), np.float64("nan"), complex(math.nan, 0)),
    "text": ("on", Name.ON),
    "dataclass": (Box(1), Box(True), Box(1.0), Box(Mode.ON), Box(np.float32(1))),
    "dataclass of zeros": (Box(0.0), Box(-0.0), Box((0.0,)), Box((-0.0,))),
    "dataclass of a dataclass": (Box(Box(1)), Box(Box(True))),
    "frozenset": (frozenset({1}), frozenset({True}), frozenset({1.0})),
    "tuple": ((1,), (True,), [1], [1.0]),
    "dict": ({1: 0.0}, {True: 0.0}, {1.0: 0.0}, {1: -0.0}),
}


@pytest.mark.usefixtures("no_programs")
@pytest.mark.parametrize("group", EQUALS)
def test_constants_keep_value_and_type(group):
    seen = []
    function = bridge.from_jax(lambda x, c: (seen.append(c), x)[1])
    constants = EQUALS[group]
    for constant in constants:
        before = len(seen)
        function(torch.ones(2), constant)
        assert len(seen) > before, constant
        assert repr(seen[-1]) == repr(constant)
        assert type(seen[-1]) is type(constant)
    count, plans = len(seen), len(module.PROGRAMS)
    for constant in constants:
        function(torch.ones(2), constant)
    assert (len(seen), len(module.PROGRAMS)) == (count, plans)


@pytest.mark.usefixtures("no_programs")
def test_nan_is_one_constant():
    plans = []
    function = bridge.from_jax(lambda x, c: x * c[0])
    for _ in range(3):
        assert function(torch.ones(2), [float("nan")]).isnan().all()
        plans.append(len(module.PROGRAMS))
    assert plans[0] == plans[2]


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_tensor_inside_a_constant_is_refused(needs_gradient):
    weight = torch.ones(2, requires_grad=needs_gradient)
    function = bridge.from_jax(lambda x, c: x)
    for constant in (Box(weight), Box([weight]), Box(Box((1, weight))), frozenset({weight})):
        with pytest.raises(TypeError, match=r"^args: got a torch\.Tensor inside of a (Box|frozenset), which is"):
            function(torch.ones(2), constant)


def test_containers_keep_their_gradients():
    weight = torch.ones(2, requires_grad=True)
    function = bridge.from_jax(lambda tree: tree["a"][0][1] * 2)
    (gradient,) = torch.autograd.grad(function({"a": [(torch.ones(2), weight)]}).sum(), weight)
    assert gradient.tolist() == [2, 2]


def test_unflatten_inverts_flatten():
    tree = {"a": [1, (2.5, None)], 3: {"x": torch.ones(1), "y": (-0.0, "s", np.float32(2))}, None: 1j}
    leaves = []
    again = unflatten(flatten(tree, leaves, None), iter(leaves))
    assert repr(again) == repr(tree)


def test_scalars_are_graph_constants():
    torch._dynamo.reset()
    function = bridge.from_jax(lambda x, mode, number: x * number if mode is Mode.ON else -x * number)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x = torch.ones(2)
    for mode in (Mode.ON, 1):
        for number in (2, 2.5, 3, True):
            torch.testing.assert_close(compiled(x, mode, number), function(x, mode, number))
    assert function(x, Mode.ON, 2)[0] == 2
    assert function(x, 1, 2)[0] == -2


def test_ordered_dict_keeps_its_type():
    seen = []

    def function(x):
        seen.append((type(x), list(x)))
        return x

    result = bridge.from_jax(function)(collections.OrderedDict(b=torch.ones(2), a=torch.zeros(3)))
    assert set(map(repr, seen)) == {repr((collections.OrderedDict, ["b", "a"]))}
    assert (type(result), list(result)) == (collections.OrderedDict, ["b", "a"])
    assert type(bridge.from_jax(lambda x: {"a": x})(torch.ones(2))) is dict
