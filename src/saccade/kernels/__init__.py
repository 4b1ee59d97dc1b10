"""Kernel families, one folder each, and the contract between them and the dispatcher."""
