"""The op linear_cross_entropy: its checks, its table of implementations and its gradients."""
