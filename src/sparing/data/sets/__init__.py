"""The data sets that have a name."""
