"""Readers of files that may be hostile."""
