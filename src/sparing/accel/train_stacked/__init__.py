"""Local training of many clients in every operation (vmap), on a CPU or a GPU."""
