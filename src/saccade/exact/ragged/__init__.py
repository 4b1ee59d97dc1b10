"""Ragged batches: sequences of different lengths packed one behind another, or dense rows of which only `lengths` keys are real."""
