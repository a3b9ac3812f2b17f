"""The runtime of the kernels in numba: compiled code on disk, vectors, threads.

`cache.KERNELS` keeps compiled code between starts. `vectors.jit` compiles a kernel, over the vectors of sixteen float32
that `ir` lowers to LLVM. `thread_team.Team` runs a kernel's units of work on all cores. `warm_up.warm_up` compiles
everything before the first step.
"""
