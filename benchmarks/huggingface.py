"""A Llama with random weights and this library's attention, against the same model with PyTorch's attention.

    PYTHONPATH=. JAX_PLATFORMS= python benchmarks/huggingface.py --output benchmarks/results/huggingface-h200.json

The contenders are the attentions of one model, in bfloat16, by transformers' names:

| contender | attention |
|---|---|
| jax_kernels | bridge.huggingface, its kernels launched directly |
| jax_kernels-growing | the same, decoding with bridge.huggingface.growing_cache |
| sdpa-cudnn | "sdpa", training only by cuDNN |
| sdpa | "sdpa", as PyTorch chooses |

Training: milliseconds per step, forward and backward of the next-token loss, by the host's clock around a queue of
steps. Decoding: milliseconds per token after a prompt, one sequence, greedy, by the host's clock around all tokens. A
ratio above 1 means faster than the named contender. A contender's error is the relative difference between its logits
and "sdpa"'s at the last token of the prompt.
"""

import contextlib
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from harness import report
from harness.process import refuse, say
from harness.timing import Contender, alternate, host_timer, speed_ratio
from rich.console import Console
from rich.table import Table
from typer import Exit, Option, run

# About 1.2 billion parameters each; the embedding is also the head.
SHAPES: dict[str, dict[str, Any]] = {
    "heads of 64": {"num_attention_heads": 32, "head_dim": 64, "vocab_size": 128256},  # Llama 3.2 1B
    "heads of 128": {"num_attention_heads": 16, "head_dim": 128, "vocab_size": 32000},
    "tiny": {
        "num_attention_heads": 4,
        "head_dim": 16,
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
    },
}
TRAINING = ("jax_kernels", "sdpa-cudnn", "sdpa")
DECODING = ("jax_kernels", "jax_kernels-growing", "sdpa")


