"""Local training of many clients on a GPU by a recorded step, with kernels of our own."""
