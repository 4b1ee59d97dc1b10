"""`dynamic_mask_attention`: attention to the best-scored keys of each query."""
