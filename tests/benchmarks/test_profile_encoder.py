"""The profile of `encode` adds up on a CPU, and knows the kernels of ours by their names."""

from __future__ import annotations

import re
import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from graphs_made import Graph, install, packed_attention

import saccade
from saccade.encoders import attention

pytest.importorskip("sentence_transformers")
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
EXACT = Path(__file__).parents[2] / "src" / "saccade" / "exact"


@pytest.fixture
def profile(load, monkeypatch):
    found, encoders = load("profile_encoder"), load("encoders")
    tiny = encoders.Architecture("tiny", "Bert", {**encoders.MINILM.sizes, **TINY}, "mean", {"add_pooling_layer": False})
    monkeypatch.setattr(found, "Case", partial(found.Case, architecture=tiny))
    monkeypatch.setattr(found, "SECONDS", 0)
    monkeypatch.setattr(found, "DEVICE", "cpu")
    return found


def test_steps_of_the_host_add_up(profile, load, tmp_path, capsys):
    assert profile.main(["--out", str(tmp_path), "--texts", "32", "600", "--dtype", "float32", "--commit", "0123abc"]) == 0
    rows = load("rows").rows_of(tmp_path / "encoder_profile.csv")
    assert {(row.table, row.direction, row.dtype, row.commit) for row in rows} == {
        ("encoder_profile", "host", "float32", "0123abc")
    }
    assert all(row.gpu and row.torch and row.date for row in rows)
    by_problem = {}
    for row in rows:
        by_problem.setdefault(row.problem, {})[row.backend] = float(row.ms_p50)
    assert list(by_problem) == ["tiny encode from strings texts=32 float32", "tiny encode from strings texts=600 float32"]
    for steps in by_problem.values():
        inside = {name: x for name, x in steps.items() if name not in ("total", profile.BESIDE)}
        assert sum(inside.values()) == pytest.approx(steps["total"], rel=1e-2)  # numbers have four digits
        run = {step for _, name, step in profile.STEPS if name not in ("load", "replay", "synchronize", "cut")}
        assert run <= inside.keys()
        assert all(inside[step] > 0 for step in run)
    few, many = by_problem.values()
    assert profile.BESIDE not in few, "32 texts are one chunk, which the caller tokenises"
    assert profile.BESIDE in many
    last = capsys.readouterr().out.strip().splitlines()
    assert last[-1].startswith("| host | total | ")
    assert last[-1].count("(100.0 %)") == 2


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_the_device_runs_the_graphs_of_the_call_again(profile, monkeypatch):
    case = profile.Case(24, "float32")
    model, texts = case.model("cpu"), case.texts()
    install(monkeypatch)
    monkeypatch.setattr(attention, "attention_forward", packed_attention)
    with saccade.optimize(model, fuse=False) as handle:
        expected = torch.from_numpy(model.encode(texts, batch_size=8))
        assert "captured:" in handle.explain()
        before = Graph.replays
        replays = profile.replays_of(lambda: model.encode(texts, batch_size=8))
        number = Graph.replays - before
        assert number > 1
        model.encode(texts[:8], batch_size=8)  # leaves other numbers in the memory of a graph
        before = Graph.replays
        found = torch.cat(replays())
        assert Graph.replays - before == number
    torch.testing.assert_close(found[found[:, 0].argsort()], expected[expected[:, 0].argsort()])
    with pytest.raises(SystemExit, match="no graph was replayed"):
        profile.replays_of(lambda: None)


def test_a_step_inside_of_another_counts_once(profile, load, monkeypatch):
    passed = [0]
    monkeypatch.setattr(load("step_clock").time, "perf_counter_ns", lambda: passed[0])

    def takes(milliseconds):
        passed[0] += milliseconds * 10**6

    clock = profile.Clock()
    inner = clock.timed("inner", lambda: takes(20))

    def outer():
        inner()
        takes(10)

    def items():
        yield inner()
        yield outer()
        takes(3)

    clock.timed("outer", outer)()
    assert clock.take() == {"inner": 20, "outer": 10}
    for _ in clock.timed_generator("items", items)():
        takes(100)  # of the caller
    assert clock.take() == {"inner": 40, "items": 13}
    with closing(clock.timed_generator("items", items)()) as some:
        next(some)
    assert clock.take() == {"inner": 20, "items": 0}
    thread = threading.Thread(target=inner)
    thread.start()
    thread.join()
    assert clock.take() == {profile.BESIDE: 20}
    assert clock.take() == {}


def test_functions_are_their_own_again(profile):
    every = profile.STEPS + profile.GENERATORS
    before = [getattr(owner, name) for owner, name, _ in every]

    def fails():
        assert all(getattr(owner, name) is not x for (owner, name, _), x in zip(every, before, strict=True))
        raise KeyError

    watched = profile.Clock().watching(profile.STEPS, profile.GENERATORS)(fails)
    with pytest.raises(KeyError):
        watched()
    assert [getattr(owner, name) for owner, name, _ in every] == before


def test_kernels_by_their_kind(profile):
    found = profile.by_kind(
        {
            "triton_per_fused_native_layer_norm_3": 1.0,
            "triton_poi_fused_gelu_0": 2.0,
            "nvjet_tst_128x64": 4.0,
            "sm80_xmma_gemm_f32f32_tn_n_bias_f16_execute_kernel__5x_cublas": 8.0,
            "forward_tokens_kernel": 16.0,
            "void fmha_cutlassF_f32_aligned_64x64": 32.0,
            "Memcpy HtoD (Pinned -> Device)": 64.0,
            "void at::native::elementwise_kernel<direct_copy_kernel_cuda>": 128.0,
            "void at::native::segment_reduce_forward_kernel<float>": 256.0,
            "void at::native::fill": 512.0,
        }
    )
    assert {kind: x for kind, (x, _) in found.items()} == {
        "fused kernels of torch.compile": 3.0, "matrix products": 12.0, "attention": 48.0, "copies": 192.0, "pooling": 256.0, "other kernels": 512.0
    }  # fmt: skip
    assert found["fused kernels of torch.compile"][1] == "triton_poi_fused_gelu_0 triton_per_fused_native_layer_norm_3"


def test_our_kernels_are_attention(profile):
    """A kernel of another name would be among others without a word."""
    files = [x for wing in ("ragged", "long", "short") for x in (EXACT / wing).rglob("*") if x.suffix in (".py", ".cu")]
    text = "\n".join(path.read_text() for path in files)
    pairs = re.findall(r"__global__ [^(]*\([^)]*\)\s+(\w+)\(|^def (\w+_kernel)\(", text, re.MULTILINE)
    names = {first or second for first, second in pairs}
    assert {"forward_tokens_kernel", "bounds_kernel", "ragged_backward", "forward_sm90"} <= names
    assert {name: profile.kind_of_kernel(name) for name in names if profile.kind_of_kernel(name) != "attention"} == {}
