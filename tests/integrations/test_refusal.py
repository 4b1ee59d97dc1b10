"""Models that do not run attention functions: refused when they are made, or run with the layers that they have for torch."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers

import saccade
from saccade.integrations import doge, refusal
from saccade.integrations import transformers as integration

VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
SAM = {**VISION, "output_channels": 16, "num_pos_feats": 8, "global_attn_indexes": [1], "window_size": 2, "mlp_dim": 48}
# model -> its tiny configuration; each looks its layers up in a table with "eager" and "sdpa"
WITH_A_TABLE = {
    "SamVisionModel": lambda: transformers.SamVisionConfig(**SAM),
    "SamModel": lambda: transformers.SamConfig(
        vision_config=SAM,
        prompt_encoder_config={"hidden_size": 16, "image_size": 16, "patch_size": 4, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 16, "mlp_dim": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "iou_head_hidden_dim": 16},
    ),
    "Data2VecVisionModel": lambda: transformers.Data2VecVisionConfig(**VISION, intermediate_size=48),
    "FalconModel": lambda: transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4),
}  # fmt: skip


@pytest.fixture(autouse=True)
def names():
    with integration.register(), integration.register_nm_sparse(), doge.register():
        yield


@pytest.fixture
def warned(caplog, monkeypatch):
    """The warnings so far of models that fall back."""
    monkeypatch.setattr(refusal, "_TOLD", set())
    caplog.set_level(logging.WARNING, "saccade")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "saccade"]


def made(name, implementation):
    torch.manual_seed(0)
    return getattr(transformers, name)._from_config(WITH_A_TABLE[name](), attn_implementation=implementation).eval()


def result(model):
    torch.manual_seed(1)
    image, words = torch.randn(2, 3, 16, 16), torch.randint(3, 64, (2, 9))
    padding = torch.ones_like(words)
    padding[0, 5:] = 0
    given = {"input_ids": words, "attention_mask": padding} if model.main_input_name == "input_ids" else {"pixel_values": image}
    if type(model).__name__ == "SamModel":
        given["input_points"] = torch.tensor([[[[3.0, 4.0]]], [[[8.0, 9.0]]]])
    with torch.no_grad():
        return model(**given)[0]


@pytest.mark.parametrize("name", WITH_A_TABLE)
def test_models_with_a_table_of_their_own_run_the_layers_for_torch(name, warned):
    ours, theirs = made(name, "saccade"), made(name, "sdpa")
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]
    assert {m.config._attn_implementation for m in ours.modules() if isinstance(m, transformers.PreTrainedModel)} == {"sdpa"}
    assert torch.equal(result(ours), result(theirs))
    (said,) = warned()
    assert said.startswith(f"{name} cannot run attn_implementation='saccade'")
    made(name, "saccade")
    assert len(warned()) == 1


@pytest.mark.parametrize("name", WITH_A_TABLE)
@pytest.mark.parametrize("implementation", ["saccade_nm", "saccade_dynamic_mask"])
def test_a_name_with_another_result_does_not_fall_back(name, implementation, warned):
    with pytest.raises(saccade.UnsupportedProblem, match=rf"{name} cannot run attn_implementation='{implementation}'"):
        made(name, implementation)
    assert not warned()


def test_a_forced_backend_does_not_fall_back(warned):
    with (
        integration.register("by_reference", backend="reference"),
        pytest.raises(saccade.UnsupportedProblem, match="SamModel cannot run attn_implementation='by_reference'"),
    ):
        made("SamModel", "by_reference")
    assert not warned()


def test_the_newest_registration_of_a_name_says_whether_it_falls_back(warned):
    with integration.register("shared"):
        with integration.register_nm_sparse("shared"), pytest.raises(saccade.UnsupportedProblem):
            made("FalconModel", "shared")
        assert made("FalconModel", "shared").config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="shared"):
        made("FalconModel", "shared")


def test_switching_a_model_falls_back_too(warned):
    model = made("SamModel", "sdpa")
    before = result(model)
    model.set_attn_implementation("saccade")
    assert torch.equal(result(model), before)
    assert len(warned()) == 1


def test_kosmos2_runs_our_function():
    text = {"vocab_size": 64, "embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4, "max_position_embeddings": 64}
    words, places = torch.randint(4, 64, (2, 9)), torch.zeros(2, 9, dtype=torch.long)
    places[:, 1:4] = 1
    padding, image, found = torch.ones_like(words), torch.randn(2, 3, 16, 16), []
    padding[0, 6:] = 0
    for implementation in ("saccade", "eager"):
        torch.manual_seed(0)
        config = transformers.Kosmos2Config(
            text_config=text, vision_config={**VISION, "intermediate_size": 48}, latent_query_num=3
        )
        model = transformers.Kosmos2Model._from_config(config, attn_implementation=implementation).eval()
        assert model.config._attn_implementation == implementation
        with torch.no_grad():
            given = {"pixel_values": image, "input_ids": words, "attention_mask": padding}
            found.append(model(**given, image_embeds_position_mask=places).last_hidden_state)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["MPNet", "RoFormer", "Bloom", "GPTJ", "GPTNeo", "Deberta", "XLM", "Splinter", "ClapText"])
@pytest.mark.parametrize("implementation", ["saccade", "saccade_nm", "saccade_dynamic_mask"])
def test_models_that_ignore_attention_functions_are_refused_under_every_name(name, implementation):
    model_class = getattr(transformers, f"{name}Model")
    with pytest.raises(
        saccade.UnsupportedProblem, match=rf"{name}Model cannot run attn_implementation='{implementation}': .*'eager'"
    ):
        model_class._from_config(model_class.config_class(), attn_implementation=implementation)
