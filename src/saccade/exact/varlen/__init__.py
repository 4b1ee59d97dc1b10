"""`attention_varlen`: exact attention over packed sequences of different lengths."""
