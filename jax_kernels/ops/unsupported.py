"""Reasons why an implementation cannot serve a request on its device, for the implementation tables of all ops."""

from jax_kernels.dispatch import Request, interpreting
from jax_kernels.pallas.mosaic import interpreter

OUT_OF_REACH = "Pallas' Triton does not reach all of an array of 2 to 4 GiB whose elements have one byte"


def no_gpu(request: Request) -> str | None:
    """The reason for a kernel that needs a GPU or Pallas' interpreter, or None."""
    if request.device.compute_capability is not None or interpreting():
        return None
    return f"it needs an NVIDIA GPU, and this runs on {request.device.name} (JAX_KERNELS_INTERPRET=1 interprets it)"


def not_hopper(request: Request) -> str | None:
    capability = request.device.compute_capability
    if capability is None or capability[0] == 9:
        return None
    return f"it needs Hopper (compute capability 9.0), and {request.device.name} is {request.device.architecture}"


def below(request: Request, capability: tuple[int, int]) -> str | None:
    """The reason for an implementation that needs at least this compute capability, or None."""
    got = request.device.compute_capability
    if got is None or got >= capability:
        return None
    wanted, found = (".".join(map(str, x)) for x in (capability, got))
    return f"it needs compute capability {wanted}, and {request.device.name} has {found}"


def no_mosaic(request: Request) -> str | None:
    """The reason for a Mosaic kernel, or None: no_gpu, or JAX's unmodified interpreter, which cannot run the kernel."""
    if request.device.compute_capability is None and interpreting() and not interpreter.INTERPRETED:
        return "JAX's interpreter of Mosaic lacks wgmma with register operands (the tests add it)"
    return no_gpu(request)
