"""Records the launches of a call where they are made, so that C++ can replay them.

`Recorder` gets each launch from the code that makes it (`launch.triton`, `nvrtc.Bound`), and finds the tensor of each address. Launchers declare
what addresses and values cannot show: `scratch` memory, `varying` numbers and `lasting` tables. They `refuse` calls that do other work than
launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.native import cuda, triton
from saccade.native.described import ADDRESS, FIXED, Described, Number, Place, Planned
from saccade.recorder import ACTIVE

Piece = tuple[int, int]  # where memory begins and ends


def varying(values: tuple[int, ...], slots: Iterable[int]) -> tuple[int, ...]:
    """Numbers of a launch, of which a recorder notes which ones change from call to call: that of each slot, but those of FIXED. A value that
    is a `Number` already keeps its slot."""
    if ACTIVE.recorder is None:
        return values
    return tuple([x if isinstance(x, Number) else Number(x, slot) for x, slot in zip(values, slots, strict=False)])


def scratch(shape: Sequence[int], dtype: torch.dtype, device: torch.device, queries: int = 0) -> Tensor:
    """Memory that launches of a call share, and that is not read later. queries: the factor of its size that is the number of tokens of q; 0
    where its size is that of all calls."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if ACTIVE.recorder is not None:
        ACTIVE.recorder.note_scratch(made, queries)
    return made


def lasting(tensor: Tensor, offset: int = 0, slot: int = FIXED) -> Tensor:
    """A tensor that lives as long as the process. offset, slot: it begins so many bytes behind what stays in its place, and which number that is."""
    if ACTIVE.recorder is not None:
        ACTIVE.recorder.lasting.append((_piece(tensor), slot, offset))
    return tensor


def is_recorded() -> bool:
    """Whether a recorder notes the launches of this thread, and has refused none of them."""
    return ACTIVE.recorder is not None and not ACTIVE.recorder.refused


def refuse() -> None:
    """The call needs more than its launches, or launches that fit no other call of its kind."""
    if ACTIVE.recorder is not None:
        ACTIVE.recorder.refused = True


def restart() -> None:
    """A backend failed, and another one makes the call: only the launches from here on are the call's."""
    if ACTIVE.recorder is not None:
        ACTIVE.recorder.restart()


def shares(shape: Sequence[int], groups: int, device: torch.device) -> Tensor:
    """Scratch memory `[.., Tq, Tk]`, float32, for shares of the gradient of a bias, which are added after the launches (see `Planned`)."""
    made = scratch(shape, torch.float32, device)
    if ACTIVE.recorder is not None:
        ACTIVE.recorder.note_shares(groups, *shape[-2:])
    return made


