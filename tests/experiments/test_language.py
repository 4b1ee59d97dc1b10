"""Language models on real text: their attention against the library's module, their weights, training in pieces, and the plot."""

from __future__ import annotations

import csv
import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from saccade.nn.dynamic_mask import DynamicMaskAttention

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "learning"))
import corpus
import language
import language_curves
import language_model
import model as stacked
import pieces
import training
from language_model import IDEAS, METHODS, SIZES, LanguageModel

TINY = SIZES["tiny"]
SMALL = ["--quick", "--context", "32", "--keep", "8", "--batch", "2", "--steps", "4", "--every", "2", "--tested", "2"]


@pytest.fixture(scope="module")
def text():
    return corpus.bytes_of_reference()


def model(method: str, keep: int = 8, seed: int = 0) -> LanguageModel:
    return LanguageModel(TINY, 50, method, keep, seed)


def tokens(length: int = 40) -> torch.Tensor:
    return torch.randint(50, (2, length), generator=torch.Generator().manual_seed(3))


def with_scores(network: LanguageModel) -> LanguageModel:
    """Scores as after some training: A is not 0."""
    with torch.no_grad():
        for layer in network.layers:
            layer.attention.A.copy_(torch.linspace(0.5, -0.8, len(layer.attention.A)))
    return network


@pytest.mark.unpoisoned  # memory that is poisoned is no longer meta
def test_names_count_the_parameters():
    for name, size in SIZES.items():
        with torch.device("meta"):
            network = LanguageModel(size, 8192, "dense", 256, 0)
        if name != "tiny":
            assert abs(network.count / 1e6 / float(name.removesuffix("M")) - 1) < 0.15, (name, network.count)


def test_all_methods_start_from_the_same_weights():
    first = dict(model("dense").named_parameters())
    for method in METHODS[1:] + IDEAS:
        other = dict(model(method).named_parameters())
        assert set(first) <= set(other)
        assert all(torch.equal(first[name], other[name]) for name in first), method
        assert {name.split(".")[-2 if "dt_proj" in name else -1] for name in set(other) - set(first)} <= {"A", "dt_proj"}
    drawn, other = model("dense", seed=1), first
    assert not torch.equal(drawn.words.weight, other["words.weight"])


@pytest.mark.parametrize("method", ["dynamic", "dynamic_recent", "topk", "topk_recent", "window"])
def test_with_room_for_every_key_it_is_dense(method):
    dense, other = model("dense"), model(method, keep=80)
    parts = [network(tokens()).float() for network in (dense, other)]
    torch.testing.assert_close(parts[1], parts[0])
    for part in parts:
        part.square().mean().backward()
    gradients = dict(other.named_parameters())
    for name, parameter in dense.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, msg=name)


def test_equal_scores_are_a_sliding_window():
    window = model("window")(tokens())
    torch.testing.assert_close(model("dynamic")(tokens()), window)
    # half of the keys are the newest, and so are the best while all scores tie
    torch.testing.assert_close(model("dynamic_recent", keep=16)(tokens()), window)
    assert not torch.allclose(model("topk")(tokens()), window)
    assert not torch.allclose(model("dense")(tokens()), window)


def test_attention_is_that_of_the_module():
    attention = language_model.Attention(128, "dynamic", 5, "auto")
    torch.nn.init.constant_(attention.A, 0.7)
    module = DynamicMaskAttention(128, 2, keep=5)
    module.load_state_dict(attention.state_dict())
    hidden = torch.randn(2, 20, 128)
    rotary = language_model.rotary_of(20, 64, hidden.device)
    torch.testing.assert_close(attention(hidden, rotary, None), module(hidden, tuple(t.squeeze(1) for t in rotary)))


def test_the_window_is_that_of_a_mask():
    inputs = [torch.randn(2, 3, 70, 16, dtype=torch.float32) for _ in range(3)]
    distance = torch.arange(70)[:, None] - torch.arange(70)
    mask = (distance >= 0) & (distance < 9)
    found = []
    for attend in (
        lambda q, k, v: stacked.sliding_window(q, k, v, 9, "auto"),
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    ):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = attend(*leaves)
        found.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("method", ["dynamic", "dynamic_recent"])
def test_the_scores_are_trained(method):
    network = with_scores(model(method))
    network(tokens()).square().mean().backward()
    found = {name: p.grad for name, p in network.named_parameters() if ".A" in name or "dt_proj" in name}
    assert len(found) == 2 * TINY.layers
    assert all(gradient is not None and gradient.any() for gradient in found.values())


