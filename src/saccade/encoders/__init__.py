"""Whole encoders: padding packed away, and on a GPU replayed from CUDA graphs."""
