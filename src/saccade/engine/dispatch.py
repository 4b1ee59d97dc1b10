"""Chooses a backend, and explains why the others were not chosen."""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch

from saccade.engine.backend import Backend
from saccade.engine.rule import Rule
from saccade.engine.switch import REASON
from saccade.errors import InvalidArgument, UnsupportedProblem
from saccade.launch.disabled import failure_of

_logger = logging.getLogger("saccade")


class Plan(NamedTuple):
    """The backend that runs a call, and why: the call is prepared with it, and `explain` prints it.

    named: the caller named the backend.
    """

    problem: Any
    backend: Backend
    named: bool = False

    @property
    def op_name(self) -> str:
        """The name that ops carry, with "auto:" in front if another backend may take over."""
        return self.backend.name if self.named else f"auto:{self.backend.name}"

    @property
    def form(self) -> Any:
        """The kernels and configurations that run the call; None if the backend has a single way."""
        return self.backend.form(self.problem) if self.backend.form else None

    @property
    def rule(self) -> Rule | None:
        """Why the backend runs the call, with the measurements that show it."""
        return self.backend.rule(self.problem)


def choose(candidates: tuple[Backend, ...], problem: Any, backend: str = "auto") -> Plan:
    """The plan of a call: with "auto" the first backend that can run and prefers the problem, else the first that can run. If that is the reference, a
    backend that `spares_reference` runs instead.

    Raises:
        InvalidArgument: no backend of this operation has that name.
        UnsupportedProblem: the named backend (or, with "auto", every backend) declines; lists every reason.
    """
    if not isinstance(backend, str) or backend != "auto":
        named = _by_name(candidates, backend)
        reasons = why_not(named, problem)
        if reasons:
            raise UnsupportedProblem(_refusal(f"backend {backend!r} cannot run", problem, {named.name: reasons}))
        return Plan(problem, named, named=True)
    chosen = _plan(candidates, problem)
    if chosen is None:
        raise UnsupportedProblem(_refusal("no backend can run", problem, {b.name: why_not(b, problem) for b in candidates}))
    if chosen.backend.is_reference and not torch.compiler.is_compiling():  # a log call would break a compiled graph
        _warn_reference(str(problem))
    return chosen


def _plan(candidates: tuple[Backend, ...], problem: Any) -> Plan | None:
    """The plan of `auto`; None if no backend can run."""
    runnable = _runnable(candidates, problem)
    if not runnable:
        return None
    if runnable[0].is_reference:
        runnable = [b for b in candidates if b.spares_reference and _can(b, problem)] or runnable
    return Plan(problem, next((b for b in runnable if b.prefers(problem)), runnable[0]))


def why_not(backend: Backend, problem: Any) -> list[str]:
    """The reasons why a backend cannot run a call: the obstacles that it names, or the process's switch."""
    return backend.why_not(problem) if backend.may_run else [REASON]


class Verdict(NamedTuple):
    """The dispatcher's verdict on one backend.

    state: "chosen", "cannot", "disabled" (a kernel of it failed), "by name only" or "not preferred". reasons: sentences; for the chosen
    backend what it is, its configuration, and the rule by which it is taken.
    """

    backend: str
    state: str
    reasons: list[str]


def verdicts(candidates: tuple[Backend, ...], problem: Any) -> list[Verdict]:
    """A verdict on each backend, in the order in which `auto` tries them; none is chosen if no backend can run."""
    plan = _plan(candidates, problem)
    return [_chosen(plan) if plan is not None and b is plan.backend else _verdict(b, problem) for b in candidates]


def _chosen(plan: Plan) -> Verdict:
    said = [plan.backend.summary]
    if plan.form is not None:
        said.append(str(plan.form))
    if by_name_only := plan.backend.by_name_only(plan.problem):
        said.append(f"as only the reference is left: {by_name_only}")
    elif plan.rule is not None:
        said.append(f"the first that can, as none is preferred: {plan.rule}" if plan.rule.against else str(plan.rule))
    return Verdict(plan.backend.name, "chosen", said)


def _verdict(b: Backend, problem: Any) -> Verdict:
    if reasons := why_not(b, problem):
        return Verdict(b.name, "cannot", reasons)
    if failed := _failed(b, problem):
        return Verdict(b.name, "disabled", [failed])
    if by_name_only := b.by_name_only(problem):
        return Verdict(b.name, "by name only", [by_name_only])
    if b.prefers(problem):
        rule = b.rule(problem)
        measured = [str(rule)] if rule and rule.source else []
        return Verdict(b.name, "not preferred", ["an earlier backend is preferred", *measured])
    return Verdict(b.name, "not preferred", [str(b.rule(problem) or "not preferred for such a problem")])


_LINES = {
    "cannot": "     {}: cannot: {}",
    "disabled": "     {}: disabled: {}",
    "by name only": "     {}: could, by name only: {}",
    "not preferred": "     {}: could, but {}",
}


def explain(candidates: tuple[Backend, ...], problem: Any) -> str:
    """A readable account: the call, the chosen backend and its configuration, and why each of the others was not chosen."""
    lines = [str(problem)]
    for backend, state, reasons in verdicts(candidates, problem):
        if state == "chosen":
            lines.append(f"  -> {backend}: {', '.join(reasons)}")
        else:
            lines.append(_LINES[state].format(backend, "; ".join(reasons)))
    return "\n".join(lines)


def _runnable(candidates: tuple[Backend, ...], problem: Any) -> list[Backend]:
    """The backends that "auto" may choose and that can run."""
    return [b for b in candidates if not b.by_name_only(problem) and _can(b, problem)]


def _can(backend: Backend, problem: Any) -> bool:
    return not why_not(backend, problem) and not _failed(backend, problem)


def _failed(backend: Backend, problem: Any) -> str:
    """Why a backend was disabled for calls of this shape; an empty string if it was not."""
    batch = getattr(problem, "batch_shape", None) or (problem.batch,)
    query = (*batch, problem.heads, problem.q_len, problem.head_dim)
    key = (*batch, problem.kv_heads, problem.kv_len, problem.head_dim)
    error = failure_of((backend.operation, backend.name, query, key, problem.dtype))
    return "" if error is None else str(error).partition("\n")[0]


def _by_name(candidates: tuple[Backend, ...], name: str) -> Backend:
    for candidate in candidates:
        if isinstance(name, str) and candidate.name == name:
            return candidate
    known = ", ".join(repr(b.name) for b in candidates)
    raise InvalidArgument(f"backend is {name!r}; allowed are 'auto', {known}")


def _refusal(headline: str, problem: Any, reasons: dict[str, list[str]]) -> str:
    # Dynamo cannot format symbolic sizes, and would report that instead of the reasons
    lines = [headline] if torch.compiler.is_compiling() else [headline, f"    {problem}"]
    for name, sentences in reasons.items():
        width = len(name) + 2
        lines += [f"  {name}: {s}" if i == 0 else f"  {'':{width}}{s}" for i, s in enumerate(sentences)]
    return "\n".join(lines)


# bounded, because every new shape leaves its text here
@functools.lru_cache(maxsize=1024)
def _warn_reference(problem: str) -> None:
    _logger.warning("only the reference backend can run %s: correct, but slow and O(Tq * Tk) in memory", problem)
