"""Kernels that gather the kept keys of each block of queries."""
