"""Hugging Face models with attn_implementation="jax_kernels", on random small configs."""

import copy

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from jax_kernels import bridge
from jax_kernels.bridge import huggingface
from jax_kernels.bridge.ops.decoding import cached_decoding
from jax_kernels.bridge.ops.drop_in import heads_first
from tests.support.cases import tiers

transformers = pytest.importorskip("transformers", minversion="5.0")

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # large, so that attention is far from uniform
}
DECODER = SHAPE | {"num_key_value_heads": 2}
# The config, its arguments, and the PyTorch attention that supports all of the model's arguments.
MODELS = {
    "llama": ("LlamaConfig", DECODER, "sdpa"),
    "mistral": ("MistralConfig", DECODER | {"sliding_window": 5}, "sdpa"),
    "qwen3": ("Qwen3Config", DECODER | {"head_dim": 16}, "sdpa"),
    "gemma2": (
        *("Gemma2Config", DECODER | {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 5.0}),
        "eager",
    ),
    "gpt-oss": (
        *("GptOssConfig", DECODER | {"head_dim": 16, "sliding_window": 5, "num_local_experts": 2}),
        "eager",
    ),
}
LENGTH = 12
PADDED = {"none": None, "left": [0] * 3 + [1] * 9, "right": [1] * 9 + [0] * 3}


def config_of(name):
    kind, arguments, _ = MODELS[name]
    more = {"num_experts_per_tok": 1} if name == "gpt-oss" else {}
    return getattr(transformers, kind)(**arguments, **more)


def both(name, cls="AutoModelForCausalLM", config=None):
    """A model with PyTorch's attention, and its copy with this library's attention."""
    torch.manual_seed(0)
    config = config_of(name) if config is None else config
    reference = MODELS[name][2] if name in MODELS else "sdpa"
    theirs = getattr(transformers, cls).from_config(copy.deepcopy(config), attn_implementation=reference).eval()
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.copy_(torch.randn(parameter.shape))
    return theirs, bridge.huggingface.replace_attention(copy.deepcopy(theirs))


def tokens_and_mask(padding):
    tokens = torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    if PADDED[padding] is None:
        return tokens, None, torch.ones(2, LENGTH, dtype=torch.bool)
    mask = torch.tensor([PADDED[padding], [1] * LENGTH])
    return tokens, mask, mask.bool()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name):
    theirs, ours = both(name)
    for padding in PADDED:
        tokens, mask, is_token = tokens_and_mask(padding)
        with torch.no_grad():
            want, got = (model(tokens, attention_mask=mask).logits for model in (theirs, ours))
        torch.testing.assert_close(got[is_token], want[is_token], atol=2e-4, rtol=2e-4)
    labels = torch.where(is_token, tokens, -100)
    for model in (theirs, ours):
        model.train()
        model(tokens, attention_mask=mask, labels=labels).loss.backward()
    pairs = list(zip(theirs.parameters(), ours.parameters(), strict=True))
    largest = max(float(parameter.grad.abs().max()) for parameter, _ in pairs if parameter.grad is not None)
    for want, got in pairs:
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, atol=2e-5 * max(1.0, largest), rtol=2e-4)


def generated(model, tokens, mask, cache):
    return model.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=10,
        min_new_tokens=10,
        do_sample=False,
        cache_implementation=cache,
        output_logits=True,
        return_dict_in_generate=True,
    )


