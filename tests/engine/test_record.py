"""The parts that are derived from the record of an operation: the schemas of its ops, which exported programs hold, and what a record must be."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor

import saccade  # noqa: F401 (it registers the ops)
from saccade.engine.record import BACKWARD_TOO, Differentiable, DifferentiableOrNone, Fields, Same, Size

SCHEMAS = """
saccade::attention_backward(Tensor dout, Tensor? dlse, Tensor? out, Tensor lse, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? lengths, Tensor? seed, float dropout_p, bool is_causal, float scale, bool bias_grad, str backend, int window_left=-1, int window_right=-1) -> (Tensor, Tensor, Tensor, Tensor)
saccade::attention_forward(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? lengths, Tensor? seed, float dropout_p, bool is_causal, float scale, str backend, int window_left=-1, int window_right=-1) -> (Tensor, Tensor)
saccade::attention_packed_backward(Tensor dout, Tensor? dlse, Tensor? out, Tensor lse, Tensor qkv, Tensor? mask, Tensor? bias, Tensor? lengths, Tensor? seed, float dropout_p, bool is_causal, float scale, bool bias_grad, str backend, int window_left=-1, int window_right=-1) -> (Tensor, Tensor)
saccade::attention_varlen_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? bias, Tensor? seed, SymInt max_q, SymInt max_k, float dropout_p, int causal, float scale, bool bias_grad, str backend, int window_left=-1, int window_right=-1) -> (Tensor, Tensor, Tensor, Tensor)
saccade::attention_varlen_forward(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? bias, Tensor? seed, SymInt max_q, SymInt max_k, float dropout_p, int causal, float scale, str backend, int window_left=-1, int window_right=-1) -> (Tensor, Tensor)
saccade::attention_varlen_packed_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor qkv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? bias, Tensor? seed, SymInt max_q, SymInt max_k, float dropout_p, int causal, float scale, bool bias_grad, str backend, int window_left=-1, int window_right=-1) -> (Tensor, Tensor)
saccade::dynamic_mask_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor query, Tensor key, Tensor value, Tensor? key_scores, Tensor start, Tensor stop, SymInt keep, bool is_causal, float scale, str backend) -> (Tensor, Tensor, Tensor, Tensor)
saccade::dynamic_mask_forward(Tensor query, Tensor key, Tensor value, Tensor? key_scores, Tensor start, Tensor stop, SymInt keep, bool is_causal, float scale, str backend) -> (Tensor, Tensor)
saccade::dynamic_mask_intervals(Tensor key_scores, SymInt keep, SymInt q_len, bool is_causal, Tensor? lengths, Tensor? document_ids, SymInt sinks=0, SymInt window=0) -> (Tensor, Tensor)
saccade::dynamic_mask_kept(Tensor key_scores, int keep, int q_len, bool is_causal, Tensor? lengths, Tensor? document_ids, int sinks=0, int window=0) -> Tensor
saccade::dynamic_mask_scores_backward(Tensor dscores, Tensor derivatives, Tensor values, Tensor weight, str backend) -> (Tensor, Tensor, Tensor, Tensor)
saccade::dynamic_mask_scores_forward(Tensor values, Tensor weight, Tensor A, Tensor? bias, str form, bool save, str backend) -> (Tensor, Tensor)
saccade::joined_linear(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor
saccade::joined_matmul(Tensor x, Tensor[] weights) -> Tensor
saccade::lse_backward(Tensor? dout, Tensor? dlse, Tensor query, Tensor key, Tensor value, Tensor? added, Tensor lse, bool is_causal, float scale, bool added_grad) -> (Tensor, Tensor, Tensor, Tensor)
saccade::nm_sparse_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor kept, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? block_mask, Tensor? seed, int pattern_n, int pattern_m, float dropout_p, bool is_causal, float scale, bool bias_grad, str backend, int dense_first=0, int dense_recent=0) -> (Tensor, Tensor, Tensor, Tensor)
saccade::nm_sparse_forward(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, Tensor? block_mask, Tensor? seed, int pattern_n, int pattern_m, float dropout_p, bool is_causal, float scale, bool stores, str backend, int dense_first=0, int dense_recent=0) -> (Tensor, Tensor, Tensor)
"""  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS.strip().splitlines(), ids=lambda schema: schema.partition("(")[0])
def test_schemas_stay_as_programs_were_exported_with_them(schema):
    assert str(torch._C._get_schema(schema.partition("(")[0], "")) == schema


def test_every_op_is_listed():
    ours = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("saccade::") and "." not in name}
    assert ours == {schema.partition("(")[0] for schema in SCHEMAS.strip().splitlines()}


class Args(NamedTuple):
    query: Differentiable
    key: Differentiable
    value: Differentiable
    rows: Tensor
    columns: Annotated[Tensor, Same("rows")]
    bias: DifferentiableOrNone
    most: Size
    scale: float
    extra: int = 0
    memory: Annotated[dict | None, BACKWARD_TOO] = None


def test_fields():
    fields = Fields(Args)
    tensors = "Tensor rows, Tensor columns, Tensor? bias, SymInt most, float scale"
    assert fields.schema() == f"Tensor query, Tensor key, Tensor value, {tensors}"
    assert fields.schema(packed=True) == f"Tensor qkv, {tensors}"
    assert fields.defaults() == ["int extra=0"]
    assert (fields.tensors, fields.plain, fields.count, fields.whole) == (6, 8, 9, 10)
    assert fields.names[fields.extra] == "bias"
    assert fields.same == [(4, 3)]


class NumberFirst(NamedTuple):
    query: Differentiable
    key: Differentiable
    value: Differentiable
    scale: float
    bias: DifferentiableOrNone


class WithoutKey(NamedTuple):
    query: Differentiable
    value: Differentiable
    other: Differentiable
    bias: DifferentiableOrNone


@pytest.mark.parametrize("record", [NumberFirst, WithoutKey])
def test_a_record_in_another_order_is_refused(record):
    with pytest.raises(AssertionError):
        Fields(record)
