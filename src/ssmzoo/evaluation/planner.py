"""Plan which tokens a model reads so that what requests begin with is read once.

Requests come in as tokens, batches of reads come out. Nothing here knows a model: a state is a
number of bytes.

1. The tokens of all requests form a prefix tree. A node is where requests part, or where one ends.
2. A node whose state would save fewer than ``WORTH`` tokens goes: its tokens are read again.
3. Where the states of a node and of those below it do not fit into the memory together, children
   go on from a node further above and read the tokens between again: those for which that makes
   the fewest tokens in all. So states are chosen before anything is read, by what they save. To
   drop the least recently used one reads more, but for chains of many requests that begin with
   one another, in which each state could make room for the next.
4. The tree is read depth first, a batch of nodes at a time. The states of a batch are kept until
   all that goes on from them is read, and dropped then.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeVar

# a call behind kept states has so many times the rows of one from the beginning, whose rows are
# longer, if it has no more tokens
WIDER = 4
# rows of a call where the batch size is "auto", and tokens; a call that finds no memory halves both
AUTO_ROWS, AUTO_TOKENS = 64, 16_384
WORTH = 32  # tokens that a kept state must save: about the price of one more row in a call

Tokens = tuple[int, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """A request for the log-likelihoods of the last tokens of a sequence.

    Attributes:
        tokens: The sequence, cut to the model's window. Its last token is not read.
        scored: How many of the last tokens are predicted; 0 where the last is read by others, as in
            generation.
    """

    tokens: Tokens
    scored: int

    @property
    def predictor(self) -> int:
        """The place of the token behind which the first scored one is predicted."""
        return len(self.tokens) - 1 - self.scored


@dataclass(frozen=True)
class Answer:
    """What a read tells about a request: the tokens behind the places ``begin`` to ``end``."""

    request: int
    begin: int
    end: int


@dataclass(frozen=True)
class Read:
    """The tokens ``begin`` to ``end`` of a request, read from the state of a row of the parent.

    Attributes:
        request: A request that has these tokens.
        parent: The row of the batch that this one goes on from; 0 where there is none.
        begin: How many tokens that row's state has seen.
        end: How many tokens this read's state has seen.
        answers: What the read tells.
        last: The requests that end here, whose last token is the next.
    """

    request: int
    parent: int
    begin: int
    end: int
    answers: tuple[Answer, ...]
    last: tuple[int, ...]


@dataclass(frozen=True)
class ReadBatch:
    """Reads of one call.

    Attributes:
        depth: Goes on from the latest batch of the depth before, whose states were kept; from
            nothing where it is 0.
        keeps: Whether the states are kept for batches of the next depth.
        reads: The rows.
    """

    depth: int
    keeps: bool
    reads: tuple[Read, ...]


@dataclass(frozen=True)
class Limits:
    """What calls and kept states may take.

    Attributes:
        rows: Rows of a call that reads from the beginning; behind kept states up to ``WIDER`` times
            as many, with at most the tokens of so many requests.
        tokens: Tokens of a call, padding included; None: any number. One row is always read.
        memory: Bytes of kept states.
        state_bytes: Bytes of the state of one row that has seen so many tokens, padding included.
    """

    rows: int
    tokens: int | None
    memory: float
    state_bytes: Callable[[int], float]


@dataclass(frozen=True)
class ReadPlan:
    """Batches in order, and how many tokens they read."""

    batches: tuple[ReadBatch, ...]

    @property
    def read(self) -> int:
        """Tokens of all reads, without padding."""
        return sum(read.end - read.begin for batch in self.batches for read in batch.reads)


@dataclass(eq=False)
class _Node:
    """A beginning of requests: the first ``end`` tokens of ``request``."""

    request: int
    end: int
    children: list[_Node] = field(default_factory=list)
    last: list[int] = field(default_factory=list)  # requests of which no more is read
    below: float = 0.0  # most bytes of states that are kept together below its own
    tokens: int = 0  # tokens of all nodes below, each read once


@dataclass(frozen=True)
class _Row:
    """A node to read behind ``begin`` tokens, whose state a row of the parent's batch holds."""

    parent: int
    begin: int
    node: _Node

    @property
    def length(self) -> int:
        return self.node.end - self.begin


@dataclass(frozen=True)
class _Group:
    """The rows of a batch, its columns so far, and the bytes of states kept while it is read."""

    depth: int
    keeps: bool
    rows: list[_Row]
    seen: int
    held: float


def batch_limits(batch_size: int | str) -> tuple[int, int | None]:
    """Return the most rows and tokens of a call.

    Raises:
        ValueError: It is neither a count nor "auto".
    """
    if str(batch_size).partition(":")[0] == "auto":
        return AUTO_ROWS, AUTO_TOKENS
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise ValueError(f"batch_size must be at least 1, or 'auto', got {batch_size!r}")
    return int(batch_size), None


