"""The op matmul: its checks, its table of implementations, its gradients, and 8-bit matmuls."""
