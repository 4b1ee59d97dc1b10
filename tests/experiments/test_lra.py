"""The tasks in the form of the Long Range Arena: their labels by independent checks, training, pieces, and the plot."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "learning"))
import corpus
import encoder_model
import listops
import lra
import lra_curves
import lra_tasks
import pictures
from language_model import SIZES
from lra_tasks import Sizes


def shape_seen(picture: torch.Tensor) -> str:
    """The class of a plain picture, by what a reader would look at: corners, centre and filled share of the shape's box."""
    inside = picture != ground_of(picture)
    rows, columns = inside.any(1).nonzero()[:, 0], inside.any(0).nonzero()[:, 0]
    box = inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    if box.all():
        return "square"
    if not box.any(1).all() or all(row.all() or not row.any() for row in box):
        return "rows"
    if all(column.all() or not column.any() for column in box.T):
        return "columns"
    middle, last = len(box) // 2, len(box) - 1
    corners = [bool(box[i, j]) for i, j in ((0, 0), (0, -1), (last, 0), (last, -1))]
    if all(corners):
        return "frame"
    if not box[middle, box.shape[1] // 2]:
        return "ring"
    # a triangle widens from top to bottom; the other two are as wide above as below
    widths = box.sum(1)
    if widths[0] < 0.5 * widths[-1]:
        return "triangle"
    return "disc" if box.float().mean() > 0.67 else "plus"


def ground_of(picture: torch.Tensor) -> int:
    """The brightness outside: of the corner of the picture that most corners share, as a shape of up to 26 pixels covers at most one."""
    corners = [int(picture[i, j]) for i in (0, -1) for j in (0, -1)]
    return max(corners, key=corners.count)


def test_pictures_show_their_class():
    pixels, classes = pictures.draw(400, 5, plain=True)
    found = [shape_seen(picture.view(32, 32)) for picture in pixels]
    assert found == [pictures.CLASSES[number] for number in classes.tolist()]
    assert set(found) == set(pictures.CLASSES)
    assert all(len(picture.unique()) == 2 for picture in pixels)
    assert min(int(p.max()) - int(p.min()) for p in pixels) >= pictures.CONTRAST - 1


def test_pictures_are_of_the_seed_and_noisy():
    one, classes = pictures.draw(50, 3)
    again, same = pictures.draw(50, 3)
    assert torch.equal(one, again)
    assert torch.equal(classes, same)
    assert not torch.equal(one, pictures.draw(50, 4)[0])
    assert min(len(p.unique()) for p in one) > 20


def evaluated(tokens: list[int]) -> int:
    """The value of an expression with a stack, from its last token to its first."""
    stack: list[int | None] = []
    for token in reversed(tokens):
        if token == listops.CLOSE:
            stack.append(None)
        elif token >= listops.FIRST_DIGIT:
            stack.append(token - listops.FIRST_DIGIT)
        else:
            values = []
            while (value := stack.pop()) is not None:
                values.append(value)
            name = listops.OPERATORS[token - listops.FIRST_OPERATOR]
            middle = sorted(values)[(len(values) - 1) // 2]
            stack.append({"MAX": max(values), "MIN": min(values), "SM": sum(values) % 10, "MED": middle}[name])
    (value,) = stack
    return value


def test_expressions_of_the_full_length_have_their_values():
    plan = listops.Plan.long(2048)
    tokens, values = listops.examples(6, 1, plan)
    assert tokens.shape == (6, 2048)
    for row, value in zip(tokens.tolist(), values.tolist(), strict=True):
        used = [t for t in row if t != listops.PAD]
        assert 683 <= len(used) <= 2048
        assert row[: len(used)] == used
        assert evaluated(used[1:]) == value


def test_expressions_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(lra_tasks, "PIECE", 8)  # six pieces, of two processes
    sizes = Sizes(32, 30, 10)
    drawn, kept, anew = (lra_tasks.data_of("listops", sizes, None, cache) for cache in (tmp_path, tmp_path, None))
    for name in ("tokens", "classes", "test_tokens", "test_classes"):
        assert torch.equal(getattr(drawn, name), getattr(kept, name))
        assert torch.equal(getattr(drawn, name), getattr(anew, name))
    assert drawn.tokens.shape == (30, 1, 32)
    assert drawn.test_tokens.shape == (10, 1, 32)
    assert [evaluated([t for t in row[0][1:] if t]) for row in drawn.tokens.tolist()] == drawn.classes.tolist()
    assert not torch.equal(drawn.tokens[:10], drawn.test_tokens)


def test_guesses_count_answers_by_the_first_operator():
    # MAX of training is 9 twice and 4 once, MIN always 1; 1 is the most frequent answer
    first, second = torch.tensor([2, 2, 2, 3, 3, 3]), torch.tensor([2, 3, 2, 3])
    tokens, tested = (torch.stack((torch.ones_like(t), t), 1)[:, None].to(torch.uint8) for t in (first, second))
    values = torch.tensor([9, 9, 4, 1, 1, 1]), torch.tensor([9, 1, 4, 9])
    data = lra_tasks.Data("listops", tokens, values[0], tested, values[1], listops.VOCABULARY, 10)
    assert lra_tasks.guessed(data) == (0.25, 0.5)


def test_passages_are_of_the_documents_that_the_label_says():
    texts = [bytes([number]) * (30 + 7 * number) for number in range(20)]
    tokens, same, numbers = lra_tasks.pairs(texts, 20, 300, 0)
    assert int(numbers.min()) == 2  # shorter ones have no two passages
    for (one, other), label, (first, second) in zip(tokens, same.tolist(), numbers.tolist(), strict=True):
        assert len(one.unique()) == len(other.unique()) == 1
        assert {int(one[0]), int(other[0])} == {first, second}
        assert (one[0] == other[0]) == bool(label)
    assert 0.4 < same.float().mean() < 0.6


def test_passages_do_not_overlap_and_places_do_not_tell():
    texts = [bytes((7 * number + place) % 256 for place in range(250)) for number in range(2)]
    tokens, same, numbers = lra_tasks.pairs(texts, 40, 2000, 1)
    places = (tokens[:, :, 0].long() - 7 * numbers) % 256
    swapped = (tokens[:, :, 0].long() - 7 * numbers.flip(1)) % 256
    places = torch.where(((places <= 210).all(1))[:, None], places, swapped)
    own = places[same == 1]
    assert (own[:, 0] - own[:, 1]).abs().min() >= 40
    assert (own[:, 0] < own[:, 1]).float().mean() == pytest.approx(0.5, abs=0.06)  # in either order
    gaps = [(places[same == label][:, 0] - places[same == label][:, 1]).abs().float().mean() for label in (0, 1)]
    assert gaps[0] == pytest.approx(float(gaps[1]), rel=0.1)


def test_documents_come_back_from_their_tokens(tmp_path):
    pytest.importorskip("tokenizers")
    texts = {f"a/{n}": f"Document {n}: café → {'word ' * 100}{n}\n" for n in range(200)}
    made = [corpus.Document(name, text) for name, text in texts.items()]
    corpus.write(made, 300, tmp_path, [])
    train, heldout = corpus.split(made)
    assert lra_tasks.documents(tmp_path) == [[d.text.encode() for d in part] for part in (train, heldout)]


def test_every_byte_has_a_letter():
    assert sorted(lra_tasks.bytes_of_letters().values()) == list(range(256))


def plan_of(**sizes) -> lra.Plan:
    return lra.Plan(**{"batch": 16, "steps": 120, "every": 60, "warmup": 5, "lr": 3e-3, "width": 64, "layers": 1, "landmarks": 8, "backend": "reference", "device": "cpu"} | sizes)  # fmt: skip


@pytest.mark.parametrize("variant", ["dense", "1:2", "2:4", "nystrom", "nystrom_2:4_tuned"])
def test_it_learns(variant):
    data = lra_tasks.expressions(Sizes(24, 100, 50), workers=1)
    run = lra.Run(plan_of(tune=120), data, variant, 0)
    run.lr = 3e-3
    rows = list(run.rows())
    assert [row.step for row in rows] == [60, 120]
    assert rows[1].train_loss < rows[0].train_loss - 0.1
    assert rows[1].train_loss < 2.1  # of ten classes a guess has 2.3


def test_two_passages_are_told_apart():
    texts = [
        bytes(torch.randint(16 * n, 16 * n + 16, (200,), generator=torch.Generator().manual_seed(n)).tolist()) for n in range(8)
    ]
    train, tests = (lra_tasks.pairs(texts, 32, count, seed) for count, seed in ((400, 0), (100, 1)))
    data = lra_tasks.Data("retrieval", train[0], train[1], tests[0], tests[1], 256, 2)
    rows = list(lra.Run(plan_of(steps=150, every=150), data, "dense", 0).rows())
    assert rows[0].accuracy > 0.8


def test_pixels_turn_with_their_row_and_their_column():
    sizes = {"classes": 2, "texts": 1, "first": False, "pad": None}
    network = encoder_model.Classifier(SIZES["tiny"], 32, "dense", 0, **sizes, side=4)
    cos, sin = network._rotary(torch.zeros(1, 16))
    assert cos.shape == sin.shape == (16, 1, 64)
    line = encoder_model.rotary_of(4, 32, torch.device("cpu"))[0]
    at = 4 * 2 + 3  # row 2, column 3
    torch.testing.assert_close(cos[at, 0, :16], line[2, 0, :16])
    torch.testing.assert_close(cos[at, 0, 16:32], line[3, 0, :16])
    torch.testing.assert_close(cos[:, :, :32], cos[:, :, 32:])  # the halves that a turn pairs


def test_batches_are_of_seed_and_step():
    one = lra.batch_of(1000, 8, 0, 3)
    assert torch.equal(one, lra.batch_of(1000, 8, 0, 3))
    assert not torch.equal(one, lra.batch_of(1000, 8, 0, 4))
    assert not torch.equal(one, lra.batch_of(1000, 8, 1, 3))


SMALL = ["--quick", "--task", "listops", "--task", "retrieval", "--steps", "4", "--every", "2", "--batch", "4", "--examples", "40", "--tested", "10"]  # fmt: skip


def untimed(folder: Path) -> list[dict[str, str]]:
    with open(folder / "lra.csv", newline="") as handle:
        return [{k: v for k, v in row.items() if k not in ("step_ms", "peak_mib")} for row in csv.DictReader(handle)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert lra.main([*SMALL, "--out", str(folder)]) == 0
    return folder


def test_every_variant_has_its_rows(whole):
    ends = {(r["task"], r["variant"]): r for r in untimed(whole) if r["step"] == r["steps"]}
    assert list(ends) == [(task, variant) for task in ("listops", "retrieval") for variant in lra.VARIANTS]
    assert {r["steps"] for (_, v), r in ends.items() if "tuned" in v} == {"2"}
    # the same batches and weights: pruning alone makes the losses differ, and little
    for variants in (("dense", "1:2", "2:4"), lra.VARIANTS[-3:]):
        losses = [float(ends["listops", variant]["train_loss"]) for variant in variants]
        assert len(set(losses)) == 3
        assert max(losses) - min(losses) < 0.3


def test_in_pieces_the_losses_are_those_of_a_whole_run(whole, tmp_path, capsys):
    one_task = SMALL[:3] + SMALL[5:]
    cut = [*one_task, "--out", str(tmp_path), "--minutes", "1e-6", "--resume"]
    said = []
    while len(said) < 40 and (not said or "with --resume goes on" in said[-1]):
        assert lra.main(cut) == 0
        said.append(capsys.readouterr().out)
    assert 7 <= len(said) < 40
    assert untimed(tmp_path) == [row for row in untimed(whole) if row["task"] == "listops"]
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quick", "--width", "96"], "--width is 96"),
        (["--quick", "--task", "image", "--length", "100"], "--length is 100"),
        (["--quick", "--task", "retrieval", "--length", "10000000"], "0 documents have two passages"),
        (
            ["--quick", "--task", "listops", "--examples", "9", "--tested", "9", "--method", "nystrom", "--landmarks", "7"],
            "64 tokens are no multiple of 7",
        ),
        (["--device", "cpu", "--task", "retrieval", "--data", "/nowhere"], "tokenizer.json"),
    ],
)
def test_says_what_is_wrong(arguments, said, tmp_path, capsys):
    assert lra.main([*arguments, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_draws(whole, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "lra.csv").write_text((whole / "lra.csv").read_text())
    light, dark = lra_curves.draw(tmp_path / "lra.csv")
    assert (light.name, dark.name) == ("lra.png", "lra.dark.png")
    assert min(light.stat().st_size, dark.stat().st_size) > 5_000
    (tmp_path / "lra.csv").write_text("\n".join((whole / "lra.csv").read_text().splitlines()[:2]) + "\n")
    with pytest.raises(ValueError, match="no run that was trained to its last step"):
        lra_curves.draw(tmp_path / "lra.csv")


def test_a_task_has_its_budget():
    """Sizes that are not given are those of the task; what goes on from other weights has a tenth of the steps."""
    plan = lra.Plan(device="cpu")
    pictures, tuned = plan.of("image", "dense"), plan.of("image", "nystrom_tuned")
    assert (pictures.steps, pictures.every, pictures.lr) == (20_000, 1000, 5e-4)
    assert (tuned.steps, tuned.every, tuned.warmup) == (2000, 1000, 200)
    given = lra.Plan(device="cpu", steps=40, every=10, lr=2e-3)
    assert given.of("image", "1:2").steps == given.of("listops", "1:2").steps == 40
    assert given.of("image", "nystrom_1:2_tuned").steps == 4
    assert plan.of("listops", "dense").lr == 1e-3
    with pytest.raises(ValueError, match="--steps is -1; it must be at least 0"):
        lra.Plan(device="cpu", steps=-1)
