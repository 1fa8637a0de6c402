"""Test cases, oracles and error bounds of matmuls in 8 and fewer bits."""
