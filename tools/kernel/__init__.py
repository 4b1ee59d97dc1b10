"""The loop for one kernel: `make kernel K=exact/short/forward`."""
