"""Passing states between the processes of a row: from the one before, to the one behind.

A mixer receives a state where its scan begins, and sends one where it ends. The gradient of a
received state goes back to the process that sent it.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ssmzoo.modeling.rollback import RollbackCache

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_NAME, _DIMS = 40, 8  # the longest name in bytes, the most dimensions


class CutRows(NamedTuple):
    """Which sequences of a piece of packed rows go on: from the piece before, in the one behind.

    Attributes:
        entering: For each sequence of this piece the row whose state it may begin with ``[S]``.
        fresh: Whether it begins anew instead ``[S]``.
        leaving: For each row the sequence of this piece that its end belongs to ``[B]``.
    """

    entering: Tensor
    fresh: Tensor
    leaving: Tensor


class StatePassing:
    """The states that the layers of one call receive and send.

    Args:
        group: The processes, in the order of the pieces; None: all of them.
        rows: Where sequences are packed, which of them cross the cuts; None: each row is one.
    """

    def __init__(self, group: dist.ProcessGroup | None, rows: CutRows | None) -> None:
        self._line = ProcessLine(group)
        self._rows = rows
        self._opened: dict[int, tuple[_Arriving, _Leaving]] = {}  # by layer

    def require_new(self) -> None:
        """Raise unless no call has passed states here.

        Raises:
            ValueError: One has.
        """
        if self._opened:
            raise ValueError(
                "cache has read its piece of the row already; take a new one for every "
                "call, of sequence_piece or sequence_cache"
            )

    def open_layer(self, index: int, device: torch.device) -> tuple[Any, Any]:
        """Return where a layer's states come from, and where they go to, by name.

        They are the same when it runs again.
        """
        if index not in self._opened:
            if self._opened:
                arriving, leaving = next(reversed(self._opened.values()))
                leaving.close()
                arriving.receive_all()
            route = self._line, self._rows, device
            self._opened[index] = _Arriving(*route), _Leaving(*route)
        return self._opened[index]

    def close(self, hidden_states: Tensor) -> Tensor:
        """Receive and send the remaining states; return ``hidden_states``, tied to their gradients.

        A process whose tokens have no loss must run a backward pass, too, for those before it.
        """
        pairs = [*self._opened.values()]
        pairs[-1][1].close()
        ends = [end for arriving, _ in pairs for end in arriving.drain()]
        ends += [end for _, leaving in pairs for end in leaving.ends]
        if not torch.is_grad_enabled():
            self._line.finish()  # no backward pass will wait for it
        return cast(Tensor, _Tied.apply(hidden_states, *ends)) if ends else hidden_states

    def final(self, index: int) -> dict[str, Tensor]:
        """Return a layer's final states by name, cut from the graph; of a layer unopened, none."""
        if index not in self._opened:
            return {}
        return {name: state.detach() for name, state in self._opened[index][1].items()}

    def broadcast_last(self, cache: RollbackCache) -> tuple[list[dict[str, Tensor]], int]:
        """Return, in every process, the states of the last one's cache, and the tokens of all."""
        line, states = self._line, cache.get_states()
        device = next(state.device for held in states for state in held.values())
        shapes: list[Any] = [[{n: s.to("meta") for n, s in held.items()} for held in states]]
        dist.broadcast_object_list(shapes, line.end, line.group)
        seen = [0] * line.count
        dist.all_gather_object(seen, cache.seen_tokens, line.group)
        if not line.last:
            states = [
                {n: torch.empty_like(s, device=device) for n, s in held.items()}
                for held in shapes[0]
            ]
        for held in states:
            for name, state in held.items():
                held[name] = state.contiguous()
                dist.broadcast(held[name], line.end, line.group)
        return states, sum(seen)


class ProcessLine:
    """This process's place among those of a row; sends to and receives from its neighbours."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        rank, count = dist.get_rank(group), dist.get_world_size(group)
        self.count, self.first, self.last = count, rank == 0, rank == count - 1
        self._before = None if self.first else self._number(rank - 1)
        self._behind = None if self.last else self._number(rank + 1)
        owner = cast("dist.ProcessGroup", dist.group.WORLD if group is None else group)
        self._in_flight = _in_flight.setdefault(owner, [])
        self.end = self._number(count - 1)

    def _number(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def send_on(self, tensor: Tensor) -> None:
        """Send to the process behind."""
        self._send(tensor, self._behind)

    def send_back(self, tensor: Tensor) -> None:
        """Send to the process before."""
        self._send(tensor, self._before)

    def receive(self, tensor: Tensor) -> Tensor:
        """Fill a tensor from the process before."""
        dist.recv(tensor, self._before, self.group)
        return tensor

    def receive_back(self, tensor: Tensor) -> Tensor:
        """Fill a tensor from the process behind."""
        dist.recv(tensor, self._behind, self.group)
        return tensor

    def finish(self) -> None:
        """Wait until all tensors that were sent in the group have arrived."""
        for work, _ in self._in_flight:
            work.wait()
        self._in_flight.clear()

    def _send(self, tensor: Tensor, to: int | None) -> None:
        tensor = tensor.detach().contiguous()
        sent = self._in_flight
        sent[:] = [(work, kept) for work, kept in sent if not work.is_completed()]
        sent.append((dist.isend(tensor, to, self.group), tensor))


# by group: tensors that are being sent; they must live until they arrive, also after the call
_in_flight: WeakKeyDictionary[dist.ProcessGroup, list[tuple[Any, Tensor]]] = WeakKeyDictionary()


class _Sent(torch.autograd.Function):
    """Send a state on; the gradient comes from the process behind."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, line: ProcessLine) -> Tensor:
        ctx.line, ctx.like = line, (state.shape, state.dtype, state.device)
        line.send_on(state)
        return state.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        shape, dtype, device = ctx.like
        return ctx.line.receive_back(torch.empty(shape, dtype=dtype, device=device)), None


