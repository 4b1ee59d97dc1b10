"""Named problems of `nm_sparse_attention`, their inputs and their check."""
