"""Keys and values of many requests at once: one storage a layer, one slot a request.

A slot is a row of `[slots, H, capacity, D]` that is valid up to the request's length. Tokens are written at
`(slot, position in the cache)`, so requests of any length share one forward, and taking back the last `n` tokens of a
request is `lengths[slot] -= n`: no holes, no copies. A finished request's slot is the next one's.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch


FIRST_SLOTS, FIRST_CAPACITY, LARGE = 4, 128, 16
# Rows whose block or context differ by more than a factor of two are not padded to one rectangle beyond these sizes.
SHORT_BLOCK, SHORT_CONTEXT = 16, 256
DENSE = 0.5  # share of the rows between the first and the last of a group that makes a view cheaper than a copy


class Slots:
    """Which slots are taken, and how many tokens each holds. Storages grow by doubling when they are next written."""

    def __init__(self):
        self.count, self.capacity = FIRST_SLOTS, FIRST_CAPACITY
        self.lengths = [0] * self.count
        self._free = list(range(self.count - 1, -1, -1))

    @property
    def large(self) -> bool:
        """Whether storages have grown far beyond their first size."""
        return self.count * self.capacity > LARGE * FIRST_SLOTS * FIRST_CAPACITY

    @property
    def taken(self) -> int:
        return self.count - len(self._free)

    def acquire(self) -> int:
        """The lowest free slot, empty."""
        if not self._free:
            self._free = list(range(2 * self.count - 1, self.count - 1, -1))
            self.lengths += [0] * self.count
            self.count *= 2
        slot = self._free.pop()
        self.lengths[slot] = 0
        return slot

    def release(self, slot: int) -> None:
        if slot in self._free or not 0 <= slot < self.count:
            raise ValueError(f"slot {slot} is not taken.")
        self.lengths[slot] = 0
        self._free.append(slot)
        self._free.sort(reverse=True)

    def rollback(self, slot: int, tokens: int) -> None:
        """Take back the last `tokens` tokens of a slot."""
        if not 0 <= tokens <= self.lengths[slot]:
            raise ValueError(f"slot {slot} holds {self.lengths[slot]} tokens; {tokens} cannot be taken back.")
        self.lengths[slot] -= tokens

    def reserve(self, length: int) -> None:
        """Make room for slots of that length."""
        while self.capacity < length:
            self.capacity *= 2


class SlotStorage:
    """Keys and values of one layer, `[slots, H, capacity, D]` each, grown to what the slots ask for."""

    def __init__(self, slots: Slots):
        self.slots = slots
        self.keys = self.values = None

    def write(self, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
        """Store `[T, H, D]` at `(rows[t], :, places[t])`."""
        self.keys, self.values = self._grown(self.keys, key), self._grown(self.values, value)
        self.keys[rows, :, places] = key
        self.values[rows, :, places] = value

    def _grown(self, old: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        count, capacity = self.slots.count, self.slots.capacity
        if old is not None and old.shape[0] == count and old.shape[2] == capacity:
            return old
        shape = count, like.shape[1], capacity, like.shape[2]
        with torch.inference_mode(False):  # it may be written to in other modes
            new = torch.zeros(shape, dtype=like.dtype, device=like.device)
        if old is not None:
            new[: old.shape[0], :, : old.shape[2]] = old
        return new


@dataclass
class Group:
    """Requests whose attention is one rectangle `[R, L, K]`: rows, queries, keys.

    Attributes:
        tokens: `[n]`, where the group's tokens are in the packed forward.
        row, offset: `[n]`, the token's row in the rectangle and its place in its row's block.
        starts: `[R]`, tokens in the cache before the block; rows between the members have 0.
        least: the smallest start of a member.
        queries, keys: `L` and `K`.
        span: the slots `[first, last)` the rectangle covers, as a view; or
        index: `[R]`, the slots to copy, where a view would cover too many others.
    """

    tokens: torch.Tensor
    row: torch.Tensor
    offset: torch.Tensor
    starts: torch.Tensor
    least: int
    queries: int
    keys: int
    span: tuple[int, int]
    index: torch.Tensor | None

    def rows_of(self, stored: torch.Tensor, first_row: int, first_key: int = 0) -> torch.Tensor:
        """The group's part `[R, H, K - first_key, D]` of a layer's storage, of which row 0 is slot `first_row`."""
        keys = slice(first_key, self.keys)
        if self.index is None:
            return stored[self.span[0] - first_row : self.span[1] - first_row, :, keys]
        return stored[self.index - first_row, :, keys]


@dataclass
class Varlen:
    """Requests behind each other: rows and places of all their keys in the handed-out storage, and where each
    request's queries and keys begin (int32, one more than there are requests)."""

    rows: torch.Tensor
    places: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    longest_query: int
    longest_key: int


