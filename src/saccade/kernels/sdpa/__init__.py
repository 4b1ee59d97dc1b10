"""torch's own scaled_dot_product_attention as a backend."""
