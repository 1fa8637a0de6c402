"""Choices that ring_attention's callers and its strategy "auto" make before any kernel runs."""
