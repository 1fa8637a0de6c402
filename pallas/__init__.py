"""The kernels. Nothing here knows Flax, PyTorch, the public API or which GPU it runs on."""
