"""The kernels. They do not depend on Flax, PyTorch, the public API or the GPU that runs them."""
