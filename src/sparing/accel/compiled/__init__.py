"""Loops compiled for the CPU, beside the plain bodies whose bits they give."""
