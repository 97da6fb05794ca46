"""A real federation: letters, the node, the server's desk, and what carries them."""
