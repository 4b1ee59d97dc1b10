"""Methods that lie on a module in the place of those of its class: what copies, pickles and replicas get, and what is left behind."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from encoders_made import made, padded
from torch import nn

import saccade
from saccade.encoders import own
from saccade.encoders.own import Own


class Doubled(Own):
    """The forward of a module, doubled."""

    def __call__(self, x):
        return 2 * self.stock(x)


def layer():
    made = nn.Linear(3, 3)
    Doubled(made).put()
    return made


def test_it_takes_the_place_of_the_method_and_leaves_nothing_behind():
    before = set(vars(nn.Linear(3, 3)))
    made, x = layer(), torch.randn(2, 3)
    torch.testing.assert_close(made(x), 2 * nn.functional.linear(x, made.weight, made.bias))
    assert own.remove(made)
    torch.testing.assert_close(made(x), nn.functional.linear(x, made.weight, made.bias))
    assert set(vars(made)) == before
    assert not own.remove(made)


def test_the_method_of_somebody_else_stays():
    made = nn.Linear(3, 3)
    made.forward = lambda x: x
    assert not own.remove(made)
    assert made.forward(1) == 1


def test_replicas_stay_for_the_methods_that_are_left():
    made = nn.Linear(3, 3)
    Doubled(made).put()
    Doubled(made, "extra_repr").put()
    assert own.remove(made)
    assert not any(isinstance(x, Own) for x in vars(made._replicate_for_data_parallel()).values())
    assert isinstance(vars(made)["extra_repr"], Own)


def replica_of(module):
    """As `nn.DataParallel` makes them: modules without parameters, which get tensors."""
    replica = module._replicate_for_data_parallel()
    for name, x in module._parameters.items():
        setattr(replica, name, None if x is None else x.detach().clone())
    for name, part in module._modules.items():
        setattr(replica, name, replica_of(part))
    return replica


@pytest.mark.parametrize("another", [copy.deepcopy, replica_of])
def test_another_module_runs_its_own_weights(another):
    original, x = layer(), torch.randn(2, 3)
    other = another(original)
    other.weight.data.zero_()
    other.bias.data.fill_(1)
    torch.testing.assert_close(other(x), torch.ones(2, 3))
    assert not torch.equal(original(x), other(x))


def test_replicas_of_an_optimised_encoder_run_as_stock():
    """`nn.DataParallel` copied our forward with the model, and each GPU called the encoder of the first."""
    ours, theirs = (x.eval() for x in made("bert"))
    handle = saccade.optimize(ours)
    ids, mask = padded((5, 9, 3))
    replica = replica_of(ours)
    last = replica.encoder.layer[-1].output.LayerNorm
    last.weight.zero_()
    last.bias.zero_()
    with torch.no_grad():
        assert replica(input_ids=ids, attention_mask=mask)[0].abs().max() == 0
        wanted = theirs(input_ids=ids, attention_mask=mask)[0]
        torch.testing.assert_close(
            ours(input_ids=ids, attention_mask=mask)[0][mask.bool()], wanted[mask.bool()], rtol=1e-4, atol=1e-4
        )
    assert isinstance(pickle.loads(pickle.dumps(ours)), type(ours))
    handle.restore()
    assert not any(isinstance(x, Own) for x in vars(ours).values())
