"""The main job: the same sentences through the same encoder, with torch's attention, with saccade's, and with saccade's pruned
2:4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from saccade.cli.demo.encoder import Encoder
from saccade.cli.demo.sentences import QUERIES, sentences
from saccade.testing.timing import take_turns

TORCH, OURS, PRUNED = "torch", "saccade", "saccade 2:4"
_NAMES = {TORCH: "sdpa", OURS: "saccade"}
_ANSWERS = 3


@dataclass(frozen=True)
class Outcome:
    """The results in one dtype: embeddings by each attention (queries last), and milliseconds for all sentences. PRUNED is not timed, because batches
    of short sentences do not measure it fairly."""

    dtype: torch.dtype
    vectors: dict[str, Tensor]
    milliseconds: dict[str, float]

    @property
    def difference(self) -> float:
        """Largest difference of any component of any embedding."""
        return float((self.vectors[TORCH] - self.vectors[OURS]).abs().max())

    @property
    def similarity(self) -> float:
        """Smallest cosine between the two embeddings of one sentence."""
        return float((self.vectors[TORCH] * self.vectors[OURS]).sum(-1).min())

    @property
    def pruned_cosines(self) -> Tensor:
        """Cosine between the dense and the pruned embedding of each sentence."""
        return (self.vectors[TORCH] * self.vectors[PRUNED]).sum(-1)


def run(console: Console, device: torch.device, count: int, repeats: int) -> list[Outcome]:
    """Embed, compare, search and print; the numbers for the plots."""
    from saccade.integrations.transformers import register, register_nm_sparse

    register()
    # without a GPU the backend is named, because "auto" would warn for every new shape that it is slow
    register_nm_sparse(backend="auto" if device.type == "cuda" else "reference")
    texts = sentences(count)
    dtypes = [torch.float32] + ([torch.float16, torch.bfloat16] if device.type == "cuda" else [])
    outcomes = []
    with console.status("loading all-MiniLM-L6-v2 and embedding") as status:
        for dtype in dtypes:
            status.update(f"embedding {len(texts)} sentences in {_name(dtype)}")
            outcomes.append(_outcome(texts, device, dtype, repeats))
    console.print(_table(outcomes, len(texts)))
    console.print(_search_table(texts, outcomes[0]))
    console.print(_verdict(outcomes))
    console.print(_pruned_verdict(outcomes))
    return outcomes


def top_answers(outcome: Outcome, attention: str, documents: int) -> tuple[Tensor, Tensor]:
    """`(scores, rows)`, each `[queries, 3]`: the nearest sentences by cosine."""
    vectors = outcome.vectors[attention]
    scores = vectors[documents:] @ vectors[:documents].T
    best = scores.topk(_ANSWERS, dim=-1)
    return best.values, best.indices


def _outcome(texts: list[str], device: torch.device, dtype: torch.dtype, repeats: int) -> Outcome:
    encoder = Encoder(device, dtype)
    batches = encoder.batches([*texts, *QUERIES])
    vectors: dict[str, Tensor] = {}

    def embed(name: str) -> None:
        encoder.use(_NAMES[name])
        vectors[name] = encoder.embed(batches)

    times = take_turns({name: lambda name=name: embed(name) for name in _NAMES}, device, repeats)  # type: ignore[misc]
    encoder.use("saccade_nm")
    vectors[PRUNED] = encoder.embed(batches)
    return Outcome(dtype, vectors, times)


def _table(outcomes: list[Outcome], count: int) -> Table:
    table = Table(title=f"all-MiniLM-L6-v2, {count} sentences of Python's language reference", title_justify="left")
    for column in ("dtype", "torch ms", "saccade ms", "torch / saccade", "largest difference", "least cosine"):
        table.add_column(column, justify="right")
    for outcome in outcomes:
        torch_ms, our_ms = outcome.milliseconds[TORCH], outcome.milliseconds[OURS]
        table.add_row(
            _name(outcome.dtype), f"{torch_ms:.1f}", f"{our_ms:.1f}", f"{torch_ms / our_ms:.2f}",
            f"{outcome.difference:.1e}", f"{outcome.similarity:.7f}",
        )  # fmt: skip
    return table


def _search_table(texts: list[str], outcome: Outcome) -> Table:
    table = Table(title="Semantic search with saccade's embeddings", title_justify="left", show_lines=True)
    table.add_column("question", ratio=2)
    table.add_column("cosine", justify="right")
    table.add_column("nearest sentences", ratio=5)
    scores, rows = top_answers(outcome, OURS, len(texts))
    for query, query_scores, query_rows in zip(QUERIES, scores.tolist(), rows.tolist(), strict=True):
        cosines = "\n".join(f"{score:.2f}" for score in query_scores)
        answers = "\n".join(escape(_shorten(texts[row])) for row in query_rows)
        table.add_row(query, cosines, answers)
    return table


def _verdict(outcomes: list[Outcome]) -> str:
    documents = outcomes[0].vectors[TORCH].shape[0] - len(QUERIES)
    lines = []
    for outcome in outcomes:
        (_, theirs), (_, ours) = (top_answers(outcome, name, documents) for name in (TORCH, OURS))
        same = int((theirs == ours).all(-1).sum())
        colour = "green" if same == len(QUERIES) else "yellow"
        lines.append(
            f"[{colour}]{_name(outcome.dtype)}: torch's embeddings give the same three answers to {same} of {len(QUERIES)} questions[/]"
        )
    return "\n".join(lines)


def _pruned_verdict(outcomes: list[Outcome]) -> str:
    """Report how 2:4 pruning of every layer changes embeddings and search, without any training."""
    documents = outcomes[0].vectors[TORCH].shape[0] - len(QUERIES)
    lines = [
        "Pruned 2:4 in every layer (attn_implementation='saccade_nm'), without any training, against torch's dense attention:"
    ]
    for outcome in outcomes:
        (_, theirs), (_, ours) = (top_answers(outcome, name, documents) for name in (TORCH, PRUNED))
        first = int((theirs[:, 0] == ours[:, 0]).sum())
        shared = sum(len(set(a) & set(b)) for a, b in zip(theirs.tolist(), ours.tolist(), strict=True))
        cosines = outcome.pruned_cosines
        lines.append(
            f"{_name(outcome.dtype)}: cosine of embeddings {float(cosines.mean()):.4f} on average, {float(cosines.min()):.4f} at least; "
            f"the same first answer to {first} of {len(QUERIES)} questions, {shared} of {theirs.numel()} answers shared"
        )
    return "\n".join(lines)


def _shorten(text: str, width: int = 150) -> str:
    return text if len(text) <= width else text[: width - 1].rsplit(" ", 1)[0] + " …"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
