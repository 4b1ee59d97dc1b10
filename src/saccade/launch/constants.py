"""Numbers that the host and kernels of every family share. A Triton kernel wants its globals as `tl.constexpr`, made of these in its own file."""

LOG2E = 1.4426950408889634  # log2(e): kernels take exponentials in base 2, for which there is an instruction
LN2 = 0.6931471805599453  # ln(2): and give the log-sum-exp in base e