class _Received(torch.autograd.Function):
    """Receive a state; the gradient goes to the process before."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, state: Tensor, line: ProcessLine) -> Tensor:
        ctx.line = line
        return line.receive(torch.empty_like(state))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.line.send_back(grads[0])
        return None, None, None


class _Tied(torch.autograd.Function):
    """Return a tensor; its backward pass also visits all states sent and received, used or not."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *ends: Tensor) -> Tensor:
        ctx.ends = len(ends)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], *[None] * ctx.ends


class _Kind(enum.IntEnum):
    END = 0  # of a layer's states
    PLAIN = 1
    LEARNED = 2  # a gradient comes back


_HEADER = 3 + _DIMS + _NAME // 8  # numbers: kind, dtype, dimensions, sizes, name


def _header(
    kind: _Kind, dtype: torch.dtype, name: str, shape: Sequence[int], device: torch.device
) -> Tensor:
    """Return the header of a state, by which the receiver allocates its tensor."""
    if dtype not in _DTYPES or len(shape) > _DIMS or len(name.encode()) > _NAME:
        raise ValueError(
            f"state {name!r} must have a name of at most {_NAME} bytes, at most {_DIMS} dimensions "
            f"and one of the dtypes {', '.join(map(str, _DTYPES))}, got {dtype}, {list(shape)}"
        )
    sizes = [*shape, *[0] * (_DIMS - len(shape))]
    letters = memoryview(name.encode().ljust(_NAME, b"\0")).cast("q").tolist()
    numbers = [kind, _DTYPES.index(dtype), len(shape), *sizes, *letters]
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _read_header(header: Tensor) -> tuple[_Kind, torch.dtype, str, list[int]]:
    kind, dtype, dims, *numbers = header.tolist()
    name = array("q", numbers[_DIMS:]).tobytes().rstrip(b"\0").decode()
    return _Kind(kind), _DTYPES[dtype], name, numbers[:dims]


class _Arriving(Mapping[str, Tensor]):
    """A layer's initial states by name, each received when it is asked for."""

    def __init__(self, line: ProcessLine, rows: CutRows | None, device: torch.device) -> None:
        self._line, self._rows, self._device = line, rows, device
        self._found: dict[str, Tensor] = {}
        self._ended = line.first

    def __getitem__(self, name: str) -> Tensor:
        while name not in self._found and not self._ended:
            self._receive()
        state = self._found[name]
        if self._rows is None:
            return state
        state = state.index_select(0, self._rows.entering)
        return state.index_fill(0, self._rows.fresh.nonzero().flatten(), 0)

    def __bool__(self) -> bool:
        return not self._line.first

    def __iter__(self) -> Iterator[str]:
        self.receive_all()
        return iter(self._found)

    def __len__(self) -> int:
        self.receive_all()
        return len(self._found)

    def drain(self) -> list[Tensor]:
        """Return all states that were received with a gradient, used by a mixer or not."""
        self.receive_all()
        return [state for state in self._found.values() if state.requires_grad]

    def receive_all(self) -> None:
        while not self._ended:
            self._receive()

    def _receive(self) -> None:
        device = self._device
        header = self._line.receive(torch.empty(_HEADER, dtype=torch.int64, device=device))
        kind, dtype, name, shape = _read_header(header)
        if kind is _Kind.END:
            self._ended = True
            return
        empty = torch.empty(shape, dtype=dtype, device=device)
        if kind is _Kind.LEARNED and torch.is_grad_enabled():
            anchor = torch.zeros((), device=device, requires_grad=True)
            state = cast(Tensor, _Received.apply(anchor, empty, self._line))
        else:
            state = self._line.receive(empty)
        self._found[name] = state


class _Leaving(MutableMapping[str, Tensor]):
    """A layer's final states by name, each sent as it is put in."""

    def __init__(self, line: ProcessLine, rows: CutRows | None, device: torch.device) -> None:
        self._line, self._rows, self._device = line, rows, device
        self._states: dict[str, Tensor] = {}
        self.ends: list[Tensor] = []  # where gradients of sent states come in
        self._closed = False

    def __setitem__(self, name: str, state: Tensor) -> None:
        again = name in self._states  # a checkpointed layer runs twice
        if self._rows is not None:
            state = state.index_select(0, self._rows.leaving)
        self._states[name] = state
        if again or self._line.last:
            return
        learned = state.requires_grad and torch.is_grad_enabled()
        kind = _Kind.LEARNED if learned else _Kind.PLAIN
        self._line.send_on(_header(kind, state.dtype, name, state.shape, state.device))
        if learned:
            self.ends.append(cast(Tensor, _Sent.apply(state, self._line)))
        else:
            self._line.send_on(state)

    def __getitem__(self, name: str) -> Tensor:
        return self._states[name]

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"the state {name!r} is sent, and cannot be taken back")

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def close(self) -> None:
        """Say that there are no more states of this layer."""
        if not (self._closed or self._line.last):
            self._line.send_on(_header(_Kind.END, torch.int64, "", (), self._device))
        self._closed = True