class Packing:
    """The geometry of one packed forward over `[1, T]` tokens.

    Args:
        rows: slots, each once.
        starts: tokens each of them holds already.
        counts: tokens each of them gets, at least 1.
    """

    def __init__(self, rows: list[int], starts: list[int], counts: list[int], device: torch.device):
        def ints(values):
            return torch.tensor(values, dtype=torch.long, device=device)

        self.rows, self.starts, self.counts = rows, starts, counts
        self.device, self._elsewhere = device, {}
        self._varlen: Varlen | None = None
        self.first, self.last = min(rows), max(rows) + 1
        self.keys = max(s + n for s, n in zip(starts, counts))
        self.bounds = [0]
        for n in counts:
            self.bounds.append(self.bounds[-1] + n)
        which = [i for i, n in enumerate(counts) for _ in range(n)]
        places = [s + j for s, n in zip(starts, counts) for j in range(n)]
        self.token_rows = ints([rows[i] for i in which])
        self.token_places = ints(places)

        buckets: dict[tuple[int, int], list[int]] = {}
        for i, (start, n) in enumerate(zip(starts, counts)):
            buckets.setdefault((_size(n, SHORT_BLOCK), _size(start + n, SHORT_CONTEXT)), []).append(i)
        self.groups = []
        for members in buckets.values():
            slots = [rows[i] for i in members]
            low, high = min(slots), max(slots) + 1
            dense = len(members) >= DENSE * (high - low)
            place = {i: (rows[i] - low if dense else at) for at, i in enumerate(members)}
            group_starts = [0] * (high - low if dense else len(members))
            for i in members:
                group_starts[place[i]] = starts[i]
            tokens = [t for i in members for t in range(self.bounds[i], self.bounds[i + 1])]
            self.groups.append(
                Group(
                    tokens=ints(tokens),
                    row=ints([place[i] for i in members for _ in range(counts[i])]),
                    offset=ints([j for i in members for j in range(counts[i])]),
                    starts=ints(group_starts),
                    least=min(starts[i] for i in members),
                    queries=max(counts[i] for i in members),
                    keys=max(starts[i] + counts[i] for i in members),
                    span=(low, high),
                    index=None if dense else ints(slots),
                )
            )

    def on(self, device: torch.device) -> "Packing":
        """The same geometry on another device, for targets whose layers are spread over several."""
        if device == self.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = Packing(self.rows, self.starts, self.counts, device)
        return self._elsewhere[device]

    def varlen(self) -> "Varlen":
        """The layout flash attention takes: every request's keys behind the last one's. Made once a forward."""
        if self._varlen is None:
            device = self.token_rows.device
            ends = [s + n for s, n in zip(self.starts, self.counts)]

            def ints(values, dtype=torch.long):
                return torch.tensor(values, dtype=dtype, device=device)

            self._varlen = Varlen(
                rows=ints([row - self.first for row, end in zip(self.rows, ends) for _ in range(end)]),
                places=ints([place for end in ends for place in range(end)]),
                queries=ints(self.bounds, torch.int32),
                keys=ints([0, *accumulate(ends)], torch.int32),
                longest_query=max(self.counts),
                longest_key=max(ends),
            )
        return self._varlen

    @property
    def cells(self) -> int:
        """Query-key pairs the rectangles hold, padding included: what attention costs beside reading the keys."""
        return sum(len(g.starts) * g.queries * g.keys for g in self.groups)


def _size(value: int, short: int) -> int:
    """0 up to `short`, then one more for every doubling."""
    return max(0, (max(value, 1) - 1).bit_length() - (short - 1).bit_length())
