"""The table of efficient transformers beside N:M attention: each computes what its paper defines, and the table itself on a CPU."""

from __future__ import annotations

import csv
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import saccade

RIVALS = {"performer", "linformer", "nystromformer", "window"}


def staged(query, key, value, pattern):
    """The three steps by the backend that a CPU has."""
    return saccade.nm_sparse.scores(query, key, pattern=pattern).softmax().matmul(value)


@pytest.fixture
def table(load, timed_once, monkeypatch):
    """The table on the CPU, with few tokens."""
    module, encoders = load("tables.nm_rivals"), load("nm_encoder")
    monkeypatch.setattr(encoders, "DEVICE", "cpu")
    monkeypatch.setattr(encoders, "TOKENS", 256)
    monkeypatch.setattr(encoders, "LAYERS", 2)
    small = {
        "LENGTHS": (256,), "CHECKED": (256,), "HEADS": 2, "staged": staged, "peak_bytes": lambda call: (call(), 2**20)[1], "device_time": timed_once,
        "SHAPES": [encoders.Shape(256, 2, 32, dtype) for dtype in (torch.bfloat16, torch.float32)],
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    return module


def rows_of(load, table, path):
    table.run(load("rows").Writer(path, dict.fromkeys(("gpu", "torch", "date"), "x")), 1)
    with open(path, newline="") as handle:
        return list(csv.DictReader(handle))


def heads(length=512, dim=64):
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(3, 2, 3, length, dim, generator=generator).unbind(0))


def test_each_rival_is_its_definition(load):
    query, key, value = heads()
    found = load("rivals").rivals(512, 64, torch.float32, "cpu")
    assert set(found) == RIVALS
    outputs = {name: rival.attend(query, key, value) for name, rival in found.items()}
    for name, rival in found.items():
        torch.testing.assert_close(outputs[name], rival.definition(query * 64**-0.5, key, value), atol=2e-5, rtol=1e-4)
    # none of them is another one, or dense
    outputs["dense"] = F.scaled_dot_product_attention(query, key, value)
    names = list(outputs)
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            assert (outputs[name] - outputs[other]).norm() > 0.05 * outputs["dense"].norm(), (name, other)


@pytest.mark.parametrize("pattern", ["2:4", "1:2"])
def test_nystromformer_pruned(load, pattern):
    """Both large softmaxes are pruned, and nothing else."""
    table, approximations = load("tables.nm_rivals"), load("approximations")
    query, key, value = heads()
    found = table.combined(torch.bfloat16)[f"nystromformer {pattern}"]
    out = found.attend(query, key, value)
    torch.testing.assert_close(out, found.definition(query * 64**-0.5, key, value), atol=2e-5, rtol=1e-4)

    def weights(queries, keys):
        return saccade.nm_sparse.compress(64**-0.5 * queries @ keys.mT, "1:2", fill=-torch.inf).softmax().to_dense()

    if pattern == "1:2":  # the format of float32 has no other
        q, k = (approximations.pooled(x, 64) for x in (query, key))
        middle = approximations.pseudo_inverse(torch.softmax(64**-0.5 * q @ k.mT, -1))
        torch.testing.assert_close(out, weights(query, k) @ (middle @ (weights(q, key) @ value)), atol=1e-4, rtol=1e-3)
    assert set(table.combined(torch.float32)) == {"nystromformer 1:2"}


def test_heads_may_be_views_of_packed_projections(load):
    packed = torch.randn(2, 512, 3, 3, 64)
    given = packed.permute(2, 0, 3, 1, 4).unbind(0)
    for name, rival in load("rivals").rivals(512, 64, torch.float32, "cpu").items():
        expected = rival.attend(*(x.contiguous() for x in given))
        torch.testing.assert_close(rival.attend(*given), expected, msg=name)


@pytest.mark.parametrize(("length", "reach"), [(512, 128), (64, 16), (48, 16), (16, 16)])
def test_the_window_in_blocks_sees_the_keys_near_the_query(load, length, reach):
    rivals = load("rivals")
    query, key, value = heads(length, 8)
    place = torch.arange(length)
    mask = (place - place[:, None]).abs() <= reach
    assert torch.equal(rivals.near(torch.zeros(length, length), reach), mask)
    expected = F.scaled_dot_product_attention(query, key, value, mask)
    attend = rivals.window(rivals.blocks_of_window(length, reach), torch.float32)
    torch.testing.assert_close(attend(query, key, value), expected)


