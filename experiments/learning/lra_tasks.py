"""Three tasks of the form of the Long Range Arena, made from what is at hand.

    listops     values of expressions as in `listops.py`, 683 to 2,047 tokens after a first one, padded to 2,048, nested at most 10 deep, of at
                most 8 arguments. The Arena's have 500 to 2,000 and at most 10 arguments, of which one draw in 24 is short enough.
    image       `pictures.py`: the shape in 1,024 pixels of 32 greys, eight classes. The Arena's are photographs, CIFAR-10, of 256 greys.
    retrieval   whether two passages of 1,024 bytes are of the same document of the corpus, or of two documents. The Arena asks whether one
                paper cites the other, from 4,000 bytes each. A passage alone says nothing: documents are drawn in the same way for both answers,
                and passages of one do not overlap.

Test examples have their own seed, and for retrieval their own documents, those that `corpus.py` holds out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing import Pool
from pathlib import Path

import listops
import pictures
import torch
from corpus import END, name_in, python_reference, split
from pieces import write as whole_or_not
from torch import Tensor

PIECE = 250  # expressions that are drawn from one seed
SEED_OF_TESTS = 10**6


@dataclass(frozen=True)
class Sizes:
    """The sizes of a task: tokens of a text, and examples for training and for the test."""

    length: int
    examples: int
    tested: int


@dataclass(frozen=True)
class Data:
    """Tokens uint8 `[N, texts, T]` and classes int64 `[N]`. first: a model reads the first token. pad: its id, if there is padding. side:
    of a square picture whose rows the tokens are."""

    name: str
    tokens: Tensor
    classes: Tensor
    test_tokens: Tensor
    test_classes: Tensor
    vocabulary: int
    count: int
    first: bool = False
    pad: int | None = None
    side: int = 0


def expressions(sizes: Sizes, workers: int = 16) -> Data:
    """The task listops. 96,000 take a core 16 minutes."""
    plan = listops.Plan.long(sizes.length)
    wanted = [(sizes.tested, SEED_OF_TESTS), (sizes.examples, 0)]
    jobs = [(min(PIECE, count - at), first + at, plan) for count, first in wanted for at in range(0, count, PIECE)]
    drawn = _drawn(jobs, workers)
    tokens = torch.cat([torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 1, sizes.length) for raw, _ in drawn])
    values = torch.tensor([value for _, found in drawn for value in found])
    parts = (tokens[sizes.tested :], values[sizes.tested :], tokens[: sizes.tested], values[: sizes.tested])
    return Data("listops", *(part.clone() for part in parts), listops.VOCABULARY, 10, first=True, pad=listops.PAD)


def _drawn(jobs: list[tuple[int, int, listops.Plan]], workers: int) -> list[tuple[bytes, list[int]]]:
    if len(jobs) <= 4:  # sooner done than other processes begin
        return [_some_expressions(*job) for job in jobs]
    # one thread each: a process that is forked after torch has used OpenMP's threads would wait for them for ever
    with Pool(min(workers, len(jobs)), torch.set_num_threads, (1,)) as pool:
        return pool.starmap(_some_expressions, jobs)


def _some_expressions(count: int, seed: int, plan: listops.Plan) -> tuple[bytes, list[int]]:
    # bytes travel through a pipe; tensors would through /dev/shm, of which a container may have 64 MB
    tokens, values = listops.examples(count, seed, plan)
    return bytes(tokens.to(torch.uint8).untyped_storage()), values.tolist()


def images(sizes: Sizes) -> Data:
    """The task image."""
    if sizes.length != pictures.SIDE**2:
        raise ValueError(f"--length is {sizes.length}; a picture has {pictures.SIDE**2} pixels")
    parts = [pictures.draw(count, seed) for count, seed in ((sizes.examples, 0), (sizes.tested, SEED_OF_TESTS))]
    # 32 greys: of 256, which a model has to learn one by one, the noise of 12 levels tells hardly more
    (tokens, classes), (test_tokens, test_classes) = ((pixels[:, None] // 8, found) for pixels, found in parts)
    return Data("image", tokens, classes, test_tokens, test_classes, 32, len(pictures.CLASSES), side=pictures.SIDE)


def passages(sizes: Sizes, folder: Path | None) -> Data:
    """The task retrieval, from the corpus in a folder, or else from Python's reference."""
    texts = documents(folder) if folder is not None else [[d.text.encode() for d in part] for part in split(python_reference())]
    counts = ((sizes.examples, 0), (sizes.tested, SEED_OF_TESTS))
    parts = [pairs(part, sizes.length, *each)[:2] for part, each in zip(texts, counts, strict=True)]
    return Data("retrieval", *parts[0], *parts[1], 256, 2)


