"""Decides which model classes of transformers can run our attention functions. The others are refused when a model is made, or run torch's layers.

transformers checks `_supports_sdpa` only for its own names; under another name it makes any model. A model that ignores the function still
gets its mask, and adds our True and False to the scores as 1 and 0. Padding then leaks and a causal model sees the future, without any error.

Some of these models have layers for "sdpa" in a table of their own, which compute the same result. A name that means exact attention falls
back to these layers; a name whose result differs never does.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import sys
from typing import Any

from saccade.errors import SaccadeError, UnsupportedProblem
from saccade.hardware import package_version

_logger = logging.getLogger("saccade")

_METHOD = "get_correct_attn_implementation"
# the attribute in which the wrapper keeps the names that it refuses: other copies of this package in the process add theirs to the same set
_NAMES = "_saccade_refused_names"
# the same for those of them that mean exact attention
_EXACT = "_saccade_exact_names"
_ITSELF = "_saccade_wrapper"
_HAS_ATTENTION = re.compile(r"^class \w*Attention\w*\(|softmax\(", re.MULTILINE)
# models that look up their layer class in a table of transformers' own names: another name gives a KeyError or the eager layer
_HAS_TABLE = re.compile(r"_CLASSES\[\w*\.?_?attn_implementation\w*\]")


def refuse_models_that_ignore(name: str, exact: bool) -> None:
    """From now on, making a model with `attn_implementation=name`, or switching it to that, raises if the model does not run
    attention functions. exact: whether the name computes what "sdpa" does, so that a model with layers for that runs them. The last call of a
    name counts."""
    from transformers import PreTrainedModel

    method = getattr(PreTrainedModel, _METHOD, None)
    if method is None:
        raise SaccadeError(
            f"transformers {package_version('transformers')} has no PreTrainedModel.{_METHOD}, where models that ignore attention "
            "functions are refused; 5.23 has it"
        )
    names = getattr(method, _NAMES, None)
    if names is None:
        names = set()
        method = _refusing(method, names, set())
        setattr(PreTrainedModel, _METHOD, method)
    names.add(name)
    told: set[str] = getattr(method, _EXACT, set())
    (told.add if exact else told.discard)(name)


def allow_models_that_ignore(name: str) -> None:
    """Undo `refuse_models_that_ignore`; with the last name the method of transformers is restored, unless other code has wrapped it since."""
    from transformers import PreTrainedModel

    method: Any = getattr(PreTrainedModel, _METHOD, None)
    names: set[str] = getattr(method, _NAMES, set())
    names.discard(name)
    getattr(method, _EXACT, set()).discard(name)
    # functools.wraps copies attributes, so a wrapper around ours has them too
    ours: Any = getattr(method, _ITSELF, method)
    if ours is method and hasattr(method, _ITSELF) and not names:
        setattr(PreTrainedModel, _METHOD, ours.__wrapped__)


def why_not(model_class: Any) -> str | None:
    """Why a model of this class cannot run attention functions; None if it can."""
    source = _source(model_class)
    if not _HAS_ATTENTION.search(source):
        # a convolution, or a wrapper around other models, which are checked separately
        return None
    if not (model_class._supports_sdpa or model_class._supports_attention_backend):
        return "transformers declares no support for attention functions (its layers add masks as numbers, or do not say their direction)"
    if _HAS_TABLE.search(source):
        return "it looks up its layers in a table that has only the names of transformers itself"
    return None


def _refusing(method: Any, names: set[str], exact: set[str]) -> Any:
    @functools.wraps(method)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested_attention in names and (reason := why_not(type(self))):
            if requested_attention not in exact or not type(self)._supports_sdpa:
                raise UnsupportedProblem(
                    f"{type(self).__name__} cannot run attn_implementation={requested_attention!r}: {reason}; use 'eager' (as a part of a "
                    f"larger model: attn_implementation={{'': {requested_attention!r}, '<its key in the config>': 'eager'}})"
                )
            _warn_of_torch(type(self), requested_attention, reason)
            requested_attention = "sdpa"
        return method(self, requested_attention, *args, **kwargs)

    setattr(get_correct_attn_implementation, _NAMES, names)
    setattr(get_correct_attn_implementation, _EXACT, exact)
    setattr(get_correct_attn_implementation, _ITSELF, get_correct_attn_implementation)
    return get_correct_attn_implementation


# each (module, name) that a warning has named: a model and its parts come from one module
_TOLD: set[tuple[str, str]] = set()


def _warn_of_torch(model_class: Any, name: str, reason: str) -> None:
    """Say once for a module of transformers that its models run torch's layers."""
    if (told := (model_class.__module__, name)) in _TOLD:
        return
    _TOLD.add(told)
    _logger.warning(
        "%s cannot run attn_implementation=%r: %s; it runs torch's own attention, 'sdpa', in all of its layers",
        model_class.__name__, name, reason,
    )  # fmt: skip


@functools.cache
def _source(model_class: Any) -> str:
    """The source of the module that defines the class; empty if it cannot be read."""
    try:
        return inspect.getsource(sys.modules[model_class.__module__])
    except (KeyError, OSError, TypeError):
        return ""
