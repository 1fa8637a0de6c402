"""The direct route: a call's kernels, launched on PyTorch's current stream, without JAX.

JAX compiles a call once. If the program is a chain of kernels, fills and copies, the chain is read from the executable,
and later calls launch it through the CUDA driver.

| file | content |
|---|---|
| chain.py | the parts of a chain |
| compile.py | compiles a JAX function for a GPU |
| executable.py | reads the chain from the executable |
| records.py | reads the file formats of an executable |
| launcher.py | loads and launches a chain |
| dlpack_route.py | the other route: JAX runs the function |
"""
