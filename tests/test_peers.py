"""`scripts/peers.py`: suites of tiny projects run with and without our functions, and what is said of those that are not there."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import saccade

SCRIPTS = Path(__file__).parent.parent / "scripts"


def _loaded(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def peers():
    return _loaded("peers")


@pytest.fixture(scope="module")
def plugin():
    return _loaded("peers_plugin")


TORCHS = """
import pytest, torch
import torch.nn.functional as F

def test_right_by_both():
    x = torch.randn(2, 2, 5, 8)
    expected = torch.softmax(x @ x.mT / 8 ** 0.5, -1) @ x
    torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), expected)

def test_of_torch_alone():
    assert F.scaled_dot_product_attention.__module__.startswith("torch")

def test_of_ours_alone():
    assert F.scaled_dot_product_attention.__module__.startswith("saccade")

def test_wrong_by_both():
    assert False

@pytest.mark.skip
def test_skipped():
    pass
"""

FLASH = """
import pytest, torch
import flash_attn
from flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_kvpacked_func
from flash_attn.helpers import twice

def test_packings_are_one_function():
    qkv = torch.randn(2, 5, 3, 2, 8)
    out = flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(out, flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], 0.0, causal=True))
    assert torch.equal(out, flash_attn_func(*qkv.unbind(2), causal=True))
    assert twice(2) == 4

