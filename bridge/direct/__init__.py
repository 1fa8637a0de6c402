"""The direct route: a call's kernels, launched on PyTorch's current stream, without JAX.

JAX compiles a call once. Where the program is a chain of kernels, fills and copies, they are read from the executable,
and later calls launch them by the CUDA driver.

| file | what it does |
|---|---|
| chain.py | the parts of a chain |
| target.py | compiles a JAX function for a GPU |
| executable.py | finds the chain in the executable |
| records.py | the formats in which an executable is written |
| driver.py | the CUDA driver, and Mosaic's compiler |
| launcher.py | loads and launches a chain |
"""
