"""The backend `masked`: any N:M by masking dense tiles, Triton."""
