"""Numbers that the host and the kernels of every family share. Triton kernels need globals as `tl.constexpr`; each file makes its
own from these."""

# log2(e): kernels compute exponentials in base 2, for which there is an instruction
LOG2E = 1.4426950408889634
# ln(2): kernels return the log-sum-exp in base e
LN2 = 0.6931471805599453
