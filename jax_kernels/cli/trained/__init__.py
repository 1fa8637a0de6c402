"""The commands that use a model of `jax-kernels train`: generate and eval."""
