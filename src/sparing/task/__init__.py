"""Datasets, partitions, networks, local training and evaluation."""
