"""A mask of a function that reads tensors: it is refused when a tensor has changed after the mask was made."""

import copy
import functools
import gc
import weakref

import jax
import pytest
import torch
import torch.nn.attention.flex_attention

from jax_kernels import bridge
from jax_kernels.bridge import masks
from jax_kernels.bridge.translate import mask_sources

LENGTH, HEADS = 12, 2
QKV = [torch.randn(1, LENGTH, HEADS, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
GLOBAL = torch.zeros(LENGTH, dtype=torch.int32)


class Documents(torch.nn.Module):
    """A module whose mask_mod reads a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.zeros(LENGTH, dtype=torch.int64))

    def mask_mod(self, b, h, q, k):
        return self.ids[q] == self.ids[k]


def of_cell(ids):
    return lambda b, h, q, k: ids[q] == ids[k]


def of_nested_cells(ids):
    inner = lambda i: ids[i]
    return lambda b, h, q, k: inner(q) == inner(k)


def of_default(ids):
    return lambda b, h, q, k, own=ids: own[q] == own[k]


def of_partial(ids):
    return functools.partial(lambda own, b, h, q, k: own[q] == own[k], ids)


def of_torchs(ids):
    return torch.nn.attention.flex_attention.and_masks(of_cell(ids), lambda b, h, q, k: k >= 0)


def of_list(ids):
    tables = [ids]
    return lambda b, h, q, k: tables[0][q] == tables[0][k]


READERS = {f.__name__: f for f in (of_cell, of_nested_cells, of_default, of_partial, of_torchs, of_list)}
COUNTED = "^mask: got from_function.*, which has the values that {} had when it was made, and .* has changed since"


def attend(mask):
    return bridge.flash_attention(*QKV, mask=mask)


def oracle(keep):
    query, key, value = (x.double().transpose(1, 2) for x in QKV)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, keep).transpose(1, 2)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("is_known", [False, True], ids=["new", "known"])
def test_changed_tensor(name, is_known):
    ids = torch.zeros(LENGTH, dtype=torch.int32)
    mask_mod = READERS[name](ids)
    mask = masks.from_function(mask_mod)
    for _ in range(3 if is_known else 0):
        attend(mask)
    ids[LENGTH // 2 :] = 1
    with pytest.raises(ValueError, match=r"^mask: .* has changed since"):
        attend(mask)
    keep = ids[:, None] == ids
    torch.testing.assert_close(attend(masks.from_function(mask_mod)).double(), oracle(keep), atol=1e-5, rtol=1e-5)


def test_error_names_the_tensor():
    module = Documents()
    cases = {"self.ids": module.mask_mod, "module.ids": lambda b, h, q, k: module.ids[q] == module.ids[k]}
    for text, mask_mod in cases.items():
        mask = masks.from_function(mask_mod)
        attend(mask)
        module.ids.fill_(3)
        with pytest.raises(ValueError, match=COUNTED.format(text)):
            attend(mask)


def test_rebound_global(monkeypatch):
    mask = masks.from_function(lambda b, h, q, k: GLOBAL[q] == GLOBAL[k])
    for _ in range(3):
        attend(mask)
    monkeypatch.setitem(globals(), "GLOBAL", GLOBAL.clone())
    with pytest.raises(ValueError, match=COUNTED.format("GLOBAL")):
        attend(mask)


def test_rebound_variable():
    ids = torch.zeros(LENGTH, dtype=torch.int32)
    mask = masks.from_function(lambda b, h, q, k: ids[q] == ids[k])
    attend(mask)
    ids = torch.ones(LENGTH, dtype=torch.int32)
    with pytest.raises(ValueError, match=COUNTED.format("ids")):
        attend(mask)


def test_copies_on_other_devices():
    """A copy is checked like the mask, also for a part of it."""
    ids = torch.zeros(LENGTH, dtype=torch.int32)
    mask = masks.causal() & masks.from_function(of_cell(ids))
    copied = lambda: jax.device_put(mask, jax.devices()[0])
    moved, unknown = mask_sources.passed_on(mask, copied()), copied()
    mask_sources.check([moved])
    ids += 1
    mask_sources.check([unknown])
    with pytest.raises(ValueError, match=COUNTED.format("ids")):
        mask_sources.check([moved])


def test_replaced_or_moved_buffer():
    for change in (lambda x: setattr(x, "ids", x.ids.clone()), lambda x: setattr(x.ids, "data", x.ids.clone())):
        module = Documents()
        mask = masks.from_function(module.mask_mod)
        attend(mask)
        change(module)
        with pytest.raises(ValueError, match=r"^mask: .* self.ids has changed since"):
            attend(mask)


def test_inference_tensors_are_compared_by_value():
    """PyTorch does not count changes of inference tensors."""
    with torch.inference_mode():
        ids = torch.zeros(LENGTH, dtype=torch.int32)
        mask = masks.from_function(of_cell(ids))
        first = attend(mask)
        torch.testing.assert_close(attend(mask), first)
        ids[3:] = 1
        with pytest.raises(ValueError, match=r"^mask: .* ids has changed since"):
            attend(mask)


def test_every_use_of_the_mask():
    ids = torch.zeros(LENGTH, dtype=torch.int32)
    mask = masks.from_function(of_cell(ids))
    prepared = bridge.prepare_mask(mask, *QKV[:2])
    compiled = bridge.compile_attention(mask, LENGTH, 8, num_heads=HEADS, dtype=torch.float32, device="cpu")
    graph = torch.compile(attend, fullgraph=True, backend="aot_eager")
    module = bridge.nn.FlexAttention(mask)
    uses = {
        "composed": lambda: attend(mask & masks.causal()),
        "negated": lambda: attend(~(masks.causal() | mask)),
        "prepared": lambda: attend(prepared),
        "prepare": lambda: bridge.prepare_mask(mask, *QKV[:2]),
        "compiled": lambda: compiled(*QKV),
        "compile": lambda: bridge.compile_attention(mask, LENGTH, 8, device="cpu"),
        "module": lambda: module(*QKV),
        "graph": lambda: graph(mask),
        "dynamic": lambda: bridge.dynamic_mask_attention(*QKV, mask),
        "blocks": lambda: bridge.block_sparse_attention(*QKV, mask),
        "among": lambda: masks.top_k(torch.zeros(1, LENGTH), 2, among=mask, q_length=LENGTH),
    }
    for use in uses.values():
        use()
    ids.fill_(0)  # PyTorch counts a write of equal values, too
    for use in uses.values():
        with pytest.raises(ValueError, match="ids has changed since"):
            use()


def test_backward_after_the_change():
    """The forward used the old values, and so does its backward."""
    ids = torch.zeros(LENGTH, dtype=torch.int32)
    mask = masks.from_function(of_cell(ids))
    query = QKV[0].clone().requires_grad_()
    want = None
    for _ in range(3):
        out = bridge.flash_attention(query, *QKV[1:], mask=mask)
        (want,) = torch.autograd.grad(out.sum(), query, retain_graph=True)
    ids.fill_(1)
    (got,) = torch.autograd.grad(out.sum(), query)
    torch.testing.assert_close(got, want)


def test_builders_and_copies_have_no_sources():
    ids = torch.zeros(LENGTH, dtype=torch.int32)
    segments, mask = masks.segments(ids), masks.from_function(of_cell(ids))
    duplicate = copy.deepcopy(mask)
    want = attend(mask)
    ids[3:] = 1
    torch.testing.assert_close(attend(segments), want)  # a builder copies its argument, as documented
    torch.testing.assert_close(attend(duplicate), want)


def test_mask_of_a_module_is_collected():
    module = Documents()
    module.mask = masks.from_function(module.mask_mod)
    for _ in range(3):
        attend(module.mask)
    reference = weakref.ref(module)
    del module
    gc.collect()
    assert reference() is None
