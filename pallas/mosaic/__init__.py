"""Parts for all Mosaic kernels: launch, barriers, tiles in shared memory, registers, the tile scheduler."""
