"""Handles one call of any operation, from its arguments to a backend, without knowing any operation."""
