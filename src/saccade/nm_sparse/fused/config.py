"""Launch configurations of the fused kernels on sparse tensor cores: tiles, warpgroups, and which of several equivalent selection
codes they compile."""

from __future__ import annotations

from dataclasses import dataclass

SELECT_OVERRIDE, SELECT_EARLY, SELECT_UNORDERED = range(2, 5)  # cuda/selection.cuh


class _Config:
    """A configuration of a kernel, whose fields are macros of its source."""

    def defines(self) -> dict[str, int | bool]:
        """The configuration as macros of the kernel."""
        return {name.upper(): value for name, value in vars(self).items()}


@dataclass(frozen=True)
class Sm90Config(_Config):
    """`fused_sm90.cu`. warpgroups: consumer warpgroups, of 64 queries each. block_kv: keys of a tile. stages: tiles of the ring,
    a power of two.

    query_steps: steps of 16 dims of S for which Q is a register operand instead of one in shared memory. persistent: one thread
    block per multiprocessor processes blocks of queries at a fixed stride; not with a block mask. overlap: select while the
    products P V of the same warpgroup run, which costs registers for a second operand. resident: thread blocks of one warpgroup that share a
    multiprocessor, only for a block mask. early: for so many heads the first block of queries, which a block mask may show all keys, comes before all
    others; not with is_causal.
    """

    warpgroups: int = 3
    block_kv: int = 96
    stages: int = 2
    query_steps: int = 0
    persistent: bool = False
    overlap: bool = False
    resident: int = 1
    early: int = 0
    selection: int = SELECT_OVERRIDE

    @property
    def block_q(self) -> int:
        """Queries per thread block."""
        return 64 * self.warpgroups

    def shared_bytes(self, head_dim: int, key_tiles: int = 0) -> int:
        """Bytes of dynamic shared memory: tiles, barriers and, for a block mask, a byte or (one warpgroup) a bit per key tile."""
        tiles = 2 * head_dim * (64 * self.warpgroups + 2 * self.stages * self.block_kv)
        barriers = 4 * self.stages + 2 * self.warpgroups + 1
        return 1024 + tiles + 8 * barriers + (4 * -(-key_tiles // 32) if self.warpgroups == 1 else key_tiles)


@dataclass(frozen=True)
class Sm80Config(_Config):
    """`fused_sm80.cu`. warps: warps of `tall` times 16 queries each. stages: tiles of K and V in shared memory (1 to 4). resident:
    thread blocks that should fit on a multiprocessor.

    With 3 or 4 stages warps wait for no barrier in each tile; not possible with a mask or in float32. query_steps: steps of 16
    dims for which Q stays in registers. parts: parts of 32 keys of a tile, one of which is selected between the products of
    others; needs 32 queries per warp and 3 or 4 stages. tf32: the inputs are float32.
    """

    warps: int = 4
    stages: int = 2
    resident: int = 1
    tall: int = 1
    query_steps: int = 0
    parts: int = 1
    block_kv: int = 64
    selection: int = SELECT_OVERRIDE
    tf32: bool = False

    def shared_bytes(self, head_dim: int) -> int:
        """Bytes of dynamic shared memory: tiles of K and V, Q (which float32 reads into registers), and a barrier."""
        if self.tf32:
            return 4 * self.stages * self.block_kv * (2 * (-(-head_dim // 32) * 32) + 12)
        barrier = 16 if self.stages > 2 else 0
        return (2 * self.stages * self.block_kv + 16 * self.tall * self.warps) * (2 * head_dim + 16) + barrier


@dataclass(frozen=True)
class DkvConfig(_Config):
    """`backward_dkv_sm90.cu`. stages: tiles of 64 queries in its ring, a power of two. own_registers: K and V are register
    operands. bias: bytes of a number of the bias, 0 without one."""

    stages: int = 4
    own_registers: bool = False
    bias: int = 0

    def shared_bytes(self, head_dim: int) -> int:
        """Bytes of dynamic shared memory: K and V of 128 keys; Q, dO, bits, lse and delta of the tiles, with a bias that and what
        corrects weights; barriers."""
        biased = 320 + 64 * (128 * self.bias + 16) if self.bias else 0
        return 1024 + 512 * head_dim + self.stages * (256 * head_dim + 1024 + 640 + biased) + 8 * (2 * self.stages + 1)


@dataclass(frozen=True)
class DqConfig(_Config):
    """`backward_dq_sm90.cu`. block_kv: keys of a tile, 64 or 128. stages: tiles of its ring, a power of two.

    turns: warpgroups issue the products of a tile in turn; not with a block mask. bias: bytes of a number of the bias, 0 without one.
    """

    block_kv: int = 128
    stages: int = 2
    turns: bool = False
    bias: int = 0

    def shared_bytes(self, head_dim: int) -> int:
        """Bytes of dynamic shared memory: Q and dO of 128 queries; K, V and bits of the tiles, with a bias that; barriers."""
        biased = 128 * (self.block_kv + 8) * self.bias
        return 1024 + 512 * head_dim + self.stages * (self.block_kv * (4 * head_dim + 16) + biased) + 8 * (2 * self.stages + 1)


def pick_backward(head_dim: int, blocks: bool = False, bias: int = 0) -> tuple[DkvConfig, DqConfig]:
    """Launch configurations of backward for a head dim of 64 or 128, measured on an H200 without a block mask
    (docs/notes/nm_sparse.md). With a block mask, tiles are its own, and a warpgroup passes those that only the other sees. With a bias of
    numbers of so many bytes, tiles fit shared memory with it."""
    wide = head_dim > 64
    if bias:
        return DkvConfig(2 if wide or bias == 4 else 4, not wide, bias), DqConfig(64, 2, wide and not blocks, bias)
    return DkvConfig(4, not wide), DqConfig(64, 4) if blocks else DqConfig(128, 2 if wide else 4, wide)


@dataclass(frozen=True)
class OnePassConfig(_Config):
    """`backward_one_pass_sm90.cu`. stages: tiles of dO in its ring, of 64 queries; one less than of Q. ordered: blocks of keys add
    to dQ in turn, so that its sums are the same every time."""

    stages: int = 2
    ordered: bool = True

    def shared_bytes(self, head_dim: int) -> int:
        """Bytes of dynamic shared memory: K and V of 128 keys; Q and dO of the tiles; dS of two tiles and dQ of one; bits, lse
        and delta with every Q; barriers and a number."""
        tiles = self.stages * 128 * head_dim + (self.stages + 1) * (128 * head_dim + 1024 + 640)
        return 1024 + 512 * head_dim + tiles + 2 * 16384 + 256 * head_dim + 8 * (2 * (2 * self.stages + 1) + 3) + 8


def pick_one_pass(head_dim: int, ordered: bool = True) -> OnePassConfig:
    """Launch configuration of the backward in one pass for a head dim of 64 or 128."""
    return OnePassConfig(2 if head_dim > 64 else 4, ordered)


# KiB of shared memory of a multiprocessor; a thread block has 1 less. CUDA C++ Programming Guide, table of compute capabilities
_SHARED_KIB = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100, 121: 100}


def pick_sm80(head_dim: int, arch: int, keep: int, is_causal: bool, features: bool = False, tf32: bool = False) -> Sm80Config:
    """The first configuration that fits the shared memory of the architecture; features: dropout or a mask. Measured on an H200
    (docs/notes/nm_sparse.md), so it is a prediction for the GPUs that have only this kernel."""
    whole = 1024 * _SHARED_KIB.get(arch, 100)
    return next(
        config
        for config in _sm80_shapes(head_dim, arch, keep, is_causal, features, tf32)
        if config.resident * (config.shared_bytes(head_dim) + 1024) <= whole
    )


def _sm80_shapes(head_dim: int, arch: int, keep: int, is_causal: bool, features: bool, tf32: bool) -> list[Sm80Config]:
    """The configurations in order of preference; the last one fits everywhere."""
    if tf32:
        return [Sm80Config(8, 2, tf32=True), Sm80Config(8, 1, tf32=True)]
    if head_dim > 128:
        return [Sm80Config(4, 2), Sm80Config(4, 1)]
    # with 32 queries per warp there are no registers left for them
    if features:
        return [Sm80Config(4, 2, 2), Sm80Config(8, 2), Sm80Config(8, 1)]
    # the same instruction up to sm_90; on later architectures unordered pairs may take longer, according to the assembler
    selection = SELECT_UNORDERED if keep == 2 and arch < 100 else SELECT_EARLY
    if head_dim > 64:
        return [
            Sm80Config(8, 3, tall=2, selection=selection),
            Sm80Config(8, 2, tall=2, selection=selection),
            Sm80Config(8, 1),
        ]
    wide, narrow = (
        [Sm80Config(warps, stages, 8 // warps, 2, head_dim // 16, 2, selection=selection) for stages in (4, 3)]
        for warps in (8, 4)
    )
    # small blocks of queries waste less at the causal edge
    return [*(narrow if is_causal else []), *wide, Sm80Config(8, 1)]


def padded_dim(head_dim: int) -> int:
    """The head dim for which a kernel is compiled: a multiple of 64, filled up with zeros."""
    return -(-head_dim // 64) * 64


def _own_tiles(dim: int, is_causal: bool, more: bool) -> Sm90Config:
    """With a block mask a thread block takes the 64 queries of one row of the mask. Tiles are few, so several thread blocks share a
    multiprocessor: starts and ends of some overlap with tiles of others. At D = 128 three with one place for V took 0.43 ms and two 0.39
    (BigBird's mask, n = 16,384, an H100). more: dropout or a mask of keys, which spill beside Q in registers, or if four thread blocks share."""
    early = 0 if is_causal else 48
    if more:
        return Sm90Config(1, 64, 2, resident=2, early=early)
    if dim == 64:
        return Sm90Config(1, 64, 2, resident=4, early=early)
    return Sm90Config(1, 64, 2, query_steps=8, resident=2, early=early)


def pick_sm90(
    head_dim: int, keep: int, q_len: int, is_causal: bool, blocks: bool, dropout: bool, keys: bool = False, queries: bool = False,
    bias: bool = False,
) -> Sm90Config:  # fmt: skip
    """Measured on an H200 at D = 64 and 128 (docs/notes/nm_sparse.md); for other head dims, a configuration that does not spill.
    It is the same whether or not a call stores its selection. A block mask needs tiles of its 64 keys (`_own_tiles`), and so does a mask of
    queries (`queries`), whose hidden tiles are one; its configurations, and those of a bias, do not spill, and were not measured."""
    dim = padded_dim(head_dim)
    if bias:
        return Sm90Config(2, 64, 4 if dim <= 128 else 2)
    if queries and dim <= 128:
        return Sm90Config(2 if dim > 64 or dropout else 3, 64, 4)
    if blocks and not queries and dim <= 128:
        return _own_tiles(dim, is_causal, dropout or keys)
    if blocks or queries:
        return Sm90Config(2, 64, 2)
    if dropout:
        return Sm90Config(2, 64, 2)
    # the tuned configurations spill with a key-padding mask
    if keys and dim <= 128:
        return Sm90Config(3, 96, 4) if dim == 64 else Sm90Config(2, 96, 2)
    # the variant that ptxas schedules in fewer clocks
    selection = SELECT_EARLY if keep == 1 or (dim == 128 and not is_causal) else SELECT_OVERRIDE
    # with short blocks of queries, the start and end of one overlap with another only if a thread block has several
    if dim == 64:
        return Sm90Config(3, 128, 4, persistent=not is_causal and q_len <= 2048, selection=selection)
    if dim == 128:
        persistent = not is_causal and q_len <= 4096
        # 2:4 has more work between products, and sparse products read shared memory while they run: Q in registers leaves room
        # for that
        if keep == 2 or (not is_causal and q_len < 2048):
            return Sm90Config(2, 128, 2, query_steps=8, overlap=True, persistent=persistent, selection=selection)
        return Sm90Config(persistent=persistent, selection=selection)
    return Sm90Config(2, 96 if dim == 192 else 64, 2)
