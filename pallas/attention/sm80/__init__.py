"""Attention kernels for GPUs from Ampere on: tensor cores by mma.sync, copies by cp.async."""
