"""A decoder-only Transformer as an nnx module."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_kernels.masks.checks import is_array
from jax_kernels.models.block import Block
from jax_kernels.models.block_stack import run_blocks
from jax_kernels.models.config import TransformerConfig, check_kind
from jax_kernels.models.generate import check_generation, generate
from jax_kernels.models.head import head_kernel, head_logits
from jax_kernels.models.layers.attention import KVCache
from jax_kernels.models.layers.delayed_scaling import AmaxHistory, recording
from jax_kernels.models.layers.normalization import RMSNorm
from jax_kernels.models.layers.quantized import QuantizedWeight
from jax_kernels.models.layers.routing import ExpertBias, Routing
from jax_kernels.models.parallel.sharding import ShardingRules, has_explicit_axes, under_auto_axes
from jax_kernels.models.training.losses import linear_cross_entropy
from jax_kernels.models.training.packing import DealtDocuments, packed
from jax_kernels.models.training.token_ids import check_targets, checked_tokens, usable_ids
from jax_kernels.plain_numbers import plain
from jax_kernels.tracing.promotion import under_defaults

__all__ = ["Block", "Transformer", "flat_parameters"]


class Transformer(nnx.Module):
    """A causal decoder: token embedding, blocks with RMSNorm before attention and MLP, a final RMSNorm, a head.

    Parameters, with N from 0 to num_layers - 1 (kernels are [in, out], the transpose of PyTorch's Linear)::

        embed                                [vocab_size, model_dim]
        layers.N.attention_norm.scale        [model_dim]
        layers.N.attention.q_proj.kernel     [model_dim, num_heads * head_dim]
        layers.N.attention.k_proj.kernel     [model_dim, num_kv_heads * head_dim]
        layers.N.attention.v_proj.kernel     [model_dim, num_kv_heads * head_dim]
        layers.N.attention.out_proj.kernel   [num_heads * head_dim, model_dim]
        layers.N.attention.q_norm.scale      [head_dim], with qk_norm; also k_norm
        layers.N.mlp_norm.scale              [model_dim]
        layers.N.mlp.gate_proj.kernel        [model_dim, mlp_dim]
        layers.N.mlp.up_proj.kernel          [model_dim, mlp_dim]
        layers.N.mlp.down_proj.kernel        [mlp_dim, model_dim]
        final_norm.scale                     [model_dim]
        head.kernel                          [model_dim, vocab_size], unless tie_embeddings

    The forward, with the names of `flat_parameters`: x = embed[tokens]; for each block
    x += out_proj(attention(rotary(q), rotary(k), v)) of attention_norm(x), then
    x += down_proj(silu(gate_proj(h)) * up_proj(h)) with h = mlp_norm(x); logits = final_norm(x) @ head.kernel, or
    @ embed.T when tied. config.logit_softcap caps the logits. The residual stream is in config.dtype. RMSNorm is
    x / sqrt(mean(x²) + norm_eps) * scale.

    In the blocks of config.expert_layers the MLP is a MixtureOfExperts, with these parameters instead of its own (E is
    num_experts, D the width of an expert)::

        layers.N.mlp.router                      [model_dim, E], float32
        layers.N.mlp.gate_proj, .up_proj         [E, model_dim, D]
        layers.N.mlp.down_proj                   [E, D, model_dim]
        layers.N.mlp.shared.gate_proj.kernel     [model_dim, shared_experts * D], with shared_experts; also up, down
        layers.N.mlp.expert_bias                 [E], float32, with bias_rate; an ExpertBias, not an nnx.Param

    Args:
      config: the sizes, dtypes, implementations and sharding of the model.
      rules: the mesh axes that shard each array; None for ShardingRules().
      rngs: initialises the parameters, from its stream `params`. Embeddings are normal with variance 1 / model_dim,
        kernels LeCun normal.

    On a mesh (`with jax.set_mesh(mesh)`, see make_mesh and shard_model) the same calls run over the mesh's devices.
    Tokens and results are in the order of the sequence. On Explicit axes the rules shard the results, and a cache keeps
    its sharding.
    """

    block_type = Block
    config_type = TransformerConfig

    def __init__(self, config: TransformerConfig, *, rules: ShardingRules | None = None, rngs: nnx.Rngs) -> None:
        check_kind("config", config, self.config_type, f"a {self.config_type.__name__}")
        check_kind("rules", rules, ShardingRules | None, "ShardingRules or None")
        check_kind("rngs", rngs, nnx.Rngs, "nnx.Rngs")
        self.config = config
        self.rules = ShardingRules() if rules is None else rules
        initialize = nnx.initializers.normal(config.model_dim**-0.5)
        self.embed = nnx.Param(initialize(rngs.params(), (config.vocab_size, config.model_dim), config.param_dtype))
        self.layers = nnx.List(
            [self.block_type(config, index=i, rules=self.rules, rngs=rngs) for i in range(config.num_layers)]
        )
        self.final_norm = RMSNorm(
            config.model_dim, epsilon=config.norm_eps, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs
        )
        if not config.tie_embeddings:
            self.head = nnx.Linear(
                config.model_dim,
                config.vocab_size,
                use_bias=False,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                rngs=rngs,
            )

    def init_cache(self, batch: int, max_length: int, dtype: Any = None) -> tuple[KVCache, ...]:
        """A tuple with an empty KVCache for each block, for `batch` sequences of up to `max_length` tokens.

        dtype: default config.dtype. KVCache.with_length sets a length for each sequence.
        """
        return tuple(layer.attention.init_cache(batch, max_length, dtype) for layer in self.layers)

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """The embeddings of integer tokens [B, T]: [B, T, model_dim], in param_dtype.

        Raises ValueError for another shape or dtype, and for known ids outside the vocabulary. Traced ids outside it
        give NaN.
        """
        tokens = checked_tokens(tokens, self.config.vocab_size)
        if has_explicit_axes():
            embed = lambda model, tokens: model.embed_tokens(tokens)
            return under_auto_axes(embed, self, (tokens,), self._spec("batch", "tokens", None, of=tokens))
        # Each device needs whole rows of the table. If a mesh axis sharded the rows, it would shard the embeddings too.
        # The same axis shards the batch, so XLA would gather the embeddings and their gradient.
        table = self.rules.constrain(self.embed[...], "vocab", None)
        return jnp.take(table, usable_ids(tokens, self.config.vocab_size), axis=0)

    @under_defaults
    def __call__(
        self,
        tokens: jax.Array | None = None,
        *,
        embeddings: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        cache: tuple[KVCache, ...] | None = None,
    ) -> jax.Array | tuple[jax.Array, tuple[KVCache, ...]]:
        """The logits of the next token at every position: float32 [B, T, vocab_size]; with a cache (logits, the new
        cache).

        Args:
          tokens: integers [B, T], from 0 to vocab_size - 1. With a cache these are the next T tokens. Padding (where
            segment_ids are below 0) may have any token id.
          embeddings: [B, T, model_dim], the output of embed_tokens, instead of tokens: for gradients of the input.
          segment_ids: integers [B, T], the ids of packed documents: each run of equal ids is a document, also if the id
            comes back later in the row. A token attends only within its document, and positions start at 0 in each
            document. An id below 0 marks padding. Inside a jax.shard_map over the tokens, the ids of a row must differ.
          cache: from init_cache or from the previous call. Not changed.

        Returns:
          float32 logits [B, T, vocab_size]; with a cache (logits, the new cache).

        Raises:
          ValueError: a shape or dtype is wrong, an id is outside the vocabulary (a traced one gives NaN logits), not
            exactly one of tokens and embeddings is given, cache and segment_ids are both given, or the cache has no
            room (under jit that gives NaN: see MultiHeadAttention).
          TypeError: the cache is not a tuple of KVCaches, or its length or segment_ids are not integers.
        """
        if cache is not None and not isinstance(cache, tuple | list):
            raise TypeError(f"cache: got {type(cache).__name__}, want the tuple from init_cache or from a call")
        if cache is not None and len(cache) != len(self.layers):
            raise ValueError(f"cache: got {len(cache)} entries, want one for each of the {len(self.layers)} layers")
        for i, entry in enumerate(cache or ()):
            check_kind(f"cache[{i}]", entry, KVCache, "a KVCache, as init_cache and calls return")
        if (tokens is None) == (embeddings is None):
            got = "neither" if tokens is None else "both"
            raise ValueError(f"tokens, embeddings: got {got}, want exactly one of them")
        if embeddings is None:
            tokens = checked_tokens(tokens, self.config.vocab_size, segment_ids=segment_ids)
        else:
            self._check_embeddings(embeddings)
        if has_explicit_axes():
            return self._called_under_auto_axes(tokens, embeddings, segment_ids, cache)
        if cache is None:
            x, order, _ = self._hidden(tokens, embeddings, segment_ids)
            return self._logits(x if order is None else self._constrained(x[:, np.argsort(order)]))
        if segment_ids is not None:
            raise ValueError("segment_ids: got an array with a cache, want None: a cache holds one document")
        x, cache = self._extended(tokens, embeddings, cache)
        return self._logits(x), cache

    def _check_embeddings(self, embeddings: Any) -> None:
        """Raises TypeError unless embeddings are an array, ValueError unless they are floats [B, T, model_dim]."""
        is_array("embeddings", embeddings, "floats [batch, length, model_dim]")
        shape, dtype, width = embeddings.shape, embeddings.dtype, self.config.model_dim
        if len(shape) != 3 or shape[2] != width or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"embeddings: got {dtype} {shape}, want floats [batch, length, {width}]")

    def _called_under_auto_axes(self, tokens: Any, embeddings: Any, segment_ids: Any, cache: Any) -> Any:
        """The results of a call, run with the Explicit axes of the mesh of jax.set_mesh turned into Auto axes."""
        given = tokens if embeddings is None else embeddings
        logits = self._spec("batch", "tokens" if cache is None else None, "vocab", of=given)
        placed = jax.tree.map(lambda x: getattr(jax.typeof(x).sharding, "spec", P()), cache)

        def call(model: Any, tokens: Any, embeddings: Any, segment_ids: Any, cache: Any) -> Any:
            return model(tokens, embeddings=embeddings, segment_ids=segment_ids, cache=cache)

        results = logits if cache is None else (logits, placed)
        return under_auto_axes(call, self, (tokens, embeddings, segment_ids, cache), results)

    def _spec(self, *names: str | None, of: Any) -> P:
        """The PartitionSpec, by the rules, of an array whose axes have these names: up to (batch, tokens, vocabulary).

        of: an array whose first two axes are (batch, tokens). Its batch and length, and vocab_size, are the lengths of
        the axes, on which it depends whether a mesh axis can shard them.
        """
        lengths = (*of.shape[:2], self.config.vocab_size)
        return self.rules.spec(names, lengths, jax.sharding.get_abstract_mesh())

    def losses(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        weights: jax.Array | None = None,
        reduction: str = "none",
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> jax.Array:
        """The cross-entropy of each token's target under its logits, in nats: float32 [B, T], or their sum or mean.

        Equivalent to linear_cross_entropy of the logits of a call, but the logits are never all in memory. For training
        take "sum" or "mean": their gradients need three matmuls with the head; with "none" they need four.

        Args:
          tokens, targets: integers [B, T], from 0 to vocab_size - 1. A target below 0 has a loss of 0 and no gradient.
            A token is padding if it and its target are below 0, or if its segment id is below 0. Without segment_ids
            later tokens attend to padding, as to token 0, so put padding at the end of a row.
          segment_ids: integers [B, T], the ids of packed documents, or None, as in a call. A token attends only within
            its document. All targets count here; next_token_loss ignores targets in another document.
          weights: floats [B, T], the factor of each token's loss; None is 1.
          reduction, z_loss, label_smoothing: as in linear_cross_entropy. The softcap is config.logit_softcap.

        Raises:
          ValueError: a shape or dtype is wrong, an id is outside the vocabulary (a traced one gives a loss of NaN), a
            number is out of range, or the devices along the sequence axis do not divide the tokens.
          TypeError: segment_ids or targets are not integers, or weights are not floats.
        """
        options: dict[str, Any] = {"reduction": reduction, "z_loss": z_loss, "label_smoothing": label_smoothing}
        return self.losses_and_routing(tokens, targets, segment_ids=segment_ids, weights=weights, **options)[0]

    @under_defaults
    def losses_and_routing(
        self,
        tokens: jax.Array,
        targets: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        weights: jax.Array | None = None,
        reduction: str = "none",
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> tuple[jax.Array, Routing | None]:
        """(the result of `losses`, the Routing of the blocks with experts), for a load-balancing loss.

        The Routing's arrays have a first axis for the blocks of config.expert_layers. They count all tokens, also
        padding. None for a model without experts. Arguments and errors are as in `losses`.
        """
        targets = targets if hasattr(targets, "dtype") else jnp.asarray(targets)
        if not jnp.issubdtype(targets.dtype, jnp.integer):
            raise TypeError(f"targets: got dtype {targets.dtype}, want integers")
        ids = segment_ids.segment_ids if isinstance(segment_ids, DealtDocuments) else segment_ids
        tokens = checked_tokens(tokens, self.config.vocab_size, segment_ids=ids, targets=targets)
        if targets.shape != tokens.shape:
            raise ValueError(f"targets: got shape {targets.shape}, want tokens' {tokens.shape}")
        check_targets(targets, self.config.vocab_size)
        reduction = plain(reduction)
        options: dict[str, Any] = {
            "reduction": reduction,
            "z_loss": plain(z_loss),
            "label_smoothing": plain(label_smoothing),
        }
        records = bool(jax.tree.leaves(nnx.state(self.layers, AmaxHistory)))
        if has_explicit_axes():
            if records:
                raise NotImplementedError("mesh: got Explicit axes with fp8_scaling='delayed', want Auto axes")

            def losses(model: Any, tokens: Any, targets: Any, segment_ids: Any, weights: Any) -> Any:
                given = {"segment_ids": segment_ids, "weights": weights}
                return model.losses_and_routing(tokens, targets, **given, **options)

            of_routing = Routing(load=P(), probability=P()) if self.config.expert_layers else None  # type: ignore[arg-type]
            of_losses = self._spec("batch", "tokens", of=tokens) if reduction == "none" else P()
            return under_auto_axes(losses, self, (tokens, targets, segment_ids, weights), (of_losses, of_routing))
        x, order, routing = self._hidden(tokens, None, segment_ids, targets, records=records)
        tied = self.config.tie_embeddings
        w = self.embed[...] if tied else head_kernel(self.head, x.dtype)
        if order is not None:
            targets, weights = targets[:, order], None if weights is None else weights[:, order]
        found = linear_cross_entropy(
            x,
            w,
            targets,
            weights=weights,
            transpose_w=tied,
            softcap=self.config.logit_softcap,
            rules=self.rules,
            **options,
        )
        return found if order is None or reduction != "none" else found[:, np.argsort(order)], routing

    def generate(
        self,
        tokens: jax.Array,
        max_new_tokens: int,
        temperature: float | jax.Array = 1.0,
        top_k: int | None = None,
        eos_id: int | None = None,
        *,
        lengths: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """The tokens that the model draws after prompts, int32 [B, max_new_tokens], in one compiled loop.

        Args:
          tokens: integers [B, P], the prompts. Shorter prompts are padded at the end, with any ids, and need `lengths`.
            Traced ids cannot be checked: under jit, a prompt with an id outside the vocabulary draws no tokens.
          max_new_tokens: the number of tokens to draw for each prompt. With the prompt, fewer than 2**31.
          temperature: divides the logits; 0 always takes the likeliest token. A traced value below 0 counts as 0.
          top_k: draw among the top_k likeliest tokens, and tokens tied with the last of them; None for all tokens.
          eos_id: a prompt is done once it has drawn this token. The loop ends when all prompts are done.
          lengths: integers [B], from 1 to P, the tokens of each prompt; None for P.
          key: a jax.random.key; required unless the temperature is known to be 0.

        Returns:
          int32 [B, max_new_tokens], the tokens after each prompt. All tokens after an eos_id are eos_id. From the first
          logits with a NaN on, all tokens are eos_id, or -1 without an eos_id.

        Raises:
          ValueError, TypeError: an argument is wrong; the error names it.
        """
        max_new_tokens, top_k, eos_id = map(plain, (max_new_tokens, top_k, eos_id))
        tokens, lengths = check_generation(
            tokens, lengths, max_new_tokens, temperature, top_k, eos_id, key, self.config.vocab_size
        )
        if has_explicit_axes():
            if not isinstance(temperature, jax.core.Tracer):
                temperature = float(temperature)
            fixed = None if isinstance(temperature, jax.core.Tracer) else temperature

            def draw(model: Any, tokens: Any, lengths: Any, traced: Any, key: Any) -> jax.Array:
                heat = traced if fixed is None else fixed
                return generate(model, tokens, lengths, max_new_tokens, heat, top_k, eos_id, key)

            given = tokens, lengths, temperature if fixed is None else None, key
            return under_auto_axes(draw, self, given, self._spec("batch", None, of=tokens))
        return generate(self, tokens, lengths, max_new_tokens, temperature, top_k, eos_id, key)

    def next_logits(self, tokens: jax.Array, lengths: jax.Array, more: int) -> tuple[Any, Any]:
        """((logits, cache) after the prompts, advance): a model's interface for `generate`.

        tokens: int32 [B, P], the prompts, lengths: int32 [B]. more: the largest number of tokens after the prompts.
        advance(token [B], index of the token after the prompt, from 0, cache before it) returns (logits, cache) after
        the token. Logits are float32 [B, vocab_size].
        """
        batch, length = tokens.shape
        room = -(-(length + more) // 8) * 8  # decode_attention's Hopper kernel copies caches of other lengths
        x, cache = self._extended(tokens, None, self.init_cache(batch, room))
        cache = tuple(layer.with_length(lengths) for layer in cache)
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)

        def advance(token: jax.Array, index: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            x, cache = self._extended(token[:, None], None, cache)
            return self._logits(x)[:, 0], cache

        return (self._logits(last)[:, 0], cache), advance

    def _extended(self, tokens: Any, embeddings: Any, cache: Any) -> tuple[jax.Array, tuple[KVCache, ...]]:
        """(the final norm's result for the new tokens [B, T, model_dim], the new cache), from tokens or embeddings."""
        x = self.embed_tokens(tokens) if embeddings is None else embeddings
        x = x.astype(self.config.dtype)
        filled = []
        with recording(False):
            for layer, layer_cache in zip(self.layers, cache, strict=True):
                x, layer_cache, _ = layer(x, layer_cache)
                x = x.astype(self.config.dtype)
                filled.append(layer_cache)
        return self.final_norm(x), tuple(filled)

    def _hidden(
        self, tokens: Any, embeddings: Any, segment_ids: Any = None, targets: Any = None, *, records: bool = False
    ) -> tuple[jax.Array, Any, Any]:
        """(the final norm's result [B, T, model_dim], order, routing), for whole sequences without a cache.

        order: int32 [T], the index in the sequence of the token at each position of the result, as sharded layouts need
        it; None if the result is in the order of the sequence. routing: the Routing of the blocks with experts, with a
        first axis for these blocks; None without experts. targets: a loss's targets, which mark padding. Exactly
        one of tokens and embeddings is given. records: whether the blocks add to their AmaxHistories, in place.
        """
        length = (tokens if embeddings is None else embeddings).shape[1]
        is_dealt = isinstance(segment_ids, DealtDocuments)  # then the tokens are in the order of their layout
        order = None if is_dealt else self.layers[0].attention.token_order(length, "tokens")
        is_local = isinstance(order, jax.Array)
        documents: Any = segment_ids if is_dealt else None
        if segment_ids is not None and not is_dealt:
            documents = packed(segment_ids, tokens if embeddings is None else embeddings, is_whole=not is_local)
        if embeddings is None:
            ids = None if documents is None else documents.segment_ids
            tokens = usable_ids(tokens, self.config.vocab_size, segment_ids=ids, targets=targets)
        if is_local:  # inside a shard_map the tokens are in this order already
            order = None
        if order is not None:
            tokens, embeddings, documents = jax.tree.map(lambda x: x[:, order], (tokens, embeddings, documents))
        x = self.embed_tokens(tokens) if embeddings is None else embeddings
        x = self._constrained(x.astype(self.config.dtype))
        x, routing = run_blocks(self.layers, x, documents, config=self.config, rules=self.rules, records=records)
        return self.final_norm(x), order, routing

    def _constrained(self, x: jax.Array) -> jax.Array:
        """x [B, T, model_dim], sharded by the rules over the mesh of jax.set_mesh."""
        return self.rules.constrain(x, "batch", "tokens", None)

    def _logits(self, x: jax.Array) -> jax.Array:
        """The head's logits, float32 [B, T, vocab_size], from the final norm's result."""
        if self.config.tie_embeddings:
            logits = jnp.matmul(x, self.embed[...].T.astype(x.dtype), preferred_element_type=jnp.float32)
        else:
            logits = head_logits(self.head, x)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def flat_parameters(model: nnx.Module | nnx.State) -> dict[str, np.ndarray]:
    """The model's nnx.Params and ExpertBiases on the host, by dotted name.

    For example {"layers.0.attention.q_proj.kernel": array, ...}.

    model: a Flax model, or an nnx.State such as its gradients.

    Raises ValueError for a model with low-bit weights, which are not nnx.Params.
    """
    check_kind("model", model, nnx.Module | nnx.State, "an nnx.Module, or an nnx.State such as its gradients")
    if jax.tree.leaves(nnx.state(model, QuantizedWeight)):
        raise ValueError("model: got one with low-bit weights, want the model before quantize_weights")
    state = nnx.to_flat_state(nnx.state(model, nnx.Any(nnx.Param, ExpertBias)))
    return {".".join(str(part) for part in path): np.asarray(param[...]) for path, param in state}
