"""What any Mosaic kernel needs: its launch, barriers, tiles in shared memory, registers, and who takes which tile."""
