"""The backend `mma_sp`: selection, softmax and products in one kernel on sparse tensor cores, CUDA C++."""
