"""Epsilon, secrets and releases."""