@pytest.mark.parametrize("method", ["topk", "topk_recent"])
def test_untrained_scores_choose_alone(method):
    network = model(method)
    network(tokens()).square().mean().backward()
    assert not [name for name, p in network.named_parameters() if (".A" in name or "dt_proj" in name) and p.grad is not None]
    # what a score is beyond its rank does not matter: another factor, the same keys and output
    before = network(tokens())
    with torch.no_grad():
        for layer in network.layers:
            layer.attention.A.mul_(3)
    torch.testing.assert_close(network(tokens()), before)


def test_the_last_logits_alone():
    network = model("dynamic")
    torch.testing.assert_close(network(tokens(), last=3), network(tokens())[:, -3:])


def test_scores_do_not_tie_under_autocast():
    network = with_scores(model("dynamic"))
    values = torch.randn(1, 200, TINY.width)
    attention = network.layers[0].attention
    with torch.autocast("cpu", torch.bfloat16):
        scores = attention.scores(values)
    torch.testing.assert_close(scores, attention.scores(values), rtol=0, atol=0)


@pytest.mark.parametrize("method", METHODS + IDEAS)
def test_the_loss_falls(method, text):
    plan = language.Plan(context=48, keep=12, batch=4, steps=24, every=6, warmup=2, tested=8, device="cpu")
    run = language.Run(plan, text, "tiny", method, 0)
    first = run.evaluate()
    rows = list(run.rows())
    assert [row.step for row in rows] == [6, 12, 18, 24]
    assert rows[-1].heldout_loss < first - 1.0
    assert rows[-1].train_loss < rows[0].train_loss
    assert rows[-1].tokens == 24 * 4 * 48


@pytest.mark.parametrize("method", ["gated_recent", "gated_window"])
def test_with_room_for_every_key_a_gate_is_that_of_dense_attention(method):
    gated, other, plain = model("gated_dense"), model(method, keep=80), model("dense")
    torch.testing.assert_close(other(tokens()).float(), gated(tokens()).float())
    assert not torch.equal(gated(tokens()), plain(tokens()))


def test_batches_are_of_seed_and_step(text):
    plan = language.Plan(context=16, keep=4, batch=3, device="cpu")
    one = language.batch_of(text.train, plan, 0, 5)
    assert one.shape == (3, 17)
    assert torch.equal(one, language.batch_of(text.train, plan, 0, 5))
    assert not torch.equal(one, language.batch_of(text.train, plan, 0, 6))
    assert not torch.equal(one, language.batch_of(text.train, plan, 1, 5))


