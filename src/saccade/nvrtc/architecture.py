"""The architectures for which sources are compiled, and which of them a device can run."""

from __future__ import annotations

from saccade.errors import InvalidArgument

# the letter allows instructions of that compute capability only (wgmma and TMA multicast on sm_90a), which no other device runs
ARCHITECTURES = ("70", "75", "80", "86", "89", "90", "90a", "100", "120")


def architecture_named(name: str | int) -> str:
    """`name` as one of `ARCHITECTURES`: 90, "90" and "sm_90" are the same."""
    known = str(name).removeprefix("sm_")
    if known not in ARCHITECTURES:
        raise InvalidArgument(f"architecture is {name!r}; allowed are {', '.join(ARCHITECTURES)}")
    return known


def architecture_for(capability: int) -> str:
    """The architecture to compile for so that a device of this compute capability can run it, such as "86" for 87; never one with
    a letter.

    A cubin runs on devices of the same major and a later minor capability.
    """
    older = [a for a in ARCHITECTURES if a.isdigit() and int(a) <= capability and int(a) // 10 == capability // 10]
    if not older:
        plain = ", ".join(a for a in ARCHITECTURES if a.isdigit())
        raise InvalidArgument(f"no source is compiled for compute capability {capability}; there are architectures {plain}")
    return older[-1]
