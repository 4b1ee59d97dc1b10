"""From texts to arrays of token ids: the tokenizer's Rust code on chunks of texts, in a thread of its own, without padding."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from saccade.encoders import locks
from saccade.encoders.prefix import first_words, is_certain
from saccade.encoders.together import Together, flat, together

_A = TypeVar("_A")
_B = TypeVar("_B")
_AHEAD = 4  # chunks that are tokenised ahead of their use
_FIRST, _MOST = 256, 2048  # texts of the first chunk, which the device waits for, and of later ones
_AT_ONCE = 256  # encodings that are read without a pause: some 0.8 ms
_FEW = 500  # added tokens that are checked in each call
_METHODS = ("__call__", "_encode_plus", "_batch_encode_plus", "set_truncation_and_padding")


class NotCopied(RuntimeError):
    """A tokenizer whose Rust part cannot be copied."""


class _OfRust:
    """Turns an error of Rust into `NotCopied`. Rust raises plain `Exception`, and an except clause for that would catch every other error too."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is Exception:
            raise NotCopied(f"its tokenizer cannot be copied ({error})") from error


class Chunk(NamedTuple):
    """Tokens of some texts, as arrays of numpy.

    Attributes:
        ids: of all texts, one text behind another.
        lengths: the number of ids of each text.
        places: the place of each text in the input.
        types: token types, None if the model reads none.
    """

    ids: Any
    lengths: Any
    places: Any
    types: Any


