"""`encode` of an optimised `SentenceTransformer` and `predict` of a `CrossEncoder`: from strings to results, without waiting for the host."""

from __future__ import annotations

import contextlib
import inspect
import logging
import reprlib
from numbers import Integral
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from saccade.encoders import covered, own, pipeline, tokens
from saccade.encoders.own import Own
from saccade.encoders.pipeline import Bound, Results
from saccade.encoders.pooling import pool_of
from saccade.encoders.served import Unfit
from saccade.errors import InvalidArgument

_NAMES = {"SentenceTransformer": ("encode", "encode_query", "encode_document"), "CrossEncoder": ("predict", "rank")}
_STOCK_ROWS = 32  # batch_size of stock where the user leaves it open
# heads of transformers that read nothing but rows: their batch may lie on the host, where it is packed
_HEADS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")


_training = attrgetter("training")


class _Stock(RuntimeError):
    """The call must run stock after all."""


class Method(Own):
    """A method of a model that takes strings."""

    def __init__(self, strings: Strings, name: str):
        super().__init__(strings.model, name)
        self.strings, signature = strings, self.__signature__
        parameters = [x.replace(default=None) if x.name == "batch_size" else x for x in signature.parameters.values()]
        self.__signature__ = signature.replace(parameters=parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.strings.kind == "SentenceTransformer" and kwargs.get("input_ids") is not None:
            if args or not kwargs.keys().isdisjoint(("inputs", "sentences")):
                raise InvalidArgument("inputs and input_ids are both given; one of them is allowed")
            kwargs["inputs"] = _Ids(kwargs.pop("input_ids"))
        try:
            given = self.__signature__.bind(*args, **kwargs)
        except TypeError:  # a deprecated name, or a call that stock refuses
            self.strings.last = "stock: its arguments have other names"
            return self.stock(*args, **kwargs)
        if self.name in ("encode", "predict"):
            asked = dict(given.arguments)  # without defaults, beside which stock ignores the old name of an argument
            asked |= asked.pop("kwargs", {})
            given.apply_defaults()
            given.arguments.pop("kwargs", None)
            return self.strings(self.stock, given.arguments | asked, asked)
        given.arguments.setdefault("batch_size", None)
        return self.stock(*given.args, **given.kwargs)


class _Ids(list[Any]):
    """Token ids that pass through a stock method: of one text, or a list of them."""

    def __init__(self, ids: Any):
        ids = _listed(ids)
        if not isinstance(ids, (list, tuple)):
            raise InvalidArgument(f"input_ids is {reprlib.repr(ids)}; it must be a list of ints, or a list of such lists")
        found = map(_listed, ids)
        super().__init__([[*x] if isinstance(x, tuple) else x for x in found])


def _listed(x: Any) -> Any:
    """Tensors and arrays as lists, all else as it is."""
    return x.tolist() if hasattr(x, "tolist") else x


class Strings:
    """The state that the methods of a model share: its tokenizer's copies, and the last call."""

    def __init__(self, model: Any, served: Any):
        self.model, self.served, self.last = model, served, "no call yet"
        self.kind = type(model).__name__
        self.tokens: tokens.Tokens | None = None
        self.known = set(inspect.signature(getattr(type(model), _NAMES[self.kind][0])).parameters)
        for name in _NAMES[self.kind]:
            if hasattr(model, name) and own.clear(model, name):
                Method(self, name).put()

    def detach(self) -> None:
        """Restore the model's own methods."""
        for name in _NAMES[self.kind]:
            own.remove(self.model, name)
        self.tokens = None

    def explain(self) -> str:
        """How the last call ran."""
        return f"{self.kind}.{_NAMES[self.kind][0]} from strings: {self.last}"

    def __call__(self, stock: Any, options: dict[str, Any], asked: dict[str, Any]) -> Any:
        inputs = options["inputs"]
        is_ids = isinstance(inputs, _Ids) or (self.kind == "SentenceTransformer" and _are_ids(inputs))
        single = bool(inputs) and not isinstance(inputs[0], list) if is_ids else self.model.is_singular_input(inputs)
        texts = [inputs] if single else inputs.tolist() if hasattr(inputs, "tolist") else list(inputs)
        reason = self._why_not(options, None if is_ids else texts)
        if not reason:
            try:
                found = self._run(texts, options, is_ids)
                return found[0] if single else found
            except (_Stock, tokens.NotCopied) as error:
                reason = str(error)
            except Unfit as error:
                self.served.unfit = reason = str(error)
                self.served.say(f"{reason}; it runs as stock")
        self.last = f"stock: {reason}"
        if is_ids:
            raise InvalidArgument(f"token ids are given; they are not taken where {reason}")
        if options["batch_size"] is None:
            asked["batch_size"] = _STOCK_ROWS
        return stock(**asked)

    def _why_not(self, options: dict[str, Any], texts: list[Any] | None) -> str:
        size, model, served = options["batch_size"], self.model, self.served
        others = {x: y for x, y in options.items() if x not in self.known}
        if options["pool"] is not None or isinstance(options["device"], (list, tuple)):
            return "a pool of processes computes it"
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            return f"batch_size is {size!r}"
        if options.get("output_value", "sentence_embedding") != "sentence_embedding":
            return f"output_value is {options['output_value']!r}"
        if texts is not None and not self._are_texts(texts):
            return "its inputs are no texts"
        if options.get("precision") not in (None, "float32", "int8", "uint8", "binary", "ubinary"):
            return f"precision is {options['precision']!r}"
        if options.get("apply_softmax") and model.num_labels == 1:
            return "versions of sentence-transformers differ in apply_softmax of one label"
        reason = covered.why_not_model(model, served) or covered.why_not_call(model, served, others)
        if not reason and covered.is_elsewhere(options["device"], served):
            return f"the model moves to {options['device']}"
        prompt = options["prompt"] is not None or options["prompt_name"] is not None or model.default_prompt_name is not None
        if not reason and prompt and self.kind == "SentenceTransformer" and not model[1].include_prompt:
            return "the prompt is left out of the pooling"
        return reason or covered.limit_of(model[0], others.get("task"))[1]

    def _are_texts(self, inputs: list[Any]) -> bool:
        if self.kind == "SentenceTransformer":
            return set(map(type, inputs)) <= {str}
        return set(map(type, inputs)) <= {list, tuple} and all(len(x) == 2 and {*map(type, x)} == {str} for x in inputs)

    @torch.inference_mode()
    def _run(self, inputs: list[Any], options: dict[str, Any], is_ids: bool) -> Any:
        import numpy as np

        model, served = self.model, self.served
        prompt = model._resolve_prompt(options["prompt"], options["prompt_name"]) or ""
        if self._trains():  # eval() sets every module
            model.eval()
        if not inputs:
            self.last = "0 inputs in 0 batches"
            return self._finished(None, options)
        limit = covered.limit_of(model[0], options.get("task"))[0]
        if is_ids:
            self._check_ids(inputs, prompt, limit)
        lengths = (
            list(map(len, inputs)) if is_ids or self.kind == "SentenceTransformer" else [len(x[0]) + len(x[1]) for x in inputs]
        )
        order = np.argsort(-np.array(lengths), kind="stable")
        if is_ids:
            chunks = tokens.given(inputs, order)
        else:
            if self.tokens is None or self.tokens.tokenizer is not model[0].processor:
                self.tokens = tokens.Tokens(model[0].processor, "token_type_ids" in served.signature.parameters)
            chunks = self.tokens.chunks(self.tokens.copy(limit), inputs, order, prompt)
        device = served.state.tensors[0].device
        budget = pipeline.GPU_TOKENS if device.type == "cuda" else pipeline.CPU_TOKENS
        bound = Bound(options["batch_size"], budget, self.kind == "CrossEncoder")
        self.last = f"{len(inputs)} inputs"
        to_host = bool(options["convert_to_numpy"]) and not options["convert_to_tensor"]
        with contextlib.closing(chunks):  # ends the thread in every case
            return self._finished(self._computed(chunks, bound, options, len(inputs), to_host), options)

    def _trains(self) -> bool:
        """Whether a module is in training mode. The encoder's modules are those that its state has just listed; to walk over them took 170 us."""
        others = self.model.named_modules(memo={self.served.model})
        return any(map(_training, self.served.state.modules)) or any(x.training for _, x in others)

    def _computed(self, chunks: Any, bound: Bound, options: dict[str, Any], count: int, to_host: bool) -> Tensor | None:
        one = self._embeddings if self.kind == "SentenceTransformer" else self._scores
        results, number = Results(count, to_host), 0
        with _bar(options["show_progress_bar"], count, type(self.model).__module__) as progress:
            for batch in pipeline.batches(chunks, bound):
                rows = one(batch, options)
                # numpy knows no bfloat16; on the device the conversion costs the host nothing
                results.add(rows.float() if to_host and rows.dtype == torch.bfloat16 else rows, batch.places)
                if progress is not None:
                    progress.update(len(batch.places))
                number += 1
        self.last = f"{count} inputs in {number} batches"
        return results.finish()

    def _embeddings(self, batch: tokens.Chunk, options: dict[str, Any]) -> Tensor:
        if len(batch.ids) == 0:
            raise _Stock("there is no token")
        mode = self.model[1].pooling_mode
        pool = pool_of(mode)
        assert pool is not None, "such a mode is not covered"
        found = pipeline.embed(self.served, pool, pipeline.packed(batch, self.served))
        for module in list(self.model)[2:]:
            found = module({"sentence_embedding": found})["sentence_embedding"]
        truncate_dim = self.model.truncate_dim if options["truncate_dim"] is None else options["truncate_dim"]
        if truncate_dim is not None:
            found = found[..., :truncate_dim]
        return torch.nn.functional.normalize(found, p=2, dim=1) if options["normalize_embeddings"] else found

    def _scores(self, batch: tokens.Chunk, options: dict[str, Any]) -> Tensor:
        model, tokenizer, device = self.model, self.model[0].processor, self.served.state.tensors[0].device
        features = pipeline.padded(batch, tokenizer.pad_token_id, tokenizer.pad_token_type_id, tokenizer.padding_side == "left")
        host = tokenizer.pad_token_id == self.served.padding and tokenizer.padding_side == "right"
        if not host or self.served.model.config.model_type not in _HEADS:
            features = {name: x.to(device, non_blocking=True) for name, x in features.items()}
        scores: Tensor = model({**features, "modality": "text"})["scores"]
        if scores.is_floating_point() and torch.finfo(scores.dtype).bits < 32:
            scores = scores.float()
        activation = model.activation_fn if options["activation_fn"] is None else options["activation_fn"]
        if activation is not None:
            scores = activation(scores)
        if model.num_labels == 1 and scores.ndim > 1:
            scores = scores.squeeze(-1)
        return torch.softmax(scores, dim=1) if options["apply_softmax"] and scores.ndim > 1 else scores

    def _check_ids(self, inputs: list[Any], prompt: str, limit: int | None) -> None:
        if prompt:
            raise InvalidArgument(f"input_ids are given with the prompt {prompt!r}; put its tokens before them")
        words = self.served.model.get_input_embeddings().num_embeddings
        for i, x in enumerate(inputs):
            if not isinstance(x, list) or not all(issubclass(kind, Integral) and kind is not bool for kind in {*map(type, x)}):
                raise InvalidArgument(f"input_ids[{i}] is {reprlib.repr(x)}; it must be a list of ints")
            if limit is not None and len(x) > limit:
                raise InvalidArgument(f"input_ids[{i}] has {len(x)} tokens; the model takes at most {limit}")
            if len(x) and not 0 <= min(x) <= max(x) < words:
                raise InvalidArgument(f"input_ids[{i}] goes from {min(x)} to {max(x)}; ids are 0 to {words - 1}")

    def _finished(self, found: Tensor | None, options: dict[str, Any]) -> Any:
        """As stock converts it."""
        import numpy as np

        device = self.served.state.tensors[0].device
        if found is None:
            if options["convert_to_tensor"]:
                return torch.tensor([], device=device)
            return np.array([]) if options["convert_to_numpy"] else []
        if options.get("precision") not in (None, "float32"):
            from sentence_transformers.util import quantize_embeddings

            found = torch.from_numpy(quantize_embeddings(_as_numpy(found), precision=options["precision"]))
        if options["convert_to_tensor"]:
            return found
        if options["convert_to_numpy"]:
            return _as_numpy(found.float() if self.kind == "CrossEncoder" else found)
        return list(found)


def _as_numpy(found: Tensor) -> Any:
    return (found.float() if found.dtype == torch.bfloat16 else found).cpu().numpy()


def _bar(shown: bool | None, count: int, name: str) -> Any:
    """A progress bar as a context; None in it if there is none to show. One of tqdm that is not shown takes 20 us."""
    if shown is None:
        shown = logging.getLogger(name).getEffectiveLevel() in (logging.INFO, logging.DEBUG)
    if not shown:
        return contextlib.nullcontext()
    from tqdm.autonotebook import tqdm  # type: ignore[import-untyped]

    return tqdm(total=count, desc="Inputs")


def _are_ids(inputs: Any) -> bool:
    """Whether inputs are lists of ints."""
    return isinstance(inputs, list) and all(isinstance(x, list) and set(map(type, x)) <= {int} for x in inputs) and any(inputs)


def attach(model: Any, served: Any) -> Strings | None:
    """Make a `SentenceTransformer` or `CrossEncoder` run from strings; None if it is neither."""
    kind = type(model).__name__
    is_known = kind in _NAMES and type(model).__module__.startswith("sentence_transformers.")
    return Strings(model, served) if is_known and any(x is served.model for x in model[0].modules()) else None
