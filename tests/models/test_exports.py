"""The names of `from jax_kernels.models import *`."""

import inspect

import jax_kernels
import jax_kernels.models


def test_star_import_keeps_the_ops():
    names: dict = {}
    exec("from jax_kernels import dilated_attention, dynamic_mask_attention", names)
    exec("from jax_kernels.models import *", names)
    assert names["dilated_attention"] is jax_kernels.dilated_attention
    assert names["dynamic_mask_attention"] is jax_kernels.dynamic_mask_attention
    assert names["Transformer"] is jax_kernels.models.Transformer


def test_star_import_gives_every_public_name():
    public = {
        name for name, x in vars(jax_kernels.models).items() if not name.startswith("_") and not inspect.ismodule(x)
    }
    assert set(jax_kernels.models.__all__) == public
