"""The errors saccade raises. Each message repeats what was given and says what is allowed."""


class SaccadeError(Exception):
    """Base class of every error raised by this library."""


class InvalidArgument(SaccadeError, ValueError):
    """An argument has no meaning: wrong shape, dtype, device, range or name."""


class UnsupportedProblem(SaccadeError, NotImplementedError):
    """The call is meaningful, but the backend that was asked for cannot run it here."""


class CompilerUnavailable(SaccadeError, RuntimeError):
    """There is no compiler for CUDA C++ here, or it does not know the architecture; the message says what to install."""


class CompileError(SaccadeError, RuntimeError):
    """A kernel does not compile here, or the device does not load what was compiled: NVRTC refused a source, or Triton a kernel.

    The message names the kernel, the compiler and its version, and holds what the compiler said, which `log` is too; `options` is what it was
    called with, `architecture` that of NVRTC (None for Triton). A call that `backend="auto"` chose goes on with another kernel.
    """

    def __init__(self, summary: str, options: tuple[str, ...], log: str, architecture: str | None = None):
        super().__init__(f"{summary}\noptions: {' '.join(options)}\n{log}" if options else f"{summary}\n{log}")
        self.summary, self.options, self.log, self.architecture = summary, options, log, architecture
