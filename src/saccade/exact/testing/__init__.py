"""Named problems of `attention`, and their check."""
