"""Why an implementation cannot serve a request on its device: what the ops' implementation tables share."""

from jax_kernels.dispatch import Request, interpreting
from jax_kernels.pallas.mosaic import interpreter

OUT_OF_REACH = "Pallas' Triton does not reach all of an array of 2 to 4 GiB whose elements have one byte"


def no_gpu(request: Request) -> str | None:
    """For a kernel, which a GPU runs, or Pallas' interpreter."""
    if request.device.compute_capability is not None or interpreting():
        return None
    return f"it needs an NVIDIA GPU, and this runs on {request.device.name} (JAX_KERNELS_INTERPRET=1 interprets it)"


def not_hopper(request: Request) -> str | None:
    capability = request.device.compute_capability
    if capability is None or capability[0] == 9:
        return None
    return f"it needs Hopper (compute capability 9.0), and {request.device.name} is {request.device.architecture}"


def below(request: Request, capability: tuple[int, int]) -> str | None:
    """For what needs at least this compute capability."""
    got = request.device.compute_capability
    if got is None or got >= capability:
        return None
    wanted, found = (".".join(map(str, x)) for x in (capability, got))
    return f"it needs compute capability {wanted}, and {request.device.name} has {found}"


def no_mosaic(request: Request) -> str | None:
    """For a Mosaic kernel: no_gpu, and that JAX's interpreter as it comes cannot run it."""
    if request.device.compute_capability is None and interpreting() and not interpreter.INTERPRETED:
        return "JAX's interpreter of Mosaic lacks wgmma with register operands (the tests add it)"
    return no_gpu(request)
