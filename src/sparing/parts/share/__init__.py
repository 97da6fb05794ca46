"""Which part of the model travels."""
