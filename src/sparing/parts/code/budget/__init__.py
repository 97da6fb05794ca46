"""A byte budget, spent where it buys most."""
