"""Launching kernels; knows nothing of attention."""
