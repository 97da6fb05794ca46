"""The algebra: trees, keyed draws, parcels, what a method is, the round and the exact fold."""
