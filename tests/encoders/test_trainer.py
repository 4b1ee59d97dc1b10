"""`transformers.Trainer` trains an optimised encoder as it trains stock: the same losses, norms of gradients and weights."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from encoders_made import SIZES
from padded_made import PADDED

import saccade

pytest.importorskip("accelerate")
LENGTHS = (5, 9, 1, 7, 12, 3, 4, 8, 2, 6, 11, 10)


class Rows(torch.utils.data.Dataset):
    """Sentences of different lengths; `length` is no argument of a model's forward, so Trainer drops it."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, row):
        ids = torch.randint(3, 80, (LENGTHS[row],), generator=torch.Generator().manual_seed(row)).tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": row % 3, "length": len(ids)}


def collated(padding, seen):
    """A collator that fills the batch up, and notes the columns it was given."""

    def collate(rows):
        seen.update(*rows)
        width = max(len(row["input_ids"]) for row in rows)
        fillers = {"input_ids": padding, "attention_mask": 0}
        batch = {
            name: torch.tensor([row[name] + [filler] * (width - len(row[name])) for row in rows])
            for name, filler in fillers.items()
        }
        return batch | {"labels": torch.tensor([row["labels"] for row in rows])}

    return collate


def trained(model, folder, optimised):
    """(losses and norms of gradients by step, evaluation, weights, columns that reached the collator, what was said of the last training step)."""
    seen = set()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=0.1,
        learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=3, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    handle = saccade.optimize(model) if optimised else None
    rows, collate = Rows(), collated(model.config.pad_token_id, seen)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate)
    trainer.train()
    last = handle.served[0].last if handle else ""
    logged = [[x["loss"], x["grad_norm"]] for x in trainer.state.log_history if "loss" in x]
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "saved"))
    return torch.tensor(logged), evaluated, [x.detach().clone() for x in model.parameters()], seen, last


@pytest.mark.parametrize("name", ["bert", "mpnet"])
def test_as_stock(name, tmp_path):
    torch.manual_seed(0)
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
    if name == "bert":
        ours = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **quiet))
    else:
        ours = transformers.MPNetForSequenceClassification(transformers.MPNetConfig(**PADDED["mpnet"][2], **quiet))
    theirs = copy.deepcopy(ours)
    got, want = trained(ours, tmp_path / "ours", True), trained(theirs, tmp_path / "theirs", False)
    assert len(want[0]) == 6
    assert want[0][:, 1].max() > 0.1  # clipped
    torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=1e-3)
    assert got[1] == pytest.approx(want[1], rel=1e-3)
    for x, y in zip(got[2], want[2], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    assert "length" not in got[3]
    assert got[3] == want[3]
    on_a_cpu = "unpadded" if name == "bert" else "stock: CUDA graphs need a GPU"
    assert "captured" in got[4] or got[4] == on_a_cpu
    again = type(ours).from_pretrained(tmp_path / "ours" / "saved")
    torch.testing.assert_close(next(again.parameters()), got[2][0].cpu())
