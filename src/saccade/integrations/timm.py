"""`patch`: the attention of a timm model runs `saccade.attention`, whether its layers call torch's function or form their scores."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Any

from torch import nn

from saccade.engine.arguments import check_flag, shown
from saccade.errors import InvalidArgument, SaccadeError, UnsupportedProblem
from saccade.integrations import timm_layers
from saccade.integrations.timm_layers import BY_HAND, has_softmax, patched_class, read_globals


class Patch:
    """The changes that `patch` has made to a model, and their removal. As a context manager it restores at the end of the block."""

    def __init__(self, model: nn.Module, skip_unknown: bool) -> None:
        self._model = type(model).__name__
        self._changed: list[tuple[nn.Module, type, type]] = []
        self._turned_on: list[nn.Module] = []
        found, self._left = _survey(model)
        if self._left and not skip_unknown:
            named = ", ".join(f"{name} ({kind})" for name, kind in list(self._left.items())[:3])
            raise UnsupportedProblem(
                f"{len(self._left)} layers of this {self._model} form a softmax in a way that is not known: {named}"
                f"{', ...' if len(self._left) > 3 else ''}; skip_unknown=True leaves those as they are"
            )
        if not found:
            raise UnsupportedProblem(
                f"this {self._model} has no layer of timm, nor one that calls torch's attention, that is known"
            )
        for module, after in found:
            before: type = type(module)
            module.__class__ = after
            self._changed.append((module, before, after))
            if getattr(module, "fused_attn", True) is False:
                module.fused_attn = True  # type: ignore[assignment]  # a plain flag of timm's layers, not a submodule
                self._turned_on.append(module)
        self._active = True

    @property
    def active(self) -> bool:
        """Whether the model still runs our attention."""
        return self._active

    @property
    def counts(self) -> dict[str, int]:
        """How many layers were patched, by the name of their class in timm."""
        names = (f"{before.__module__.rpartition('.')[2]}.{before.__name__}" for _, before, _ in self._changed)
        return dict(Counter(names))

    @property
    def left(self) -> dict[str, str]:
        """The unchanged layers and their classes; empty except with `skip_unknown=True`."""
        return dict(self._left)

    def restore(self) -> None:
        """Make the model compute as before. Later calls do nothing.

        Raises:
            SaccadeError: other code has changed the class of a layer meanwhile; nothing is restored then.
        """
        if not self._active:
            return
        for module, before, after in self._changed:
            if type(module) is not after:
                raise SaccadeError(
                    f"a patched {before.__name__} is a {type(module).__name__} by now, by somebody else; undo that first, then restore"
                )
        for module, before, _ in self._changed:
            module.__class__ = before
        for module in self._turned_on:
            module.fused_attn = False  # type: ignore[assignment]
        self._active = False

    def __enter__(self) -> Patch:
        if not self._active:
            raise SaccadeError("this model was restored; call saccade.integrations.timm.patch(model) again")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.restore()

    def __repr__(self) -> str:
        layers = ", ".join(f"{count} x {name}" for name, count in self.counts.items())
        left = f"; {len(self._left)} left as they are" if self._left else ""
        return f"<patch({self._model}): {layers if self._active else 'restored'}{left}>"


def patch(model: nn.Module, *, skip_unknown: bool = False) -> Patch:
    """Make every attention layer of a timm model run `saccade.attention`.

        with saccade.integrations.timm.patch(model):
            logits = model(images)

        report = patch(model)  # until report.restore()
        print(report)  # <patch(SwinTransformer): 12 x swin_transformer.WindowAttention>

    `saccade.replace_sdpa()` reaches layers that call torch's function. This reaches these too, but only in this model and not in the
    whole process. It also reaches:

    * layers whose fused attention is off, as is timm's default for Swin and Visformer. It is turned on, so biases of relative positions
      (Swin, BEiT, MaxViT) and masks of shifted windows are the mask of one call, with their gradients. Masks of shifted windows (Swin,
      both Swin V2) are passed once for all images, where timm repeats them for each.
    * layers that always form their scores: both Swin V2, GCViT, TNT, the last layers of ConViT, and the one query of CrossViT and of
      VOLO's class attention.

    Outputs and gradients are those of the model up to rounding. Dropout of attention weights has the same distribution, but other
    draws. Weights and their names, checkpointing, deep copies and `torch.compile` stay as they are; to pickle a whole model, restore it
    first. A call that `attention` refuses and torch takes runs torch's function, as under `replace_sdpa`. Layers see the globals of their
    module as they were when a model with such layers was last patched.

    Args:
        model: a model of timm, or any module around some of its layers. Layers of other libraries are patched too if a method of
            theirs calls torch's function.
        skip_unknown: leave unknown layers that form a softmax as they are, and name them in `left`: LeViT, MViTv2, ConViT's gated
            layers, attention over channels, `nn.MultiheadAttention`, your own layers.

    Returns:
        the report and handle, a context manager: `counts`, `left`, `active`, `restore()`.

    Raises:
        InvalidArgument: `model` is no module, or `skip_unknown` no bool.
        UnsupportedProblem: there is no layer that is known; or one that is not, unless `skip_unknown`. Nothing is changed then.
        SaccadeError: the model is patched already.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is {shown(model)}; it must be a torch.nn.Module")
    return Patch(model, check_flag("skip_unknown", skip_unknown))


def _survey(model: nn.Module) -> tuple[list[tuple[nn.Module, type]], dict[str, str]]:
    """The layers that can be patched with their new classes, and those that form a softmax in another way."""
    found: list[tuple[nn.Module, type]] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        kind: type = type(module)
        if kind.__module__ == timm_layers.__name__:
            raise SaccadeError(f"{name or 'the model'} is patched already; restore it first")
        known = BY_HAND.get(f"{kind.__module__}.{kind.__qualname__}")
        fits = known is None or all(hasattr(module, need) for need in known.needs)
        after = patched_class(kind) if fits and not kind.__module__.startswith("torch.") else None
        if after is not None:
            read_globals(after)
            found.append((module, after))
        elif _forms_a_softmax(module):
            left[name or "the model"] = kind.__name__
    return found, left


def _forms_a_softmax(module: Any) -> bool:
    """Whether a layer's own code, not that of its parts, has a softmax, whoever wrote it."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    if type(module).__module__.startswith("torch."):
        return False
    own = [f for owner in type(module).__mro__ if not owner.__module__.startswith("torch.") for f in vars(owner).values()]
    return any(map(has_softmax, own)) or any(isinstance(child, nn.Softmax) for child in module.children())
