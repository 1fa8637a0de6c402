"""Small memory-bound Triton kernels that run before and after attention. XLA does their work without Pallas-Triton."""