def pairs(texts: list[bytes], length: int, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(bytes uint8 `[count, 2, length]`, 1 where both are of one document and else 0 `[count]`, numbers of both documents among `texts`
    `[count, 2]`). Every document of at least two passages is as likely as another, as is each place in it."""
    fitting = [number for number, text in enumerate(texts) if len(text) >= 2 * length]
    if len(fitting) < 2:
        raise ValueError(f"{len(fitting)} documents have two passages of --length {length} bytes; there must be at least 2")
    generator = torch.Generator().manual_seed(seed)
    same = torch.randint(2, (count,), generator=generator)
    first = torch.randint(len(fitting), (count,), generator=generator)
    away = torch.randint(1, len(fitting), (count,), generator=generator)
    chosen = torch.stack((first, torch.where(same == 1, first, (first + away) % len(fitting))), 1)
    share = torch.rand(count, 2, generator=generator, dtype=torch.float64).tolist()
    found = bytearray()
    for (one, other), (early, late), swapped in zip(
        chosen.tolist(), share, torch.rand(count, generator=generator).tolist(), strict=True
    ):
        ends = [texts[fitting[number]] for number in (one, other)]
        # the first passage ends before the second begins in both kinds of pair, so that places do not tell
        cut = [int(part * (len(text) - 2 * length + 1)) for part, text in zip(sorted((early, late)), ends, strict=True)]
        two = [ends[0][cut[0] : cut[0] + length], ends[1][cut[1] + length : cut[1] + 2 * length]]
        found += b"".join(reversed(two) if swapped < 0.5 else two)
    tokens = torch.frombuffer(found, dtype=torch.uint8).view(count, 2, length)
    return tokens, same, torch.tensor(fitting)[chosen]


def documents(folder: Path) -> list[list[bytes]]:
    """Training and held-out documents of a corpus as bytes, from its tokens and its `tokenizer.json`."""
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"{folder} holds no tokenizer.json; `python experiments/learning/corpus.py --fetch --out {folder}` prepares it"
        )
    words = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    byte_of = bytes_of_letters()
    meaning = {number: bytes(byte_of[letter] for letter in word) for word, number in words.items() if number != END}
    parts = []
    for name in ("train", "heldout"):
        tokens = torch.frombuffer(bytearray((folder / f"{name}.bin").read_bytes()), dtype=torch.uint16).to(torch.int32)
        ends = (tokens == END).nonzero()[:, 0].tolist()
        begins = [0, *(end + 1 for end in ends)]
        numbers = tokens.tolist()
        parts.append([b"".join(meaning[n] for n in numbers[a:b]) for a, b in zip(begins, ends, strict=False)])
    return parts


def bytes_of_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level tokenizer stands for: printable ones for themselves, the others, in order, for the letters
    from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


def data_of(task: str, sizes: Sizes, folder: Path | None, cache: Path | None) -> Data:
    """Draw a task. folder: of the corpus. cache: a folder where what was drawn is kept."""
    made: dict[str, Callable[[], Data]] = {
        "listops": lambda: expressions(sizes),
        "image": lambda: images(sizes),
        "retrieval": lambda: passages(sizes, folder),
    }
    if cache is None:
        return made[task]()
    kept = cache / kept_name(task, sizes, folder)
    if not kept.is_file():
        whole_or_not(asdict(made[task]()), kept)
    return Data(**torch.load(kept, weights_only=True))


def guessed(data: Data) -> tuple[float, float]:
    """Accuracy on the test examples of two guesses that are learned by counting: the most frequent answer, and the most frequent one among
    texts with the same second token, which in ListOps is the outermost operator."""
    most = torch.bincount(data.classes).argmax()
    table = torch.zeros(data.vocabulary, data.count, dtype=torch.int64)
    table.index_put_((data.tokens[:, 0, 1].long(), data.classes), torch.tensor(1), accumulate=True)
    by_second = table.argmax(1)[data.test_tokens[:, 0, 1].long()]
    return (data.test_classes == most).double().mean().item(), (data.test_classes == by_second).double().mean().item()


def kept_name(task: str, sizes: Sizes, folder: Path | None) -> str:
    """The name of the file with a task's examples."""
    name = name_in(folder) if task == "retrieval" and folder is not None else None
    corpus = f"-{name}" if name else ""
    return f"{task}{corpus}-{sizes.length}-{sizes.examples}-{sizes.tested}.pt"
