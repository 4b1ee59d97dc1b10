"""Dynamic mask attention: time and memory proportional to n * w, however scattered the kept keys are."""
