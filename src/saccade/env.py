"""Every environment variable the library reads, in one place.

| variable | default | meaning |
|---|---|---|
| `TRITON_INTERPRET` | unset | Triton's own switch: `1` runs the Triton kernels on the CPU, in Python. Read at import of Triton. |
| `SACCADE_PRINT_CONFIG` | unset | `1` prints each kernel configuration to stderr the first time it is chosen. |
"""

import os


def interpreting_triton() -> bool:
    """Whether Triton kernels run in the interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def print_config() -> bool:
    """Whether to print each newly chosen kernel configuration."""
    return os.environ.get("SACCADE_PRINT_CONFIG", "0") == "1"


def interpreting_environment() -> dict[str, str]:
    """This process's environment with Triton's interpreter switched on, for a child: the switch is read at import."""
    return {**os.environ, "TRITON_INTERPRET": "1"}
