"""The staged pipeline of N:M sparse attention in CUDA C++: pruned scores, their softmax, and the product with values."""
