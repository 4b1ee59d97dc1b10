"""The backward pass for sm_90, CUDA C++."""
