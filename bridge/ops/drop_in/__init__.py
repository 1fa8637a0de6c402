"""Functions with the names and arguments of PyTorch and flash-attn, and PyTorch's own path as their fallback."""
