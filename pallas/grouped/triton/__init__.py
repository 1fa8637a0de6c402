"""Grouped matmul in Pallas-Triton: sm_80 and later."""
