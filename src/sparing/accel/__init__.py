"""Faster ways to what the plain rooms do; they are registered by `install` and switched off by SPARING_PLAIN=1."""
