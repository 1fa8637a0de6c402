"""Small kernels beside the products: how their operands are prepared."""
