"""The masks of Hugging Face models: which keys a token attends to, in encoders, decoders, windows and documents."""

import copy

import pytest
import torch

from jax_kernels import bridge
from jax_kernels.bridge import huggingface
from jax_kernels.bridge.ops.drop_in import heads_first
from tests.support.huggingface_models import LENGTH, PADDED, SHAPE, both, tokens_and_mask, transformers


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
            bias = torch.randn(1, 4, 1, 10)
            got = attend(sliding_window=4, position_bias=bias, scaling=0.5)
            one = torch.nn.functional.scaled_dot_product_attention(
                query, *[key[:, :, -4:]] * 2, attn_mask=bias[..., -4:], scale=0.5
            )
            torch.testing.assert_close(got, one.transpose(1, 2))


def test_masks_of_chunks():
    """A layer with chunks does not mask them itself, so that its mask is never None."""
    config = transformers.Llama4TextConfig(attention_chunk_size=4)
    in_chunk = lambda batch, head, row, column: (column <= row) & (row // 4 == column // 4)
    position = torch.arange(10)
    want = in_chunk(0, 0, position[:, None], position)
    whole = {"batch_size": 1, "q_length": 10, "kv_length": 10, "device": torch.device("cpu")}
    got = huggingface.attention_mask(**whole, mask_function=in_chunk, local_size=4, config=config)
    torch.testing.assert_close(got, want.expand(1, 1, 10, 10))


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


def test_masks_in_early_transformers_versions(monkeypatch):
    """transformers may ask for a mask with unknown arguments; then its own function answers."""
    masks = transformers.masking_utils
    monkeypatch.setattr(masks, "sdpa_mask", lambda batch_size, cache_position: None)
    monkeypatch.setattr(masks.AttentionMaskInterface, "_global_mapping", {})
    bridge.huggingface.register("early")
    assert masks.AttentionMaskInterface()["early"] is masks.sdpa_mask
