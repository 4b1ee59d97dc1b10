"""Decides which model classes of transformers can run our attention functions, and refuses the others when a model is made.

transformers checks `_supports_sdpa` only for its own names; under another name it makes any model. A model that ignores the
function still
gets its mask, and adds our True and False to the scores as 1 and 0: padding leaks and a causal model sees the future, without any
error.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

from saccade.errors import SaccadeError, UnsupportedProblem
from saccade.hardware import package_version

_METHOD = "get_correct_attn_implementation"
# where the wrapper keeps the names that it refuses: other copies of this package in the process add theirs to the same set
_NAMES = "_saccade_refused_names"
_ITSELF = "_saccade_wrapper"
_HAS_ATTENTION = re.compile(r"^class \w*Attention\w*\(|softmax\(", re.MULTILINE)
# models that look up their layer class in a table of transformers' own names: another name gives a KeyError or the eager layer
_HAS_TABLE = re.compile(r"_CLASSES\[\w*\.?_?attn_implementation\w*\]")


def refuse_models_that_ignore(name: str) -> None:
    """From now on, making a model with `attn_implementation=name`, or switching it to that, raises if the model does not run
    attention functions."""
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
        setattr(PreTrainedModel, _METHOD, _refusing(method, names))
    names.add(name)


def allow_models_that_ignore(name: str) -> None:
    """Undo `refuse_models_that_ignore`; with the last name the method of transformers is put back, unless somebody has wrapped it since."""
    from transformers import PreTrainedModel

    method: Any = getattr(PreTrainedModel, _METHOD, None)
    names: set[str] = getattr(method, _NAMES, set())
    names.discard(name)
    # functools.wraps copies attributes, so a wrapper around ours has them too
    ours: Any = getattr(method, _ITSELF, method)
    if ours is method and hasattr(method, _ITSELF) and not names:
        setattr(PreTrainedModel, _METHOD, ours.__wrapped__)


def why_not(model_class: Any) -> str | None:
    """Why a model of this class cannot run attention functions; None if it can."""
    source = _source(model_class)
    if not _HAS_ATTENTION.search(source):
        # a convolution, or a wrapper around other models, which are checked themselves
        return None
    if not (model_class._supports_sdpa or model_class._supports_attention_backend):
        return "transformers declares no support for attention functions (its layers add masks as numbers, or do not say their direction)"
    if _HAS_TABLE.search(source):
        return "it looks up its layers in a table that has only the names of transformers itself"
    return None


def _refusing(method: Any, names: set[str]) -> Any:
    @functools.wraps(method)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested_attention in names and (reason := why_not(type(self))):
            raise UnsupportedProblem(
                f"{type(self).__name__} cannot run attn_implementation={requested_attention!r}: {reason}; use 'eager' (as a part of a "
                f"larger model: attn_implementation={{'': {requested_attention!r}, '<its key in the config>': 'eager'}})"
            )
        return method(self, requested_attention, *args, **kwargs)

    setattr(get_correct_attn_implementation, _NAMES, names)
    setattr(get_correct_attn_implementation, _ITSELF, get_correct_attn_implementation)
    return get_correct_attn_implementation


@functools.cache
def _source(model_class: Any) -> str:
    """The source of the module that defines the class; empty if it cannot be read."""
    try:
        return inspect.getsource(sys.modules[model_class.__module__])
    except (KeyError, OSError, TypeError):
        return ""
