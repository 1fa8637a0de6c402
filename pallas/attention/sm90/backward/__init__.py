"""The Hopper backward kernels of attention."""
