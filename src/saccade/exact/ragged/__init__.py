"""Ragged batches: sequences of different lengths packed one behind another, or dense rows whose first `lengths` keys are real."""
