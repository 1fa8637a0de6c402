"""The examples of a tutorial run as one program, in the order of the page, with the results that the page promises."""

import re
from pathlib import Path

import pytest

from tests.support.processes import cpu_devices

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
# Lines that run after a tutorial's program: the results that its text promises.
CHECKS = {
    "long_context": """
assert jnp.abs(sharded - on_one_device).max() < 1e-4
assert devices == 4 and {len(x.sharding.device_set) for x in batches[0]} == {4}
assert plan.implementation == "mosaic_gpu"
assert losses[-1] < 0.5 * losses[0]
""",
    "sparse_model": """
assert losses[-1] < 0.5 * losses[0]
assert plan.implementation == "mosaic_gpu"
assert 0.3 < mask.density(length, length, 32) < 0.4
assert reached[0] == 100 and reached[-1] <= 100 + 2 * 32
assert learned_losses[-1] < learned_losses[0]
""",
    "mixture_of_experts": """
assert log[-1]["loss"] < 0.75 * log[0]["loss"]
assert 0.019 < log[-1]["balance_loss"] < 0.03 and 1 <= log[-1]["largest_load"] < 4
assert routing.load.shape == (2, 8) and (np.asarray(routing.load).sum(1) == 2 * 8 * 64).all()
assert (np.asarray(drawn) == np.asarray(drawn_by_small)).mean() > 0.5
np.testing.assert_allclose(logits.numpy(), np.asarray(trainer.model(prompt)), atol=1e-4)
assert in_torch[0, 16:].tolist() == np.asarray(drawn)[0].tolist()
assert qwen.config._experts_implementation == "jax_kernels"
assert abs(float(nats) - log[-1]["loss"]) < 1
assert qwen.model.layers[0].mlp.experts.gate_up_proj.grad.abs().max() > 0
""",
    "port_a_pytorch_model": """
assert F.scaled_dot_product_attention is bridge.scaled_dot_product_attention
assert losses[-1] < losses[0]
""",
    "weights_to_flax": """
assert losses[-1] < losses[0]
assert np.asarray(in_flax)[0].tolist() == in_torch[0, 5:].tolist()
with torch.no_grad():
    logits = llama(torch.from_numpy(tokens)).logits
np.testing.assert_allclose(np.asarray(trainer.model(tokens)), logits.numpy(), atol=1e-4)
assert np.abs(logits - want).max() > 0.01
""",
    "paged_cache": """
assert pages.lengths.tolist() == [20, 0, 31, 82]
assert PAGES - len(pages.free) == 2 + 2 + 6
assert len(set(pages.free)) == len(pages.free)
assert np.isnan(keys).any() and np.isfinite(out[np.array([0, 2, 3])]).all() and not out[1].any()
""",
    "huggingface_trainer": """
assert model.config._attn_implementation == "jax_kernels"
assert losses[-1] < 0.5 * losses[0]
""",
    "lightning": """
assert model.losses[-1] < 0.5 * model.losses[0]
""",
}
NEEDS = {
    "mixture_of_experts": ("torch", "transformers", "flax"),
    "port_a_pytorch_model": ("torch",),
    "weights_to_flax": ("torch", "transformers", "flax"),
    "huggingface_trainer": ("torch", "transformers", "accelerate"),
    "lightning": ("torch", "lightning"),
}
DEVICES = {"long_context": 4}


def test_every_tutorial_has_a_check():
    assert {page.stem for page in TUTORIALS.glob("*.md")} == set(CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_tutorial(name, tmp_path):
    for module in NEEDS.get(name, ("flax",)):
        pytest.importorskip(module)
    parts = re.findall(r"^```python\n(.*?)^```", (TUTORIALS / f"{name}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(parts) >= 2
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join([*parts, CHECKS[name]]))
    cpu_devices.lines_of(str(script), devices=DEVICES.get(name, 1))


def test_a_wrong_check_fails(tmp_path):
    """The process of a tutorial whose check fails raises here."""
    script = tmp_path / "tutorial.py"
    script.write_text("import numpy as np\nassert np.float32(1) == 2")
    with pytest.raises(AssertionError):
        cpu_devices.lines_of(str(script), devices=1)
