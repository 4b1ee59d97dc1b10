"""`python -m tools.soak`: random problems of every operation, for as long as wanted, each judged against float64."""
