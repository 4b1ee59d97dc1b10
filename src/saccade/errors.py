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
    """NVRTC refused a source. `log` is what it said, `options` what it was called with.

    The message holds both, with the file, the line and the architecture.
    """

    def __init__(self, summary: str, options: tuple[str, ...], log: str):
        super().__init__(f"{summary}\noptions: {' '.join(options)}\n{log}")
        self.options, self.log = options, log