def memory_limit(state_memory: float | str | None) -> int | None:
    """Return the bytes of so many MiB; None of None.

    Raises:
        ValueError: It is no number above 0.
    """
    if state_memory is None:
        return None
    try:
        given = float(state_memory)
    except ValueError:
        given = math.nan
    if not 0 < given < math.inf:
        raise ValueError(f"state_memory must be a number of MiB above 0, got {state_memory!r}")
    return int(given * 2**20)


def plan(requests: Sequence[Request], limits: Limits) -> ReadPlan:
    """Return how to read requests; see the module.

    Args:
        requests: In any order; what several ask is read once.
        limits: What calls and states may take.
    """
    root = _tree(requests)
    _prune(root)
    _fit(root, limits)
    return ReadPlan(tuple(_batches(root, requests, limits)))


def tokens_alone(requests: Sequence[Request]) -> int:
    """Return how many tokens are read where each request is read alone."""
    return sum(len(request.tokens) - 1 for request in requests)


def shares(requests: Sequence[Request], parts: int) -> list[list[int]]:
    """Divide requests among processes: about as many new tokens each, cut where little is shared.

    Returns:
        The indices of each part's requests; a part may be empty.
    """
    if parts == 1:
        return [[*range(len(requests))]]
    order = sorted(range(len(requests)), key=lambda i: requests[i].tokens)
    inside = [_common(requests[a].tokens, requests[b].tokens) for a, b in pairwise(order)]
    common = [0, *inside][: len(order)]  # with the request before
    new = [len(requests[i].tokens) - c for i, c in zip(order, common, strict=True)]
    ends, around = list(accumulate(new, initial=0)), len(order) // (8 * parts)
    cuts = [0]
    for part in range(1, parts):
        even = bisect_left(ends, ends[-1] * part / parts)
        near = range(max(cuts[-1], even - around, 1), min(even + around + 1, len(order)))
        cuts.append(min(near, key=lambda i: (common[i], abs(i - even)), default=cuts[-1]))
    return [order[begin:end] for begin, end in pairwise([*cuts, len(order)])]


def cut_into_batches(
    rows: Iterable[T], length: Callable[[T], int], most: int, tokens: int | None
) -> list[list[T]]:
    """Cut rows into batches of about the same length, the longest first.

    Args:
        rows: In any order.
        length: Returns the tokens of a row.
        most: Rows of a batch.
        tokens: Tokens of a batch, if it has several rows; None: any number.
    """
    batches: list[list[T]] = []
    width = 0  # of the latest batch, whose first row is the longest
    for row in sorted(rows, key=length, reverse=True):
        count = len(batches[-1]) + 1 if batches else most + 1
        if count > most or (tokens is not None and width * count > tokens):
            batches.append([])
            width = length(row)
        batches[-1].append(row)
    return batches


def _common(a: Tokens, b: Tokens) -> int:
    """Return how many first tokens two requests share, of those that are read."""
    high = min(len(a), len(b)) - 1
    if a[:high] == b[:high]:
        return high
    low = 0
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _tree(requests: Sequence[Request]) -> _Node:
    """Return the prefix tree of the tokens that are read."""
    root = _Node(0, 0)
    path = [root]  # to the end of the latest request
    before: Tokens = ()
    for index in sorted(range(len(requests)), key=lambda i: requests[i].tokens[:-1]):
        tokens = requests[index].tokens
        shared = _common(before, tokens) if before else 0
        below = root
        while path[-1].end > shared:
            below = path.pop()
        if path[-1].end < shared:
            parting = _Node(index, shared, [below])
            path[-1].children[-1] = parting
            path.append(parting)
        if path[-1].end < len(tokens) - 1:
            leaf = _Node(index, len(tokens) - 1)
            path[-1].children.append(leaf)
            path.append(leaf)
        path[-1].last.append(index)
        before = tokens
    return root


def _walk(node: _Node) -> list[_Node]:
    """Return a node and all below it, each behind its parent."""
    nodes = [node]
    for each in nodes:
        nodes.extend(each.children)
    return nodes


def _prune(root: _Node) -> None:
    """Take away nodes whose state would save too little."""
    for parent in reversed(_walk(root)):  # from the leaves on
        children = []
        for node in parent.children:
            readers = len(node.children) + bool(node.last)
            saved = (node.end - parent.end) * (readers - 1)
            children += _apart(node) if node.children and saved < WORTH else [node]
        parent.children = children