def ahead(work: Callable[[_A], _B], items: Iterable[_A]) -> Generator[_B, None, None]:
    """`map` in a thread that is a few items ahead. It ends with the iterator, whether that is read to its end, fails or is closed.

    The device waits for the first item, so no other item shares the cores with it until it is used. With threads of Rust on every core, the caller took
    8 ms to read 256 encodings and to start the device. Alone it takes 1 ms. A second thread made two chunks share the cores, so that both came late.
    """
    source = iter(items)
    for item in islice(source, 1):
        yield work(item)
    pool = ThreadPoolExecutor(1, "saccade-tokens")
    try:
        waiting: deque[Future[_B]] = deque()
        for item in islice(source, _AHEAD):
            waiting.append(pool.submit(work, item))
        for item in source:
            waiting.append(pool.submit(work, item))
            if len(waiting) > _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def slices(count: int) -> Iterator[slice]:
    """Chunks of so many texts. A chunk is a power of two, at most half of all texts before it, so that the device seldom waits for it."""
    first = 0
    while first < count:
        half = 1 << max(0, (first // 2).bit_length() - 1)
        size = min(max(_FIRST, half), _MOST)
        yield slice(first, min(count, first + size))
        first += size


class Encoded(NamedTuple):
    """The encodings of texts. short: what `Rust.cut` leaves of the texts. joined: they are those of `together`."""

    texts: list[Any]
    short: list[Any]
    encodings: list[Any]
    joined: bool


class Rust(NamedTuple):
    """A copy of a Rust tokenizer that never pads, cuts at `limit` tokens (None for no limit), and is never changed."""

    tokenizer: Any
    limit: int | None
    certain: bool  # whether the first words of a text are enough
    typed: bool  # whether a single text has other token types than 0
    together: Together | None = None  # how many texts are taken as one

    def cut(self, texts: list[Any]) -> list[Any]:
        """The texts without what lies far beyond the limit."""
        limit = self.limit
        if limit is None or not self.certain or not isinstance(texts[0], str):
            return texts
        return [first_words(x, limit) for x in texts] if max(map(len, texts)) > limit else texts

    def encode(self, texts: list[Any], short: list[Any] | None = None) -> list[Any]:
        """The encodings of texts, or of pairs of them. short: what `cut` leaves of them."""
        short = self.cut(texts) if short is None else short
        found: list[Any] = self.tokenizer.encode_batch_fast(short)
        if short is not texts:
            limit = self.limit or 0
            again = [i for i, (x, y) in enumerate(zip(short, texts, strict=True)) if x is not y and len(found[i]) < limit]
            for i, whole in zip(again, self.tokenizer.encode_batch_fast([texts[i] for i in again]), strict=True):
                found[i] = whole
        return found

    def encoded(self, texts: list[Any], short: list[Any]) -> Encoded:
        """The encodings of texts, joined where that gives the same ids."""
        if self.together is not None and not self.typed and isinstance(texts[0], str):
            return Encoded(texts, short, self.together.encode(short), True)
        return Encoded(texts, short, self.encode(texts, short), False)

    def arrays(self, some: Encoded, typed: bool, lends: bool = False) -> tuple[Any, Any, Any]:
        """(ids, lengths, types) of texts. typed: types are wanted. lends: a thread may wait for the interpreter lock."""
        if not some.joined or self.together is None:
            return _arrays(some.encodings, typed, lends)

        def alone(group: range) -> list[list[int]]:
            texts, short = ([x[i] for i in group] for x in (some.texts, some.short))
            return [x.ids for x in self.encode(texts, short)]

        ids, lengths = self.together.read(some.encodings, len(some.texts), alone, lends)
        return *self._longer(some, ids, lengths), None

    def _longer(self, some: Encoded, ids: Any, lengths: Any) -> tuple[Any, Any]:
        """The ids and lengths with those of whole texts, where the first words of a text gave fewer tokens than the limit."""
        import numpy as np

        if some.short is some.texts:
            return ids, lengths
        pairs = zip(some.short, some.texts, lengths.tolist(), strict=True)
        again = [i for i, (x, y, n) in enumerate(pairs) if x is not y and n < (self.limit or 0)]
        if not again:
            return ids, lengths
        parts = np.split(ids, np.cumsum(lengths)[:-1])
        for i, whole in zip(again, self.tokenizer.encode_batch_fast([some.texts[i] for i in again]), strict=True):
            parts[i] = np.array(whole.ids, np.int64)
        return np.concatenate(parts), np.fromiter(map(len, parts), np.int64, len(parts))


class Tokens:
    """The ids that a fast tokenizer of transformers gives, by copies of its Rust part. Its padding and truncation are state, and stay the user's."""

    def __init__(self, tokenizer: Any, types: bool):
        self.tokenizer, self.types = tokenizer, types and "token_type_ids" in tokenizer.model_input_names
        self._lock = locks.lock()
        self._known: Any = None
        self._few = True
        self._copies: dict[int | None, Rust] = {}

    def copy(self, limit: int | None) -> Rust:
        """The copy for a limit, made again when the user's tokenizer has changed.

        Raises:
            NotCopied: a part of the tokenizer is written in Python.
        """
        with _OfRust(), self._lock:
            known = _fingerprint(self.tokenizer, self._few)
            if known != self._known:
                self._few = len(self.tokenizer._tokenizer.get_added_tokens_decoder()) <= _FEW
                known = _fingerprint(self.tokenizer, self._few)
            if known != self._known or len(self._copies) > 4:
                self._copies, self._known = {}, known
            if limit not in self._copies:
                self._copies[limit] = self._made(limit)
            return self._copies[limit]

    def _made(self, limit: int | None) -> Rust:
        user, found = self.tokenizer, copy.deepcopy(self.tokenizer._tokenizer)
        found.no_padding()
        found.no_truncation()
        typed = self.types and any(found.encode("a").type_ids)
        # below the number of special tokens the Rust code cuts nothing
        room = limit is not None and limit > found.num_special_tokens_to_add(False)
        certain = room and user.truncation_side == "right" and is_certain(found)
        found.encode_special_tokens = bool(getattr(user, "split_special_tokens", False))
        cuts_right = limit is None or (room and user.truncation_side == "right")
        joins = cuts_right and not found.encode_special_tokens  # which a copy does not keep
        as_one = together(copy.deepcopy(found), limit) if joins else None
        if limit is not None:
            found.enable_truncation(max_length=limit, stride=0, strategy="longest_first", direction=user.truncation_side)
        return Rust(found, limit, certain, typed, as_one)

    def chunks(self, rust: Rust, texts: list[Any], order: Any, before: str) -> Generator[Chunk, None, None]:
        """The tokens of texts, in an order of them. before: a prompt.

        The thread runs Rust code alone: Python code there would keep the caller from the interpreter for 5 ms at each operation of torch.
        """
        places = [order[part] for part in slices(len(texts))]

        def given() -> Iterator[tuple[list[Any], list[Any]]]:
            for some in places:
                found = [texts[i] for i in some.tolist()]
                if before:
                    found = [before + x if isinstance(x, str) else (before + x[0], *x[1:]) for x in found]
                yield found, rust.cut(found)

        def encode(pair: tuple[list[Any], list[Any]]) -> Encoded:
            return rust.encoded(*pair)

        encodings = map(encode, given()) if len(places) == 1 else ahead(encode, given())
        with closing(encodings) if isinstance(encodings, Generator) else nullcontext():
            typed = self.types and (rust.typed or not isinstance(texts[0], str))
            for number, (found, some) in enumerate(zip(encodings, places, strict=True)):
                # no other thread runs during the first chunk
                ids, counts, kinds = rust.arrays(found, typed, number > 0)
                yield Chunk(ids, counts, some, kinds)


def _arrays(encodings: list[Any], typed: bool, lends: bool) -> tuple[Any, Any, Any]:
    """The arrays of a chunk. lends: after some encodings the interpreter lock is released for a waiting thread, so that the Rust code has work."""
    import numpy as np

    parts = []
    for first in range(0, len(encodings), _AT_ONCE):
        some = encodings[first : first + _AT_ONCE]
        encodings[first : first + _AT_ONCE] = [None] * len(
            some
        )  # encodings are dropped in parts too: that takes as long as reading them
        parts.append((*flat([x.ids for x in some]), flat([x.type_ids for x in some])[0] if typed else None))
        del some
        if lends:
            time.sleep(0)
    ids, lengths, types = zip(*parts, strict=True)
    return np.concatenate(ids), np.concatenate(lengths), np.concatenate(types) if typed else None


def given(lists: list[Any], order: Any) -> Generator[Chunk, None, None]:
    """Token ids that the user has made himself, in an order of them."""
    for part in slices(len(lists)):
        yield Chunk(*flat([lists[i] for i in order[part].tolist()]), order[part], None)


def why_not(tokenizer: Any) -> str:
    """Why a tokenizer is called as it is; empty if its Rust part alone is enough."""
    rust = getattr(tokenizer, "_tokenizer", None)
    if not getattr(tokenizer, "is_fast", False) or not hasattr(rust, "encode_batch_fast"):
        return f"{type(tokenizer).__name__} is not a fast tokenizer"
    for name in _METHODS:
        method = getattr(type(tokenizer), name, None)
        if name in vars(tokenizer) or not getattr(method, "__module__", "transformers.").startswith("transformers."):
            return f"{type(tokenizer).__name__} has a {name} of its own"
    if tokenizer.pad_token is None:
        return "the tokenizer has no padding token"
    if "attention_mask" not in tokenizer.model_input_names:
        return "the tokenizer gives no attention_mask, without which tokens see padding"
    return ""


def _fingerprint(tokenizer: Any, few: bool) -> tuple[Any, ...]:
    """A fingerprint that changes whenever the ids of a text may. It holds the Rust tokenizer itself, so that no other one takes its address.

    few: the added tokens are read one by one, with their flags. If they are many, only their number is read: reading 6,400 of them took 8 ms.
    """
    rust = tokenizer._tokenizer
    parts = (rust.normalizer, rust.pre_tokenizer, rust.post_processor, rust.get_added_tokens_decoder() if few else None)
    model = tuple(
        [getattr(rust.model, name, None) for name in ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges")]
    )
    return (
        rust, rust.get_vocab_size(), tokenizer.truncation_side, getattr(tokenizer, "split_special_tokens", False), model,
        *map(repr, parts),
    )  # fmt: skip
