"""The meaning of each operation in plain torch: any device, any floating dtype, float64 for the oracle."""
