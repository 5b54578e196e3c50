"""The schedule, made as a plan makes it, against its definition in plain Python.

That of the portable plan is made by a kernel, which is interpreted; that of the Hopper path by each program for itself.
"""

import heapq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from mla_kernels.device import DeviceFacts
from mla_kernels.hopper import schedule as hopper_schedule
from mla_kernels.hopper.plan import plan_dense, refusals
from mla_kernels.plan import plan_decode
from mla_kernels.problem import TensorSpec, make_problem
from mla_kernels.schedule import WORK_FIELDS, num_slots, schedule_kernel, schedule_size
from tests.gluon_numpy import Pointer, on_numpy, tensor
from tests.hopper_calls import scalars_of
from tests.kernel_runs import INTERPRET, Memory, launch

pytestmark = INTERPRET

FIELDS = WORK_FIELDS.value
GUARD = 0x7F7F7F7F
PAGES, PAGE_SIZE = 4096, 64


@dataclass
class Piece:
    """Units `lo` to `hi` of an item; slot -1 where they are the whole item."""

    item: int
    lo: int
    hi: int
    slot: int
    program: int


@dataclass
class Schedule:
    """What the kernel wrote, and what it was made from."""

    pieces: list[Piece]
    splits: list[tuple[int, int, int]]
    units: np.ndarray  # of each item
    programs: int
    launched: int  # programs, idle ones included
    slots: int  # in the scratch of the plan
    fixed_cost: int
    split_cost: int

    @property
    def whole(self) -> bool:
        """As many items for every program, one after the other."""
        each = -(-len(self.units) // self.launched)
        return all(piece.lo == 0 and piece.slot < 0 and piece.program == piece.item // each for piece in self.pieces)

    @property
    def quota(self) -> int:
        return -(-int(self.units.sum() + self.fixed_cost * len(self.units)) // self.programs)

    def makespan(self) -> int:
        """Blocks of time until all is done: programs start in order, on `programs` workers."""
        loads: dict[int, int] = {}
        for piece in self.pieces:
            loads[piece.program] = loads.get(piece.program, 0) + piece.hi - piece.lo + self.fixed_cost
        workers = [0] * self.programs
        for program in sorted(loads):
            heapq.heapreplace(workers, workers[0] + loads[program])
        return max(workers)


def plan_of(items, programs, *, s_q=0, topk=0, extra_topk=0, has_length=True, pages=PAGES, plan=plan_decode):
    """A plan of 16 heads for a device of `programs` multiprocessors: dense, or sparse with `s_q` queries a request.

    That of the portable kernels launches a program for every item at least, that of the Hopper path no more than `programs`.
    """
    cache = TensorSpec((PAGES, PAGE_SIZE, 1, 576), "bfloat16")
    facts = DeviceFacts("a device", (9, 0), programs, 232_448)
    if not s_q:
        q = TensorSpec((items, 1, 16, 576), "bfloat16")
        problem = make_problem(q, cache, TensorSpec((items, pages), "int32"), TensorSpec((items,), "int32"))
    else:
        batch = items // s_q
        more = {}
        if extra_topk:
            more = {
                "extra_kv_cache": cache,
                "extra_indices": TensorSpec((batch, s_q, extra_topk), "int32"),
                "extra_topk_length": TensorSpec((batch,), "int32"),
            }
        problem = make_problem(
            TensorSpec((batch, s_q, 16, 576), "bfloat16"),
            cache,
            indices=TensorSpec((batch, s_q, topk), "int32"),
            topk_length=TensorSpec((batch,), "int32") if has_length else None,
            **more,
        )
    return plan(problem, facts)


def stretches(step, lengths, raw) -> list[tuple[int, ...]]:
    """What each program of the Hopper kernel makes for itself; the first one writes the list of split items to `raw`."""
    of_call, constants = scalars_of(step), step.constexprs
    programs = of_call["programs"]
    made = []
    for program in range(programs):
        fields = on_numpy(hopper_schedule).stretch(
            tensor(program), Pointer(lengths), of_call["items"], programs, of_call["max_tokens"], Pointer(raw), program == 0,
            constants["UNIT"], constants["FIXED_COST"], constants["SPLIT_COST"], constants["ITEM_CHUNK"],
        )  # fmt: skip
        made.append(tuple(int(field) for field in fields))
    return made


def run(plan, lengths, extra_lengths=None) -> Schedule:
    """Makes the schedule of a plan, checks the memory, and reads it as the attention kernel does."""
    step = plan.launches[0]
    problem, constants, programs = plan.problem, step.constexprs, plan.details["programs"]
    memory = Memory()
    raw = memory.array(plan.buffers["schedule"].shape, "int32")
    lengths = np.asarray(lengths, np.int32)
    extra = lengths if extra_lengths is None else np.asarray(extra_lengths, np.int32)
    unit = constants["UNIT"]
    counts = [np.clip(lengths.astype(np.int64), 0, problem.max_tokens)]
    if not problem.has_length:
        counts = [np.full_like(counts[0], problem.max_tokens)]
    if problem.extra is not None:
        counts.append(np.clip(extra.astype(np.int64), 0, problem.extra_width))
    units = np.maximum(sum(-(-count // unit) for count in counts), 1)
    if problem.sparse:
        units = np.repeat(units, problem.s_q)
    items = len(units)

    if step.kernel is schedule_kernel:
        launch(step, {"schedule": raw, "lengths": lengths, "table": lengths, "extra_lengths": extra})
        launched = listed = max(programs, items)
        work = raw[: FIELDS * listed].reshape(listed, FIELDS).tolist()
    else:
        launched, listed = programs, 0
        assert step.grid == (programs, 1, 1)  # 16 heads are one tile
        work = stretches(step, lengths, raw)
    memory.assert_guards_hold()
    assert raw.size == schedule_size(programs, listed, items)
    pieces = []
    for program, (first, last, first_unit, end_unit, first_slot, last_slot) in enumerate(work):
        for item in range(first, last + 1):
            assert 0 <= item < items
            lo = first_unit if item == first else 0
            hi = min(end_unit, int(units[item])) if item == last else int(units[item])
            slot = first_slot if item == first else last_slot if item == last else -1
            pieces.append(Piece(item, lo, hi, slot, program))
    count = int(raw[FIELDS * listed])
    entries = raw[FIELDS * listed + 1 :][: 3 * count].reshape(count, 3)
    assert (raw[FIELDS * listed + 1 + 3 * count :] == GUARD).all()  # nothing behind the list
    rows = problem.h_q * (1 if problem.sparse else problem.s_q)
    slots = plan.buffers["partial_out"].shape[0] // rows if programs > 1 else 0
    return Schedule(
        pieces,
        [tuple(e) for e in entries.tolist()],
        units,
        programs,
        launched,
        slots,
        constants["FIXED_COST"],
        constants["SPLIT_COST"],
    )


def assert_valid(schedule: Schedule) -> None:
    """Every unit once; pieces in order; slots of their own; the list of split items complete; balanced."""
    by_item: dict[int, list[Piece]] = {}
    for piece in schedule.pieces:
        by_item.setdefault(piece.item, []).append(piece)
    assert len(by_item) == len(schedule.units)
    split = []
    used = []
    for item in range(len(schedule.units)):
        pieces = by_item[item]
        assert [piece.lo for piece in pieces] == [0, *(piece.hi for piece in pieces[:-1])]
        assert pieces[-1].hi == schedule.units[item]
        assert all(piece.lo < piece.hi for piece in pieces)
        if len(pieces) == 1:
            assert pieces[0].slot == -1
            continue
        first = pieces[0].slot
        assert [piece.slot for piece in pieces] == list(range(first, first + len(pieces)))
        assert [piece.program for piece in pieces] == list(range(pieces[0].program, pieces[0].program + len(pieces)))
        split.append((item, first, len(pieces)))
        used += range(first, first + len(pieces))
    assert schedule.splits == split
    assert len(set(used)) == len(used)
    assert all(0 <= slot < schedule.slots for slot in used)
    if schedule.programs > 1:
        assert schedule.slots == num_slots(schedule.programs, len(schedule.units))
    assert schedule.slots <= schedule.programs + len(schedule.units)
    if not schedule.whole:
        # A program pays the fixed cost of the piece it begins with, which its stretch does not count.
        assert schedule.makespan() <= schedule.quota + schedule.fixed_cost
    else:
        for piece, after in pairwise(schedule.pieces):
            assert after.item == piece.item + 1
        # Whole items save the cost of splitting; for that they may take longer by some blocks, whatever the sizes.
        assert schedule.makespan() <= schedule.quota + 3 * (schedule.fixed_cost + schedule.split_cost)


def draw_lengths(rng: np.random.Generator, batch: int, most: int) -> np.ndarray:
    """Lengths of many kinds: alike, spread, mostly short, some empty, some beyond the table."""
    kind = rng.integers(0, 7)
    if kind == 0:
        lengths = np.full(batch, rng.integers(0, most + 1))
    elif kind == 1:
        lengths = rng.integers(0, most + 1, batch)
    elif kind == 2:
        lengths = np.exp(rng.uniform(0, np.log(most + 1), batch)).astype(np.int64)
    elif kind == 3:
        lengths = np.where(rng.random(batch) < 0.5, 0, rng.integers(0, most + 1, batch))
    elif kind == 4:
        lengths = rng.integers(0, 65, batch)
        lengths[rng.integers(batch)] = most
    elif kind == 5:
        lengths = most - rng.integers(0, most // 10 + 1, batch)
    else:
        lengths = rng.choice([-(2**31), -1, 0, 1, 63, 64, 65, most, 2**31 - 1], batch)
    return lengths.astype(np.int32)


both_plans = pytest.mark.parametrize(
    "plan", [pytest.param(plan_decode, id="program-per-item"), pytest.param(plan_dense, id="persistent")]
)


@both_plans
@pytest.mark.parametrize("programs", [1, 2, 3, 7, 16, 17])
@pytest.mark.parametrize("seed", range(3))
def test_few_programs(programs, seed, plan):
    rng = np.random.default_rng([programs, seed])
    for _ in range(40):
        batch = int(rng.integers(1, 60 if plan is plan_dense else 20))
        assert_valid(run(plan_of(batch, programs, pages=64, plan=plan), draw_lengths(rng, batch, 4096)))


@both_plans
@pytest.mark.parametrize("programs", [66, 108, 132, 264])
@pytest.mark.parametrize("seed", range(3))
def test_programs_of_a_card(programs, seed, plan):
    rng = np.random.default_rng([programs, seed])
    for _ in range(25):
        batch = int(rng.integers(1, 300)) if rng.integers(2) else int(rng.integers(1, 20))
        assert_valid(run(plan_of(batch, programs, plan=plan), draw_lengths(rng, batch, PAGES * PAGE_SIZE)))


@pytest.mark.parametrize("programs", [1, 6, 132])
def test_persistent_programs_take_items_one_after_the_other(programs):
    """Whole items: all programs but the last ones have as many, and idle ones have none."""
    for batch in (1, programs, programs + 1, 2 * programs, 3 * programs - 1, 5 * programs + 1):
        schedule = run(plan_of(batch, programs, plan=plan_dense), np.full(batch, 1))
        assert_valid(schedule)
        assert schedule.launched == programs
        if not schedule.whole:
            continue
        each = -(-batch // programs)
        counts = np.bincount([piece.program for piece in schedule.pieces], minlength=programs).tolist()
        busy = -(-batch // each)
        assert counts == [each] * (busy - 1) + [batch - each * (busy - 1)] + [0] * (programs - busy)
        assert schedule.makespan() <= schedule.quota + schedule.fixed_cost + schedule.split_cost


@pytest.mark.parametrize("programs", [6, 132])
def test_one_item_too_many_is_split(programs):
    """Left whole, one program would take twice as long as all others."""
    schedule = run(plan_of(programs + 1, programs, plan=plan_dense), np.full(programs + 1, 100_000))
    assert not schedule.whole
    assert_valid(schedule)


@pytest.mark.parametrize("programs", [1, 6, 66, 132])
def test_queries_with_indices_and_an_extra_scope(programs):
    rng = np.random.default_rng(programs)
    for _ in range(40):
        batch, s_q, topk = int(rng.integers(1, 40)), int(rng.integers(1, 4)), int(rng.integers(1, 2049))
        extra = int(rng.integers(1, 1025)) if rng.integers(2) else 0
        has_length = bool(rng.integers(2)) or not extra
        plan = plan_of(batch * s_q, programs, s_q=s_q, topk=topk, extra_topk=extra, has_length=has_length)
        assert_valid(run(plan, draw_lengths(rng, batch, topk), draw_lengths(rng, batch, extra) if extra else None))


@pytest.mark.parametrize("programs", [6, 132])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("length", [0, 1, 4096, 100_000])
@both_plans
def test_a_full_card_of_equal_lengths_stays_whole(programs, rounds, length, plan):
    schedule = run(plan_of(programs * rounds, programs, plan=plan), np.full(programs * rounds, length))
    assert schedule.whole
    assert schedule.splits == []
    assert_valid(schedule)


@both_plans
@pytest.mark.parametrize("programs", [6, 66, 132])
def test_load_follows_the_lengths(programs, plan):
    """One plan serves a batch as it goes from all short to one long request, and stays balanced."""
    batch = 24
    plan = plan_of(batch, programs, plan=plan)
    for longest in [0, 1, 64, 1000, 10_000, 100_000, PAGES * PAGE_SIZE]:
        for where in (0, 11, batch - 1):
            lengths = np.full(batch, 60)
            lengths[where] = longest
            schedule = run(plan, lengths)
            assert_valid(schedule)
            if longest >= 10_000:
                pieces = [n for item, _, n in schedule.splits if item == where]
                assert pieces[0] >= programs // 2


@pytest.mark.parametrize("lengths", [[0], [1], [262_144], [0, 0], [262_144, 0], [0, 262_144]])
@pytest.mark.parametrize("programs", [1, 2, 132])
@both_plans
def test_batches_of_one_and_two(lengths, programs, plan):
    assert_valid(run(plan_of(len(lengths), programs, plan=plan), lengths))


@both_plans
@pytest.mark.parametrize(("kind", "programs"), [("equal", 132), ("ragged", 16), ("one long", 16)])
def test_seventy_thousand_requests(kind, programs, plan):
    batch = 70_000
    lengths = np.full(batch, 130)
    if kind == "ragged":
        lengths = np.random.default_rng(0).integers(0, 4000, batch)
    elif kind == "one long":
        lengths[-1] = PAGES * PAGE_SIZE
    schedule = run(plan_of(batch, programs, plan=plan), lengths)
    assert_valid(schedule)
    assert schedule.whole == (kind == "equal")


@pytest.mark.parametrize("programs", [1, 2, 7, 132])
@pytest.mark.parametrize("lengths", ["longest", "one long", "ragged"])
def test_the_longest_line_of_the_hopper_path(programs, lengths):
    """It counts in 32 bits, and refuses what could be too long for them."""
    pages = 2**31 // PAGE_SIZE - 64
    plans = [plan_of(batch, programs, pages=pages, plan=plan_dense) for batch in (63, 65)]
    assert [bool(refusals(plan.problem, plan.facts)) for plan in plans] == [False, True]
    many = np.full(63, 2**31 - 1)
    if lengths == "one long":
        many[:-1] = 1
    elif lengths == "ragged":
        many = np.random.default_rng(0).integers(0, 2**31, 63)
    assert_valid(run(plans[0], many))


@pytest.mark.parametrize("programs", [7, 132])
def test_totals_beyond_32_bits(programs):
    """The units of all requests together need 64 bits."""
    batch, pages = 3000, 2**31 // PAGE_SIZE - 64
    schedule = run(plan_of(batch, programs, pages=pages), np.full(batch, 2**31 - 1))
    assert int(schedule.units.sum()) > 2**35
    assert not schedule.whole
    assert_valid(schedule)


@pytest.mark.parametrize("programs", [1, 2, 3, 64, 132, 1000])
@pytest.mark.parametrize("items", [1, 2, 100, 131, 132, 133, 10_000])
def test_scratch_is_bounded_by_programs_and_batch(programs, items):
    assert num_slots(programs, items) <= programs + items
    assert num_slots(programs, items) <= 2 * programs
