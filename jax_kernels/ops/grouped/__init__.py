"""The op grouped_matmul: its checks, its table of implementations and its gradients."""
