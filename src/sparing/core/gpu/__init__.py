"""Kernels for what torch has no single operation for. Triton is needed to import them."""