class Recorder:
    """Records the launches of this thread, those of one call, until its context ends. Only the call itself holds the recorder, and its result holds no tensor.

    shares: see `Planned`.
    """

    def __init__(self) -> None:
        self.refused = False
        self.shares: tuple[int, ...] = ()
        self._outer: Any = None
        self.lasting: list[tuple[Piece, int, int]] = []
        # each launch with the number of pieces of scratch memory that there were
        self._launches: list[tuple[Described, int]] = []
        self._scratch: list[Tensor] = []
        self._rules: list[Place] = []  # bytes of each piece: (of all calls, for each token of q)
        # tensors of launches, kept alive: if one were freed during the call, another might get its address
        self._held: list[Sequence[Tensor]] = []

    def __enter__(self) -> Recorder:
        self._outer, ACTIVE.recorder = ACTIVE.recorder, self
        return self

    def __exit__(self, *_: object) -> None:
        ACTIVE.recorder = self._outer

    def triton(self, compiled: Any, grid: tuple[int, int, int], tensors: Sequence[Tensor], arguments: tuple, *rule: int) -> None:
        """A launch of a compiled Triton kernel. arguments: as the kernel takes them. rule: per_sequence and tile of `Described`."""
        self._held.append(tensors)
        if not self.refused:
            self._add(triton.describe(compiled, grid, arguments, *rule))

    def triton_any(
        self,
        compiled: Any,
        follows: tuple[int, int, int] | None,
        tensors: Sequence[Tensor],
        addresses: list[int],
        changing: tuple[int, ...],
        numbers: tuple,
    ) -> None:
        """The same with numbers that change from call to call (`launch_any`). follows: (programs, per_sequence, tile) of `Described`."""
        if follows is None or not all(isinstance(x, Number) for x in changing):
            self.refused = True  # other calls would be launched with the numbers of this one
            return
        programs, *rule = follows
        self.triton(compiled, (programs, 1, 1), tensors, (*addresses, *changing, *numbers), *rule)

    def cuda(
        self,
        bound: Any,
        pointers: Sequence[int],
        maps: Sequence[tuple],
        grid: int = 0,
        follows: tuple[int, int, int] | None = None,
    ) -> None:
        """A launch of a CUDA C++ kernel, with its arguments as `Bound` takes them. follows: as in `triton_any`."""
        if grid and follows is None:
            self.refused = True  # other calls would be launched with the blocks of this one
        if not self.refused:
            self._add(cuda.describe(bound, pointers, maps, follows))

    def cuda_by_name(self, launch: Any, arguments: Mapping[str, Any]) -> None:
        """A launch of a CUDA C++ kernel that is given all its arguments by name (`Launch`)."""
        if not self.refused:
            self._add(cuda.describe_by_name(launch, arguments))

    def _add(self, launch: Described | None) -> None:
        if launch is None:
            self.refused = True
        else:
            self._launches.append((launch, len(self._scratch)))

    def restart(self) -> None:
        """Forget the launches so far (see `restart`). Their scratch memory keeps its slots, which later pieces come after."""
        self._launches.clear()
        self.shares = ()

    def note_scratch(self, made: Tensor, queries: int) -> None:
        """Scratch memory of the call (see `scratch`)."""
        size = made.element_size() * math.prod(made.shape)
        self._scratch.append(made)
        self._rules.append((0, size // queries) if queries else (size, 0))

    def note_shares(self, groups: int, q_len: int, kv_len: int) -> None:
        """The newest scratch memory has the gradient of a bias in shares (see `shares`)."""
        self.shares = len(self._scratch) - 1, groups, q_len, kv_len

    def planned(self, tensors: Sequence[Tensor], given: int) -> Planned | None:
        """The launches, in terms of the slots of tensors; None if C++ cannot replay them.

        given: how many of the tensors there were before the call. C++ looks it up by which of them begin in one place. All others are results,
        and are refused if no launch has their address: torch wrote them.
        """
        if self.refused:
            return None
        memory = _Memory((*tensors, *self._scratch), given, self.lasting)
        try:
            found = [memory.placed(launch, len(tensors) + count) for launch, count in self._launches]
        except LookupError:
            return None
        written = [i for i in range(given, len(tensors)) if tensors[i].numel()]
        if self.shares:
            written.pop()  # the gradient of the bias, which C++ adds up
        if not found or not memory.reached.issuperset(written):
            return None
        fixed, each = zip(*self._rules, strict=True) if self._rules else ((), ())
        return Planned(found, fixed, each if any(each) else (), self.shares)


class _Memory:
    """The memory of a call, in which addresses have places.

    given, lasting: as in `Recorder`. reached: slots of the addresses so far.
    """

    def __init__(self, tensors: Sequence[Tensor], given: int, lasting: list[tuple[Piece, int, int]]):
        self._pieces, self._given, self._lasting = [_piece(x) for x in tensors], given, lasting
        self._starts: dict[int, list[int]] = {}
        for i, (start, end) in enumerate(self._pieces):
            if start < end:
                self._starts.setdefault(start, []).append(i)
        self.reached: set[int] = set()

    def placed(self, launch: Described, behind: int) -> Described:
        """The launch with the places of its addresses, which are known to lie in the first `behind` tensors.

        Raises:
            LookupError: an address lies in other memory, or could be that of two tensors.
        """
        moved = []
        for x in launch.moved:
            slot, offset = self._place(x.offset, behind)
            if slot < 0:
                raise LookupError(x.offset)  # C++ encodes a map of the address of a tensor
            moved.append(x._replace(slot=slot, offset=offset))
        slots, values = list(launch.slots), list(launch.values)
        for i, slot in enumerate(slots):
            if slot == ADDRESS:
                slots[i], values[i] = self._place(values[i], behind)
        self.reached.update(slots, [x.slot for x in moved])
        return launch._replace(slots=tuple(slots), values=tuple(values), moved=tuple(moved))

    def _place(self, address: int, behind: int) -> Place:
        if not address:
            return FIXED, 0
        exact = [i for i in self._starts.get(address, ()) if i < behind]
        # tensors in one memory are of another kind than tensors in two, as far as C++ looks the call up by them
        if len(exact) == 1 or (exact and exact[-1] < self._given):
            return exact[0], 0
        covering = [i for i, (start, end) in enumerate(self._pieces[:behind]) if start <= address < end]
        if covering and not exact:
            start, end = self._pieces[covering[0]]
            if sum(begin < end and start < stop for begin, stop in self._pieces) == 1:
                return covering[0], address - start
        elif not covering:
            for (start, end), slot, offset in self._lasting:
                if start <= address < end:
                    return slot, address - offset
        raise LookupError(address)


def _piece(tensor: Tensor) -> Piece:
    """The memory that a tensor spans."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum([(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)])
    return start, start + (last + 1) * tensor.element_size()
