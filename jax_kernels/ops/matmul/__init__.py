"""The op matmul: its checks, its table of implementations, its gradients, and products of 8 bits."""
