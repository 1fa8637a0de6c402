"""Attention over whole sequences: dense, masked, in 8 bits, and dilated."""
