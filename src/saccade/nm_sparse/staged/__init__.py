"""The staged pipeline of N:M sparse attention in CUDA C++: pruned scores, their softmax, their product with values."""
