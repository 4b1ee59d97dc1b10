"""A pretrained encoder fine-tuned with pruned attention: all-MiniLM-L6-v2 on a small task, dense beside 2:4 and 1:2.

    python experiments/quality/finetune.py [--out FOLDER] [--steps 100] [--seed 0 ...]     # a CPU in float32, half an hour
    python experiments/quality/finetune.py --device cuda --dtype bf16                      # a GPU, minutes; into results/<gpu>

The task is to tell from which of 14 topics of Python's reference a sentence is (768 training sentences, the others held out).
Every weight of the encoder and a linear layer on its embedding are trained, with the same seeds, batches and learning rates for
each attention. On a CPU the pruned ones run through the reference backend, on a GPU through the one that `auto` takes, forward and
backward. In bf16 the model runs under autocast: its weights, their updates and the linear layer stay float32. One row of
`nm_finetune_minilm.csv` is one attention and seed, with the device and the dtype:

    accuracy       of held-out sentences after the last step; accuracy_dense_weights: with the weights of that seed's dense run;
                   accuracy_run_dense: with its own weights and dense attention
    mean_cosine, spearman               between its embeddings of held-out sentences and those of the dense run, each fine-tuned
    mean_cosine_before, spearman_before the same before any training
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from minilm import agreement, write
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from saccade.cli.demo.encoder import Batch, Encoder
from saccade.cli.demo.sentences import sentences_of
from saccade.integrations.transformers import register_nm_sparse

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from machine import machine
from run import gpu_folder, results_folder

TOPICS = (
    "string-methods", "formatstrings", "typesmapping", "typesseq", "customization", "comparisons", "naming", "function", "import", "try",
    "assignment", "debugger", "types", "specialnames",
)  # fmt: skip
ATTENTIONS = {"dense": "sdpa", "2:4": "saccade_nm_2_4", "1:2": "saccade_nm_1_2"}
TRAINED, BATCH = 768, 32
RATE, HEAD_RATE = 1e-4, 3e-3
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Place:
    """The device on which an encoder runs, and its dtype."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        """The GPU's name, or CPU."""
        return torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else "CPU"

    def autocast(self) -> torch.autocast:
        """The dtype of products inside of it; none but float32's own where that is asked for."""
        return torch.autocast(self.device.partition(":")[0], self.dtype, enabled=self.dtype != torch.float32)


@dataclass(frozen=True)
class Task:
    """Sentences and the number of the topic that each is from."""

    texts: list[str]
    labels: Tensor

    @classmethod
    def of_reference(cls, seed: int, most: int = 1000) -> tuple[Task, Task]:
        """(to learn from, at most `most` held out), shuffled."""
        pairs = [(text, i) for i, texts in enumerate(sentences_of(TOPICS, 1000).values()) for text in texts]
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
        parts = order[:TRAINED], order[TRAINED : TRAINED + most]
        texts = [[pairs[i][0] for i in part] for part in parts]
        labels = [torch.tensor([pairs[i][1] for i in part]) for part in parts]
        return cls(texts[0], labels[0]), cls(texts[1], labels[1])

    def draw(self, encoder: Encoder, steps: int, seed: int) -> Iterator[tuple[Batch, Tensor]]:
        """Random batches with their labels, each sentence once an epoch."""
        generator, order = torch.Generator().manual_seed(seed), []
        for _ in range(steps):
            if len(order) < BATCH:
                order = torch.randperm(len(self.texts), generator=generator).tolist()
            rows, order = order[:BATCH], order[BATCH:]
            (batch,) = encoder.batches([self.texts[i] for i in rows])
            yield batch, self.labels[rows][batch.rows]


