"""The learning benchmark: its tasks, its metric, its model against the library's module, and which parameters get gradients."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from saccade.nn.dynamic_mask import DynamicMaskAttention

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "learning"))
import curves
import listops
import model as stacked
import tasks
import train

MARK, FIRST_DATA = tasks.MARK, tasks.FIRST_DATA


def drawn(name: str, length: int = 64, items: int = 6, symbols: int = 10, count: int = 50):
    task = tasks.Task(name, length, items, symbols)
    batch = task.draw(count, torch.Generator().manual_seed(0))
    assert batch.tokens.shape == (count, length)
    assert batch.places.shape == batch.answers.shape
    assert int(batch.tokens.min()) >= 0
    assert int(batch.tokens.max()) < task.vocabulary
    return task, batch


def rows(batch):
    return zip(batch.tokens.tolist(), batch.places.tolist(), batch.answers.tolist(), strict=True)


def test_copy_asks_for_the_first_tokens():
    task, batch = drawn("copy")
    for tokens, places, answers in rows(batch):
        assert [tokens[p - (task.length - task.items)] for p in places] == answers
        assert [tokens[p] for p in places] == [MARK] * task.items
        assert max(tokens[task.items : -task.items]) < MARK  # filler between


def test_select_asks_for_the_data_in_order():
    task, batch = drawn("select")
    for tokens, places, answers in rows(batch):
        assert [t for t in tokens if t >= FIRST_DATA] == answers
        assert places == list(range(task.length - task.items, task.length))
    assert len({tuple(torch.nonzero(t >= FIRST_DATA)[:, 0].tolist()) for t in batch.tokens}) > 40  # places differ


def test_induce_asks_for_what_followed_the_trigger():
    task, batch = drawn("induce")
    distances = set()
    for tokens, places, answers in rows(batch):
        first, second = (i for i, t in enumerate(tokens) if t == MARK)
        assert second == task.length - 1
        assert places == [second]
        assert answers == [tokens[first + 1]]
        distances.add(second - first)
    assert len(distances) > 20
    assert (batch.tokens >= FIRST_DATA).sum(1).max() > 2  # the value is not the only data


def test_mqar_asks_for_the_value_of_each_key():
    task, batch = drawn("mqar")
    for tokens, places, answers in rows(batch):
        keys, values = tokens[: 2 * task.items : 2], tokens[1 : 2 * task.items : 2]
        assert len(set(keys)) == task.items
        pairs = dict(zip(keys, values, strict=True))
        assert [pairs[tokens[p]] for p in places] == answers
        assert sorted(tokens[p] for p in places) == sorted(keys * tasks.ASKED)
        assert min(places) >= 2 * task.items
        assert not set(keys) & set(values)  # kinds of their own


def test_shorter_sequences_have_fewer_pairs():
    task = tasks.Task("mqar", 1024, 100, 512)
    assert task.shorter(64) == tasks.Task("mqar", 64, 8, 512)
    assert task.shorter(960).items == 100
    assert task.shorter(64).vocabulary == task.vocabulary


def test_lengths_are_mixed_at_first():
    plan = train.Plan(
        length=512, items=64, symbols=64, width=16, seeds=2, steps=20, mixed=0.5, batch=3, device="cpu", positions="rotary"
    )
    trainer = train.Trainer(plan, "mqar", "dense")
    found = []
    for trainer.done in range(20):
        found.append(trainer.length())
    assert found == [64, 256, 512] * 3 + [64] + [512] * 10
    for length, items in ((64, 8), (256, 32), (512, 64)):
        batch = trainer._draw(plan.batch, trainer.drawing, length)
        assert batch.tokens.shape == (2, 3 * 512 // length, length)  # as many tokens
        assert batch.places.shape[2] == tasks.ASKED * items


@pytest.mark.parametrize(("length", "count"), [(30, 1), (12, 1), (64, 1), (65, 2), (256, 2), (1024, 3), (8192, 5)])
def test_the_lengths_end_with_the_full_one(length, count):
    plan = train.Plan(length=length, items=1, symbols=8, width=16, seeds=1, layers=1, mixed=1.0, device="cpu", positions="rotary")
    trainer = train.Trainer(plan, "mqar", "dense")
    found = []
    for trainer.done in range(count + 1):
        found.append(trainer.length())
    assert found[count - 1] == length
    assert found[count] == min(64, length)


def test_the_token_before_is_added():
    network = stacked.StackedTransformer([0], 40, 8, variant="dense", keep=4, width=16, layers=0, previous=True)
    tokens = torch.tensor([[[3, 7, 3, 9]]])
    one, same, _ = network(tokens, torch.tensor([[[0, 2, 3]]]))[0, 0]
    assert not torch.allclose(one, same)  # the same token after another one
    alone = network(tokens[..., :1], torch.tensor([[[0]]]))[0, 0, 0]
    torch.testing.assert_close(one, alone)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("sort", 64, 4, 8), "'sort'"), (("mqar", 10, 4, 8), "at least 27"), (("copy", 64, 9, 8), "8 symbols for 9")],
)
def test_tasks_say_what_is_wrong(arguments, said):
    with pytest.raises(ValueError, match=said):
        tasks.Task(*arguments)


def test_accuracy_by_seed():
    answers = torch.randint(7, (3, 5, 4))
    logits = F.one_hot(answers, 7).float()
    logits[1, :, :2] *= -1  # half of the second seed is wrong
    logits[2] *= -1
    assert tasks.accuracy(logits, answers).tolist() == [1.0, 0.5, 0.0]


def transformer(variant: str, seeds: int = 2, keep: int = 8):
    return stacked.StackedTransformer(list(range(seeds)), 40, 32, variant=variant, keep=keep, width=16)


def logits_of(network, seeds: int = 2):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(40, (seeds, 3, 32), generator=generator)
    return network(tokens, torch.tensor([9, 20, 31]).expand(seeds, 3, 3))


def test_equal_scores_are_a_sliding_window():
    window = logits_of(transformer("window"))
    torch.testing.assert_close(logits_of(transformer("dynamic_frozen")), window)
    torch.testing.assert_close(logits_of(transformer("dynamic")), window)  # before training
    assert not torch.allclose(logits_of(transformer("dense")), window)
    assert not torch.allclose(logits_of(transformer("dynamic_detached")), window)
    torch.testing.assert_close(logits_of(transformer("dynamic", keep=32)), logits_of(transformer("dense")))


def gradients(variant: str) -> dict[str, torch.Tensor | None]:
    network = transformer(variant)
    if variant == "dynamic":
        # at A = 0 every score is 1 whatever dt_proj is, so its gradient is 0 too
        with torch.no_grad():
            for layer in network.layers:
                layer.attention.A.fill_(0.3)
    logits_of(network).square().sum().backward()
    return {name: p.grad for name, p in network.named_parameters() if name.endswith(("A", "dt_proj.weight"))}


def test_the_gradient_reaches_the_scores():
    for name, gradient in gradients("dynamic").items():
        assert gradient is not None, name
        assert (gradient.flatten(1).abs().sum(1) > 0).all(), name  # in every seed


def test_at_the_start_the_gradient_reaches_A():
    network = transformer("dynamic")
    logits_of(network).square().sum().backward()
    assert all((layer.attention.A.grad.abs() > 0).any() for layer in network.layers)


@pytest.mark.parametrize("variant", ["dynamic_detached", "dynamic_frozen"])
def test_the_ablations_cut_it(variant):
    found = gradients(variant)
    assert len(found) == 4
    for name, gradient in found.items():
        assert gradient is None or not gradient.any(), name


def test_attention_is_that_of_the_module():
    attention = stacked.StackedAttention([torch.Generator().manual_seed(0)], 16, 2, "dynamic", 5, "auto")
    module = DynamicMaskAttention(16, 2, keep=5)
    with torch.no_grad():
        attention.A.copy_(torch.tensor([[-0.7, 0.9]]))
    weights = {name: p[0].T if p.dim() == 3 else p[0] for name, p in attention.state_dict().items()}
    module.load_state_dict(weights)
    hidden = torch.randn(3, 20, 16)
    torch.testing.assert_close(attention(hidden[None])[0], module(hidden))


@pytest.mark.parametrize("variant", stacked.VARIANTS)
def test_a_seed_does_not_depend_on_the_others(variant):
    plan = train.Plan(length=24, keep=6, items=3, symbols=5, width=16, batch=4, seeds=2, device="cpu")
    both = train.Trainer(plan, "copy", variant)
    batch = both._draw(4, torch.Generator().manual_seed(5))
    alone = stacked.StackedTransformer([1], both.task.vocabulary, 24, variant=variant, keep=6, width=16)
    torch.testing.assert_close(both.model(batch.tokens, batch.places)[1:], alone(batch.tokens[1:], batch.places[1:]))


def test_trains_and_draws(tmp_path, capsys):
    sizes = "--length 16 --keep 4 --items 2 --symbols 4 --width 16 --steps 4 --every 2 --batch 4 --test 4 --seeds 2"
    assert train.main(["--quick", "--out", str(tmp_path), "--task", "copy", "--task", "mqar", *sizes.split()]) == 0
    path = tmp_path / "learning.csv"
    with open(path, newline="") as handle:
        written = list(csv.DictReader(handle))
    runs = {(row["task"], row["variant"]) for row in written}
    # frozen is a sliding window, so by default it runs on one task only
    assert runs == {(t, v) for t in ("copy", "mqar") for v in stacked.VARIANTS} - {("mqar", "dynamic_frozen")}
    assert len(written) == len(runs) * 2 * 2  # seeds, evaluations
    assert {row["step"] for row in written} == {"2", "4"}
    assert "±" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    light, dark = curves.draw(path)
    assert (light.name, dark.name) == ("learning.png", "learning.dark.png")
    assert min(light.stat().st_size, dark.stat().st_size) > 5_000


def test_says_what_is_wrong(capsys):
    assert train.main(["--quick", "--keep", "0"]) == 2
    assert "--keep is 0" in capsys.readouterr().err


@pytest.mark.parametrize("length", [1024, 2048, 4096, 8192])
def test_the_preset_has_the_sizes_of_the_paper(length):
    plan = train.plan_of(train.parse(["--preset", "paper", "--length", str(length), "--device", "cpu"]))
    task = tasks.Task("mqar", plan.length, plan.items, plan.symbols)  # there is room for pairs and questions
    assert plan.length == length
    assert plan.keep <= 512
    assert plan.keep <= length // 4
    assert (plan.items == 512) == (length >= 4096)
    assert plan.batch * length == 32768
    assert plan.width // plan.heads == 64
    batch = task.draw(1, torch.Generator().manual_seed(0))
    assert batch.places.shape == (1, tasks.ASKED * plan.items)


PAPER = [
    "--preset",
    "paper",
    "--symbols",
    "16",
    "--batch",
    "2",
    "--test",
    "2",
    "--seeds",
    "1",
    "--width",
    "32",
    "--steps",
    "4",
    "--every",
    "2",
    "--device",
    "cpu",
]


def test_the_preset_runs_in_pieces(tmp_path, capsys):
    out = ["--out", str(tmp_path), "--append"]
    for length, variant in (("64", "dense"), ("64", "dynamic"), ("128", "dynamic"), ("64", "dense")):
        assert train.main([*PAPER, *out, "--length", length, "--variant", variant]) == 0
    with open(tmp_path / "mqar.csv", newline="") as handle:
        written = list(csv.DictReader(handle))
    # the run that was made twice is there once
    assert sorted((r["length"], r["variant"]) for r in written) == sorted(
        [("64", "dense"), ("64", "dynamic"), ("128", "dynamic")] * 2
    )
    assert {(r["task"], r["dtype"]) for r in written} == {("mqar", "bfloat16")}
    pytest.importorskip("matplotlib")
    assert [path.name for path in curves.draw(tmp_path / "mqar.csv")] == ["mqar.png", "mqar.dark.png"]


def test_a_command_can_be_cut(tmp_path, capsys):
    cut = ["--out", str(tmp_path), "--length", "64", "--variant", "dense", "--variant", "window", "--minutes", "1e-6"]
    assert train.main([*PAPER, *cut]) == 0
    assert "this run is cut, and 1 are not made" in " ".join(capsys.readouterr().out.split())
    with open(tmp_path / "mqar.csv", newline="") as handle:
        assert [(r["variant"], r["step"]) for r in csv.DictReader(handle)] == [("dense", "2")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quick", "--preset", "paper"], "--quick and --preset"),
        (["--quick", "--dtype", "float16"], "--dtype is 'float16'"),
        (["--preset", "paper", "--length", "8", "--device", "cpu"], "mqar with 1 items needs at least 9 tokens"),
    ],
)
def test_says_what_is_wrong_with_sizes(arguments, said, tmp_path, capsys):
    assert train.main([*arguments, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_append_refuses_a_csv_of_other_columns(tmp_path, capsys):
    (tmp_path / "learning.csv").write_text("a,b\n1,2\n")
    assert train.main(["--quick", "--append", "--out", str(tmp_path)]) == 2
    assert "has the columns a, b" in capsys.readouterr().err


def test_scores_do_not_tie_under_autocast():
    attention = stacked.StackedAttention([torch.Generator().manual_seed(0)], 16, 2, "dynamic_detached", 5, "auto")
    values = torch.randn(1, 300, 16)
    with torch.autocast("cpu", torch.bfloat16):
        scores = attention.scores(values)
    torch.testing.assert_close(scores, attention.scores(values), rtol=0, atol=0)


def test_listops_values():
    # [MAX 2 9 [MIN 4 7 ] 0 ] and each operator alone
    assert listops.apply("MAX", [2, 9, listops.apply("MIN", [4, 7]), 0]) == 9
    assert (listops.apply("MED", [5, 1, 3]), listops.apply("MED", [4, 1, 2, 9]), listops.apply("SM", [7, 8, 9])) == (3, 2, 4)
    plan = listops.Plan.quick()
    tokens, values = listops.examples(40, 3, plan)
    again, same = listops.examples(40, 3, plan)
    assert torch.equal(tokens, again)
    assert torch.equal(values, same)
    for row, value in zip(tokens.tolist(), values.tolist(), strict=True):
        used = [t for t in row if t != listops.PAD]
        assert used[0] == listops.CLS
        assert plan.length // 3 <= len(used) - 1 < plan.length
        assert evaluated(used[1:]) == (value, [])


def evaluated(tokens: list[int]) -> tuple[int, list[int]]:
    """(value, rest) by a parser of its own."""
    first, *rest = tokens
    if first >= listops.FIRST_DIGIT:
        return first - listops.FIRST_DIGIT, rest
    values = []
    while rest[0] != listops.CLOSE:
        value, rest = evaluated(rest)
        values.append(value)
    return listops.apply(listops.OPERATORS[first - listops.FIRST_OPERATOR], values), rest[1:]


@pytest.mark.unpoisoned
def test_listops_trains_every_variant(tmp_path):
    small = ["--quick", "--steps", "4", "--every", "2", "--examples", "200", "--out", str(tmp_path)]
    assert listops.main(small) == 0
    with open(tmp_path / "listops.csv") as handle:
        found = list(csv.DictReader(handle))
    assert {(r["variant"], r["step"]) for r in found} == {(v, s) for v in listops.VARIANTS for s in ("2", "4")}
    # the same weights and batches, so that only the pruning differs
    assert len({r["loss"] for r in found if r["step"] == "2" and r["seed"] == "0"}) == 3