def model_of(shape: str, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8}
    config = LlamaConfig(
        **sizes | SHAPES[shape], max_position_embeddings=131072, tie_word_embeddings=True, rope_theta=500000.0
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@contextlib.contextmanager
def attention_of(model: Any, contender: str) -> Iterator[None]:
    """Gives the model the attention of the contender inside the block."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from jax_kernels import bridge
    from jax_kernels.bridge.direct import route

    if contender.startswith("jax_kernels"):
        bridge.huggingface.replace_attention(model)
        with route.enabled():
            yield
    else:
        model.set_attn_implementation("sdpa")
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if contender == "sdpa-cudnn" else contextlib.nullcontext():
            yield


@contextlib.contextmanager
def attempt(contender: Contender) -> Iterator[None]:
    """contender.attempt(), but if PyTorch's attention has no kernel for a call, it is unavailable, not failed."""
    try:
        with contender.attempt():
            yield
    finally:
        if contender.status == "failed" and re.search("No (viable|available)", contender.reason):
            contender.give_up("unavailable", contender.reason)


def train(model: Any, tokens: Any) -> Callable[[str], Callable[[int], Any]]:
    """The step of training by a contender."""

    def of(contender: str) -> Callable[[int], Any]:
        def step(index: int) -> Any:
            model.zero_grad(set_to_none=True)
            with attention_of(model, contender):
                loss = model(tokens, labels=tokens, use_cache=False).loss
                loss.backward()
            return loss

        return step

    return of


def measure_training(model: Any, tokens: Any, rounds: int, seconds: float) -> list[Contender]:
    contenders, step = [], train(model.train(), tokens)
    for name in TRAINING:
        contender = Contender(name, "torch")
        contenders.append(contender)
        with attempt(contender):
            contender.start(step(name), plan="one step")
    alternate(contenders, host_timer, rounds=rounds, seconds=seconds, say=say)
    return contenders


def measure_decoding(
    model: Any, tokens: Any, steps: int, padding: int, rounds: int, write: Callable[[list[Contender]], None]
) -> list[Contender]:
    """padding: number of padding tokens at the front. write: called after each round with the contenders so far."""
    import torch

    contenders = [Contender(name, "torch", plan=f"{steps} tokens") for name in DECODING]
    model.eval()
    want = None
    with torch.no_grad():
        for contender in reversed(contenders):  # "sdpa" first: the others are compared with it
            with attempt(contender), attention_of(model, contender.name):
                logits = model(tokens, use_cache=False, logits_to_keep=1).logits.float()
                want = logits if want is None else want
                contender.judge(float((logits - want).norm() / want.norm()), "sdpa", tolerance=0.1)
                decode(model, tokens, 2, padding, contender.name)  # it compiles
        for _ in range(rounds):
            for contender in contenders:
                if contender.status == "ok":
                    with attempt(contender), attention_of(model, contender.name):
                        contender.times.append(decode(model, tokens, steps, padding, contender.name) * 1e3 / steps)
                        say(f"  {contender.name}: {contender.times[-1]:.3f} ms a token")
            write(contenders)
    return contenders


def decode(model: Any, tokens: Any, steps: int, padding: int, contender: str) -> float:
    """The seconds for `steps` new tokens after the prompt."""
    import torch
    from transformers import DynamicCache

    from jax_kernels.bridge import huggingface

    wait = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    growing = contender == "jax_kernels-growing"
    cache = huggingface.growing_cache(model) if growing else DynamicCache(config=model.config)
    counts = torch.ones(len(tokens), tokens.shape[1] + steps, dtype=torch.long, device=tokens.device)
    counts[:, :padding] = 0
    mask_of = lambda length: {"attention_mask": counts[:, :length]} if padding else {}
    length, options = tokens.shape[1], {"past_key_values": cache, "use_cache": True}
    new = model(tokens, logits_to_keep=1, **options, **mask_of(length)).logits.argmax(-1)
    wait()
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        new = model(new, **options, **mask_of(length + step)).logits.argmax(-1)
    wait()
    return time.perf_counter() - begin


def rows_of(contenders: list[Contender], facts: dict[str, Any]) -> list[dict[str, Any]]:
    times = {x.name: x.times for x in contenders if x.status == "ok" and x.times}
    rows = []
    for contender in contenders:
        row = {"contender": contender.name, **facts, **contender.findings}
        if contender.name in times:
            row["ratios"] = {name: speed_ratio(contender.times, theirs) for name, theirs in times.items()}
        rows.append(row)
    return rows


def show(results: dict[str, Any]) -> None:
    table = Table(
        "shape", "mode", "contender", "ms", "error", *TRAINING[1:], "status", title=results["environment"]["device"]
    )
    for row in results["rows"]:
        ratios = [f"{row['ratios'][name]:.3f}" if name in row.get("ratios", ()) else "" for name in TRAINING[1:]]
        ms = f"{row['median_ms']:.3f}" if "median_ms" in row else ""
        error = "" if row["error"] is None else f"{row['error']:.1e}"
        status = row["status"] + (f": {row['reason']}" if row["reason"] else "")
        table.add_row(row["shape"], row["mode"], row["contender"], ms, error, *ratios, status)
    Console(width=160).print(table)


def measure(
    output: Annotated[pathlib.Path | None, Option(help="JSON file")] = None,
    commit: Annotated[str | None, Option(help="commit to record if the tree has no .git")] = None,
    shapes: Annotated[str, Option(help="comma list of names of SHAPES")] = "heads of 64,heads of 128",
    modes: Annotated[str, Option(help="comma list of train and decode")] = "train,decode",
    length: Annotated[int, Option(min=2, help="tokens of a step, and of the prompt")] = 8192,
    steps: Annotated[int, Option(min=1, help="decoded tokens")] = 256,
    padding: Annotated[int, Option(min=0, help="padding tokens before the prompt for decoding")] = 0,
    rounds: Annotated[int, Option(min=1, help="turns of each contender")] = 3,
    seconds: Annotated[float, Option(help="seconds of a turn of training")] = 0.6,
    device: Annotated[str, Option(help="cuda or cpu")] = "cuda",
) -> None:
    """Times a model with each attention. The exit status is 1 if a contender failed."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        refuse("times a GPU, and PyTorch finds none; want --device cpu with --shapes tiny")
    unknown = [x for x in shapes.split(",") if x not in SHAPES] + [
        x for x in modes.split(",") if x not in ("train", "decode")
    ]
    if unknown:
        refuse(f"--shapes, --modes: got {unknown[0]!r}, want {', '.join(SHAPES)}; train, decode")
    results = report.header(commit, with_torch=True, timer="host")
    results["rows"] = rows = []
    for shape in shapes.split(","):
        model = model_of(shape, device)
        parameters = sum(x.numel() for x in model.parameters())
        tokens = torch.randint(3, model.config.vocab_size, (1, length), device=device)
        for mode in modes.split(","):
            say(f"{shape}, {parameters / 1e9:.2f} billion parameters, {length} tokens, {mode}")
            facts = {"shape": shape, "mode": mode, "parameters": parameters, "length": length}
            facts |= {"steps": steps, "padding": padding} if mode == "decode" else {}

            def write(contenders: list[Contender], facts: dict[str, Any] = facts, done: int = len(rows)) -> None:
                rows[done:] = rows_of(contenders, facts)
                report.write_json(output, results)

            if mode == "train":
                write(measure_training(model, tokens, rounds, seconds))
            else:
                write(measure_decoding(model, tokens, steps, padding, rounds, write))
        del model
    show(results)
    raise Exit(report.exit_status(row["status"] for row in rows))


def main() -> None:
    """Reads the command line. typer ends the process."""
    run(measure)


if __name__ == "__main__":
    sys.exit(main())