def test_the_rate_rises_and_falls():
    plan = language.Plan(steps=100, warmup=10, device="cpu")
    rates = [training.rate(step, plan) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == max(rates) == 1
    assert rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def written(folder: Path) -> list[dict[str, str]]:
    with open(folder / "language.csv", newline="") as handle:
        return list(csv.DictReader(handle))


def test_a_run_in_pieces_has_the_losses_of_a_whole_one(tmp_path, capsys):
    methods = ["--method", "dense", "--method", "dynamic"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert language.main([*SMALL, *methods, "--out", str(whole)]) == 0
    cut = [*SMALL, *methods, "--out", str(parts), "--minutes", "1e-6", "--resume"]
    said = []
    while len(said) < 10 and (not said or "with --resume goes on" in said[-1]):
        assert language.main(cut) == 0
        said.append(capsys.readouterr().out)
    assert len(said) == 4  # two runs of two evaluations each
    assert len(written(whole)) == 4
    assert untimed(whole) == untimed(parts)
    assert not list((parts / "checkpoints").iterdir())


def untimed(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k not in ("step_ms", "peak_mib")} for row in written(folder)]


def test_rows_after_the_checkpoint_are_made_again(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert language.main([*SMALL, "--method", "dynamic", "--out", str(whole)]) == 0
    cut = [*SMALL, "--method", "dynamic", "--out", str(parts), "--resume"]
    assert language.main([*cut, "--minutes", "1e-6"]) == 0
    assert [path.name for path in (parts / "checkpoints").iterdir()] == ["tiny-dynamic-0-2.pt"]
    with open(parts / "language.csv", "a", newline="") as handle:
        # as if a command had gone on from the checkpoint and was killed
        csv.DictWriter(handle, list(written(whole)[0])).writerow({**written(whole)[0], "step": 3})
    assert language.main(cut) == 0
    assert untimed(whole) == untimed(parts)


def test_a_broken_run_begins_anew(tmp_path):
    out = ["--out", str(tmp_path), "--method", "window"]
    assert language.main([*SMALL, *out]) == 0
    rows = written(tmp_path)
    with open(tmp_path / "language.csv", "w", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerow(rows[0])  # the command was killed after the first of two rows
    assert language.main([*SMALL, *out, "--resume"]) == 0
    assert [row["heldout_loss"] for row in written(tmp_path)] == [row["heldout_loss"] for row in rows]


def test_another_plan_is_not_mixed_in(tmp_path, capsys):
    out = ["--out", str(tmp_path), "--method", "window"]
    assert language.main([*SMALL, *out]) == 0
    assert language.main([*SMALL, *out, "--resume", "--keep", "6"]) == 2
    assert "needs another --out" in capsys.readouterr().err
    plan = language.plan_of(language.parse(SMALL))
    run = language.Run(plan, corpus.bytes_of_reference(), "tiny", "window", 0)
    other = language.Run(dataclasses.replace(plan, batch=3), corpus.bytes_of_reference(), "tiny", "window", 0)
    with pytest.raises(ValueError, match="'batch': 2"):
        other.load(run.state())


def test_a_run_may_be_cut_between_two_evaluations(text):
    plan = language.Plan(context=16, keep=4, batch=2, steps=44, every=22, warmup=2, tested=2, device="cpu")
    whole = [row.train_loss for row in language.Run(plan, text, "tiny", "dense", 0).rows()]
    cut = language.Run(plan, text, "tiny", "dense", 0)
    cut.deadline = 0.0
    assert list(cut.rows()) == []
    assert cut.step == training.LEAST
    again = language.Run(plan, text, "tiny", "dense", 0)
    again.load(cut.state())
    assert [row.train_loss for row in again.rows()] == whole


def test_a_line_that_was_cut_is_not_read(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,4")
    assert pieces.read(tmp_path / "a.csv") == [{"a": "1", "b": "2"}]


def test_steps_are_timed_alone(tmp_path):
    assert language.main([*SMALL, "--method", "dense", "--clock", "2", "--out", str(tmp_path)]) == 0
    (row,) = pieces.read(tmp_path / "clock.csv")
    assert (row["size"], row["method"]) == ("tiny", "dense")
    assert float(row["step_ms"]) > 0


def test_results_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "language.csv").write_text("rows\n")
    assert language.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "--resume continues it" in capsys.readouterr().err
    assert (tmp_path / "language.csv").read_text() == "rows\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quick", "--keep", "1"], "--keep is 1"),
        (["--device", "cpu", "--data", "/nowhere"], "corpus.json"),
        (["--quick", "--context", "1000000"], "--context 1000000 needs more"),
    ],
)
def test_says_what_is_wrong(arguments, said, tmp_path, capsys):
    assert language.main([*arguments, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_draws(tmp_path):
    pytest.importorskip("matplotlib")
    assert (
        language.main([*SMALL, "--method", "dense", "--method", "dynamic", "--seed", "0", "--seed", "1", "--out", str(tmp_path)])
        == 0
    )
    light, dark = language_curves.draw(tmp_path / "language.csv")
    assert (light.name, dark.name) == ("language.png", "language.dark.png")
    assert min(light.stat().st_size, dark.stat().st_size) > 5_000
    rows = [row for row in written(tmp_path) if row["step"] != row["steps"]]
    with open(tmp_path / "language.csv", "w", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(ValueError, match="no run that was trained to its last step"):
        language_curves.draw(tmp_path / "language.csv")


def test_the_plot_has_a_panel_for_each_size():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    common = {"method": "dense", "keep": "8", "context": "32", "tokens": "64", "device": "a GPU", "torch": "2"}
    rows = [
        common | {"size": size, "parameters": count, "perplexity": value, "seed": str(seed)}
        for size, count in (("3M", "3000000"), ("10M", "10000000"))
        for seed, value in enumerate(("8.0", "10.0"))
    ]
    figure = language_curves._language("language", rows)
    assert [axis.get_title() for axis in figure.axes] == ["3M parameters", "10M parameters"]
    assert [text.get_text() for text in figure.axes[1].texts] == ["9.0"]  # the mean of the seeds
    pyplot.close(figure)
