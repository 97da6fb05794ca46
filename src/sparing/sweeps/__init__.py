"""Many runs: grids, searches, worker processes."""
