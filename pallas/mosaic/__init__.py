"""Parts of any Mosaic kernel: its launch, barriers, tiles in shared memory, registers, and scheduler."""
