"""Decoding with dynamic masks: a cache of the kept keys, and the kernel that updates it and attends."""
