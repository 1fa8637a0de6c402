"""Generation of tokens in one compiled loop: the implementation of Transformer.generate."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jax_kernels import dispatch
from jax_kernels.models.config import check_size
from jax_kernels.models.training import token_ids
from jax_kernels.ops.checks import checked_integers

__all__ = ["check_generation", "generate"]

SMALLEST = float(jnp.finfo(jnp.float32).tiny)


def check_generation(
    tokens: Any, lengths: Any, max_new_tokens: Any, temperature: Any, top_k: Any, eos_id: Any, key: Any, vocabulary: int
) -> tuple[jax.Array, jax.Array]:
    """(tokens int32 [B, P], lengths int32 [B]), the checked arrays of a call of Transformer.generate.

    Tokens past a prompt's length become 0. Traced ids outside the vocabulary become `vocabulary`, the number of token
    ids, whose embedding is NaN. lengths of None become P.

    Raises ValueError or TypeError, naming the argument, for any wrong argument of generate.
    """
    tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)  # NumPy ids may exceed int32
    if tokens.ndim != 2 or tokens.shape[1] == 0 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens: got {tokens.dtype} {tokens.shape}, want integers [batch, length], length 1 or more")
    batch, length = tokens.shape
    for name, value, most in (("max_new_tokens", max_new_tokens, 2**31 - 1 - length), ("top_k", top_k, vocabulary)):
        if value is not None or name != "top_k":
            check_size(name, value, 1, most)
    if eos_id is not None and (isinstance(eos_id, bool) or not isinstance(eos_id, int | np.integer)):
        raise TypeError(f"eos_id: got {eos_id!r}, want an int or None")
    if eos_id is not None and not 0 <= eos_id < vocabulary:
        raise ValueError(f"eos_id: got {eos_id}, want one of the {vocabulary} ids from 0 to {vocabulary - 1}")
    if isinstance(temperature, jax.Array):
        if temperature.shape != () or not _is_number(temperature.dtype):
            raise TypeError(f"temperature: got {temperature.dtype} {temperature.shape}, want one number")
    elif isinstance(temperature, bool) or not isinstance(temperature, int | float | np.number):
        raise TypeError(f"temperature: got {temperature!r}, want a number")
    is_known = not isinstance(temperature, jax.core.Tracer)
    if is_known and not 0 <= float(temperature) < float("inf"):
        raise ValueError(f"temperature: got {temperature}, want a finite number of 0 or more")
    if key is None and not (is_known and _is_greedy(temperature)):
        raise ValueError(f"key: got None with temperature={temperature}, want a jax.random.key")
    if key is not None and not _is_key(key):
        raise TypeError(f"key: got {key!r}, want a jax.random.key")
    if lengths is None:
        lengths = jnp.full((batch,), length, jnp.int32)
    lengths = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths: got {lengths.dtype} {lengths.shape}, want integers [batch] = ({batch},)")
    if not isinstance(lengths, jax.core.Tracer) and batch:
        low, high = int(lengths.min()), int(lengths.max())
        if low < 1 or high > length:
            raise ValueError(f"lengths: got {low} to {high}, want 1 to the {length} tokens of a prompt")
    return _checked_ids(tokens, lengths, vocabulary), checked_integers("lengths", lengths, "integers")


def _checked_ids(tokens: Any, lengths: jax.Array, vocabulary: int) -> jax.Array:
    """tokens [B, P] as int32, with 0 past each prompt's length and `vocabulary` for traced ids outside the vocabulary.

    Raises ValueError for known ids outside the vocabulary.
    """
    past = np if token_ids.is_known(lengths) else jnp
    ends = -(past.arange(tokens.shape[1]) >= past.asarray(lengths)[:, None]).astype(np.int32)  # -1 past a prompt's end
    tokens = token_ids.checked_tokens(tokens, vocabulary, segment_ids=ends, hint="; lengths mark the ends of prompts")
    return token_ids.usable_ids(tokens, vocabulary, segment_ids=ends)


def _is_key(key: Any) -> bool:
    """Whether `key` is one key from jax.random.key or jax.random.PRNGKey."""
    if not isinstance(key, jax.Array | np.ndarray):
        return False
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key.shape == ()
    raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))  # as jax.random.PRNGKey makes them
    return key.dtype == raw.dtype and key.shape == raw.shape


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _is_greedy(temperature: Any) -> bool:
    """Whether a known temperature is 0, or so small that float32 arithmetic treats it as 0."""
    return float(temperature) < SMALLEST


def generate(
    model: Any, tokens: jax.Array, lengths: jax.Array, max_new_tokens: int, temperature: Any, top_k: int | None,
    eos_id: int | None, key: Any,
) -> jax.Array:  # fmt: skip
    """The new tokens, int32 [B, max_new_tokens], as Transformer.generate returns them, from checked arguments."""
    graphdef, state = nnx.split(model)
    is_greedy = not isinstance(temperature, jax.core.Tracer) and _is_greedy(temperature)
    return _generate(
        state,
        tokens,
        lengths,
        jnp.float32(1 if is_greedy else temperature),
        jax.random.key(0) if key is None else key,
        graphdef=graphdef,
        max_new_tokens=int(max_new_tokens),
        is_greedy=is_greedy,
        top_k=None if top_k is None else int(top_k),
        eos_id=None if eos_id is None else int(eos_id),
        target=(dispatch.target_device(tokens), dispatch.interpreting()),
    )


@functools.partial(
    jax.jit, static_argnames=("graphdef", "max_new_tokens", "is_greedy", "top_k", "eos_id", "target")
)  # fmt: skip
def _generate(
    state: Any, tokens: jax.Array, lengths: jax.Array, temperature: jax.Array, key: jax.Array, *, graphdef: Any,
    max_new_tokens: int, is_greedy: bool, top_k: int | None, eos_id: int | None, target: Any,
) -> jax.Array:  # fmt: skip
    """The loop of generate, jitted: int32 [B, max_new_tokens], with -1 or eos_id after the end of a sequence.

    target: (the device, whether kernels are interpreted), part of jit's key, since the kernels depend on it.
    """
    model = nnx.merge(graphdef, state)
    batch = tokens.shape[0]
    begin, advance = model.next_logits(tokens, lengths, max_new_tokens)
    fill = -1 if eos_id is None else eos_id

    def draw(logits: jax.Array, index: jax.Array) -> jax.Array:
        if is_greedy:
            return logits.argmax(-1).astype(jnp.int32)
        if top_k is not None:
            least = lax.top_k(logits, top_k)[0][:, -1:]
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        # Relative to the largest logit: a small temperature takes other logits to -inf instead of the largest to inf.
        scaled = (logits - logits.max(-1, keepdims=True)) / jnp.maximum(temperature, SMALLEST)
        drawn = jax.random.categorical(jax.random.fold_in(key, index), scaled)
        return jnp.where(temperature < SMALLEST, logits.argmax(-1), drawn).astype(jnp.int32)

    def goes_on(carry: Any) -> jax.Array:
        index, _, _, is_done, _ = carry
        return (index < max_new_tokens) & ~is_done.all()

    def one(carry: Any) -> Any:
        index, logits, memory, is_done, drawn = carry
        is_done = is_done | jnp.isnan(logits).any(-1)
        token = jnp.where(is_done, fill, draw(logits, index))
        drawn = lax.dynamic_update_index_in_dim(drawn, token, index, axis=1)
        if eos_id is not None:
            is_done = is_done | (token == eos_id)
        logits, memory = advance(token, index, memory)
        return index + 1, logits, memory, is_done, drawn

    logits, memory = begin
    drawn = jnp.full((batch, max_new_tokens), fill, jnp.int32)
    is_done = (tokens >= model.config.vocab_size).any(-1)  # dilated attention may skip the token and its NaN
    start = jnp.int32(0), logits, memory, is_done, drawn
    return lax.while_loop(goes_on, one, start)[-1]