def test_cache_with_spare_capacity():
    """Tokens are written in place, and attention reads them in place. Keys that other methods replace are copied."""
    cache = bridge.huggingface.growing_cache(config_of("llama"))
    new = lambda length: torch.randn(2, 2, length, 16)
    want, wanted = new(100), new(100)
    keys, values = cache.update(want, wanted, 0)
    first = keys.data_ptr()
    for _ in range(60):
        more, others = new(1), new(1)
        want, wanted = torch.cat([want, more], dim=2), torch.cat([wanted, others], dim=2)
        keys, values = cache.update(more, others, 0)
        assert torch.equal(keys, want)
        assert torch.equal(values, wanted)
    assert keys.data_ptr() == first
    query = torch.randn(2, 4, 1, 16)
    got, _ = huggingface.attention(torch.nn.Module(), query, keys, values, None)
    want_out = bridge.flash_attention(*(x.transpose(1, 2) for x in (query, want, wanted)))
    torch.testing.assert_close(got, want_out, atol=3e-6, rtol=0)
    assert cached_decoding.view_with_capacity(keys).data_ptr() == first
    cache.layers[0].crop(-20)
    more = new(3)
    keys, _ = cache.update(more, more, 0)
    assert torch.equal(keys, torch.cat([want[:, :, :-20], more], dim=2))
    assert keys.data_ptr() == first
    cache.layers[0].reorder_cache(torch.tensor([1, 0]))
    before, (keys, _) = keys, cache.update(more, more, 0)
    assert torch.equal(keys, torch.cat([before.flip(0), more], dim=2))
    assert keys.data_ptr() != first
    copied = copy.deepcopy(cache)
    keys, _ = copied.update(new(1), new(1), 0)
    assert torch.equal(keys[:, :, :-1], cache.layers[0].keys)
    more = new(200).requires_grad_()
    keys, _ = cache.update(more, more, 0)
    assert torch.autograd.grad(keys.sum(), more)[0].eq(1).all()


def test_view_with_capacity():
    whole = torch.arange(2.0 * 3 * 128 * 4).reshape(2, 3, 128, 4)
    room = cached_decoding.view_with_capacity(whole[:, :, :100])
    assert torch.equal(room, whole)
    for x in (
        whole[:, :, :100].contiguous(),  # no room, and 100 is no length bucket
        whole[:, :, 28:],  # the last head's room would reach past the end of the memory
        whole[:, :2, :100],  # another head lies between the entries
        whole[..., :2][:, :, :100],
        whole.transpose(1, 2),
    ):
        assert cached_decoding.view_with_capacity(x) is None
    assert cached_decoding.view_with_capacity(whole) is whole
    fixed = torch.zeros(1, 2, 100, 4)  # a cache of a fixed size is read in place from the second time on
    assert cached_decoding.view_with_capacity(fixed) is None
    assert cached_decoding.view_with_capacity(fixed) is fixed
    for length in (99, 100):  # another tensor at the same address, as that of a later sequence may be
        grown = fixed.view(-1)[: 2 * length * 4].view(1, 2, length, 4)
        assert grown.data_ptr() == fixed.data_ptr()
        assert cached_decoding.view_with_capacity(grown) is None
    assert cached_decoding.view_with_capacity(fixed) is fixed
    owner = whole.clone()
    assert cached_decoding.view_with_capacity(owner[:, :, :100]) is owner  # PyTorch keeps what it is a view of
    assert cached_decoding.view_with_capacity(owner[:, :, 28:]) is None  # not its front


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad], ids=["inference", "no_grad"])
@pytest.mark.parametrize("then", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_cache_continues_in_another_grad_mode(first, then, reference):
    cache = bridge.huggingface.growing_cache(config_of("llama"))
    generator = torch.Generator().manual_seed(0)
    new = lambda length: torch.randn(1, 2, length, 16, generator=generator)
    wants = [new(5), new(5)]
    with first():
        cache.update(*wants, 0)
    for mode in (then, first, then):
        with mode():
            more = [new(1), new(1)]
            wants = [torch.cat(pair, dim=2) for pair in zip(wants, more, strict=True)]
            got = cache.update(*more, 0)
            query = torch.randn(1, 4, 1, 16, generator=generator)
            out, _ = huggingface.attention(torch.nn.Module(), query, *got, None)
            want, _ = reference(*(x.transpose(1, 2) for x in (query, *wants)))
        assert all(map(torch.equal, got, wants))
        torch.testing.assert_close(out.double(), want, atol=3e-6, rtol=0)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_generate_with_spare_capacity(name):
    theirs, ours = both(name)
    tokens, mask, _ = tokens_and_mask("left")
    for attention_mask in (torch.ones_like(tokens), mask):
        arguments = {"attention_mask": attention_mask, "max_new_tokens": 10, "do_sample": False, "min_new_tokens": 10}
        got = ours.generate(tokens, past_key_values=bridge.huggingface.growing_cache(ours), **arguments)
        assert torch.equal(got, theirs.generate(tokens, **arguments))


@pytest.mark.parametrize(
    ("name", "cache"),
    tiers.some_pairs(MODELS, ["dynamic", "static"], {("llama", "dynamic"), ("gpt-oss", "static")}),
)
def test_generate(name, cache):
    theirs, ours = both(name)
    for padding in ("none", "left"):
        tokens, mask, _ = tokens_and_mask(padding)
        mask = torch.ones_like(tokens) if mask is None else mask
        want, got = (generated(model, tokens, mask, cache) for model in (theirs, ours))
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_growing_cache_compiles_once(sinks, monkeypatch):
    """Only the padded lengths reach the operator, in place. The memory in the room behind the keys has no effect.

    The keys of a second layer have the same address as the first layer's, like memory that PyTorch reuses.
    """
    seen = set()
    attend = cached_decoding._folded
    monkeypatch.setattr(cached_decoding, "_folded", lambda *given: seen.add(given[1].shape) or attend(*given))
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *shape: empty(x, *shape).fill_(torch.nan))
    layer = torch.nn.Module()
    s_aux = torch.randn(4) if sinks else None
    query, memory = torch.randn(2, 4, 1, 16), torch.randn(2, 2 * 2 * 160 * 16)
    for length in sorted([*range(100, 140), 160] * 2):
        key, value = (x[: 2 * 2 * length * 16].view(2, 2, length, 16) for x in memory)
        got, weights = huggingface.attention(layer, query, key, value, None, s_aux=s_aux)
        want = bridge.flash_attention(*(x.transpose(1, 2) for x in (query, key, value)), sinks=s_aux)
        torch.testing.assert_close(got, want, atol=3e-6, rtol=0)
        assert weights is None
    assert seen == {(2, 2, 128, 16), (2, 2, 160, 16)}


