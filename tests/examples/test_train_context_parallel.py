"""The example that trains over a sharded sequence, as it is run: by torchrun, two agents that meet over the loopback as two machines
would, a process each; its losses are those of one process."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
PATH = ROOT / "examples" / "train_context_parallel.py"
OPTIONS = ["--tokens", "512", "--keep", "16", "--steps", "3", "--width", "32", "--rate", "0.01"]


def started(*how: str) -> subprocess.Popen:
    """A torchrun of the example, without a GPU."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "SACCADE_NATIVE": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "src"), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "torch.distributed.run", *how, str(PATH), *OPTIONS]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def loaded():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("train_context_parallel", PATH)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def of_one_process(folder: Path) -> list[float]:
    """The losses of a group of one, in this process."""
    example = loaded()
    dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
    try:
        return example.train(example.arguments(OPTIONS), torch.device("cpu"))
    finally:
        dist.destroy_process_group()


@pytest.mark.unpoisoned  # FSDP fills what it allocates
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
def test_losses_of_two_agents_are_those_of_one_process(tmp_path):
    meet = ["--nnodes=2", "--nproc_per_node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    agents = [started(*meet, f"--node-rank={node}") for node in range(2)]
    try:
        alone = of_one_process(tmp_path)
        texts = [agent.communicate(timeout=120)[0] for agent in agents]
        assert all(agent.returncode == 0 for agent in agents), texts
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", "".join(texts))]
    assert len(re.findall(r"[\d,]+ tokens per second on 2 ranks", "".join(texts))) == 1
    assert len(losses) == len(alone) == 3
    assert alone[-1] < alone[0] - 0.2
    assert losses == pytest.approx(alone, abs=2e-3)


@pytest.mark.parametrize("tokens", [4096, 2**20])
def test_the_parts_of_ranks_follow_each_other(tokens):
    """Wherever a sequence begins, and where it is longer than the text."""
    example = loaded()
    text = example.corpus(2 * tokens)
    for start in (0, len(text[0]) - tokens - 5, len(text[0]) - tokens + 7, 12 * tokens):
        whole = example.stretch(text, start, tokens, 0, 1, torch.device("cpu"))
        parts = [example.stretch(text, start, tokens, rank, 4, torch.device("cpu")) for rank in range(4)]
        for x, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert x.shape == (1, tokens)
            assert torch.equal(x, torch.cat(pieces, 1))
        assert (whole.documents.diff() >= 0).all()
        assert torch.equal(whole.tokens[:, 1:], whole.targets[:, :-1])


def test_it_says_how_to_start_it(monkeypatch, capsys):
    example = loaded()
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert example.main([]) == 2
    assert "torchrun --nproc_per_node" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert example.main(["--context", "3"]) == 2
    assert "--context 3 must divide the number of processes, 4" in capsys.readouterr().err
