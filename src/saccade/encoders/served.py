"""One encoder that is served: how a call of its forward is packed, and by what it is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade import native
from saccade.encoders import attention, base, families
from saccade.encoders.attention import Borders
from saccade.encoders.base import OF_LOSSES, Encoder
from saccade.encoders.capacity import Size, sizes_of
from saccade.encoders.captured import Inside, running
from saccade.encoders.packing import Given, Packed, has_gaps, pack, packed_on_host, pieces_of, unpack
from saccade.encoders.plans import Build, Changed, Facts, builder
from saccade.encoders.pooling import Pool, keep
from saccade.engine.calls import read_later
from saccade.engine.problem import captured
from saccade.engine.switch import REASON, is_disabled
from saccade.engine.tracing import observer
from saccade.errors import InvalidArgument

# arguments that are packed; every other one has to be absent
_PACKED = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_USED = (
    "a padded position is used: a token that is no padding has mask 0; or padding lies on the left, where a pooler or head reads, "
    "or between tokens, where a sliding window counts it"
)
_LENGTH = 16  # tokens of the sequences for which layers are compiled
_HARMLESS = {"return_dict", "use_cache", "output_attentions", "output_hidden_states"}


class Unfit(RuntimeError):
    """A model whose forward does not run as its family says."""


class Served(Encoder):
    """A base model of transformers whose forward packs its batch. share: of the memory that was free, which graphs may hold. has_head: another model
    reads its output."""

    packs = True

    def __init__(self, model: Any, share: float, has_head: bool = False, fuse: bool = False):
        super().__init__(model, share, fuse)
        self.family = families.FAMILIES[model.config.model_type]
        # positions are counted by the embeddings' own number, which a later change of the config does not reach
        counted_by = getattr(getattr(model, "embeddings", None), "padding_idx", None)
        self.padding = int(model.config.pad_token_id or 0) if counted_by is None else int(counted_by)
        self._counted = self.family.positions == "counted"
        self.has_head = has_head
        self.unfit = ""  # why nothing is packed
        self.output_type: Any = None
        self._builds: dict[int, Build] = {}  # of the output, by the number of its tensors
        self._settled = -1  # the changes of the state at which calls run from graphs
        self._number = 0  # of the state
        self._facts: Facts | None = None
        self._changes = -1  # of the state for which facts were read
        self.pool: Pool | None = None  # what a graph puts out besides its rows
        self.pooling: Any = None  # the module of a SentenceTransformer that takes it
        self.mode = ""  # how that module pools
        self.sentences: Any = None  # the SentenceTransformer, if its forward is replaced

    # --- a call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inside: Inside | None = getattr(running, "inside", None)
        if inside is not None:
            return self._call_inside(inside, args, kwargs)
        given, reason = self._read(args, kwargs)
        if reason:
            self.last = f"stock: {reason}"
            return self.as_stock(*args, **kwargs)
        with self.lock:
            early, state = self._begun()
            if self.facts.reason:
                self.last = f"stock: {self.facts.reason}"
                return self.as_stock(*args, **kwargs)
            try:
                batch, used = self._pack(given)
                waiting = read_later(used) if isinstance(used, Tensor) else None
                padded = (
                    None if used is True or batch.tokens == 0 else self._hidden(batch, state, given.get("attention_mask"), early)
                )
            except (Changed, InvalidArgument) as error:
                if isinstance(error, InvalidArgument) and not (early and self.has_changed()):
                    raise
                return self(*args, **kwargs)
            except Unfit as error:
                self.unfit = str(error)
                self.say(f"{self.unfit}; it runs as stock")
                return self(*args, **kwargs)
        if padded is None or (waiting is not None and waiting()):
            self.last = "stock: there is no real token" if batch.tokens == 0 else f"stock: {_USED}"
            return self.as_stock(*args, **kwargs)
        return self._outputs(padded, given.get("return_dict"))

    def pooled(self, given: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """(the padded last layer, the embeddings) of a batch from a graph; None if the modules have to be called."""
        if self.pool is None or getattr(running, "inside", None) is not None:
            return None
        found = self._pooled_early(given)
        if found is not None:
            return found
        given = {name: x for name, x in given.items() if name in _PACKED}
        if self._read((), given)[1]:
            return None
        with self.lock:
            pieces = pieces_of(given)
            early, state = self._begun(len(pieces) == 1)
            if not base.has_graphs(self.state.tensors[0].device) or self.facts.reason or self.state.watched or self.failed:
                return None
            try:
                parts = [self._pooled(part, state, early) for part in pieces]
            except (Changed, InvalidArgument) as error:
                if isinstance(error, InvalidArgument) and not (early and self.has_changed()):
                    raise
                return self.pooled(given)
        if None in parts:
            return None
        if len(parts) == 1:
            return parts[0]
        padded, embeddings = zip(*parts, strict=True)  # type: ignore[arg-type]
        return torch.cat(padded), torch.cat(embeddings)

    def _pooled_early(self, given: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
        """As `pooled`, of a batch on the host and a model that has not changed since its last call; None of any other.

        C++ packs such batches alone, so most of what `_refused` and `_pack` ask has its answer.
        """
        if native.module is None or self.unfit or self.failed or is_disabled() or observer() or captured():
            return None
        ids, mask, types, positions = map(given.get, _PACKED)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not 0 < ids.numel() <= packed_on_host():
            return None
        if mask is not None and getattr(mask, "shape", None) != ids.shape:
            return None
        with self.lock:
            early, state = self._settled == self.state.changes and self.state.may_hold(), self._number
            if not early or torch.is_grad_enabled() or self.facts.reason:
                return None
            found = native.module.pack(ids, mask, types, positions, self.padding, self._counted, self.facts.reads_first)
            if found is None or found[3] or found[2] == 0 or self._is_beyond(ids.shape[1], found[2]):
                return None
            numbers, ends, longest, _ = found
            batch = Packed((ids.shape[0], ids.shape[1]), numbers.shape[1], numbers.numpy(), ends.numpy(), longest)
            if self.facts.has_window and has_gaps(batch):
                return None
            hidden = self._graphs_on(self.state.tensors[0].device).hidden(batch, state, True)
            if hidden is None:
                self._settled = -1
                return None
            padded, pooled = hidden
        return None if pooled is None else (padded, pooled)

    def _is_beyond(self, columns: int, longest: int) -> bool:
        """Whether a batch may have more tokens than the model has positions."""
        most = self.facts.longest
        return most is not None and (longest + self.padding >= most if self._counted else columns > most)

    def _pooled(self, given: dict[str, Any], state: int, early: bool) -> tuple[Tensor, Tensor] | None:
        batch, used = self._pack(given)
        waiting = read_later(used) if isinstance(used, Tensor) else None
        if used is True or batch.tokens == 0:
            return None
        try:
            padded, pooled = self._replayed(batch, state, early)
        except Unfit:  # which the call of the modules finds again, and says
            return None
        return None if pooled is None or (waiting is not None and waiting()) else (padded, pooled)

    def _read(self, args: tuple, kwargs: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The arguments of a call by their names, and why it runs as it is; empty if they are packed unless the model speaks against it."""
        given, reason = self._bound(args, kwargs)
        return given, reason or self._refused_arguments(given)

    def _call_inside(self, inside: Inside, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call in a captured function: that of its batch without waiting for the device, any other as stock."""
        given, reason = self._named(args, kwargs)
        reason = reason or self._refused(given) or inside.other(self, given)
        if not reason:
            try:
                padded = inside.hidden(given.get("token_type_ids") is not None)
                self.last = f"in a captured function, packed in {inside.inputs.capacity} tokens"
                return self._outputs(padded, given.get("return_dict"))
            except Unfit as error:
                self.unfit = reason = str(error)
                self.say(f"{self.unfit}; it runs as stock")
        self.last = f"stock: {reason}"
        return self.as_stock(*args, **kwargs)

    @property
    def facts(self) -> Facts:
        """The facts about the model as its state was last read."""
        if self._facts is None or self._changes != self.state.changes:
            self._changes, self._facts = self.state.changes, self._read_facts()
        return self._facts

    def _read_facts(self) -> Facts:
        config, pooler, reason = self.model.config, getattr(self.model, "pooler", None), ""
        if config.output_attentions or config.output_hidden_states:
            reason = "the config asks for attentions or hidden states"
        elif config._attn_implementation != self.attention:
            reason = f"its attention is {config._attn_implementation!r} now"
        elif self.state.recomputes:
            reason = "gradient checkpointing computes layers again in backward, where no sequence has its borders"
        elif self.state.seen:
            reason = self.state.seen
        longest = families.positions_in_table(self.model)
        reads_first = not self.family.causal and (self.has_head or pooler is not None)
        most = int(getattr(config, "max_position_embeddings", None) or 2**14)
        pooled = families.pooler_of(self.model)
        return Facts(
            reason, longest, reads_first, getattr(config, "return_dict", True), pooled, most, families.has_window(config)
        )

    def _refused(self, given: dict[str, Any]) -> str:
        return self._refused_arguments(given) or self.facts.reason

    def _refused_arguments(self, given: dict[str, Any]) -> str:
        if is_disabled():
            return REASON
        if self.unfit:
            return self.unfit
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.numel() == 0 or ids.is_floating_point():
            return "it has no input_ids `[B, T]`"
        if ids.is_meta:
            return "its input_ids lie on the meta device, where they have no values"
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
            return f"its mask has shape {list(getattr(mask, 'shape', ()))} and is no key padding `[B, T]`"
        for name, x in given.items():
            if name in _PACKED or name == OF_LOSSES or x is None:
                continue
            if name not in _HARMLESS or (x and name != "return_dict"):
                return f"{name} is asked for" if name in _HARMLESS else f"{name} is given"
        return ""

    def _pack(self, given: dict[str, Any]) -> tuple[Packed, Tensor | bool]:
        ids: Tensor = given["input_ids"]
        mask, types, positions = (given.get(name) for name in _PACKED[1:])
        longest = self.facts.longest
        if longest is not None and self.family.positions == "columns" and ids.shape[1] > longest and positions is None:
            raise InvalidArgument(
                f"input_ids have {ids.shape[1]} tokens a row; the positions of {type(self.model).__name__} end at {longest}"
            )
        device = self.state.tensors[0].device
        for name, x in zip(_PACKED[1:], (mask, types, positions), strict=True):
            if x is not None and x.device != ids.device:
                raise InvalidArgument(f"{name} lies on {x.device} and input_ids on {ids.device}; they must lie together")
        if ids.is_cuda and ids.device != device:
            raise InvalidArgument(f"input_ids lie on {ids.device} and the model on {device}; ids on the host are brought there")
        if base.has_graphs(device) and not ids.is_cuda and ids.numel() > packed_on_host():
            ids = ids.to(device, non_blocking=True)
            mask, types, positions = (x if x is None else x.to(device, non_blocking=True) for x in (mask, types, positions))
        batch, used = pack(Given(ids, mask, types, positions), self.family, self.padding, self.facts.reads_first)
        if self.facts.has_window:
            gaps = has_gaps(batch)
            used = used | gaps if isinstance(used, Tensor) else used or bool(gaps)
        last = batch.longest + self.padding
        if self._counted and longest is not None and not ids.is_cuda and positions is None and last >= longest:
            raise InvalidArgument(
                f"a sequence has {batch.longest} tokens; the positions of {type(self.model).__name__} end at {longest - self.padding - 1}"
            )
        return batch, used

    def _begun(self, may_be_early: bool = True) -> tuple[bool, int]:
        """(whether the state is still to be read, its number as far as it is known).

        The state is read while a graph runs: the graph is launched first, if the call has run before and needs no gradient.
        """
        settled = may_be_early and self._settled == self.state.changes and not self.failed and not torch.is_grad_enabled()
        if settled and self.state.may_hold():
            return True, self._number
        self._number = self.current_state()
        self._settled = self.state.changes if base.has_graphs(self.state.tensors[0].device) else -1
        return False, self._number

    def has_changed(self) -> bool:
        """Whether the model is no longer the one that the last call met."""
        self.state.read()
        return self._settled != self.state.changes

    def _replayed(self, batch: Packed, state: int, early: bool) -> tuple[Tensor, Tensor | None]:
        found = self._graphs_on(self.state.tensors[0].device).hidden(batch, state, early)
        if found is None:
            self._settled = -1
            raise Changed
        return found

    def _hidden(self, batch: Packed, state: int, mask: Tensor | None, early: bool) -> Tensor:
        """The last layer, padded."""
        device, watched = self.state.tensors[0].device, self.state.watched
        if not base.has_graphs(device) or watched or self.failed:
            self.last = f"unpadded{f': {watched or self.failed}' if base.has_graphs(device) else ''}"
            return self._eager(batch, device)
        padded, pooled = self._replayed(batch, state, early)
        if pooled is not None:
            keep(padded, mask, pooled)
        return padded

    def current_state(self) -> int:
        """The number of the model's state, whose layers are compiled."""
        return self.fused_state(self._example)

    def _example(self, tokens: int) -> tuple[Tensor, ...]:
        device = self.state.tensors[0].device
        ends = torch.arange(0, tokens + 1, _LENGTH, dtype=torch.int32, device=device)
        return (self.run_packed(torch.zeros(3, tokens, dtype=torch.int64, device=device), Borders(ends, _LENGTH)),)

    def run_fused(self, arguments: dict[str, Tensor], borders: Borders) -> Tensor:
        """`run`, with compiled layers if there are any."""
        with self.fused():
            return self.run(arguments, borders)

    def _eager(self, batch: Packed, device: torch.device) -> Tensor:
        numbers, ends = (torch.as_tensor(x).to(device) for x in (batch.numbers, batch.ends))
        rows = self.run_packed(numbers, Borders(ends, max(1, batch.longest)))
        return unpack(rows, numbers[3], batch.shape)

    def run_packed(self, numbers: Tensor, borders: Borders) -> Tensor:
        """`run` of the numbers of a packed batch, on the model's device."""
        arguments = {"input_ids": numbers[0][None], "position_ids": numbers[1][None]}
        if "token_type_ids" in self.signature.parameters:
            arguments["token_type_ids"] = numbers[2][None]
        return self.run(arguments, borders)

    def run(self, arguments: dict[str, Tensor], borders: Borders) -> Tensor:
        """The model's own forward over one row of packed tokens: `[tokens, E]`."""
        model = self.model
        if "use_cache" in self.signature.parameters:
            arguments["use_cache"] = False  # type: ignore[assignment]
        with attention.packed(borders), families.without_pooler(model, self.stock) as stock:
            found = stock(**arguments, return_dict=True)
        expected = families.layers_of(model.config)
        if borders.layers != expected:
            raise Unfit(f"{type(model).__name__} called its attention {borders.layers} times for {expected} layers")
        if type(found) is not self.output_type:
            self.output_type, self._builds = type(found), {}
        return found.last_hidden_state[0]

    def _outputs(self, padded: Tensor, return_dict: bool | None) -> Any:
        """The padded last layer in the form that the model's own forward returns."""
        assert self.output_type is not None, "a forward has run"
        pooler = self.facts.pooler
        outputs = (
            {"last_hidden_state": padded} if pooler is None else {"last_hidden_state": padded, "pooler_output": pooler(padded)}
        )
        build = self._builds.get(len(outputs))
        if build is None:
            build = self._builds[len(outputs)] = builder(self.output_type, [*outputs])
        found = build([*outputs.values()])
        return found if (self.facts.return_dict if return_dict is None else return_dict) else found.to_tuple()

    # --- for graphs and the handle

    def describe(self) -> str:
        """How it is computed, for `explain`."""
        if not base.has_graphs(next(self.model.parameters()).device):
            return "packed, computed without graphs, which need a GPU"
        if self.failed:
            return f"packed, computed without graphs: {self.failed}"
        return "packed, replayed from CUDA graphs" + (f"; {self.fusion.describe()}" if self.fusion is not None else "")

    @property
    def most(self) -> int:
        """Tokens that a sequence may have."""
        return self.facts.most

    def inputs(self, size: Size, device: torch.device) -> Any:
        """The memory of a graph of a size."""
        from saccade.encoders.graphs import Inputs

        return Inputs(size.tokens, device, size.longest)

    def outputs(self, inputs: Any) -> tuple[Tensor, ...]:
        """The last layer of packed tokens, and what is pooled of them if nobody wants a gradient."""
        arguments = inputs.arguments("token_type_ids" in self.signature.parameters)
        rows = self.run_fused(arguments, Borders(inputs.ends, min(inputs.longest, inputs.capacity)))
        return (rows,) if self.pool is None or torch.is_grad_enabled() else (rows, self.pool(rows, inputs.ends))

    def prepare(self, tokens: int, train: bool) -> None:
        """Capture the capacity of so many tokens, for short and for usual sequences."""
        with self.lock:
            state = self.current_state()
            device = self.state.tensors[0].device
            if base.has_graphs(device):
                for size in sizes_of(tokens, self.most):
                    self._graphs_on(device).make(state, size, train)
