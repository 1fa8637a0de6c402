"""linear_cross_entropy: the loss of a language model's head, without the logits of all tokens."""

import jax
from jaxtyping import Array, Float, Int

from jax_kernels.ops.cross_entropy.checks import check
from jax_kernels.ops.cross_entropy.gradients import planned, reduced
from jax_kernels.ops.cross_entropy.implementations import OP
from jax_kernels.ops.sharding.explicit_axes import as_losses, with_explicit_axes
from jax_kernels.plain_numbers import with_plain_numbers
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["linear_cross_entropy"]


@with_plain_numbers("transpose_w", "softcap", "label_smoothing", "z_loss", "ignore_index")
@with_explicit_axes(as_losses)
@under_defaults
@jax.named_scope("linear_cross_entropy")
def linear_cross_entropy(
    x: Float[Array, "... D"],
    w: Float[Array, "D V"] | Float[Array, "V D"],
    targets: Int[Array, "..."],
    *,
    weights: Float[Array, "..."] | None = None,
    reduction: str = "none",
    transpose_w: bool = False,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -1,
    precision: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "..."]:
    """The cross-entropy of each token under the logits x @ w, in nats. The logits are never all in memory.

    Equivalent to the following JAX code, in float32 from the matmul on::

        logits = x @ (w.T if transpose_w else w)
        logits = softcap * jnp.tanh(logits / softcap)
        lse = logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        losses = lse - (1 - label_smoothing) * chosen - label_smoothing * logits.mean(-1) + z_loss * lse**2
        weights = jnp.where((targets >= 0) & (targets != ignore_index), weights, 0)
        none, sum, mean = weights * losses, (weights * losses).sum(), (weights * losses).sum() / weights.sum()

    With reduction="none" the backward computes the logits again, chunk by chunk of the vocabulary: four matmuls. With
    "mean" or "sum" a differentiated call computes the gradients in the forward, tile by tile of the tokens: three
    matmuls. It keeps both gradients for the backward. While it runs, "xla" has w's gradient in float32; "mosaic_gpu"
    adds up to four parts of it in w's dtype, and more parts in float32. The Triton kernels have four matmuls with each
    reduction.

    Args:
      x: [..., D], bfloat16, float16 or float32. Products of float32 arrays are exact.
      w: [D, V], or [V, D] with transpose_w, bfloat16, float16 or float32; rounded to x's dtype for the matmuls.
      targets: integers [...]: the ids, below V. Tokens with a target below 0, such as -1 or -100, do not count: their
        loss is 0, and so are their gradients. Their x must be finite, but their weights may be NaN.
      weights: [...], the factor of each token's loss, bfloat16, float16 or float32; None is 1. They have a gradient.
      reduction: "none", the losses of the tokens; "sum"; or "mean", the sum divided by the sum of the weights of the
        tokens that count. The mean of no token is 0.
      transpose_w: whether w is [V, D].
      softcap: caps the logits smoothly to (-softcap, softcap); None for no cap.
      label_smoothing: from 0 to 1, the part of the target's probability that is spread equally over all ids.
      z_loss: the factor of lse**2, which keeps the logits from drifting.
      ignore_index: tokens with this target do not count either. It may be V or more.
      precision: None, or "fp8": x and w are rounded to e4m3 for the matmul of the logits, with a scale for each token
        and for each entry of the vocabulary, as quantize(x, scaling="row") rounds. The logits have the derivatives of
        x @ w, without rounding, and the gradients' matmuls have x's dtype. Second derivatives of a loop over such a
        call raise NotImplementedError.
      implementation: "mosaic_gpu", "triton" or "xla"; None picks the device's first that supports the call. Only "xla"
        takes float32 x, and has derivatives in forward mode (jax.jvp) and second derivatives. "mosaic_gpu" runs on
        Hopper; it takes D and V in multiples of 64, with precision="fp8" D in multiples of 128, and with bfloat16 a
        softcap from 4 to 40. "triton" has no precision="fp8".

    Returns:
      float32 [...], or a scalar with reduction="mean" or "sum".

    Raises:
      TypeError: a dtype, or the type of an argument, is wrong.
      ValueError: shapes do not fit together, a number is out of range, or a target is V or more. A traced target of V
        or more gives NaN.
      NotImplementedError: a named implementation cannot serve this call; the message has the reason.

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (2024), arXiv:2411.09009.
    """
    request, arrays, options = check(
        x=x,
        w=w,
        targets=targets,
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
    call = OP.call(request, options, implementation)
    tuned = lambda inputs: OP.tuned(call, request, planned, inputs, implementation, moving=("x", "w"))
    return reduced(call, arrays.x, arrays.w, arrays.targets, arrays.weights, reduction, tuned)


OP.explained_by(check)(linear_cross_entropy)
