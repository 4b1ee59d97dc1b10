"""Launches kernels; knows nothing of attention."""
