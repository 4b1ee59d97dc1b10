"""A `SentenceTransformer` and a `CrossEncoder` of random weights for tables of whole encoders, with a tokenizer trained on the sentences of `encoder_text`."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from encoder_text import sentences
from encoders import Architecture

LONGEST = 128


@functools.cache
def tokenizer() -> Any:
    """WordPiece over the sentences, trained at the first call: 12,000 pieces, lower case."""
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertTokenizerFast

    trained = BertWordPieceTokenizer(lowercase=True)
    trained.train_from_iterator(sentences(), vocab_size=12000, show_progress=False)
    with tempfile.TemporaryDirectory() as folder:
        trained.save_model(folder)
        return BertTokenizerFast(str(Path(folder) / "vocab.txt"), model_max_length=LONGEST)


_made: list[tuple[tuple[Any, ...], Any]] = []  # the last model and what it was made of: a case takes up to six copies


def sentence_transformer(architecture: Architecture, device: str, dtype: torch.dtype, longest: int = LONGEST) -> Any:
    """The model as a user has it, the same weights at each call. Sentences are cut at `longest` tokens."""
    asked = (architecture, device, dtype, longest)
    if not _made or _made[0][0] != asked:
        _made[:] = [(asked, _sentence_transformer(*asked))]
    return copy.deepcopy(_made[0][1])


def _sentence_transformer(architecture: Architecture, device: str, dtype: torch.dtype, longest: int) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    encoder = architecture.make(device, dtype).model
    with tempfile.TemporaryDirectory() as folder:
        encoder.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        first = Transformer(folder, max_seq_length=longest)
    pooling = Pooling(encoder.config.hidden_size, pooling_mode={"mean": "mean", "first": "cls"}[architecture.pool])
    return SentenceTransformer(modules=[first, pooling], device=device).to(dtype).eval()


def cross_encoder(architecture: Architecture, device: str, dtype: torch.dtype) -> Any:
    """A reranker of one label, the same weights at each call. Its scores differ from pair to pair, so that a mix-up is seen."""
    from sentence_transformers import CrossEncoder
    from transformers import AutoModelForSequenceClassification

    encoder = architecture.make("cpu", torch.float32).model
    encoder.config.num_labels = 1
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(encoder.config)
    model.base_model.load_state_dict(encoder.state_dict(), strict=False)  # it has a pooler besides
    torch.nn.init.normal_(model.classifier.weight)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        found = CrossEncoder(folder, max_length=LONGEST, device=device)
    return found.to(dtype).eval()


def batches_of(texts: list[str], size: int, longest: int = LONGEST) -> list[dict[str, torch.Tensor]]:
    """Padded batches on the host as the tokenizer makes them, the longest texts first, as `encode` sorts them."""
    rows = tokenizer()(texts, truncation=True, max_length=longest)["input_ids"]
    rows.sort(key=len, reverse=True)
    chosen = [rows[start : start + size] for start in range(0, len(rows), size)]
    found = [tokenizer().pad({"input_ids": part}, return_tensors="pt") for part in chosen]
    return [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in found]
