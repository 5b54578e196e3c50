"""A model of how the partitions of the kernels in `mla_kernels.hopper` wait for each other, run in random orders.

A partition is a generator, a barrier counts as the hardware's does, and what is copied asynchronously arrives whenever it
likes.  Each buffer knows what lies in it and who is reading or writing it, so that an access that could meet another one, or
that finds something else than it should, is an error in some order.
"""

import importlib
import inspect
import pkgutil
import random
import re
from collections.abc import Iterator, Sequence

import pytest
from triton.experimental.gluon._runtime import GluonJITFunction

from mla_kernels import hopper

# What a partition waits for and signals, in the order of the source: the model below says the same.
SOURCE = {
    "fetch_queries": "wait q_empty, expect q_full",
    "_fetch_keys": "wait empty[TILE_INDEX], expect barrier",
    "_fill_block": "wait empty[FIRST], arrive full[FIRST], wait empty[SECOND], wait_copies 0, arrive full[SECOND]",
    "consumer": "wait q_full, wait full[3 * OWN], wait full[1 + OWN], wait p_full[0], arrive p_full[OWN], arrive empty[1], "
    "arrive empty[3 * OWN], wait p_full[1], arrive empty[2], arrive total_full[OWN], wait total_full[OTHER]",
    "write": "arrive q_empty, arrive q_empty",  # of a piece at once, otherwise once its rows have been staged
}
KERNELS = {False: "dense", True: "sparse"}
ROPE = {False: "no-rope", True: "rope"}
ITEMS = ([1], [0], [7], [0, 0, 0], [1, 1, 1, 1], [2, 0, 3], [0, 5, 1], [3, 2, 0, 0, 1, 4])


class Barrier:
    """A phase ends when `count` have arrived and all bytes that were announced are there."""

    def __init__(self, count: int):
        self.count = self.missing = count
        self.fetches = self.phases = 0

    def arrive(self, fetches: int = 0) -> None:
        assert self.missing > 0, "arrived more often than a phase has room for"
        self.missing -= 1
        self.fetches += fetches
        self._settle()

    def fetched(self) -> None:
        self.fetches -= 1
        self._settle()

    def _settle(self) -> None:
        if self.missing == 0 and self.fetches == 0:
            self.phases += 1
            self.missing = self.count

    def passed(self, parity: int) -> bool:
        """Of a new barrier the phase before the first, whose parity is 1, counts as ended."""
        return (self.phases - 1) % 2 == parity


class Buffer:
    """Shared memory that one partition fills: its content, and the accesses that are under way."""

    def __init__(self) -> None:
        self.content: object = None
        self.readers = self.writers = 0

    def begin_write(self) -> None:
        assert not self.writers and not self.readers, "written while it is in use"
        self.writers += 1

    def end_write(self, content: object) -> None:
        self.writers -= 1
        self.content = content


Step = tuple[str, Barrier, int] | None  # a wait under its name, or a point where others may come in between
Tile = list[Buffer]  # of as many parts as there are partitions that fill it


