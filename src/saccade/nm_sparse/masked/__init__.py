"""The backend `masked`: any N:M pattern by masking dense tiles, in Triton."""
