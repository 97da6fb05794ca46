"""Client models of several sizes."""