class Model:
    """The dense kernel, or the sparse one.  `items` are numbers of pairs; `without` names a wait that is left out."""

    def __init__(self, items: list[int], sparse: bool, has_rope: bool, seed: int, without: str | None = None):
        self.items, self.sparse, self.has_rope, self.without = items, sparse, has_rope, without
        self.random = random.Random(seed)
        shares = 2 if sparse else 1
        self.q_full, self.q_empty = Barrier(1), Barrier(2)
        self.full = [Barrier(shares) for _ in range(4)]
        self.empty, self.p_full, self.total_full = ([Barrier(1) for _ in range(n)] for n in (4, 2, 2))
        # Stands for the copy of its share of the RoPE part of a block, which the threads that began it wait for.
        self.copies = [Barrier(1) for _ in range(2)]
        self.q, self.top, self.total = ([[Buffer()] for _ in range(2)] for _ in range(3))
        self.k, self.rope, self.valid = ([[Buffer() for _ in range(shares)] for _ in range(n)] for n in (4, 2, 2))
        self.q_rope = [Buffer()]
        self.p = [[Buffer()], self.rope[1] if sparse and has_rope else self.q_rope]
        producers = [self.gather(0), self.gather(1)] if sparse else [self.producer()]
        self.actors = {f"producer {i}": producer for i, producer in enumerate(producers)}
        self.actors |= {"consumer 0": self.consumer(0), "consumer 1": self.consumer(1)}

    def run(self) -> None:
        waiting: dict[str, Step] = dict.fromkeys(self.actors)
        speed = {name: self.random.choice([1, 1, 10, 100]) for name in self.actors}
        while self.actors:
            able = [name for name in self.actors if (step := waiting.get(name)) is None or step[1].passed(step[2])]
            assert able, f"a deadlock: {sorted((name, step[0]) for name, step in waiting.items() if step)}"
            name = self.random.choices(able, [speed.get(name, 1) for name in able])[0]
            try:
                step = next(self.actors[name])
                waiting[name] = None if step is not None and step[0] == self.without else step
            except StopIteration:
                del self.actors[name]
                waiting.pop(name, None)
        for barrier in (self.q_full, self.q_empty, *self.copies, *self.full, *self.empty, *self.p_full, *self.total_full):
            assert barrier.missing == barrier.count and not barrier.fetches

    def fetch(self, barrier: Barrier, content: object, tiles: list[Tile]) -> None:
        """Begins to copy some tiles; each may be written from now on, and is there at some time of its own."""
        buffers = [part for tile in tiles for part in tile]

        def transfer(buffer: Buffer) -> Iterator[Step]:
            yield None
            buffer.end_write(content)
            barrier.fetched()

        barrier.arrive(len(buffers))
        for buffer in buffers:
            buffer.begin_write()
            self.actors[f"fetch {id(buffer)}"] = transfer(buffer)

    def producer(self) -> Iterator[Step]:
        pairs_done = 0
        for item, pairs in enumerate(self.items):
            if pairs == 0:
                yield from self.fetch_queries(item)
            for pair in range(pairs):
                for block in range(2):
                    if block == 1 and pair == 0:
                        yield from self.fetch_queries(item)
                    for turn in range(2):
                        tile = 2 * block + (turn ^ block)
                        yield "empty", self.empty[tile], (pairs_done & 1) ^ 1
                        rope = [self.rope[block]] if self.has_rope and turn == 0 else []
                        self.fetch(self.full[tile], pairs_done, [self.k[tile], *rope])
                pairs_done += 1

    def gather(self, share: int) -> Iterator[Step]:
        t = 0
        for item, pairs in enumerate(self.items):
            if share == 0:
                yield from self.fetch_queries(item)
            for _ in range(pairs):
                for block in range(2):
                    yield from self.fill_block(block, share, t)
                t += 1

    def fill_block(self, block: int, share: int, t: int) -> Iterator[Step]:
        first, second = 3 * block, 1 + block
        yield f"empty {first}", self.empty[first], (t & 1) ^ 1
        yield from self.write([self.valid[block][share]], t)
        yield from self.write([self.k[first][share]], t)
        self.full[first].arrive()
        yield f"empty {second}", self.empty[second], (t & 1) ^ 1
        if self.has_rope:
            self.fetch(self.copies[share], t, [[self.rope[block][share]]])
        yield from self.write([self.k[second][share]], t)
        if self.has_rope:
            yield "copies", self.copies[share], block  # a phase for each block: of every pair there are two
        self.full[second].arrive()

    def fetch_queries(self, item: int) -> Iterator[Step]:
        yield "q_empty", self.q_empty, (item & 1) ^ 1
        self.fetch(self.q_full, ("q", item), self.q + [self.q_rope] * self.has_rope)

    def write(self, tile: Tile, content: object) -> Iterator[Step]:
        for part in tile:
            part.begin_write()
        yield None
        for part in tile:
            part.end_write(content)

    def begin_reads(self, contents: Sequence[tuple[Tile, object]]) -> None:
        for tile, content in contents:
            for part in tile:
                assert not part.writers, "read while it is written"
                assert part.content == content, f"found {part.content}, expected {content}"
                part.readers += 1

    def end_reads(self, contents: Sequence[tuple[Tile, object]]) -> None:
        for tile, _ in contents:
            for part in tile:
                part.readers -= 1

    def read(self, *contents: tuple[Tile, object]) -> Iterator[Step]:
        """A product that is waited for at once, or a load."""
        self.begin_reads(contents)
        yield None
        self.end_reads(contents)

    def consumer(self, own: int) -> Iterator[Step]:
        other, t = 1 - own, 0  # t: pairs done
        for item, pairs in enumerate(self.items):
            yield "q_full", self.q_full, item & 1
            if self.has_rope and not self.sparse:
                yield from self.read((self.q_rope, ("q", item)))
            for _ in range(pairs):
                yield "own half", self.full[3 * own], t & 1
                first = [(self.q[own], ("q", item)), (self.k[3 * own], t)]
                second = [(self.q[other], ("q", item)), (self.k[1 + own], t)]
                if self.has_rope and self.sparse:
                    second += [(self.q_rope, ("q", item)), (self.rope[own], t)]
                elif self.has_rope:
                    first += [(self.rope[own], t)]
                self.begin_reads(first)
                yield "other half", self.full[1 + own], t & 1
                yield from self.read(*second)
                self.end_reads(first)
                if self.sparse:
                    yield from self.read((self.valid[own], t))
                else:
                    for tile in (2 * own, 2 * own + 1):  # rows behind the last key are cleared
                        yield from self.write(self.k[tile], t)
                if own == 1:
                    yield "P0", self.p_full[0], t & 1
                    yield from self.read((self.top[0], t))
                    product = [(self.p[0], ("P", 0, t)), (self.k[1], t)]
                    self.begin_reads(product)
                yield from self.write(self.top[own], t)
                yield from self.write(self.p[own], ("P", own, t))
                self.p_full[own].arrive()
                if own == 1:
                    yield None
                    self.end_reads(product)
                    self.empty[1].arrive()
                yield from self.read((self.k[3 * own], t))
                self.empty[3 * own].arrive()
                if own == 0:
                    yield "P1", self.p_full[1], t & 1
                    yield from self.read((self.top[1], t))
                    yield from self.read((self.p[1], ("P", 1, t)), (self.k[2], t))
                    self.empty[2].arrive()
                t += 1
            yield from self.write(self.total[own], item)
            self.total_full[own].arrive()
            yield "total", self.total_full[other], item & 1
            yield from self.read((self.total[other], item))
            if item % 3:  # whole: the rows of its half of the columns lie over half of the queries
                yield from self.write(self.q[own], ("rows", item))
                yield from self.read((self.q[own], ("rows", item)))
            self.q_empty.arrive()


