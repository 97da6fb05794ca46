"""Where clients run: one at a time with every byte written, or many at once."""
