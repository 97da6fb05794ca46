"""How arrivals become one update."""
