"""The parts that any Mosaic kernel needs: launch, barriers, tiles in shared memory, registers, the tile scheduler."""