def _fit(root: _Node, limits: Limits) -> None:
    """Let children go on from nodes further above where the states do not fit together.

    With the nearest kept state at ``begin`` and so much room for others, a node and all below it
    take the fewest tokens if each of its children takes the cheaper of two: to go on from the
    node's state, with less room, or from ``begin``. The node itself is read if any goes on from it.
    """
    _measure(root, limits)
    if root.below <= limits.memory:
        return
    cases = dict.fromkeys((child, 0, limits.memory) for child in root.children)
    order = [*cases]
    for node, begin, room in order:  # all cases of a node before those of its children
        left = room - limits.state_bytes(node.end)
        if node.below > left:
            for child in node.children:
                for case in ((child, begin, room), (child, node.end, left)):
                    if case[2] >= 0 and case not in cases:
                        cases[case] = None
                        order.append(case)
    tokens: dict[tuple[_Node, int, float], int] = {}
    lifted: dict[tuple[_Node, int, float], list[_Node]] = {}
    for case in reversed(order):
        node, begin, room = case
        own, left = node.end - begin, room - limits.state_bytes(node.end)
        lifted[case] = []
        if node.below <= left or not node.children:
            tokens[case] = own + node.tokens
            continue
        above = [tokens[child, begin, room] for child in node.children]
        behind = [tokens.get((child, node.end, left), math.inf) for child in node.children]
        best = sum(map(min, above, behind)) + own
        alone = sum(above) + (own if node.last else 0)
        if alone <= best:
            tokens[case], lifted[case] = alone, node.children
        else:
            tokens[case] = int(best)
            pairs = zip(node.children, above, behind, strict=True)
            lifted[case] = [child for child, a, b in pairs if a < b]
    parents: list[tuple[_Node, float]] = [(root, limits.memory)]
    for parent, room in parents:
        asked, parent.children = parent.children, []
        for node in asked:
            up = set(lifted.get((node, parent.end, room), ()))
            asked += [child for child in node.children if child in up]
            node.children = [child for child in node.children if child not in up]
            if node.children or node.last:
                parent.children.append(node)
                parents.append((node, room - limits.state_bytes(node.end)))
    _measure(root, limits)


def _measure(root: _Node, limits: Limits) -> None:
    """Count the tokens below each node, and the states that are kept together there."""
    for node in reversed(_walk(root)):  # from the leaves on
        node.below = node.tokens = 0
        for child in node.children:
            own = limits.state_bytes(child.end) if child.children else 0
            node.below = max(node.below, own + child.below)
            node.tokens += child.end - node.end + child.tokens


def _apart(node: _Node) -> list[_Node]:
    """Return the nodes that take a node's place where its state is not kept."""
    own = [_Node(node.request, node.end, last=node.last)] if node.last else []
    return own + node.children


def _batches(root: _Node, requests: Sequence[Request], limits: Limits) -> Iterator[ReadBatch]:
    """Yield the batches, depth first: those that go on from a batch before the next of its kind."""
    waiting = _groups([_Row(0, 0, node) for node in _apart(root)], 0, 0, 0.0, limits)
    while waiting:
        group = waiting.pop()
        reads = [_read(row, requests) for row in group.rows]
        yield ReadBatch(group.depth, group.keeps, tuple(reads))
        if group.keeps:
            rows = [
                _Row(place, row.node.end, child)
                for place, row in enumerate(group.rows)
                for child in row.node.children
            ]
            waiting += _groups(rows, group.depth + 1, group.seen, group.held, limits)


def _groups(rows: list[_Row], depth: int, seen: int, held: float, limits: Limits) -> list[_Group]:
    """Return the batches that go on from one batch of ``seen`` columns, the last to be read first.

    A batch of kept states takes at most half of the memory that is left, and what deeper ones need
    is left, but it has at least a row.
    """
    left = limits.memory - held
    kept: list[_Row] = []
    others: list[_Row] = []
    asked = list(rows)
    for row in asked:
        if not row.node.children:
            others.append(row)
        elif limits.state_bytes(seen + row.length) <= left:
            kept.append(row)
        else:
            asked += [_Row(row.parent, row.begin, node) for node in _apart(row.node)]
    # shorter rows are padded to the longest
    columns = seen + max((row.length for row in others + kept), default=0)
    size = limits.state_bytes(columns)
    deeper = max((row.node.below for row in kept), default=0)
    room = keeps = WIDER * limits.rows
    if size:
        room, keeps = int(left / 2 / size), int((left - deeper) / size)
    most, tokens = limits.rows, limits.tokens
    if depth:
        most = max(most, min(WIDER * most, room))
        whole = limits.rows * columns
        tokens = whole if tokens is None else min(tokens, whole)
    length = operator.attrgetter("length")
    groups = [
        _Group(depth, False, part, seen, held)
        for part in cut_into_batches(others, length, most, tokens)
    ]
    for part in cut_into_batches(kept, length, max(1, min(most, room, keeps)), tokens):
        columns = seen + part[0].length
        held_then = held + len(part) * limits.state_bytes(columns)
        groups.append(_Group(depth, True, part, columns, held_then))
    return groups


def _read(row: _Row, requests: Sequence[Request]) -> Read:
    node, answers = row.node, []
    for below in _walk(node):
        for index in below.last:
            first = max(requests[index].predictor, row.begin)
            if first < (end := min(node.end, len(requests[index].tokens) - 1)):
                answers.append(Answer(index, first, end))
    return Read(node.request, row.parent, row.begin, node.end, tuple(answers), tuple(node.last))
