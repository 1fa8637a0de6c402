"""Attention of sequences that several devices share, round a ring."""
