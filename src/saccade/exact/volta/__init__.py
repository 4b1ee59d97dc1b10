"""Exact attention on Volta's and Turing's tensor cores (mma.m8n8k4), CUDA C++."""
