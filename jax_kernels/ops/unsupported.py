"""Reasons why an implementation cannot serve a request on its device, for the implementation tables of all ops."""

from jax_kernels.dispatch import Request, interpreting
from jax_kernels.pallas.mosaic import interpreter
from jax_kernels.pallas.triton import backend

OUT_OF_REACH = "Pallas' Triton does not reach all of an array of 2 to 4 GiB whose elements have one byte"


def no_gpu(request: Request) -> str | None:
    """The reason, in words for users, why a kernel cannot run on the request's device without a GPU.

    None if the device is a GPU, or if Pallas' interpreter is on.
    """
    if request.device.compute_capability is not None or interpreting():
        return None
    return f"it needs an NVIDIA GPU, and this runs on {request.device.name}"


def no_triton_gpu(request: Request) -> str | None:
    """`no_gpu` for a Triton kernel, with the setting that interprets the kernel."""
    reason = no_gpu(request)
    return None if reason is None else f"{reason} (JAX_KERNELS_INTERPRET=1 interprets it)"


def no_triton(request: Request) -> str | None:
    """The reason why no Triton kernel can run: this JAX lacks Pallas-Triton, or the request's GPU is too old.

    None if the GPU is new enough, and on a device without a GPU, which other checks refuse.
    """
    return below(request, (8, 0)) if backend.AVAILABLE else "this JAX has no Pallas-Triton"


def not_hopper(request: Request) -> str | None:
    """The reason why a Hopper kernel cannot run on the request's GPU; None on Hopper, and on a device without a GPU."""
    capability = request.device.compute_capability
    if capability is None or capability[0] == 9:
        return None
    return f"it needs Hopper (compute capability 9.0), and {request.device.name} is {request.device.architecture}"


def below(request: Request, capability: tuple[int, int]) -> str | None:
    """The reason, in words for users, why the request's GPU is too old for an implementation; None if it is not.

    capability: the least compute capability (major, minor) that the implementation needs. A device without a GPU gives
    None: other checks refuse it.
    """
    got = request.device.compute_capability
    if got is None or got >= capability:
        return None
    wanted, found = (".".join(map(str, x)) for x in (capability, got))
    return f"it needs compute capability {wanted}, and {request.device.name} has {found}"


def no_mosaic(request: Request) -> str | None:
    """The reason, in words for users, why a Mosaic kernel cannot run on the request's device; None if it can.

    It needs an NVIDIA GPU, or Pallas' interpreter with the tests' additions: JAX's own interpreter cannot run it.
    """
    if request.device.compute_capability is None and interpreting() and not interpreter.INTERPRETED:
        return "JAX's interpreter of Mosaic lacks wgmma with register operands (the tests add it)"
    return no_gpu(request)
