"""Compares the demo's model with PyTorch: logits and input gradients of both modules on the trained weights."""

import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_kernels.cli.demo.training import Trainer, make_model
from jax_kernels.models import flat_parameters

__all__ = ["Comparison", "compare"]

HAS_TORCH = importlib.util.find_spec("torch") is not None
if HAS_TORCH:
    # Imported before JAX's first use, so that JAX leaves GPU memory for PyTorch.
    import jax_kernels.bridge  # noqa: F401

# Relative to the largest magnitude: the two modules sum float32 products in different orders.
TOLERANCE = 1e-4
MAX_LENGTH = 256


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of a comparison with PyTorch. text: for the terminal. numbers: for run.json.

    passed: whether all errors are within their bounds. It is True if there was no comparison, as without PyTorch;
    numbers is then {"left_out": the reason}.
    """

    passed: bool
    text: str
    numbers: dict[str, Any]


def compare(trainer: Trainer, windows: np.ndarray) -> Comparison:
    """The Comparison of logits and input gradients of the Flax and the PyTorch module on the trained weights, in
    float32.

    windows: uint8 [B, T + 1], bytes and the bytes that follow them.
    The input gradient is the gradient of the mean loss with respect to the input's token embeddings. Both modules run
    on a GPU if JAX does and PyTorch can; otherwise both run on the CPU.
    """
    if not HAS_TORCH:
        reason = "torch is not installed"
        return Comparison(True, f"[bold]PyTorch[/] comparison left out: {reason}", {"left_out": reason})
    from jax_kernels.bridge import nn as bridge_nn

    on_gpu = jax.default_backend() == "gpu" and bridge_nn.has_gpu()
    windows = windows[:, : MAX_LENGTH + 1]
    tokens, targets = windows[:, :-1].astype(np.int32), windows[:, 1:].astype(np.int32)
    # Without 8-bit matmuls, in which the last bit of a sum may change the next rounding by a whole step: the modules
    # would differ by percents.
    config = dataclasses.replace(
        trainer.settings.model, dtype="float32", implementation=None, remat=False, precision=None, scaling=None
    )
    device = jax.devices()[0] if on_gpu else jax.devices("cpu")[0]
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        ours = _flax(trainer, config, device, tokens, targets)
        theirs = _torch(flat_parameters(nnx.merge(trainer.graphdef, trainer.params)), config, on_gpu, tokens, targets)

    numbers: dict[str, Any] = {"device": "cuda" if on_gpu else "cpu", "tolerance": TOLERANCE, "tokens": tokens.size}
    lines = []
    for name, got, want in zip(("logits", "input gradients"), theirs, ours, strict=True):
        largest = float(np.abs(want).max())
        difference = float(np.abs(got - want).max())
        # A NaN on either side must fail.
        passed = difference <= TOLERANCE * largest
        numbers[name.replace(" ", "_")] = {"difference": difference, "largest": largest, "passed": passed}
        verdict = "" if passed else " [red]too far[/]"
        lines.append(f"{name} differ by {difference:.1e} at most (the largest is {largest:.1e}){verdict}")
    text = f"[bold]PyTorch[/] on the same weights, float32, {numbers['device']}: {'; '.join(lines)}; "
    text += f"tolerance {TOLERANCE:.0e} of the largest"
    return Comparison(all(numbers[name]["passed"] for name in ("logits", "input_gradients")), text, numbers)


def _flax(trainer, config, device, tokens, targets) -> tuple[np.ndarray, np.ndarray]:
    """(logits, gradient of the mean loss with respect to the token embeddings) of the Flax model, as NumPy arrays."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make_model(config, nnx.Rngs(0))))
    params, tokens, targets = jax.device_put((trainer.params, tokens, targets), device)

    @jax.jit
    def logits_and_gradient(params, tokens, targets):
        model = nnx.merge(graphdef, params)

        def loss(embeddings):
            logits = model(embeddings=embeddings)
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(), logits

        embeddings = model.embed_tokens(tokens).astype(jnp.float32)
        gradient, logits = jax.grad(loss, has_aux=True)(embeddings)
        return logits, gradient

    return jax.tree.map(np.asarray, logits_and_gradient(params, tokens, targets))


def _torch(parameters, config, on_gpu, tokens, targets) -> tuple[np.ndarray, np.ndarray]:
    """(logits, gradient of the mean loss with respect to the token embeddings) of the PyTorch model, as NumPy
    arrays.
    """
    from jax_kernels.bridge import nn

    return nn.logits_and_input_gradients(config, parameters, tokens, targets, device="cuda" if on_gpu else "cpu")
