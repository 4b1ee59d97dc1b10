"""Outputs that are built without their constructor are what it builds."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import OrderedDict

import pytest
import torch
from transformers import modeling_outputs

from saccade.encoders.plans import builder, signature

KINDS = [
    (modeling_outputs.BaseModelOutput, ["last_hidden_state"]),
    (modeling_outputs.BaseModelOutputWithPooling, ["last_hidden_state", "pooler_output"]),
    (modeling_outputs.SequenceClassifierOutput, ["logits"]),
]


@pytest.mark.parametrize(("kind", "names"), KINDS, ids=lambda x: getattr(x, "__name__", ""))
def test_an_output_of_transformers(kind, names):
    tensors = [torch.ones(2) * i for i in range(len(names))]
    got, want = builder(kind, names)(tensors), kind(**dict(zip(names, tensors, strict=True)))
    for found in (got, copy.copy(got), pickle.loads(pickle.dumps(got))):
        assert type(found) is kind
        assert list(found) == list(want) == names
        assert vars(found).keys() == vars(want).keys()
        for name in vars(want):
            torch.testing.assert_close(getattr(found, name), getattr(want, name))
        for x, y in zip(found.to_tuple(), tensors, strict=True):
            torch.testing.assert_close(x, y)
    assert got[names[0]] is got[0] is tensors[0]
    got[names[0]] = torch.zeros(1)
    assert getattr(got, names[0]) is got[0]


@dataclasses.dataclass
class Own(OrderedDict):
    """An output whose constructor does more."""

    first: torch.Tensor = None

    def __post_init__(self):
        self["first"], self.doubled = self.first, 2 * self.first


def test_an_output_of_another_kind_is_built_by_its_constructor():
    found = builder(Own, ["first"])([torch.ones(2)])
    assert found.doubled.sum() == 4
    assert builder(dict, ["a", "b"])([torch.ones(1), torch.zeros(1)]).keys() == {"a", "b"}


def test_signatures():
    x = torch.ones(2, 3)
    first = signature({"x": x, "flag": None}, "ignored")
    assert first == signature({"x": 2 * x, "flag": None, "ignored": 3}, "ignored")
    others = [{"x": x[:1]}, {"x": x.double()}, {"x": x.clone().requires_grad_()}, {"x": x, "flag": True}, {"y": x}]
    assert len({first, *[signature({"flag": None, **other}, "ignored") for other in others]}) == 6
    assert signature({"x": x, "flag": 0}, "ignored") is None  # 0 is no False, and equals it
    with torch.no_grad():
        assert signature({"x": x, "flag": None}, "ignored") != first
