"""The parts of an operation with a packed form that torch sees: its ops and its autograd.Functions, derived from the record of its arguments.

There is one opaque op for each direction. `Library.define` with a plain `autograd.Function` around it costs about a third of
`custom_op` with `register_autograd` per call: 10.9 against 31.9 us on one slow CPU core. The difference is visible on short sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.engine import op_replay
from saccade.engine.alternatives import Alternatives
from saccade.engine.backend import Backend, Launchers
from saccade.engine.by_torch import reference_launchers
from saccade.engine.calls import recordable, uncast
from saccade.engine.first_order import applied, refuse_if_differentiated_forward
from saccade.engine.flops import by_pairs
from saccade.engine.gradient import function
from saccade.engine.layout import Rows
from saccade.engine.namespace import fragment
from saccade.engine.op_replay import OpReplay
from saccade.engine.prepare import Prepared
from saccade.engine.record import Fields
from saccade.engine.tracing import eager, register
from saccade.native.recording import Recorder

_BEFORE = ("dout", "dlse", "out", "lse")  # what ops of backward take first


class Ops:
    """The ops of one operation, the launchers behind them, and the Functions around them (`separate`, and `packed` for one tensor of all three).

    Args:
        name: of the operation. functions: names of the Functions in profiles.
        record: its arguments. rows: how its tensors lie.
        attend: its meaning in plain torch, `args -> (out, lse)`.
        pairs: `args -> ` pairs of a query and a key, for FLOPs.
        shapes: `args -> (query, key)` whose shapes and dtype a failure is remembered by.
        replays: how C++ replays forward and backward.
        needs_out: whether backward always gets the output.
    """

    def __init__(
        self,
        name: str,
        functions: tuple[str, str],
        record: type,
        backends: tuple[Backend, ...],
        rows: Rows,
        *,
        attend: Callable[[Any], tuple[Tensor, Tensor]],
        pairs: Callable[[Any], int],
        shapes: Callable[[Any], tuple[Any, Any]],
        replays: tuple[OpReplay, OpReplay],
        needs_out: bool,
    ):
        self.name, self.rows, self.shapes = name, rows, shapes
        self.fields = fields = Fields(record)
        self.record, self.tensors, self.count, self.plain = fields.record, fields.tensors, fields.count, fields.plain
        self.replay_forward, self.replay_backward = replays
        self.by_name = {backend.name: backend for backend in backends}
        reference = reference_launchers(attend, rows)
        self.launchers = Alternatives(name, backends, ("reference",), reference, self._join).launchers
        self._define(pairs, "Tensor out" if needs_out else "Tensor? out")
        self.separate = function(functions[0], fields, 2, self._apply, self._apply_backward)
        self.packed = function(functions[1], fields, 2, self._apply, self._apply_packed_backward, rows.unpack)

    def _define(self, pairs: Callable[[Any], int], out: str) -> None:
        self._library, fields, unpack = fragment(), self.fields, self.rows.unpack
        # after the op's own arguments, so that programs exported without them still run
        last = ", ".join(["str backend", *fields.defaults()])
        before, after = f"Tensor dout, Tensor? dlse, {out}, Tensor lse", f"bool bias_grad, {last}"
        define = self._library.define
        define(f"{self.name}_forward({fields.schema()}, {last}) -> (Tensor, Tensor)")
        define(f"{self.name}_backward({before}, {fields.schema()}, {after}) -> (Tensor, Tensor, Tensor, Tensor)")
        define(f"{self.name}_packed_backward({before}, {fields.schema(packed=True)}, {after}) -> (Tensor, Tensor)")
        self.forward_op = self._register("forward", self._forward, self._fake_forward, by_pairs(fields, pairs))
        self.backward_op = self._register("backward", self._backward, self._fake_backward, by_pairs(fields, pairs, 4))
        self.packed_backward_op = self._register(
            "packed_backward", self._packed_backward, self._fake_packed_backward, by_pairs(fields, pairs, 4, unpack)
        )

    def _register(self, direction: str, run: Any, fake: Any, flops: Any) -> Any:
        return register(self._library, f"{self.name}_{direction}", run, fake, flops)

    def _join(self, alternatives: Alternatives, chain: tuple[str, ...]) -> Launchers:
        def forward(args: Any) -> Any:
            return alternatives.attempt(chain, *self.shapes(args), lambda found: found.forward(args))

        def backward(args: Any, *given: Any, **options: Any) -> Any:
            return alternatives.attempt(chain, *self.shapes(args), lambda found: found.backward(args, *given, **options))

        return Launchers(forward, backward)

    # --- the calls of the public function

    def run(self, prepared: Prepared, args: Any, qkv: Tensor | None, recorder: Recorder | None) -> tuple[Tensor, Tensor | None]:
        """(out, lse) of a prepared call, whose query, key and value may be views of `qkv`. recorder: gets the launches."""
        if recorder is not None:
            with recorder:
                return self.run(prepared, args, qkv, None)
        problem, chosen = prepared.problem, prepared.backend
        if chosen.attend is not None:
            if problem.needs_grad and not torch.compiler.is_compiling():
                args = self.record(*map(recordable, args[: self.tensors]), *args[self.tensors :])
            try:
                with uncast(args.query):
                    return chosen.attend(args, problem)
            except NotImplementedError as error:
                refuse_if_differentiated_forward(error, problem, chosen.name)
                raise
        if not problem.needs_grad:
            return self.forward(args, prepared.op_name)
        given = args[: self.fields.whole]
        for i, j in self.fields.same:
            if given[i] is given[j]:  # one tensor is saved once
                given = (*given[:i], None, *given[i + 1 :])
        function, rows = (self.separate, given[:3]) if qkv is None else (self.packed, (qkv,))
        return applied(function, problem, chosen.name, *rows, *given[3:], prepared.op_name, chosen.saves_output)

    def forward(self, args: Any, backend: str) -> tuple[Tensor, Tensor]:
        """(out, lse) of a backend with its own kernels; called through the op if the call is traced or otherwise observed."""
        if eager(*args[: self.tensors]):
            return self.launchers(backend).forward(args)
        return self.forward_op(*args[: self.plain], backend, *args[self.plain : self.count])

    def backward(
        self, args: Any, dout: Tensor, dlse: Tensor | None, out: Tensor | None, lse: Tensor, bias_grad: bool, backend: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(dq, dk, dv, dbias); dbias is only valid if `bias_grad` is set."""
        if eager(dout, dlse, *args[: self.tensors]):
            return self.launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=None)
        last = args[self.plain : self.count]
        return self.backward_op(dout, dlse, out, lse, *args[: self.plain], bias_grad, backend, *last)

    def packed_backward(
        self,
        qkv: Tensor,
        args: Any,
        dout: Tensor,
        dlse: Tensor | None,
        out: Tensor | None,
        lse: Tensor,
        bias_grad: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor | None]:
        """(dqkv, dbias); dbias is only valid if `bias_grad` is set."""
        if eager(dout, dlse, qkv, *args[3 : self.tensors]):
            dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
            *_, dbias = self.launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=dqkv)
            return dqkv, dbias
        last = args[self.plain : self.count]
        return self.packed_backward_op(dout, dlse, out, lse, qkv, *args[3 : self.plain], bias_grad, backend, *last)

    # --- what the Functions call

    def _apply(self, args, options) -> tuple[tuple, tuple]:
        backend, saves_output = options
        out, lse = results = self.forward(args, backend)
        return results, (out if saves_output else None, lse)

    def _apply_backward(self, args, rows, dout, dlse, kept, wanted, options) -> tuple[tuple, Tensor | None]:
        dq, dk, dv, dbias = self.backward(args, dout, dlse, kept[0], kept[1], wanted, options[0])
        return (dq, dk, dv), dbias

    def _apply_packed_backward(self, args, rows, dout, dlse, kept, wanted, options) -> tuple[tuple, Tensor | None]:
        dqkv, dbias = self.packed_backward(rows[0], args, dout, dlse, kept[0], kept[1], wanted, options[0])
        return (dqkv,), dbias

    # --- implementations of the ops, and their fakes

    def _forward(self, *given):
        # C++ replays no call with a window: what has defaults is there only where it differs from them
        call = self.replay_forward.call(given) if len(given) == self.plain + 1 else None
        found = op_replay.replayed(call)
        if found is not None:
            return found
        arguments, (backend,) = self._apart(given, 1)
        args = self.record(*arguments)
        return self._made(self.replay_forward, call, backend, args, lambda: self.launchers(backend).forward(args))

    def _backward(self, *given):
        call = self.replay_backward.call(given) if len(given) == self.plain + 6 else None
        found = op_replay.replayed(call)
        if found is not None:
            return found
        dout, dlse, out, lse = given[:4]
        arguments, (bias_grad, backend) = self._apart(given[4:], 2)
        args = self.record(*arguments)

        def make() -> tuple[Tensor, ...]:
            dq, dk, dv, dbias = self.launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=None)
            return dq, dk, dv, lse.new_empty(0) if dbias is None else dbias

        return self._made(self.replay_backward, None if bias_grad or dlse is not None else call, backend, args, make)

    def _packed_backward(self, dout, dlse, out, lse, qkv, *call):
        arguments, (bias_grad, backend) = self._apart((*self.rows.unpack(qkv), *call), 2)
        args = self.record(*arguments)
        dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        *_, dbias = self.launchers(backend).backward(args, dout, dlse, out, lse, bias_grad=bias_grad, packed=dqkv)
        return dqkv, lse.new_empty(0) if dbias is None else dbias

    def _apart(self, given: tuple, own: int) -> tuple[tuple, tuple]:
        """The fields of a record among the arguments of an op, and the op's own arguments, which come before the fields with defaults."""
        behind = self.plain + own
        return (*given[: self.plain], *given[behind:]), given[self.plain : behind]

    def _made(self, replay: OpReplay, call: Any, backend: str, args: Any, make: Callable[[], Any]) -> Any:
        """The results of an op that Python computes; call: as C++ looks it up, None if it does not."""
        chosen = self.by_name.get(backend.rpartition(":")[2])
        if call is None or chosen is None or not chosen.replays or not op_replay.may_record(call, args.query):
            return make()
        limits = None if chosen.limits is None else functools.partial(chosen.limits, args)
        return op_replay.recorded(replay.layouts, call, make, limits)

    def _fake_forward(self, *given):
        args = self.record(*self._apart(given, 1)[0])
        lse = args.query.new_empty(self.rows.lse(args.query), dtype=torch.float32)
        return self.rows.like(args.query, args.value.shape[-1]), lse

    def _fake_backward(self, dout, dlse, out, lse, *call):
        arguments, (bias_grad, _) = self._apart(call, 2)
        args = self.record(*arguments)
        return *(self.rows.like(x) for x in args[:3]), _fake_dbias(lse, args.bias, bias_grad)

    def _fake_packed_backward(self, dout, dlse, out, lse, qkv, *call):
        bias, bias_grad = call[self.fields.extra - 3], call[self.plain - 3]
        return torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device), _fake_dbias(lse, bias, bias_grad)


def _fake_dbias(lse: Tensor, bias: Tensor | None, bias_grad: bool) -> Tensor:
    return torch.empty(bias.shape, dtype=bias.dtype, device=bias.device) if bias is not None and bias_grad else lse.new_empty(0)
