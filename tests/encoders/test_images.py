"""Optimised towers of images on a CPU are stock and say so; sizes, arguments and reasons are decided on the host."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
import transformers
from images_made import IMAGES, JOINT, made_joint, made_tower, pixels, texts

import saccade
from saccade.encoders import images, training
from saccade.encoders.capacity import ROWS, rows_captured, rows_up_to


@pytest.mark.parametrize("name", IMAGES)
def test_on_a_cpu_a_tower_is_stock(name):
    ours, theirs = made_tower(name)
    handle = saccade.optimize(ours)
    for model in (ours, theirs):
        out = model(pixel_values=pixels(3))
        (out.last_hidden_state.square().mean() + out.pooler_output.square().mean()).backward()
    torch.testing.assert_close(ours(pixels(3)).last_hidden_state, theirs(pixels(3)).last_hidden_state)
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None)
        if x.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-6)
    assert handle.served[0].last == "stock: CUDA graphs need a GPU"
    assert "stock: CUDA graphs need a GPU" in handle.explain()


@pytest.mark.parametrize("name", JOINT)
def test_both_towers_of_a_joint_model(name):
    ours, theirs = made_joint(name)
    handle = saccade.optimize(ours)
    assert [one.tower.main for one in handle.served] == ["input_ids", "pixel_values"]
    ids, mask = texts(3)
    got, want = (m(input_ids=ids, attention_mask=mask, pixel_values=pixels(2)) for m in (ours, theirs))
    torch.testing.assert_close(got.logits_per_image, want.logits_per_image, rtol=1e-4, atol=1e-5)


def test_a_head_is_left_and_its_base_is_served():
    config = transformers.ViTConfig(**IMAGES["vit"][2])
    model = transformers.ViTForImageClassification(config)
    handle = saccade.optimize(model)
    assert [one.model for one in handle.served] == [model.vit]
    projected = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**IMAGES["clip"][2]))
    assert len(saccade.optimize(projected).served) == 1


class _Centred(transformers.ViTModel):
    """A tower whose own forward mixes the images of a batch."""

    def forward(self, pixel_values):
        found = super().forward(pixel_values)
        found.pooler_output = found.pooler_output - found.pooler_output.mean(0)
        return found


def test_a_class_with_a_forward_of_its_own_is_not_changed():
    with pytest.raises(saccade.InvalidArgument, match="_Centred has a forward of its own"):
        saccade.optimize(_Centred(transformers.ViTConfig(**IMAGES["vit"][2])))


def test_restore_and_copies():
    ours, theirs = made_tower("vit")
    keys, implementation, signature = set(ours.__dict__), ours.config._attn_implementation, inspect.signature(ours.forward)
    with saccade.optimize(ours) as handle:
        assert inspect.signature(ours.forward) == signature
        for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            with torch.no_grad():
                for x in other.parameters():
                    x.mul_(1.5)
                assert not torch.allclose(other(pixels(2))[0], ours(pixels(2))[0])
        with pytest.raises(saccade.InvalidArgument, match="optimised already"):
            saccade.optimize(ours)
    assert not handle.active
    assert set(ours.__dict__) == keys
    assert ours.config._attn_implementation == implementation
    torch.testing.assert_close(ours(pixels(2))[0], theirs(pixels(2))[0])


def test_sizes():
    found = rows_up_to(ROWS)
    assert found == [1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    for rows in range(1, ROWS + 1):
        size = rows_captured(rows)
        assert size in found
        assert size >= rows
        assert rows <= 16 or (size - rows) / size < 0.2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "it has no pixel_values"),
        ({"pixel_values": torch.zeros(3, 16, 16)}, "it has no pixel_values"),
        ({"pixel_values": torch.zeros(0, 3, 16, 16)}, "it has no pixel_values"),
        ({"pixel_values": torch.zeros(2, 3, 16, 16, dtype=torch.long)}, "it has no pixel_values"),
        ({"pixel_values": torch.zeros(2, 1, 16, 16)}, "have 1 channels and the model has 3"),
        ({"pixel_values": pixels(2), "interpolate_pos_encoding": True}, "interpolate_pos_encoding is given"),
        ({"pixel_values": pixels(2), "bool_masked_pos": torch.zeros(2, 4, dtype=torch.bool)}, "bool_masked_pos is given"),
        ({"pixel_values": pixels(2), "output_hidden_states": True}, "output_hidden_states is asked for"),
        ({"pixel_values": pixels(2).requires_grad_()}, "a gradient of pixel_values is wanted"),
        ({"pixel_values": torch.zeros(257, 3, 1, 1)}, "graphs end at 256 rows"),
        ({"pixel_values": pixels(2), "interpolate_pos_encoding": False, "return_dict": False, "output_attentions": None}, ""),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_captured(arguments, reason):
    one = saccade.optimize(made_tower("vit")[0]).served[0]
    found = one.refused_arguments(arguments)
    assert reason in found
    assert bool(reason) == bool(found)


def test_text_towers_take_a_mask_of_the_shape_of_the_ids():
    one = saccade.optimize(made_joint("clip")[0]).served[0]
    ids, mask = texts(2)
    assert not one.refused_arguments({"input_ids": ids, "attention_mask": mask, "position_ids": None})
    assert "attention_mask" in one.refused_arguments({"input_ids": ids, "attention_mask": mask[:, :4]})
    assert "inputs_embeds is given" in one.refused_arguments({"input_ids": ids, "inputs_embeds": mask})


def test_outputs_have_memory_of_their_own():
    one = saccade.optimize(made_tower("vit")[0]).served[0]
    memory = torch.randn(4, 2)
    for rows in (4, 3):
        (found,) = one.cut([memory], ["last_hidden_state"], {"pixel_values": pixels(rows)})
        assert torch.equal(found, memory[:rows])
        assert found.data_ptr() != memory.data_ptr()


def test_rows_behind_the_batch_hold_nothing_of_the_last_one():
    ids, mask = texts(4)
    batch = {"input_ids": ids, "attention_mask": mask}
    rows = images.Rows(4, images.form_of(batch), torch.device("cpu"))
    rows.load(batch)
    with torch.inference_mode():
        rows.load({name: x[:3] for name, x in batch.items()})
    assert torch.equal(rows.tensors["input_ids"][:3], ids[:3])
    assert (rows.tensors["input_ids"][3] == 0).all()
    assert (rows.tensors["attention_mask"][3] == 1).all()


def test_an_output_that_no_loss_reads_gives_no_gradient():
    shared, pooler, unread = (torch.ones(2, requires_grad=True) for _ in range(3))
    leaves = [shared, pooler, unread]
    doutputs, reached = training.all_reached(lambda: [shared * 2, shared * pooler, torch.ones(2)], leaves)
    assert [x.tolist() for x in doutputs] == [[0, 0]] * 3
    assert reached == [[True, False, False], [True, True, False], [False, False, False]]
    memory = [torch.full((2,), 7.0) for _ in doutputs]
    assert training.fill(memory, [torch.ones(2), None, None], reached) == [True, False, False]
    assert [x.tolist() for x in memory] == [[1, 1], [0, 0], [0, 0]]
    assert training.fill(memory, [None, torch.ones(2), None], reached) == [True, True, False]


def test_forms_are_few():
    one = saccade.optimize(made_tower("dinov2")[0]).served[0]
    known = [one._known(images.form_of({"pixel_values": pixels(1, side=side)})) for side in range(8, 32)]
    assert known == [True] * 16 + [False] * 8


def test_a_model_with_batch_normalisation_is_left():
    ours, _ = made_tower("vit")
    ours.layernorm = torch.nn.BatchNorm1d(5)
    with pytest.raises(saccade.InvalidArgument, match="batch normalisation"):
        saccade.optimize(ours)


@pytest.mark.parametrize("bad", [{}, {"images": 0}, {"images": [True]}, {"images": 257}])
def test_prepare_checks_the_number_of_images(bad):
    handle = saccade.optimize(made_tower("vit")[0])
    handle.prepare(images=4)
    with pytest.raises(saccade.InvalidArgument):
        handle.prepare(**bad)


def test_timm():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    ours = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=7).eval()
    theirs = copy.deepcopy(ours)
    with saccade.optimize(ours) as handle:
        torch.testing.assert_close(ours(pixels(2, side=32)), theirs(pixels(2, side=32)))
        assert handle.served[0].last == "stock: CUDA graphs need a GPU"
    assert "forward" not in ours.__dict__
