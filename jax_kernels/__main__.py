"""`python -m jax_kernels` is the command jax-kernels."""

from jax_kernels.cli import main

if __name__ == "__main__":
    main()
