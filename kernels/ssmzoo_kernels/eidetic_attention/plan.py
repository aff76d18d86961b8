"""What reads what: a call cut into works of some thousands of queries with their streams of keys.

The sequences' chunks are cut into blocks of queries. A block that begins at position p reads keys
from p - window + 1 on, so that its mask is a band, the same for all: its query r sees the keys
``r <= c < r + reach``. Keys before a sequence's first token are cut off, and blocks that lose
equally many go together. Blocks of sequences of equal length lie a fixed distance apart; those of
packed or ragged ones are gathered.

Dimensions: N blocks at once, M queries of each, K keys of each.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ssmzoo_kernels.declaration import accumulator
from ssmzoo_kernels.eidetic_attention.arguments import Call, Tensors
from ssmzoo_kernels.eidetic_attention.chunks import Chunks, chunk_table
from ssmzoo_kernels.eidetic_attention.rows import Gathered, Rows, Strided, runs

QUERIES = 4096  # at a time: what is gathered for them fits a cache
JOINED = 512  # rows up to which copying them side by side costs less than merging results
SHORT = 16  # the most tokens of a sequence in a call that is decoding


class Mask(NamedTuple):
    """Which keys are hidden from which queries."""

    bias: Tensor  # 0 or minus infinity; [M, K] for all blocks, or [N, 1, 1 or M, K]
    blind: Tensor | None  # queries that see no key, [M, 1] or [N, 1 or M, 1]; None: there are none


class Stream(NamedTuple):
    """What some queries read at once: rows of one table, or of several side by side."""

    parts: list[tuple[str, Rows]]  # [N, K] together
    mask: Mask | None = None
    causal: bool = False  # K = M, and a key is hidden from the queries before it

    @property
    def keys(self) -> int:
        """Return K."""
        return sum(rows.width for _, rows in self.parts)

    @property
    def rows(self) -> int:
        """Return how many rows all blocks read together."""
        return sum(rows.count * rows.width for _, rows in self.parts)


class Work(NamedTuple):
    """Some queries and their streams, of which the first shows every query a key."""

    queries: Rows  # [N, M]
    streams: list[Stream]


class Band(NamedTuple):
    """Keys of tokens: a query at position p sees ``reach`` of them, the newest at p - ``shift``."""

    table: str
    reach: int
    shift: int
    past: int  # how many rows before the call the table has of each sequence
    begin: int  # where the rows of the call begin in it, behind those

    @property
    def back(self) -> int:
        """How far behind a query its oldest key lies."""
        return self.shift + self.reach - 1


def block_size(window: int) -> int:
    """Return how many queries of a chunk go together: fewer score fewer keys in vain.

    Measured on a CPU, where small products waste time of their own (README).
    """
    return window if window < 128 else 64 if window < 512 else 128


class Plan:
    """The tables and works of a call."""

    def __init__(self, tensors: Tensors, call: Call) -> None:
        self.tensors, self.call = tensors, call
        self.exact, self.device = accumulator(tensors.q), tensors.q.device
        self.lengths: list[int] = call.offsets.diff().tolist()
        self.seen: list[int] = call.seen.tolist()
        self.counts: list[int] = [] if call.mem_count is None else call.mem_count.tolist()
        self.window = call.window or 0
        # where all of the past is read, it need not join the call's tokens
        self.whole = call.window is None or _decodes(self.lengths, self.seen, call.window)
        self.tables: dict[str, tuple[Tensor, Tensor]] = {}
        self.bands: list[Band] = []
        self.masks: dict[tuple[int, int, int], Mask] = {}
        t = tensors
        self._add_band("window", self.window, 0, t.k, t.v, t.past_k, t.past_v)
        self._add_band(
            "late", call.late_span, self.window, t.late_k, t.late_v, t.late_past_k, t.late_past_v
        )
        if t.mem_k is not None and t.mem_v is not None:
            self.tables["memory"] = t.mem_k.flatten(0, 1), t.mem_v.flatten(0, 1)

    def works(self) -> Iterator[Work]:
        """Yield the works; every query is in one of them."""
        if not any(self.lengths):
            return iter(())
        if self.whole:
            return self._whole()
        if len({*self.lengths}) == len({*self.seen}) == 1:
            return self._regular()
        return self._scattered(chunk_table(self.call.offsets.diff(), self.call.seen, self.window))

    def read(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return a stream's keys and values, ``[N, K, G, d]``."""
        pairs = [[rows.take(x) for x in self.tables[table]] for table, rows in stream.parts]
        if len(pairs) == 1:
            return pairs[0][0], pairs[0][1]
        return torch.cat([k for k, _ in pairs], dim=1), torch.cat([v for _, v in pairs], dim=1)

    def gradients(self, grad_q: Tensor, grads: dict[str, list[Tensor]]) -> Tensors:
        """Return gradients of the tensors, given those of the tables."""
        t = self.tensors
        found: dict[str, Tensor | None] = {"q": grad_q}
        found |= self._split("", "window", t.past_k, grads)
        found |= self._split("late_", "late", t.late_past_k, grads)
        if t.mem_k is not None:
            for name, x in zip("kv", grads["memory"], strict=True):
                found[f"mem_{name}"] = x.view(t.mem_k.shape)
        return Tensors(*(found.get(name) for name in Tensors._fields))  # pyright: ignore[reportArgumentType]

    # --- tables ---

    def _add_band(
        self,
        name: str,
        reach: int,
        shift: int,
        k: Tensor | None,
        v: Tensor | None,
        past_k: Tensor | None,
        past_v: Tensor | None,
    ) -> None:
        if k is None or v is None:
            return
        self.tables[name] = k, v
        past = begin = 0
        if past_k is not None and past_v is not None:
            past = past_k.shape[1]
            old_k, old_v = past_k.flatten(0, 1), past_v.flatten(0, 1)
            if self.whole:
                self.tables[f"{name} past"] = old_k, old_v
            else:
                begin = old_k.shape[0]
                self.tables[name] = torch.cat([old_k, k]), torch.cat([old_v, v])
        self.bands.append(Band(name, reach, shift, past, begin))

    def _split(
        self, prefix: str, name: str, past: Tensor | None, grads: dict[str, list[Tensor]]
    ) -> dict[str, Tensor]:
        """Return gradients of a band's rows of the call and of those before it, by argument."""
        found = {}
        for i, which in enumerate("kv" if name in grads else ""):
            now = grads[name][i]
            if past is not None:
                if f"{name} past" in grads:
                    before = grads[f"{name} past"][i]
                else:  # joined: what an op returns may not share memory
                    old = past.shape[0] * past.shape[1]
                    now, before = now[old:].clone(), now[:old].clone()
                found[f"{prefix}past_{which}"] = before.view(past.shape)
            found[f"{prefix}{which}"] = now
        return found

    # --- works with a window ---

    def _regular(self) -> Iterator[Work]:
        """Yield the works of sequences of equal length and past."""
        window, length, seen = self.window, self.lengths[0], self.seen[0]
        size = block_size(window)
        sequences, opened = len(self.lengths), seen // window
        chunks = (seen + length - 1) // window - opened + 1
        back = max(band.back for band in self.bands)
        # chunks with all of their tokens and all keys' in this call
        begin = -(-(seen + back) // window) - opened
        end = max(begin, (seen + length) // window - opened)
        alone = [c for c in range(chunks) if not begin <= c < end]
        if end - begin < sequences:  # fewer works if each takes a chunk of all sequences
            alone, end = [*range(chunks)], begin
        for c in alone:
            first = max(0, (opened + c) * window - seen)
            stop = min(length, (opened + c + 1) * window - seen)
            for at in range(first, stop, size):
                queries = min(size, stop - at)
                for part in _parts(range(sequences), queries):
                    ids = [s * chunks + c for s in part]
                    if seen and at < back:  # keys from before the call lie elsewhere
                        some = torch.tensor([*part], device=self.device)
                        yield self._gather(seen + at, queries, some, some * 0 + at, None, ids)
                    else:
                        yield self._view(seen + at, queries, part[0] * length + at, length, ids)
        for at in range(0, window if begin < end else 0, size):
            queries = min(size, window - at)
            for s in range(sequences):
                for part in _parts(range(begin, end), queries):
                    position = (opened + part[0]) * window + at
                    first = s * length + position - seen
                    ids = [s * chunks + c for c in part]
                    yield self._view(position, queries, first, window, ids, step=window)

    def _scattered(self, chunks: Chunks) -> Iterator[Work]:
        """Yield the works of sequences of any length and past."""
        size = block_size(self.window)
        # by place in the chunk, whether the call cuts the chunk's start off, keys that do not
        # exist, queries to a power of two: of what goes together, no two blocks share a token
        groups: dict[tuple, list[int]] = defaultdict(list)
        table = zip(*(x.tolist() for x in chunks[1:]), strict=True)
        for i, (number, _, start, count) in enumerate(table):
            for at in range(0, count, size):
                queries = min(size, count - at)
                if queries < size:
                    queries = 1 << (queries - 1).bit_length()
                position = number * self.window + start + at
                early = min(position, max(band.back for band in self.bands))
                groups[at, start > 0, early, queries].append(i)
        for (at, _, early, _), members in groups.items():
            counts = (chunks.count[members] - at).clamp(max=size)
            queries = int(counts.max())
            for part in _parts(range(len(members)), queries):
                ids = members[part.start : part.stop]
                count = counts[part.start : part.stop]
                yield self._gather(
                    early,
                    queries,
                    chunks.sequence[ids],
                    chunks.first[ids] + at,
                    None if bool((count == queries).all()) else count,
                    ids,
                )

    def _view(
        self, position: int, queries: int, first: int, pitch: int, ids: list[int], step: int = 0
    ) -> Work:
        """Return the work of blocks a fixed distance apart.

        Args:
            position: Of the first block's first query in its sequence.
            queries: M.
            first: Where that query lies among the call's tokens.
            pitch: How far apart blocks begin there.
            ids: The blocks' chunks.
            step: How far apart they begin in their sequence.
        """
        streams = []
        for band in self.bands:
            absent = max(0, band.back - position)
            keys = band.reach - 1 + queries - absent
            if keys > 0:
                low = band.begin + first - band.back + absent
                rows = Strided(low, pitch, len(ids), keys)
                streams.append(
                    Stream([(band.table, rows)], self._mask(queries, band.reach, absent))
                )
        if self.call.mem_positions is None:
            places = None
        else:
            places = position + step * torch.arange(len(ids), device=self.device)
        streams += self._remembered(ids, places, queries)
        return Work(Strided(first, pitch, len(ids), queries), self._join(streams, queries))

    def _gather(
        self,
        early: int,
        queries: int,
        sequence: Tensor,  # [N]
        first: Tensor,  # [N]
        count: Tensor | None,  # [N]
        ids: list[int],
    ) -> Work:
        """Return the work of blocks that lie anywhere.

        Args:
            early: The position of their first queries, or any that is not too early for a key.
            queries: M.
            sequence: Whose the blocks are.
            first: Where they begin, counted from their sequence's first token in the call.
            count: How many queries they have, if not all have M.
            ids: Their chunks.
        """
        own, length = (x[sequence, None] for x in (self.call.offsets, self.call.offsets.diff()))
        place = first[:, None] + torch.arange(queries, device=self.device)
        inside = None
        if count is not None:
            inside = place < (first + count)[:, None]
            place = place.minimum(length - 1)
        rows = Gathered(own + place, inside, queries)
        streams = []
        for band in self.bands:
            absent = max(0, band.back - early)
            keys = band.reach - 1 + queries - absent
            if keys <= 0:
                continue
            low = absent - band.back
            place = first[:, None] + torch.arange(low, low + keys, device=self.device)
            inside = None if count is None else place < length
            old = (sequence[:, None] + 1) * band.past + place
            new = band.begin + own + place.minimum(length - 1)
            found = Gathered(torch.where(place < 0, old, new), inside, self.window)
            streams.append(Stream([(band.table, found)], self._mask(queries, band.reach, absent)))
        streams += self._remembered(ids, self.call.seen[sequence] + first, queries)
        return Work(rows, self._join(streams, queries))

    def _mask(self, queries: int, reach: int, absent: int) -> Mask:
        """Return the band's mask without the keys that do not exist."""
        known = self.masks.get((queries, reach, absent))
        if known is None:
            query = torch.arange(queries, device=self.device)[:, None]
            key = torch.arange(absent, reach - 1 + queries, device=self.device)
            seen = (query <= key) & (key < query + reach)
            blind = ~seen.any(dim=1, keepdim=True)
            known = Mask(_bias(~seen, self.exact), blind if bool(blind.any()) else None)
            self.masks[queries, reach, absent] = known
        return known

    def _join(self, streams: list[Stream], queries: int) -> list[Stream]:
        """Put few rows side by side where no mask depends on the block."""
        same = [x for x in streams if not x.causal and (x.mask is None or x.mask.bias.dim() == 2)]
        if len(same) < 2 or sum(x.rows for x in same) > JOINED:
            return streams
        mask = None
        if any(x.mask for x in same):
            zeros = torch.zeros(queries, 1, dtype=self.exact, device=self.device)
            bias = (zeros.expand(-1, x.keys) if x.mask is None else x.mask.bias for x in same)
            mask = Mask(torch.cat([*bias], dim=1), None)
        together = Stream([part for x in same for part in x.parts], mask)
        return [together, *(x for x in streams if x not in same)]

    def _remembered(self, ids: list[int], position: Tensor | None, queries: int) -> list[Stream]:
        """Return the stream of the chunks' memories, if any holds something.

        Args:
            ids: The chunks.
            position: Of each block's first query; needed only with the memory's positions.
            queries: M.
        """
        memory = self.tensors.mem_k
        if memory is None:
            return []
        counts = [self.counts[i] for i in ids]
        most = max(counts)
        if most == 0:
            return []
        keys = runs([i * memory.shape[1] for i in ids], most, self.device)
        if self.call.mem_positions is None and min(counts) == most:
            return [Stream([("memory", keys)])]
        held = torch.tensor(counts, device=self.device)[:, None, None]
        hidden = torch.arange(most, device=self.device) >= held  # [N, 1, m]
        if self.call.mem_positions is not None and position is not None:
            query = position[:, None, None] + torch.arange(queries, device=self.device)[:, None]
            at = self.call.mem_positions[ids][:, None, :most]
            hidden = hidden | (at > query - self.window)  # [N, M, m]
        return [Stream([("memory", keys)], _hiding(hidden, self.exact))]

    # --- works that read all of the past ---

    def _whole(self) -> Iterator[Work]:
        """Yield the works of sequences that read all of the past, equal lengths together."""
        first, groups = self.call.offsets.tolist(), defaultdict(list)
        for s, length in enumerate(self.lengths):
            groups[length].append(s)
        groups.pop(0, None)
        for length, members in groups.items():
            for part in _parts(range(len(members)), length):
                some = members[part.start : part.stop]
                rows = runs([first[s] for s in some], length, self.device)
                streams = [Stream([("window", rows)], causal=length > 1)]
                for band in self.bands:
                    streams += self._behind(band, some, length)
                position = None
                if self.call.mem_positions is not None:
                    position = self.call.seen[some]
                # a memory is only read when decoding, and then a sequence has one chunk
                streams += self._remembered(some, position, length)
                yield Work(rows, self._join(streams, length))

    def _behind(self, band: Band, members: list[int], queries: int) -> list[Stream]:
        """Return the stream of a band's rows from before the call, if any is seen."""
        past = band.past
        known = [min(self.seen[s], past) for s in members]
        low, high = past - max(known, default=0), past
        if self.window:  # the first query's oldest key and the last one's newest
            low = max(low, past - band.back)
            high = min(past, past + queries - band.shift)
        if low >= high:
            return []
        keys = runs([s * past + low for s in members], high - low, self.device)
        one = queries == 1 or not self.window
        if one and past - min(known) <= low:
            return [Stream([(f"{band.table} past", keys)])]
        query = torch.arange(queries if self.window else 1, device=self.device)[:, None]
        oldest = past - torch.tensor(known, device=self.device)[:, None, None]  # [N, 1, 1]
        key = torch.arange(low, high, device=self.device)
        hidden = key < oldest
        if self.window:
            behind = past + query - key  # [M, K]
            hidden = hidden | (behind < band.shift) | (behind > band.back)
        return [Stream([(f"{band.table} past", keys)], _hiding(hidden, self.exact))]


def _parts(members: range, queries: int) -> Iterator[range]:
    """Cut a range into parts of so many members that they have at most ``QUERIES`` queries."""
    step = max(1, QUERIES // queries)
    return (members[i : i + step] for i in range(0, len(members), step))


def _decodes(lengths: list[int], seen: list[int], window: int) -> bool:
    """Tell whether a call is a few tokens of one chunk of every sequence."""
    length = lengths[0] if lengths else 0
    return (
        0 < length <= SHORT
        and lengths == [length] * len(lengths)
        and all(before % window + length <= window for before in seen)
    )


def _bias(hidden: Tensor, exact: torch.dtype) -> Tensor:
    """Return 0, and minus infinity where keys are hidden."""
    zeros = torch.zeros(hidden.shape, dtype=exact, device=hidden.device)
    return zeros.masked_fill_(hidden, -torch.inf)


def _hiding(hidden: Tensor, exact: torch.dtype) -> Mask:
    """Return the mask of keys hidden from queries, ``[N, 1 or M, K]``."""
    blind = hidden.all(dim=-1, keepdim=True)
    return Mask(_bias(hidden, exact)[:, None], blind if bool(blind.any()) else None)