class Tuned:
    """An encoder, its linear layer, and one attention."""

    def __init__(self, attention: str, seed: int, place: Place) -> None:
        torch.manual_seed(seed)
        self.place = place
        self.encoder = Encoder(torch.device(place.device), torch.float32)
        self.encoder.use(ATTENTIONS[attention])
        # drawn on the CPU, so that it is the same everywhere
        self.head = nn.Linear(self.encoder.model.config.hidden_size, len(TOPICS)).to(place.device)

    def train(self, task: Task, steps: int, seed: int, tick) -> None:
        """Cross-entropy by AdamW, rates falling to 0."""
        groups = [{"params": self.encoder.model.parameters()}, {"params": self.head.parameters(), "lr": HEAD_RATE}]
        optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for batch, labels in task.draw(self.encoder, steps, seed):
            # the model stays in eval mode, because the attentions draw dropout differently
            with self.place.autocast():
                pooled = self.encoder.pool(batch)
            loss = nn.functional.cross_entropy(self.head(16 * pooled), labels.to(self.place.device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            tick(loss.item())

    @torch.inference_mode()
    def accuracy(self, task: Task, embeddings: Tensor) -> float:
        """The accuracy of these embeddings of the task's texts."""
        found = self.head(16 * embeddings.to(self.place.device)).argmax(-1).cpu()
        return (found == task.labels).double().mean().item()

    def embed(self, task: Task, attention: str | None = None) -> Tensor:
        """Unit vectors of the task's texts, by the trained attention or another one."""
        if attention is not None:
            self.encoder.use(ATTENTIONS[attention])
        with self.place.autocast():
            return self.encoder.embed(self.encoder.batches(task.texts))


def measure(steps: int, seeds: list[int], most: int, place: Place) -> list[dict[str, object]]:
    """A row for each seed and attention."""
    rows: list[dict[str, object]] = []
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        bar = progress.add_task("fine-tuning", total=len(seeds) * len(ATTENTIONS) * steps)
        for seed in seeds:
            learn, held_out = Task.of_reference(seed, most)
            dense: Tuned | None = None
            before: dict[str, Tensor] = {}
            for name in ATTENTIONS:
                tuned = Tuned(name, seed, place)
                before[name] = tuned.embed(held_out)
                tuned.train(learn, steps, seed, lambda loss: progress.advance(bar))
                after = tuned.embed(held_out)
                dense = dense or tuned
                theirs = dense.embed(held_out, "dense")
                with_dense_weights = dense.accuracy(held_out, dense.embed(held_out, name))
                found: dict[str, object] = {"attention": name, "seed": seed, "steps": steps}
                found |= {"device": place.name, "dtype": str(place.dtype).removeprefix("torch.")}
                found["accuracy"] = tuned.accuracy(held_out, after)
                found["accuracy_dense_weights"] = with_dense_weights
                found["accuracy_run_dense"] = tuned.accuracy(held_out, tuned.embed(held_out, "dense"))
                for suffix, pair in (("", (theirs, after)), ("_before", (before["dense"], before[name]))):
                    result = asdict(agreement(*pair))
                    found |= {f"{key}{suffix}": result[key] for key in ("mean_cosine", "spearman")}
                rows.append(found | {name: value for name, value in machine().items() if name != "gpu"})
                console.print("  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder of the results (default: results/<gpu>, or results/cpu)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--seed", action="append", type=int, help="may be repeated; 0, 1 and 2 by default. The CSV has these alone"
    )
    parser.add_argument("--held-out", type=int, default=1000, help="at most so many sentences are held out")
    given = parser.parse_args(arguments)
    place = Place(given.device, DTYPES[given.dtype])
    on_cpu = torch.device(place.device).type == "cpu"
    if not on_cpu and not torch.cuda.is_available():
        parser.error(f"--device is {given.device}, and torch sees no GPU here; --device cpu runs")
    if on_cpu and given.dtype != "float32" and given.out is None:
        parser.error(f"--dtype is {given.dtype} on a CPU: name a folder with --out, since results/cpu has the rows of float32")
    for pattern in ("2:4", "1:2"):
        register_nm_sparse(ATTENTIONS[pattern], pattern=pattern, backend="reference" if on_cpu else "auto")
    rows = measure(given.steps, given.seed or [0, 1, 2], given.held_out, place)
    path = write(rows, (given.out or results_folder() / (gpu_folder() if not on_cpu else "cpu")) / "nm_finetune_minilm.csv")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