def calls_in_source() -> dict[str, str]:
    """What each function of the package waits for and signals."""
    found = {}
    for module in pkgutil.iter_modules(hopper.__path__):
        for name, value in vars(importlib.import_module(f"{hopper.__name__}.{module.name}")).items():
            if isinstance(value, GluonJITFunction):
                pattern = r"\b(?:mbarrier\.)?(wait|arrive|expect|wait_copies)\(([\w \[\]*+]+)"
                calls = re.findall(pattern, inspect.getsource(value.fn))
                found[name] = ", ".join(f"{what} {barrier}" for what, barrier in calls)
    return {name: calls for name, calls in found.items() if calls}


def test_the_model_is_of_these_kernels():
    """A change of who waits for whom belongs into the model first."""
    assert calls_in_source() == SOURCE


@pytest.mark.once
@pytest.mark.parametrize("has_rope", [True, False], ids=ROPE.get)
@pytest.mark.parametrize("sparse", [False, True], ids=KERNELS.get)
@pytest.mark.parametrize("items", ITEMS, ids=str)
def test_no_order_is_wrong(items, sparse, has_rope):
    for seed in range(150):
        Model(items, sparse, has_rope, seed).run()


def run_many(sparse: bool, has_rope: bool, without: str) -> None:
    for seed in range(300):
        Model(ITEMS[seed % len(ITEMS)], sparse, has_rope, seed, without).run()


COMMON_WAITS = ["q_empty", "q_full", "own half", "other half", "P0", "P1", "total"]
WAITS = [(False, True, wait) for wait in ["empty", *COMMON_WAITS]]
WAITS += [(True, has_rope, f"empty {tile}") for has_rope in (True, False) for tile in range(4)]
WAITS += [(True, has_rope, wait) for has_rope in (True, False) for wait in COMMON_WAITS]
WAITS += [(True, True, "copies")]


@pytest.mark.once
@pytest.mark.parametrize(
    ("sparse", "has_rope", "wait"),
    [pytest.param(*case, id=f"{KERNELS[case[0]]}-{ROPE[case[1]]}-{case[2]}") for case in WAITS],
)
def test_no_wait_can_be_left_out(sparse, has_rope, wait):
    """Which also shows that the model finds what is wrong."""
    with pytest.raises(AssertionError, match=r"^(found|read|written|arrived|a deadlock)"):
        run_many(sparse, has_rope, wait)
