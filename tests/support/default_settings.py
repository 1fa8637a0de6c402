"""PyTorch's default device and default dtype, and the results of a call under them."""

import contextlib

import torch


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS = {"meta": lambda: torch.device("meta"), "float64": lambda: default_dtype(torch.float64)}


def results(call, tensors):
    out = call(*tensors)
    out = next(iter(out.values()))[0] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out
    learned = [x for x in tensors if x.requires_grad]
    return [out, *(torch.autograd.grad(out.sin().sum(), learned) if out.requires_grad else [])]
