"""Named problems of `dynamic_mask_attention`, their inputs and their check."""
