"""The errors saccade raises. Each message repeats what was given and says what is allowed."""


class SaccadeError(Exception):
    """Base class of every error raised by this library."""


class InvalidArgument(SaccadeError, ValueError):
    """An argument has no meaning: wrong shape, dtype, device, range or name."""


class UnsupportedProblem(SaccadeError, NotImplementedError):
    """The call is meaningful, but the backend that was asked for cannot run it here."""
