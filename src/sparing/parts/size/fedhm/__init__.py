"""Low-rank client models (FedHM): factors, decompositions, weights by rank, partitions."""
