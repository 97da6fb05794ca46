"""Layers of many clients at once, for a GPU: Triton kernels behind autograd functions that vmap knows.

Each of them computes what the layer of torch computes, with a client axis in front. They are trusted against those.
"""
