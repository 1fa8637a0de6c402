"""Attention on Hopper: the Mosaic kernels, and what XLA makes before and behind them."""
