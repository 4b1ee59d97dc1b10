"""Exact attention for short sequences: one program holds whole rows of scores. See README.md here."""