def test_a_projection_pools(load):
    rivals, approximations = load("rivals"), load("approximations")
    x = torch.randn(2, 64, 3, 8).transpose(1, 2)
    torch.testing.assert_close(rivals.projected(x, rivals.pooling(16, 64, "cpu")), approximations.pooled(x, 16))


def test_the_budget_is_the_error_of_the_definition(load):
    check = load("nm_check")
    given = [x.bfloat16() for x in heads(64, 16)]

    def definition(query, key, value):
        return torch.softmax(query @ key.mT / 4, -1) @ value

    same = check.error_over_budget(definition, definition, given)
    assert 0.1 < same < 1 / 3
    exact = check.error_over_budget(lambda *x: definition(*(y.double() for y in x)), definition, given)
    assert exact < 1e-6
    assert check.error_over_budget(lambda *x: 1.1 * definition(*x), definition, given) > 5
    assert check.error_over_budget(lambda *x: definition(*x) * float("nan"), definition, given) == float("inf")


def test_the_table_on_a_cpu(load, table, tmp_path, capsys):
    path = tmp_path / "nm_rivals.csv"
    rows = rows_of(load, table, path)
    found = {(r["problem"], r["backend"]): r for r in rows}
    assert len(found) == len(rows)
    ours = {"bf16": {"staged 2:4", "fused 2:4", "fused 1:2"}, "fp32": {"staged 1:2", "fused 1:2"}}
    ours["bf16"] |= {"nystromformer 2:4", "nystromformer 1:2"}
    ours["fp32"] |= {"nystromformer 1:2"}
    for dtype, names in ours.items():
        every = {"unfused", "sdpa", *names} | RIVALS
        assert {b for p, b in found if p == f"attention(B=1 H=2 T=256 D=64 {dtype})"} == every
        whole = f"encoder(2 layers B=1 H=2 T=256 D=64 FF=32 {dtype})"
        assert {b for p, b in found if p == whole} == every | {"none"}
        bare = float(found[whole, "none"]["ms_p50"])
        for name in every:
            share = re.fullmatch(r"peak [\d.]+ MiB, without attention ([\d.]+)", found[whole, name]["note"])
            assert float(share[1]) == pytest.approx(bare / float(found[whole, name]["ms_p50"]), rel=2e-3, abs=1e-3)
            assert 0 < float(found[whole, name]["error_ratio"]) <= 1
    assert len(found) == 11 + 9 + 12 + 10
    assert "nystromformer x" in capsys.readouterr().out
    assert not torch.backends.cuda.matmul.allow_tf32  # as before

    pytest.importorskip("matplotlib")
    written = load("plot").draw(path)
    assert [p.name for p in written] == ["nm_rivals.png", "nm_rivals.dark.png"]
    assert min(p.stat().st_size for p in written) > 8_000


@pytest.mark.parametrize("name", ["performer", "window", "staged 2:4", "fused 1:2", "nystromformer 2:4", "sdpa"])
def test_a_wrong_result_ends_the_table(load, table, monkeypatch, tmp_path, name):
    """Dense attention in place of an approximation, and a value that is lost in place of dense attention."""
    before = table.attentions

    def wrong(length, dtype):
        every = before(length, dtype)
        dense = F.scaled_dot_product_attention
        return every | {name: replace(every[name], attend=dense if name != "sdpa" else lambda q, k, v: dense(q, k, v.roll(1, 2)))}

    monkeypatch.setattr(table, "attentions", wrong)
    monkeypatch.setattr(table, "device_time", lambda *given: pytest.fail("it was timed"))
    with pytest.raises(SystemExit, match=rf"nothing is timed: in bf16 the error is over its budget for {name} by \d"):
        rows_of(load, table, tmp_path / "nm_rivals.csv")
    assert not torch.backends.cuda.matmul.allow_tf32


def test_lengths_fit_every_rival(load):
    table, rivals = load("tables.nm_rivals"), load("rivals")
    for length in {*table.LENGTHS, *table.CHECKED, *(shape.length for shape in table.SHAPES)}:
        assert not any(length % part for part in (rivals.RANK, rivals.LANDMARKS, rivals.REACH))
    assert {str(shape).rpartition(" ")[2] for shape in table.SHAPES} == {"bf16)", "fp32)"}
