"""Work that may take any time or memory, in processes that can be killed.

`pool.ForkPool` is the server's side: tenants in turns, and what each has used. `worker.serve_forks` is the process: it
loads what the work needs once, and its forks do the work under limits of the kernel.
"""
