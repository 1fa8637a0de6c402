"""Parts that the Hopper attention kernels share, one file for each feature of a call."""
