"""Faster local training on a CPU: one client after the other, or dense layers without forming weights."""
