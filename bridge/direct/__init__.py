"""The direct route: a call's kernels, launched on PyTorch's current stream, without JAX.

JAX compiles a call once. If the program is a chain of kernels, fills and copies, the chain is read from the executable,
and later calls launch it through the CUDA driver.

| file | content |
|---|---|
| chain.py | the parts of a chain |
| compile.py | compiles a JAX function for a GPU |
| executable.py | reads the chain from the executable |
| records.py | reads the file formats of an executable |
| mosaic_launch.py | notes the launch of a compiled Mosaic kernel |
| program_cache.py, call_key.py | keep chains on disk, by program or by call |
| loaded_kernels.py | loads a chain's kernels, and unloads them |
| launch_block.py | the host memory of a launch |
| launcher.py | launches a chain |
| dlpack_route.py | the other route: JAX runs the function |
"""
