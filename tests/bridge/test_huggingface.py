"""Hugging Face models with attn_implementation="jax_kernels", on random small configs."""

import copy

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from jax_kernels import bridge
from jax_kernels.bridge import huggingface
from jax_kernels.bridge.ops.decoding import cached_decoding
from tests.support.cases import tiers
from tests.support.huggingface_models import LENGTH, MODELS, PADDED, both, config_of, tokens_and_mask, transformers


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


def test_growing_cache_with_gradients_of_queries_alone():
    """A backward through several calls, where the first layer's keys need no gradient, as under LoRA of queries."""
    model = both("llama")[1]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    tokens, parameters = tokens_and_mask("none")[0], [x for x in model.parameters() if x.requires_grad]
    gradients = []
    for cache in (transformers.DynamicCache(config=model.config), bridge.huggingface.growing_cache(model)):
        steps = tokens[:, :5], tokens[:, 5:]
        loss = sum(model(x, past_key_values=cache).logits.square().mean() for x in steps)
        gradients.append(torch.autograd.grad(loss, parameters))
    torch.testing.assert_close(*gradients)
    cache = bridge.huggingface.growing_cache(model.config)
    out = model(tokens[:, :9], past_key_values=cache).logits
    cache.crop(-4)
    model(tokens[:, 9:], past_key_values=cache)  # writes over tokens that the first call's backward needs
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


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


def test_errors(monkeypatch):
    model = transformers.AutoModelForCausalLM.from_config(
        config_of("llama"), attn_implementation=bridge.huggingface.register()
    )
    layer, (query, key, value) = torch.nn.Module(), torch.randn(3, 1, 4, 12, 16)
    for name in ("indices", "block_indices", "sinks"):
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
