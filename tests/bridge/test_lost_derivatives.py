"""Every float tensor of a call has a gradient, or the call raises: no derivative is lost in silence."""

import pytest
import torch

from jax_kernels import bridge
from tests.support.cases.option_values import CASES

WITHOUT = {"decode_attention", "flash_attention_fp8", "quantize", "quantize_fp8"}


def calls_of(op):
    """Yields (the name of a float tensor, a call's arguments), each tensor once."""
    given, options = CASES[op]
    seen = set()
    for name, values in {None: (None,), **options}.items():
        others = {}
        if len(values) == 2 and isinstance(values[1], dict):
            values, others = values
        for value in values:
            call = given | others | ({} if name is None else {name: value})
            for tensor, x in call.items():
                if isinstance(x, torch.Tensor) and x.is_floating_point() and tensor not in seen:
                    seen.add(tensor)
                    yield tensor, call


def is_learned(function, name, call):
    """Whether the tensor `name` has a gradient of the results. Calls the function with and without gradients before."""
    call = {key: x.detach() if isinstance(x, torch.Tensor) else x for key, x in call.items()}
    function(**call)
    call[name] = call[name].clone().requires_grad_()
    with torch.no_grad():
        function(**call)
    found = function(**call)
    found = [x for x in (found if isinstance(found, tuple) else (found,)) if isinstance(x, torch.Tensor)]
    total = sum(x.float().sin().sum() for x in found if x.requires_grad)
    return bool(total) and torch.autograd.grad(total, call[name], allow_unused=True)[0] is not None


@pytest.mark.parametrize("op", sorted({op.split()[0] for op in CASES}))
def test_each_tensor_has_a_gradient_or_an_error(op):
    function = getattr(bridge, op)
    for name, call in calls_of(op):
        is_stored = call.get(name.removesuffix("_scale"), call[name]).dtype == torch.float8_e4m3fn
        if op in WITHOUT and name != "scale":
            with pytest.raises(NotImplementedError, match=r"no gradient|no derivative"):
                is_learned(function, name, call)
        elif name.endswith("_scale") and is_stored:
            with pytest.raises(NotImplementedError, match=f"^{name}: got a tensor that requires"):
                is_learned(function, name, call)
        elif not is_stored and op != "quantize":
            assert is_learned(function, name, call), name
