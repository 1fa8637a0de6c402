"""The loss curve of one contender of benchmarks/train.py, on the text that `jax-kernels demo` takes."""

import time
from typing import Any

__all__ = ["losses_of"]

# One part in 20 of the text is held out. `loss` is the mean of the last 50 steps.
HELD_OUT, LAST = 20, 50
LEARNING_RATE, WARMUP = 1e-3, 0.05


def losses_of(case: Any, config: Any) -> dict[str, Any]:
    """The row of a contender: its losses in nats per byte, step by step, by Trainer on the .py files of Python.

    The batches, the initial parameters and the schedule (AdamW, a linear warm-up over 5 % of the steps, then a cosine)
    depend on the case's sizes and seed alone, so that contenders differ in their arithmetic only. case: a TrainCase.
    config: its TransformerConfig.
    """
    import jax
    import numpy as np
    import optax

    from jax_kernels.cli.demo.data import standard_library_files
    from jax_kernels.models import TokenBatches, Trainer, make_mesh, read_text

    text = np.asarray(read_text(standard_library_files()))
    cut = len(text) - len(text) // HELD_OUT
    mesh = make_mesh(case.axes or {"data": 1})
    steps, warmup = case.curve, max(1, round(WARMUP * case.curve))
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, warmup, max(steps, warmup + 1))
    trainer = Trainer(config, optax.adamw(schedule, b2=0.95, weight_decay=0.1), mesh=mesh, seed=case.seed)
    batch, length = case.shape
    seen = TokenBatches(text[:cut], length, batch, mesh=mesh, seed=case.seed)
    held_out = TokenBatches(text[cut:], length, batch, mesh=mesh)
    found: list[Any] = []
    start = time.perf_counter()
    trainer.fit(seen, steps, on_step=lambda step, of: found.append((of["loss"], of["gradient_norm"])))
    losses, norms = (np.asarray(jax.device_get(column), np.float64) for column in zip(*found, strict=True))
    seconds = time.perf_counter() - start
    count = min(8, held_out.windows // batch)
    held = [trainer.evaluate(held_out[i]) for i in range(count)]
    return {
        "device": jax.devices()[0].device_kind,
        "devices": case.devices,
        "seed": case.seed,
        "batch": batch,
        "seq_len": length,
        "text_bytes": len(text),
        "steps": steps,
        "seconds": seconds,
        "losses": [round(float(x), 5) for x in losses],
        "gradient_norms": [round(float(x), 5) for x in norms],
        "loss": float(losses[-LAST:].mean()),
        "held_out_loss": float(np.mean(held)) if held else None,
    }
