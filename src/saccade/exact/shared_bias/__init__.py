"""A bias that many rows share, beyond 128 tokens, in Triton."""
