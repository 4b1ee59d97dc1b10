"""The errors saccade raises. Each message repeats what was given and says what is allowed."""


class SaccadeError(Exception):
    """Base class of every error raised by this library."""


class InvalidArgument(SaccadeError, ValueError):
    """An argument is invalid: it has a wrong shape, dtype, device, range or name."""


class UnsupportedProblem(SaccadeError, NotImplementedError):
    """The call is valid, but the requested backend cannot run it here."""


class CompilerUnavailable(SaccadeError, RuntimeError):
    """There is no compiler for CUDA C++ here, or it does not know the architecture; the message says what to install."""


class CompileError(SaccadeError, RuntimeError):
    """A kernel does not compile here (NVRTC refused a source, or Triton a kernel), or the device cannot load the result.

    The message names the kernel, the compiler and its version, and contains the output of the compiler, which is also in `log`.
    `options` are the compiler's options, and `architecture` is that of NVRTC (None for Triton). Under `backend="auto"` the call
    continues with another kernel.
    """

    def __init__(self, summary: str, options: tuple[str, ...], log: str, architecture: str | None = None):
        super().__init__(f"{summary}\noptions: {' '.join(options)}\n{log}" if options else f"{summary}\n{log}")
        self.summary, self.options, self.log, self.architecture = summary, options, log, architecture
