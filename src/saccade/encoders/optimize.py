"""`saccade.optimize`: one line after which an encoder runs without padding, and on a GPU from CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from saccade.encoders import attention, families, images, own, padded, pooling, sentences, strings
from saccade.encoders.capacity import ROWS, capacities, rows_up_to
from saccade.encoders.captured import CapturedFunction
from saccade.encoders.images import Batched
from saccade.encoders.own import Own
from saccade.encoders.served import Served
from saccade.encoders.strings import Strings
from saccade.engine.arguments import check_flag
from saccade.errors import InvalidArgument, SaccadeError
from saccade.hardware import has_package


class _Forward(Own):
    """The `forward` of a model that is served."""

    def __init__(self, served: Served | Batched):
        super().__init__(served.model)
        self.served = served

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.served(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _own_forward, (self.served.model,)


def _own_forward(model: nn.Module) -> Any:
    """The forward of the class of a model that is unpickled, and has no attribute of its own yet. Its config names our attention, in a process that may
    not know it."""
    if has_package("transformers"):
        attention.register()
    return model.forward


class Optimized:
    """The result of `optimize`. Leaving it as a context manager, or `restore()`, makes the model what it was.

    Attributes:
        served: the encoders that are packed or captured by batch size.
    """

    def __init__(self, served: list[Served | Batched], left: list[str], from_strings: list[Strings]):
        self.served, self._left, self._strings = served, left, from_strings
        self._functions: list[CapturedFunction] = []
        self._before = [(_implementation(s), s.model.__dict__.get("forward")) for s in served]
        for one in served:
            if one.attention:
                one.model.set_attn_implementation(one.attention)
            _Forward(one).put()

    def __enter__(self) -> Optimized:
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    @property
    def active(self) -> bool:
        """Whether the models are served."""
        return bool(self.served)

    def restore(self) -> None:
        """Make every model what it was, and free all graphs. Safe to call again."""
        for one, (implementation, forward) in zip(self.served, self._before, strict=True):
            model = one.model
            if own.remove(model) and forward is not None:  # somebody else's, as accelerate puts one there
                model.forward = forward
            if one.attention and _implementation(one) == one.attention:  # else the user has chosen another since
                model.set_attn_implementation(implementation)
            if one.fusion is not None:
                one.fusion.undo()
            if isinstance(one, Served):
                sentences.detach(one)
                pooling.detach(one)
            one.graphs.clear()
            one._gpu = None
        for x in self._strings:
            x.detach()
        self.served, self._before, self._functions, self._strings = [], [], [], []

    def capture(self, function: Callable[[dict[str, Tensor]], Any]) -> CapturedFunction:
        """Run a function around the encoder, such as a whole training step, from one CUDA graph for each size of its batch.

        ```python
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=True)

        def train_step(batch):
            optimizer.zero_grad(set_to_none=True)
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss

        step = handle.capture(train_step)
        for batch in loader:
            loss = step(batch)
        ```

        Args:
            function: takes a dict of tensors on the model's device and returns tensors, or tuples, lists and dicts of them. The batch that is passed
                holds `input_ids` `[B, T]`; it may lie on the host, where packing it costs no waiting for the GPU.

        Returns:
            a function of a batch, which returns copies without a graph of autograd. Make it once: graphs belong to it.

        Raises:
            InvalidArgument: function is not callable, or the handle serves more than one encoder, or none any more.

        The first call with a size is a real step that runs uncaptured and makes what the optimiser keeps; the second one captures and replays. No
        step is computed twice. A size is B, T (filled up to a multiple of 16 where there is a mask, and other tensors `[B, T]` are token types,
        positions or integer labels), and the next capacity of real tokens. A capture that fails gives one warning, and the step runs uncaptured, as
        do later ones. So do batches that use padded positions, and those without a GPU.

        Conditions on the function:

        * It calls the encoder, itself or through a head, with the batch's own `input_ids` and `attention_mask`. Any other call of it runs as stock.
        * It reads nothing on the host: no `loss.item()`, no `print(loss)`, no GradScaler. Python in it runs at the first two calls of a size alone.
        * Optimisers have `capturable=True`. A learning rate that changes is a tensor, `lr=torch.tensor(1e-5, device="cuda")`.
        * `zero_grad(set_to_none=True)` stands at its start. Gradients are valid inside alone: graphs share memory.
        * It ignores columns of mask 0, of which it may see more than were passed.
        * Modules beside the encoder stay as they are: their modes and parameters are not looked at.

        No loss of an uncaptured step outside may be alive at a capture: autograd keeps nodes of that step's stream with it.
        """
        found = CapturedFunction(self, function)
        self._functions.append(found)
        return found

    def prepare(
        self,
        tokens: int | list[int] | None = None,
        *,
        images: int | list[int] | None = None,
        sequences: int | None = None,
        train: bool = False,
    ) -> None:
        """Capture graphs ahead of their first use, with a progress bar.

        Args:
            tokens: real tokens of a batch; an int stands for every capacity up to it. Each is captured for sequences of up to 128 tokens, and for those
                of up to 512 if the model has so many positions.
            images: images of a batch, in the size and dtype of the model; an int stands for every batch size up to it. timm's models and text
                towers of fixed width capture at first use.
            sequences: a hint that changes nothing: a capacity takes up to one sequence a token.
            train: capture forward and backward; else the forward alone.

        Raises:
            InvalidArgument: a number that is no positive int, neither tokens nor images, or images beyond the largest graph.
        """
        from rich.progress import track

        check_flag("train", train)
        if tokens is None and images is None:
            raise InvalidArgument("prepare is given neither tokens nor images")
        of_tokens, of_images = _sizes("tokens", tokens, capacities), _sizes("images", images, rows_up_to)
        if sequences is not None and not _is_positive(sequences):
            raise InvalidArgument(f"sequences is {sequences!r}; it must be a positive int, or None")
        if max(of_images, default=0) > ROWS:
            raise InvalidArgument(f"images is {images!r}; graphs end at {ROWS} images")
        for one in self.served:
            capture, sizes = (one.prepare_rows, of_images) if isinstance(one, Batched) else (one.prepare, of_tokens)
            for size in track(sizes, description=f"capturing {type(one.model).__name__}", disable=not sizes):
                capture(size, train)

    def explain(self) -> str:
        """The parts that are served and how, the parts that are left as they are and why, and the memory of the graphs."""
        lines = []
        for one in self.served:
            parameter = next(one.model.parameters())
            lines.append(f"{type(one.model).__name__} on {parameter.device}, {str(parameter.dtype)[6:]}: {one.describe()}")
            lines.append(f"  last call: {one.last}")
            held = sum([g.bytes for g in one.graphs.values()])
            lines += [f"  {len(one.graphs)} graphs, {held / 2**20:.0f} MiB"] * bool(one.graphs)
            if parameter.dtype == torch.float32 and parameter.device.type == "cuda":
                lines.append("  float32: model.to(torch.bfloat16) or autocast would use the 16-bit matrix units")
        lines += [f"  {x.explain()}" for x in self._strings] + [f"  {x.explain()}" for x in self._functions]
        return "\n".join([*lines, *self._left])


def _is_positive(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _sizes(name: str, number: Any, up_to: Callable[[int], list[int]]) -> list[int]:
    """The sizes to capture for an argument of `prepare`."""
    if number is None:
        return []
    numbers: list[int] = number if isinstance(number, list) else [number]
    if not all(map(_is_positive, numbers)):
        raise InvalidArgument(f"{name} is {number!r}; it must be a positive int, or a list of them")
    return numbers if isinstance(number, list) else up_to(number)


def _implementation(one: Served | Batched) -> str | None:
    return getattr(getattr(one.model, "config", None), "_attn_implementation", None)


def optimize(model: nn.Module, *, memory: float = 0.25, fuse: bool | None = None) -> Optimized:
    """Run the encoders inside a model without padding, and on a GPU from CUDA graphs, in inference and in training.

    The model is changed in place; its inputs, outputs, parameters and names stay as they are. Below, *stock* means as it was before.

    * Text encoders are packed. A padded batch goes in, its real tokens are packed into one row, the model's own forward computes them, and the
      outputs are put back into their padded places. Padded positions of the output are 0. On a GPU the packed forward is captured in a CUDA graph
      for each capacity and replayed. A capacity is the number of tokens that a graph has room for; they are about an eighth apart. If a gradient
      is needed, backward is captured too.
    * `encode` of a `SentenceTransformer` and `predict` of a `CrossEncoder` tokenise in a thread while the encoder runs.
    * Image towers, and the text towers beside them, have nothing to pack. On a GPU they are captured for each batch size; on a CPU they are stock.
    * Text encoders that cannot be packed, such as MPNet, DeBERTa and T5's encoder, keep their own attention and their padding. On a GPU they are
      captured for each batch size and width; on a CPU they are stock.

    Args:
        model: an encoder of transformers, with or without a head; ViT, CLIP, SigLIP or DINOv2; timm's `VisionTransformer`; a
            `SentenceTransformer`, `CrossEncoder` or `SparseEncoder`; or any module that holds one. Ids on the host are packed there, and copied
            to the GPU once.
        memory: the share of the GPU's free memory that graphs may hold, above 0 and at most 1. The least recently used graphs are freed first, as
            are those beyond 1,024.
        fuse: on a GPU, torch.compile fuses the operations between the matrix products, and query, key and value become one
            product. Each mode and dtype is compiled once for all sizes, before its first capture, in some 5 to 35 s; `explain()` shows the time.
            The weights of that product are moved side by side in memory, each still a tensor of its own. False turns fusion off. None, the
            default, turns it on for packed encoders and for the towers of transformers; nothing else is fused.

    Returns:
        a handle with `explain()`, `prepare(...)`, `capture(...)` and `restore()`. As a context manager it restores at the end of the block.

    Raises:
        InvalidArgument: `model` is no module, is optimised already, or holds no encoder that can be optimised (the message says why); or
            `memory` or `fuse` has another value than those above.
        SaccadeError: transformers is not installed.

    Some calls run stock, and `explain()` says why:

    * calls with `output_attentions`, `output_hidden_states`, a cache, 4-D masks or embeddings in place of ids;
    * calls whose mask hides tokens that are no padding, or padding between tokens in a model with sliding windows;
    * calls of encoders with hooks inside, or with a `forward` that was put on a part;
    * traced and captured calls, and those that a `TorchDispatchMode` sees, as a FLOP counter does.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    if not isinstance(memory, (int, float)) or isinstance(memory, bool) or not 0 < memory <= 1:
        raise InvalidArgument(f"memory is {memory!r}; it must be above 0 and at most 1, a share of the free memory")
    if fuse is not None:
        check_flag("fuse", fuse)
    has_transformers = has_package("transformers")
    served: list[Served | Batched] = []
    left: list[str] = []
    if has_transformers:
        attention.register()
    for base, head, embeds in _encoders(model) if has_transformers else _of_timm(model):
        if isinstance(base.__dict__.get("forward"), _Forward):
            raise InvalidArgument(f"{type(base).__name__} is optimised already; call restore() of the first handle")
        tower = images.tower_of(base)
        reason = families.why_not(base, embeds, head) if tower is None else images.why_not(base) or families.derived_forward(base)
        as_it_is = padded.encoder(base, float(memory), reason) if reason and tower is None else None
        if fuse and (as_it_is is not None or tower is images.TIMM):
            left.append(f"{type(base).__name__}: not fused: only packed encoders and towers of transformers are")
        if as_it_is is not None:
            served.append(as_it_is)
        elif reason:
            left.append(f"{type(base).__name__}: stock: {reason}")
        else:
            fused = fuse is not False and tower is not images.TIMM
            served.append(
                Served(base, float(memory), head is not None, fused)
                if tower is None
                else Batched(base, float(memory), tower, fused)
            )
    if not served and not left and not has_transformers:
        raise SaccadeError("transformers is not installed; pip install 'saccade-attention[hf]'")
    if not served:
        found = "; ".join(left) or f"{type(model).__name__} holds no model of transformers"
        raise InvalidArgument(f"nothing can be optimised: {found}")
    for one in served:
        if isinstance(one, Served):
            pooling.attach(model, one)
            sentences.attach(model, one)
    found_strings = [strings.attach(model, one) for one in served if isinstance(one, Served)]
    return Optimized(served, left, [x for x in found_strings if x is not None])


