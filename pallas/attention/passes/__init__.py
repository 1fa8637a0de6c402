"""Small Triton kernels before and behind attention, bound by memory."""
