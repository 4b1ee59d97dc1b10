"""The keys that a query keeps: intervals of positions, computed in plain torch or by kernels, and lists of kept keys."""