SCORES = {
    "padding": {"mask": (2, 1, 1, 131)},
    "of one": {"mask": (1, 1, 131)},
    "heads": {"mask": (2, 4, 1, 131), "sinks": (4,)},
    "alibi": {"bias": (1, 4, 1, 131)},
    "both": {"mask": (2, 1, 1, 131), "bias": (2, 4, 1, 131), "softcap": 2.0},
}


@pytest.mark.parametrize("name", SCORES)
def test_decoding_with_masks_and_biases(name, reference):
    """One call for each kind, in a cache with room. Then the mask is written in place, and the call repeated."""
    options = dict(SCORES[name])
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, heads, 192, 16, generator=generator) for heads in (4, 2, 2))
    query, key, value = query[:, :, :1], key[:, :, :131], value[:, :, :131]
    for part in ("bias", "sinks"):
        if part in options:
            options[part] = torch.randn(options[part], generator=generator)
    if "mask" in options:
        options["mask"] = torch.rand(options["mask"], generator=generator) < 0.5
    for _ in range(2):
        got = cached_decoding.decode_cache(query, key, value, **options)
        want, _ = reference(*(x.transpose(1, 2) for x in (query, key, value)), **options)
        torch.testing.assert_close(got, want.float(), atol=3e-6, rtol=0)
        for part in ("mask", "bias"):
            if part in options:
                options[part][..., 100:] = 0


def test_changed_mask_is_padded_again():
    """PyTorch counts neither writes through .data or NumPy nor new memory."""

    def assign(mask):
        mask.data = ~mask.data

    mask = torch.rand(2, 1, 1, 131, generator=torch.Generator().manual_seed(0)) < 0.5
    kept = cached_decoding._padded(mask, 160)
    assert cached_decoding._padded(mask, 160) is kept
    writes = (lambda x: x.logical_not_(), lambda x: x.data.logical_not_(), lambda x: np.logical_not(x, out=x.numpy()))
    for write in (*writes, assign):
        write(mask)
        padded = cached_decoding._padded(mask, 160)
        assert torch.equal(padded[..., :131], mask)
        assert not padded[..., 131:].any()


