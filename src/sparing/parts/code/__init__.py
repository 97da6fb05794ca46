"""How an update is written."""
