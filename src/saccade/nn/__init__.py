"""Thin modules around the operations: projections and the call."""

from saccade.nn.attention import AttentionPooling, SelfAttention
from saccade.nn.dynamic_mask import DynamicMaskAttention
from saccade.nn.encoder import Encoder, EncoderLayer
from saccade.nn.nystrom import NystromAttention
from saccade.nn.triangle import TriangleAttention

__all__ = [
    "AttentionPooling",
    "DynamicMaskAttention",
    "Encoder",
    "EncoderLayer",
    "NystromAttention",
    "SelfAttention",
    "TriangleAttention",
]
