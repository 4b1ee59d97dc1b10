"""Chooses the configuration of a call: translates its sizes, features and device into the arguments of `config.pick`."""

from __future__ import annotations

from torch import Tensor

from saccade.exact.args import AttentionArgs, windows_of
from saccade.exact.short.config import Config, is_plain, pick, takes_sm90, tile_size
from saccade.exact.short.launch import takes_tma
from saccade.exact.short.sm90 import kernel_name
from saccade.hardware import arch_of, multiprocessors
from saccade.launch.aside import failure_of

# programs per multiprocessor in the configurations for a shared bias; those configurations are used if there is work for that
# many
_SHARED_BIAS_PROGRAMS = 4


def choose(direction: str, args: AttentionArgs, featured: bool = False, others: tuple[Tensor, ...] = ()) -> Config:
    """The configuration of a call.

    Args:
        direction: "fwd" or "bwd".
        featured: the call has a feature that `args` does not show, such as the gradient of a bias or of the log-sum-exp.
        others: further tensors, besides query, key and value, that the copy engine would have to address.
    """
    query, key = args.query, args.key
    problems, grouped = query.shape[0] * query.shape[1], query.shape[1] != key.shape[1]
    q_len, kv_len, head_dim = query.shape[2], key.shape[2], query.shape[3]
    masked = any(t is not None for t in (args.mask, args.bias, args.lengths, args.seed))
    rows, dim, size, arch = tile_size(max(q_len, kv_len)), tile_size(head_dim), query.element_size(), arch_of(query.device)
    sm90 = takes_sm90(arch, problems, q_len, kv_len, head_dim, size, grouped, masked, args.is_causal)
    sm90 = sm90 and takes_tma(query, key, args.value, *others)
    kind = "pool_" + direction if q_len == 1 else direction
    plain = is_plain(problems, grouped, featured or args.is_causal or masked)
    shared_bias = args.bias is not None and not grouped and shared_bias_programs(args, _SHARED_BIAS_PROGRAMS) > 0
    unsplit = args.mask is not None or (args.bias is not None and is_row(args.bias))
    own_bias = args.bias is not None and not unsplit and args.bias.dim() == 4 and args.bias.shape[0] == query.shape[0] > 1
    chosen = pick(kind, rows, dim, size, arch, plain, sm90, shared_bias, unsplit, own_bias)
    if chosen.sm90 and failure_of(kernel_name(chosen.sm90)):
        chosen = pick(kind, rows, dim, size, arch, plain, False, shared_bias, unsplit, own_bias)
    return chosen


def is_row(tensor: Tensor) -> bool:
    """Whether all queries share a row of a mask or bias."""
    return tensor.dim() < 2 or tensor.shape[-2] == 1 or tensor.stride(-2) == 0


def shared_bias_programs(args: AttentionArgs, programs_per_sm: int) -> int:
    """The number of persistent programs that each compute a single head, for a bias that the batch shares, or a single head of a
    window, for a bias that the images share; 0 without such a bias."""
    bias, query = args.bias, args.query
    batch, heads = query.shape[:2]
    windows = windows_of(bias, batch)
    if bias is None or (bias.dim() == 4 and bias.shape[0] > 1 and bias.stride(0) != 0 and not windows):
        return 0
    groups, sharing = (heads * windows, batch // windows) if windows else (heads, batch)
    chunks = programs_per_sm * multiprocessors(query.device) // groups
    if windows and programs_per_sm:  # heads of windows beyond the programs that fit at once read their bias once all the same
        chunks = max(chunks, 1)
    return groups * chunks if 0 < chunks < sharing else 0
