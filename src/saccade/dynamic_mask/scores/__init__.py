"""`dynamic_mask_scores`: the scores of keys from their values, in one kernel forward and one backward."""
