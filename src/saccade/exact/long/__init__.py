"""Exact attention for 65 tokens and more on sm_90, dense or packed, in CUDA C++. `docs/notes/long.md` has the tiling and the measurements."""
