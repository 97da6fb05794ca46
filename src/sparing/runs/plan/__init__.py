"""How the work is laid out on a machine."""
