"""Which keys a query keeps: intervals of positions, by plain torch or by kernels, and lists of kept keys."""
