"""The CUDA C++ kernels of `gather` for sm_90."""
