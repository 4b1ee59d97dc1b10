"""Named problems of `attention`, and the check of a backend on them."""