def _encoders(model: nn.Module) -> list[tuple[Any, Any, bool]]:
    """(base model, the model whose head reads its output or None, whether it is part of an embedding model or a reranker) of every encoder in a module."""
    from transformers import PreTrainedModel

    embeds = type(model).__module__.startswith("sentence_transformers")
    found: dict[int, tuple[Any, Any, bool]] = {}
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside:
            inside |= {id(x) for x in module.modules()}
            base = module.base_model
            found |= {id(x): (x, None if x is module else module, embeds) for x in _towers(base) or [base]}
    return [*found.values(), *(x for x in _of_timm(model) if id(x[0]) not in found)]


def _towers(base: Any) -> list[Any]:
    """The outermost towers in a model: itself, or the two of CLIP; none where it is packed."""
    from transformers import PreTrainedModel

    found: list[Any] = []
    inside: set[int] = set()
    if base.config.model_type not in families.FAMILIES:
        for x in base.modules():
            # a layer may hold the config of its model
            if isinstance(x, PreTrainedModel) and id(x) not in inside and images.tower_of(x) is not None:
                inside |= {id(y) for y in x.modules()}
                found.append(x)
    return found


def _of_timm(model: nn.Module) -> list[tuple[Any, Any, bool]]:
    return [(x, None, False) for x in model.modules() if images.tower_of(x) is images.TIMM]
