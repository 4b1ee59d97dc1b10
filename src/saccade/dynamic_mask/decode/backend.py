"""The backend that decodes: one token at a time over the kept keys of a cache."""

from __future__ import annotations

from saccade.dynamic_mask.args import DecodeLaunchers
from saccade.dynamic_mask.problem import DynamicMaskProblem
from saccade.dynamic_mask.requirements import why_not
from saccade.engine.backend import Backend

# each token is one launch
MAX_DECODE_TOKENS = 8


def _why_not_decode(problem: DynamicMaskProblem) -> list[str]:
    reasons = why_not(problem)
    if problem.q_len > MAX_DECODE_TOKENS:
        reasons.append(f"takes at most {MAX_DECODE_TOKENS} tokens at a time, got {problem.q_len}")
    if problem.needs_grad:
        reasons.append("has no backward, and query requires a gradient (use torch.no_grad())")
    return reasons


def _load_decode() -> DecodeLaunchers:
    from saccade.dynamic_mask.decode.launcher import Decode

    return DecodeLaunchers(Decode)


# the problem describes only the new tokens
DECODE = Backend(
    name="decode",
    operation="dynamic_mask_decode",
    summary="one launch per token over the entries of a DynamicMaskCache, in place, Triton, sm_80 and later",
    why_not=_why_not_decode,
    # in the interpreter only if requested by name
    prefers=lambda problem: problem.device_type == "cuda",
    launchers=_load_decode,
)
