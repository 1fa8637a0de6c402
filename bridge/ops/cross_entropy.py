"""linear_cross_entropy on PyTorch tensors."""

import torch

from jax_kernels.bridge.interop.arguments import dtensors
from jax_kernels.bridge.interop.arguments.autocast import under_autocast
from jax_kernels.bridge.interop.arguments.plain_numbers import in_int32
from jax_kernels.bridge.jax_functions.api import JaxOp
from jax_kernels.bridge.jax_functions.argument_checks import check_optional_tensors, check_tensors
from jax_kernels.ops.cross_entropy import linear_cross_entropy as ops
from jax_kernels.spelling import with_name_hints

__all__ = ["linear_cross_entropy"]

_linear_cross_entropy = JaxOp(ops.linear_cross_entropy, is_opaque=True)


@with_name_hints
def linear_cross_entropy(
    x: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    reduction: str = "none",
    transpose_w: bool = False,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -1,
    precision: str | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """jax_kernels.linear_cross_entropy on PyTorch tensors: the cross-entropy of each token under the logits x @ w, with
    gradients of x, w and weights. The logits are never all in memory.

    With reduction="mean", x [N, D], and -100 for the targets that do not count, it equals
    torch.nn.functional.cross_entropy((x @ w).float(), targets). Autocast casts x and w. See bridge.from_jax for
    torch.compile and CUDA graphs.

    Args:
      x: [..., D], bfloat16, float16 or float32.
      w: [D, V], or [V, D] with transpose_w, like torch.nn.Linear's weight, on x's device; rounded to x's dtype for the
        matmuls.
      targets: int64 or another integer dtype, [...]: the ids. Tokens with a target below 0, such as -100, do not count.
        The host does not read them: a target of V or more gives NaN.
      weights: [...], the factor of each token's loss, or None. With reduction="mean" the sum is divided by the sum of
        the weights of the tokens that count.
      reduction: "none", "sum" or "mean". With "sum" and "mean" the forward computes the gradients, if any are needed.
        The mean of no token is 0, where PyTorch's is NaN.
      transpose_w: whether w is [V, D].
      softcap, label_smoothing, z_loss, precision: as in jax_kernels.linear_cross_entropy.
      ignore_index: tokens with this target do not count either.
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call.

    Returns:
      float32 [...], or a scalar with reduction="mean" or "sum".

    It raises the errors of jax_kernels.linear_cross_entropy, or of bridge.from_jax if they differ.
    """
    targets = in_int32(targets)
    call = _linear_cross_entropy.lookup(
        (x, w, targets, weights),
        (reduction, transpose_w, softcap, label_smoothing, z_loss, ignore_index, precision, implementation),
    )
    if call and call.cached:
        return call.cached(call.tensors)
    check_tensors(x=x, w=w, targets=targets)
    check_optional_tensors(weights=weights)
    dtensors.refuse("linear_cross_entropy", x=x, w=w, targets=targets, weights=weights)
    x, w = under_autocast(x), under_autocast(w)
    return _linear_cross_entropy.run(
        call,
        x,
        w,
        targets,
        weights=weights,
        reduction=reduction,
        transpose_w=transpose_w,
        softcap=softcap,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        ignore_index=ignore_index,
        precision=precision,
        implementation=implementation,
    )
