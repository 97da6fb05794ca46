"""A model, its data and a loss together."""
