"""The search for configurations of the family `short`: `python -m tools.tuner`."""