def test_padded_prompts_decode_with_split_keys(monkeypatch):
    """All tokens of all layers decode by split keys. A token's mask is padded once for all layers."""
    _, ours = both("llama")
    tokens, mask, _ = tokens_and_mask("left")
    calls, padded = [], []
    attend, pad = cached_decoding.decode_cache, cached_decoding._pad
    monkeypatch.setattr(
        cached_decoding, "decode_cache", lambda *x, **given: calls.append(given["mask"]) or attend(*x, **given)
    )
    monkeypatch.setattr(cached_decoding, "_pad", lambda x, room: padded.append(x) or pad(x, room))
    ours.generate(tokens, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert [x.shape for x in calls] == [(2, 1, 1, length) for length in (13, 14, 15) for _ in range(2)]
    assert len(padded) == 3


def test_windows_use_no_dense_mask(monkeypatch):
    """A sequence without padding gets a window, and no dense mask."""
    _, ours = both("mistral")
    seen = []
    attend = heads_first.attend
    monkeypatch.setattr(heads_first, "attend", lambda *x, **given: seen.append(given) or attend(*x, **given))
    tokens, mask, _ = tokens_and_mask("left")
    with torch.no_grad():
        ours(tokens)
        assert [(x["mask"], x["is_causal"], x["window"]) for x in seen] == [(None, True, (4, 0))] * 2
        seen.clear()
        ours(tokens, attention_mask=mask)
        assert all(x["mask"].shape == (2, 1, LENGTH, LENGTH) and "window" not in x for x in seen)


@pytest.mark.parametrize("padding", PADDED)
def test_bidirectional_encoders(padding):
    config = transformers.BertConfig(**SHAPE, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    theirs, ours = both("bert", "AutoModel", config)
    tokens, mask, is_token = tokens_and_mask(padding)
    want, got = (model(tokens, attention_mask=mask).last_hidden_state for model in (theirs, ours))
    torch.testing.assert_close(got[is_token], want[is_token], atol=1e-4, rtol=1e-4)
    moved = tokens.clone()
    moved[:, 8] = 5
    assert not torch.allclose(ours(moved, attention_mask=mask).last_hidden_state[:, 4], got[:, 4], atol=1e-3)


# Models that do not declare `_supports_sdpa`. Splinter's layers have no is_causal, and it is False in the decoders of
# the other two. BigBird's encoder adds its mask to the scores by code of its own.
WITHOUT_SDPA = {
    "splinter": ("Splinter", SHAPE),
    "nllb-moe": (
        "NllbMoe",
        {"num_experts": 2, "expert_capacity": 64, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    ),
    "bigbird": ("BigBirdPegasus", {"attention_type": "original_full"}),
}
ENCODER_DECODER = {
    "vocab_size": 97, "d_model": 32, "max_position_embeddings": 64, "pad_token_id": 0, "dropout": 0.0,
    "attention_dropout": 0.0, "decoder_start_token_id": 2, "init_std": 0.3,
} | {f"{side}_{name}": size for side in ("encoder", "decoder")
     for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("name", WITHOUT_SDPA)
def test_models_without_sdpa(name, padding):
    kind, arguments = WITHOUT_SDPA[name]
    torch.manual_seed(0)
    is_encoder = name == "splinter"
    config = getattr(transformers, f"{kind}Config")(**(arguments if is_encoder else ENCODER_DECODER | arguments))
    theirs = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    for parameter in theirs.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    ours = bridge.huggingface.replace_attention(copy.deepcopy(theirs))
    tokens, mask, is_token = tokens_and_mask(padding)
    given = {"attention_mask": mask} | ({} if is_encoder else {"decoder_input_ids": tokens[:, :7]})
    with torch.no_grad():
        want, got = (model(tokens, **given)[0] for model in (theirs, ours))
    kept = is_token if is_encoder else slice(None)
    torch.testing.assert_close(got[kept], want[kept], atol=2e-5, rtol=2e-5)


def layer(**attributes):
    return type("Layer", (torch.nn.Module,), attributes)()


def test_one_query_with_a_window():
    query, key = torch.randn(1, 4, 1, 8), torch.randn(1, 4, 10, 8)
    attend = lambda **options: huggingface.attention(layer(is_causal=True), query, key, key, None, **options)[0]
    want = huggingface.attention(layer(is_causal=True), query, *[key[:, :, -4:]] * 2, None)[0]
    for grad_mode in (torch.no_grad, torch.enable_grad):
        with grad_mode():
            torch.testing.assert_close(attend(sliding_window=4), want)
            torch.testing.assert_close(attend(sliding_window=16), attend())


@pytest.mark.parametrize("length", [1, 3])
def test_one_batch_of_queries(length):
    query, key = torch.randn(1, 4, length, 8), torch.randn(2, 4, 5, 8)
    with torch.no_grad():
        got = huggingface.attention(layer(is_causal=False), query, key, key, None)[0]
    want = torch.nn.functional.scaled_dot_product_attention(query, key, key).transpose(1, 2)
    torch.testing.assert_close(got, want)


def test_tokens_before_the_first_document():
    query = torch.randn(1, 4, 5, 8)
    starts = torch.tensor([2, 5], dtype=torch.int32)
    got = huggingface.attention(layer(is_causal=True), query, query, query, None, cu_seq_lens_q=starts)[0]
    one = query[:, :, 2:]
    want = torch.nn.functional.scaled_dot_product_attention(one, one, one, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(got[:, 2:], want)
    assert (got[:, :2] == 0).all()


def test_encoder_decoder_with_position_bias():
    config = transformers.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0,
        decoder_start_token_id=0, initializer_factor=3.0,
    )  # fmt: skip
    theirs, ours = both("t5", "AutoModelForSeq2SeqLM", config)
    tokens, mask, _ = tokens_and_mask("right")
    arguments = {"attention_mask": mask, "decoder_input_ids": tokens[:, :7]}
    for model in (theirs, ours):
        model(tokens, **arguments).logits.square().mean().backward()
    want, got = (model(tokens, **arguments).logits for model in (theirs, ours))
    torch.testing.assert_close(got, want, atol=5e-4, rtol=5e-4)
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    want, got = (model.get_parameter(name).grad for model in (theirs, ours))
    torch.testing.assert_close(got, want, atol=2e-5 * float(want.abs().max()), rtol=1e-3)


def test_packed_documents():
    theirs, ours = both("llama")
    tokens, _, _ = tokens_and_mask("none")
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    with torch.no_grad():
        want = torch.cat([theirs(tokens[:1, :5]).logits, theirs(tokens[:1, 5:]).logits], dim=1)
        got = ours(tokens[:1], position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(got, want, atol=2e-4, rtol=2e-4)
    query, key, value = torch.randn(3, 1, 4, 12, 16)
    layer = torch.nn.Module()
    got, _ = huggingface.attention(layer, query, key, value, None, cu_seq_lens_q=starts)
    cut = lambda x: (x[:, :, :5], x[:, :, 5:])
    parts = [
        huggingface.attention(layer, *given, None)[0] for given in zip(cut(query), cut(key), cut(value), strict=True)
    ]
    torch.testing.assert_close(got, torch.cat(parts, dim=1), atol=3e-6, rtol=0)
    with pytest.raises(ValueError, match=r"^cu_seq_lens_q: got it with 2 batch entries, want one packed sequence"):
        huggingface.attention(layer, *torch.randn(3, 2, 4, 12, 16), None, cu_seq_lens_q=starts)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiles_for_many_lengths(name):
    """The layers' scale, softcap and window are floats and ints of modules, which torch.compile turns into symbols."""
    theirs, ours = both(name)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, dynamic=True)
    frames = []
    for length in (12, 16, 19):
        tokens = torch.randint(3, 97, (2, length))
        got, want = compiled(tokens).logits, theirs(tokens).logits
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        frames.append(counter.frame_count)
    assert frames[1] == frames[2]
    gradients = []
    for x, model in ((got, ours), (want, theirs)):
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients.append(torch.autograd.grad(x.square().mean(), parameters))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-3)


def test_compiles_in_one_graph():
    torch._dynamo.reset()
    theirs, ours = both("llama")
    tokens, mask, is_token = tokens_and_mask("left")
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        got, want = compiled(tokens, attention_mask=mask).logits, theirs(tokens, attention_mask=mask).logits
    torch.testing.assert_close(got[is_token], want[is_token], atol=2e-4, rtol=2e-4)


@pytest.mark.timeout(300)
def test_one_graph_decodes_a_static_cache(monkeypatch):
    """The graph uses split keys, and reads no key past a sequence's last. No token compiles a new graph or program."""
    torch._dynamo.reset()
    theirs, ours = both("llama")
    programs, folded = [], cached_decoding._folded
    monkeypatch.setattr(cached_decoding, "_folded", lambda *given: programs.append(given[1].shape) or folded(*given))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    tokens, mask, _ = tokens_and_mask("left")
    room = torch.cat([mask, mask.new_ones(2, 24 - LENGTH)], dim=1)  # the positions of the cache, without the padding's
    places = mask.cumsum(-1).sub(1).clamp(min=0)
    results, counts = [], []
    for model, step in ((theirs, theirs), (ours, compiled)):
        cache = transformers.StaticCache(config=model.config, max_cache_len=24)
        with torch.no_grad():
            logits = [model(tokens, attention_mask=room, position_ids=places, past_key_values=cache).logits[:, -1:]]
            for layer in cache.layers if model is ours else ():
                layer.values[:, :, LENGTH:] = torch.nan
            for at in range(6):
                given = {"attention_mask": room, "position_ids": places[:, -1:] + 1 + at, "past_key_values": cache}
                logits.append(step(logits[-1].argmax(-1), **given).logits)
                counts.append(len(programs))
        results.append(torch.cat(logits, dim=1))
    want, got = results
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    torch.testing.assert_close(got, want, atol=5e-4, rtol=5e-4)
    assert set(programs) == {(2, 2, 24, 16)}
    assert counts[6] == counts[-1]
    assert counter.frame_count == 1


def test_registration():
    assert bridge.huggingface.register() == bridge.huggingface.register() == "jax_kernels"
    model = transformers.AutoModelForCausalLM.from_config(config_of("llama"), attn_implementation="jax_kernels")
    assert model.config._attn_implementation == "jax_kernels"
    assert bridge.huggingface.replace_attention(model) is model
    model.set_attn_implementation("sdpa")
    assert bridge.huggingface.replace_attention(model).config._attn_implementation == "jax_kernels"


def test_masks_in_early_transformers_versions(monkeypatch):
    """transformers may ask for a mask with unknown arguments; then its own function answers."""
    masks = transformers.masking_utils
    monkeypatch.setattr(masks, "sdpa_mask", lambda batch_size, cache_position: None)
    monkeypatch.setattr(masks.AttentionMaskInterface, "_global_mapping", {})
    bridge.huggingface.register("early")
    assert masks.AttentionMaskInterface()["early"] is masks.sdpa_mask


def test_errors(monkeypatch):
    model = transformers.AutoModelForCausalLM.from_config(
        config_of("llama"), attn_implementation=bridge.huggingface.register()
    )
    layer, (query, key, value) = torch.nn.Module(), torch.randn(3, 1, 4, 12, 16)
    for name in ("indices", "block_indices"):
        with pytest.raises(NotImplementedError, match=f"^{name}: got one, want None"):
            huggingface.attention(layer, query, key, value, None, **{name: query})
    # Nothing says whether this layer has the window of its config.
    layer.config = transformers.MistralConfig(sliding_window=5)
    with pytest.raises(NotImplementedError, match=r"^sliding_window: got none from Module, and 5 from its config"):
        huggingface.attention(layer, query, key, value, None)
    with pytest.raises(TypeError, match=r"^model: got Linear, want a transformers\.PreTrainedModel"):
        bridge.huggingface.replace_attention(torch.nn.Linear(2, 2))
    own = type(model)
    monkeypatch.setattr(own, "_can_set_attn_implementation", classmethod(lambda cls: False))
    model.config._attn_implementation_internal = "sdpa"
    with pytest.raises(ValueError, match=r"^model: got a LlamaForCausalLM, whose attention does not go through"):
        bridge.huggingface.replace_attention(model)
