"""The programs that contributors run from a checkout: the soak, the tuner, the loop for one kernel, and readers of compiled kernels."""
