"""Kernels in interpreters, and checks of their memory accesses."""