def test_ragged_packings():
    kv, ends = torch.randn(7, 2, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    assert flash_attn_varlen_kvpacked_func(kv[:, 0], kv, ends, ends, 4, 4).shape == (7, 2, 8)

def test_a_window():
    q = torch.randn(1, 4, 1, 8)
    flash_attn_func(q, q, q, window_size=(1, 0))

def test_alibi():
    q = torch.randn(1, 4, 1, 8)
    flash_attn_func(q, q, q, alibi_slopes=torch.ones(q.shape[2]))

def normalize_flash_attn_S(weights, q, causal=False):
    raise AssertionError("ours are normalized")

def test_weights():
    assert normalize_flash_attn_S(3, None, causal=True) == 3
"""


@pytest.fixture
def folder(tmp_path):
    """Two projects: one of torch's function, one that is laid out as flash-attention, whose extension is not compiled."""
    fake = tmp_path / "fake" / "tests"
    fake.mkdir(parents=True)
    (fake / "test_fake.py").write_text(TORCHS)
    flash = tmp_path / "flash-attention"
    (flash / "flash_attn").mkdir(parents=True)
    (flash / "flash_attn" / "__init__.py").write_text("from flash_attn.flash_attn_interface import flash_attn_func\n")
    (flash / "flash_attn" / "helpers.py").write_text("def twice(x):\n    return 2 * x\n")
    (flash / "flash_attn" / "flash_attn_interface.py").write_text(
        "import flash_attn_2_cuda\n\n\ndef flash_attn_func(q, k, v):\n    return flash_attn_2_cuda.fwd(q, k, v)\n"
    )
    (flash / "tests").mkdir()
    (flash / "tests" / "test_flash_attn.py").write_text(FLASH)
    return tmp_path


def _suite(peers, name="fake", adapter="sdpa", tests=("tests/test_*.py",)):
    return peers.Suite(name, f"somebody/{name}", adapter, tests)


def test_what_is_worse_with_us_is_counted_and_named(peers, folder, capfd):
    assert peers.main(["--peers", str(folder)], (_suite(peers), _suite(peers, "absent"))) == 1
    head, row, *sentences = capfd.readouterr().out.splitlines()
    assert head.split() == [
        "suite",
        "without:",
        "passed",
        "failed",
        "skipped",
        "with:",
        "passed",
        "failed",
        "skipped",
        "refused",
        "worse",
    ]
    assert row.split() == ["fake", "2", "2", "1", "2", "2", "1", "0", "1"]
    assert sentences == [
        "fake: worse with us: tests/test_fake.py::test_of_torch_alone",
        f"absent: there is no folder {folder / 'absent'}; clone somebody/absent there",
    ]


def test_nothing_worse_is_a_success_and_an_expression_chooses(peers, folder, capfd, monkeypatch):
    asked = []
    monkeypatch.setattr(peers, "run", lambda *given: asked.append(given) or peers.Run({"a": "failed", "b": "passed"}))
    words = ["--peers", str(folder), "--only", "fake", "-k", "right", "--minutes", "3"]
    assert peers.main(words, (_suite(peers), _suite(peers, "absent"))) == 0
    assert [(ours, options, minutes) for _, _, ours, options, minutes in asked] == [
        (o, ["-k", "right"], 3.0) for o in (False, True)
    ]
    assert capfd.readouterr().out.splitlines()[1].split() == ["fake", "1", "1", "0", "1", "1", "0", "0", "0"]


def test_only_what_fails_with_us_runs_without_us(peers, folder, capfd):
    # a file that cannot be collected does not keep those beside it from running
    (folder / "fake" / "tests" / "test_broken.py").write_text("import no_such_module\n")
    assert peers.main(["--peers", str(folder), "--without", "failed"], (_suite(peers),)) == 1
    _, row, sentence = capfd.readouterr().out.splitlines()
    assert row.split() == ["fake", "1", "2", "0", "2", "3", "1", "0", "1"]
    assert sentence == "fake: worse with us: tests/test_fake.py::test_of_torch_alone"


@pytest.mark.parametrize(("which", "fails", "runs"), [("none", True, 1), ("failed", True, 2), ("failed", False, 1)])
def test_no_test_runs_without_us_unless_asked(peers, folder, monkeypatch, which, fails, runs):
    asked = []
    found = peers.Run({"a": "failed" if fails else "passed"})
    monkeypatch.setattr(peers, "run", lambda *given: asked.append(given) or found)
    assert peers.main(["--peers", str(folder), "--without", which], (_suite(peers),)) == int(which == "none")
    assert [ours for _, _, ours, *_ in asked] == [True, False][:runs]


def test_flash_attention_is_served_without_its_extension(peers, folder, capfd):
    suite = next(s for s in peers.SUITES if s.name == "flash-attention")
    assert peers.main(["--peers", str(folder), "--only", "flash-attention"], peers.SUITES) == 0
    # what cannot be collected without us is one failure
    assert capfd.readouterr().out.splitlines()[1].split() == [suite.name, "0", "1", "0", "4", "0", "0", "1", "0"]


def test_a_process_that_dies_has_told_what_it_ran(peers, folder, capfd):
    test = folder / "fake" / "tests" / "test_fake.py"
    test.write_text("import os\n\ndef test_first():\n    pass\n\ndef test_second():\n    os.abort()\n")
    assert peers.main(["--peers", str(folder)], (_suite(peers),)) == 1
    out = capfd.readouterr().out.splitlines()
    assert out[1].split()[:3] == ["fake", "1", "0"]
    assert "fake: the run with us was ended by signal 6" in out


MANY = """
import pytest

@pytest.mark.parametrize("d", range(10), ids=[f"d{i}" for i in range(10)])
@pytest.mark.parametrize("b, c", [(i, i) for i in range(20)])
@pytest.mark.parametrize("a", range(20))
def test_many(a, b, c, d):
    pass

def test_one():
    pass
"""
COUNTING = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    with open("collected", "a") as file:
        file.write(f"{len(items)} ")
"""


def test_one_test_of_many_is_chosen_before_all_are_made(peers, folder, capfd):
    (folder / "fake" / "tests" / "test_fake.py").write_text(MANY)
    (folder / "fake" / "conftest.py").write_text(COUNTING)
    without, ours = (peers.run(_suite(peers), folder, ours, ["--peers-every=40"], 1) for ours in (False, True))
    assert without.outcomes == ours.outcomes
    assert ours.count("passed") in (100, 101)  # of 4,001
    collected = [int(count) for count in (folder / "fake" / "collected").read_text().split()]
    assert len(collected) == 2
    assert max(collected) == 101
    values = [name.partition("[")[2].rstrip("]").split("-") for name in ours.outcomes if "[" in name]
    assert all(len(set(column)) >= 10 for column in zip(*values, strict=True))  # no list is cut to a few values


def test_no_suite_at_all_gets_a_sentence_each(peers, tmp_path, capfd):
    assert peers.main(["--peers", str(tmp_path)]) == 1
    first, *sentences = capfd.readouterr().out.splitlines()
    assert first == "nothing ran"
    assert [line.partition(":")[0] for line in sentences] == [suite.name for suite in peers.SUITES]
    (tmp_path / "pytorch" / "test").mkdir(parents=True)
    (said,) = (s for s in peers.SUITES if s.name == "pytorch")
    assert "has none of test_transformers.py, test_nestedtensor.py" in peers.missing(said, tmp_path)


def test_every_suite_has_an_adapter(peers, plugin):
    assert {suite.adapter for suite in peers.SUITES} == set(plugin.ADAPTERS)


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 5, 3, 8)])
def test_xformers_tensors(plugin, shape):
    q, k, v = (torch.randn(shape) for _ in range(3))
    bias = torch.randn(2, 5, 5) if len(shape) == 3 else torch.randn(2, 3, 5, 5)
    heads_first = [x[:, None] if x.dim() == 3 else x.transpose(1, 2) for x in (q, k, v)]
    expected = saccade.attention(*heads_first, bias[:, None] if bias.dim() == 3 else bias, 0.0, False, 0.5)
    found = plugin.memory_efficient_attention(q, k, v, bias, scale=0.5, op="theirs")
    assert torch.equal(found, expected[:, 0] if q.dim() == 3 else expected.transpose(1, 2))
    with pytest.raises(saccade.InvalidArgument, match="which has no counterpart"):
        plugin.memory_efficient_attention(q, k, v, object())


def test_transformers_calls_ours_under_the_name_of_torchs_function(plugin):
    modeling = pytest.importorskip("transformers.modeling_utils")
    masking = pytest.importorskip("transformers.masking_utils")
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    model = BertModel(BertConfig(**sizes, attn_implementation="eager")).eval()
    ids, mask = torch.randint(50, (2, 7)), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    expected = model(ids, mask).last_hidden_state
    tables = modeling.ALL_ATTENTION_FUNCTIONS, masking.ALL_MASK_ATTENTION_FUNCTIONS
    theirs = [table["sdpa"] for table in tables]
    plugin.transformers()
    try:
        assert all(table["sdpa"].__module__.startswith("saccade") for table in tables)
        model.set_attn_implementation("sdpa")
        found = model(ids, mask).last_hidden_state
        with pytest.raises(pytest.skip.Exception, match="saccade refuses: softcap asks for a soft cap"):
            tables[0]["sdpa"](model, *3 * [torch.randn(1, 2, 7, 16)], None, softcap=50.0)
    finally:
        for table, function in zip(tables, theirs, strict=True):
            table.register("sdpa", function)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_and_the_draw_of_dropout_are_told_as_flash_attention_tells_them(plugin, device):
    q, k = torch.randn(2, 9, 4, 16, device=device), torch.randn(2, 11, 2, 16, device=device)
    eye = torch.eye(11, 16, device=device)[None, :, None].expand(2, 11, 2, 16).clone().requires_grad_()
    function = plugin.flash_attn_functions()["flash_attn_func"]
    out, _, told = function(q, k, eye, 0.4, return_attn_probs=True)
    assert told.shape == (2, 4, 128, 128)
    assert told.dtype == q.dtype
    told, scores = told[:, :, :9, :11], torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 4
    torch.testing.assert_close(told.abs(), torch.softmax(scores, -1), atol=4e-3, rtol=1e-2)
    torch.testing.assert_close(out.transpose(1, 2)[..., :11], told.clamp(min=0) / 0.6, atol=4e-3, rtol=1e-2)
    again = function(q, k, eye, 0.4, return_attn_probs=True)[2][:, :, :9, :11]
    assert not torch.equal(again > 0, told > 0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_of_packed_tokens_are_told_by_sequence(plugin, device):
    ends = torch.tensor([0, 3, 9], dtype=torch.int32, device=device)
    qkv = torch.randn(9, 3, 2, 16, device=device, requires_grad=True)
    function = plugin.flash_attn_functions()["flash_attn_varlen_qkvpacked_func"]
    out, _, told = function(qkv, ends, 6, 0.4, 0.5, return_attn_probs=True)
    assert told.shape == (2, 2, 128, 128)
    assert not told[0, :, 3:].any()
    assert not told[0, :, :, 3:].any()
    for n, tokens in enumerate((slice(0, 3), slice(3, 9))):
        q, k, v = (x.transpose(0, 1) for x in qkv[tokens].detach().unbind(1))
        there = told[n, :, : q.shape[1], : q.shape[1]]
        torch.testing.assert_close(there.abs(), torch.softmax(q @ k.mT / 2, -1), atol=4e-3, rtol=1e-2)
        torch.testing.assert_close(out[tokens].transpose(0, 1), there.clamp(min=0) / 0.6 @ v, atol=4e-3, rtol=1e-2)
