"""The schedule, made as a plan makes it, against its definition in plain Python.

That of the portable plan is made by a kernel, which is interpreted; that of the Hopper path by each program for itself.
"""

import heapq
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mla_kernels.device import DeviceFacts
from mla_kernels.formats import V32_FP8
from mla_kernels.hopper import schedule as hopper_schedule
from mla_kernels.hopper.dense import dense_kernel
from mla_kernels.hopper.plan import plan_dense, plan_sparse, refusals
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
HOPPER = on_numpy(hopper_schedule)


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


def plan_of(
    items,
    programs,
    *,
    s_q=0,
    topk=0,
    extra_topk=0,
    has_length=True,
    has_extra_length=True,
    pages=PAGES,
    num_splits=None,
    plan=plan_decode,
):
    """A plan of 16 heads for a device of `programs` multiprocessors: dense, or sparse with `s_q` queries a request.

    That of the portable kernels launches a program for every item at least, that of the Hopper path no more than `programs`.
    """
    row, dtype = (V32_FP8.token_bytes, V32_FP8.dtype) if plan is plan_sparse else (576, "bfloat16")
    cache = TensorSpec((PAGES, PAGE_SIZE, 1, row), dtype)
    facts = DeviceFacts("a device", (9, 0), programs, 232_448)
    if not s_q:
        q = TensorSpec((items, 1, 16, 576), "bfloat16")
        table, lengths = TensorSpec((items, pages), "int32"), TensorSpec((items,), "int32")
        problem = make_problem(q, cache, table, lengths, num_splits=num_splits)
    else:
        batch = items // s_q
        more = {}
        if extra_topk:
            more = {
                "extra_kv_cache": cache,
                "extra_indices": TensorSpec((batch, s_q, extra_topk), "int32"),
                "extra_topk_length": TensorSpec((batch,), "int32") if has_extra_length else None,
            }
        problem = make_problem(
            TensorSpec((batch, s_q, 16, 576), "bfloat16"),
            cache,
            indices=TensorSpec((batch, s_q, topk), "int32"),
            topk_length=TensorSpec((batch,), "int32") if has_length else None,
            num_splits=num_splits,
            **more,
        )
    return plan(problem, facts)


def stretches(step, lengths, extra_lengths, raw=None) -> list[tuple[int, ...]]:
    """What each program of a Hopper kernel makes for itself; the first one writes the list of split items to `raw`."""
    of_call, constants = scalars_of(step), step.constexprs
    if step.kernel is dense_kernel:
        extra_tokens, scopes = 0, (1, True, False, False)
    else:
        names = ("S_Q", "HAS_LENGTH", "HAS_EXTRA", "HAS_EXTRA_LENGTH")
        extra_tokens, scopes = of_call["extra_tokens"], tuple(constants[name] for name in names)
    _, has_length, _, has_extra_length = scopes
    # Where there are no lengths, there is nothing to read.
    lengths = Pointer(lengths if has_length else lengths[:0])
    extra_lengths = Pointer(extra_lengths if has_extra_length else extra_lengths[:0])
    of_lengths = (lengths, extra_lengths, of_call["max_tokens"], extra_tokens)
    programs, unit, items = of_call["programs"], constants["UNIT"], of_call["items"]
    fixed_cost = constants["FIXED_COST"] if items > programs else 0
    made = []
    for program in range(programs):
        if constants["FIXED_SPLITS"]:
            fields = HOPPER.fixed_stretch(tensor(program), of_call["num_splits"], *of_lengths, *scopes, unit)
        elif pieces := of_call["num_splits"]:
            assert not (has_length or has_extra_length)
            fields = HOPPER.even_stretch(tensor(program), items, programs, pieces, *of_lengths, scopes[0], scopes[2], unit)
        else:
            fields = HOPPER.made_stretch(
                tensor(program), items, programs, *of_lengths, Pointer(raw), program == 0, fixed_cost, *scopes, unit,
                constants["SPLIT_COST"],
            )  # fmt: skip
        made.append(tuple(int(field) for field in fields))
    return made


def units_of(problem, unit, lengths, extra_lengths) -> np.ndarray:
    """Units of each item."""
    counts = [np.clip(lengths.astype(np.int64), 0, problem.max_tokens)]
    if not problem.has_length:
        counts = [np.full_like(counts[0], problem.max_tokens)]
    if problem.extra is not None:
        extra = np.clip(extra_lengths.astype(np.int64), 0, problem.extra_width)
        counts.append(extra if problem.has_extra_length else np.full_like(extra, problem.extra_width))
    units = np.maximum(sum(-(-count // unit) for count in counts), 1)
    return np.repeat(units, problem.s_q) if problem.sparse else units


def run(plan, lengths, extra_lengths=None) -> Schedule:
    """Makes the schedule of a plan, checks the memory, and reads it as the attention kernel does."""
    step = plan.launches[0]
    problem, constants, programs = plan.problem, step.constexprs, plan.details["programs"]
    memory = Memory()
    raw = memory.array(plan.buffers["schedule"].shape, "int32")
    lengths = np.asarray(lengths, np.int32)
    extra = lengths if extra_lengths is None else np.asarray(extra_lengths, np.int32)
    units = units_of(problem, constants["UNIT"], lengths, extra)
    items = len(units)

    if step.kernel is schedule_kernel:
        launch(step, {"schedule": raw, "lengths": lengths, "table": lengths, "extra_lengths": extra})
        launched = listed = max(programs, items)
        work = raw[: FIELDS * listed].reshape(listed, FIELDS).tolist()
    else:
        launched, listed = programs, 0
        assert step.grid == (programs, 1, 1)  # 16 heads are one tile
        work = stretches(step, lengths, extra, raw)
    memory.assert_guards_hold()
    persistent = step.kernel is not schedule_kernel
    even = scalars_of(step)["num_splits"] if persistent else 0  # then nothing is listed
    assert raw.size == (1 if even else schedule_size(programs, listed, items))
    pieces = []
    for program, (first, last, first_unit, end_unit, first_slot, last_slot) in enumerate(work):
        for item in range(first, last + 1):
            assert 0 <= item < items
            lo = first_unit if item == first else 0
            hi = min(end_unit, int(units[item])) if item == last else int(units[item])
            slot = first_slot if item == first else last_slot if item == last else -1
            pieces.append(Piece(item, lo, hi, slot, program))
    if even:
        assert (raw == GUARD).all()
        entries = np.array([(item, item * even, even) for item in range(items if even > 1 else 0)], np.int32)
    else:
        count = int(raw[FIELDS * listed])
        entries = raw[FIELDS * listed + 1 :][: 3 * count].reshape(count, 3)
        assert (raw[FIELDS * listed + 1 + 3 * count :] == GUARD).all()  # nothing behind the list
    rows = problem.h_q * (1 if problem.sparse else problem.s_q)
    slots = plan.buffers["partial_out"].shape[0] // rows if programs > 1 and even != 1 else 0
    assert slots == (items * even if even > 1 else 0 if even else num_slots(programs, items) if programs > 1 else 0)
    if even:  # the merging is told the same
        assert [launch.scalars[1:3] for launch in plan.launches[1:]] == ([(items, even)] if even > 1 else [])
    return Schedule(
        pieces,
        [tuple(e) for e in entries.tolist()],
        units,
        programs,
        launched,
        slots,
        0 if persistent and items <= programs else constants["FIXED_COST"],
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


@dataclass
class Selection:
    """Queries with indices: arguments of `plan_of`, and lengths of the requests."""

    items: int
    options: dict[str, Any]
    lengths: np.ndarray
    extra_lengths: np.ndarray | None


def draw_selection(rng: np.random.Generator, most_requests: int) -> Selection:
    """With an extra scope or without one, each with lengths or without."""
    batch, s_q, topk = int(rng.integers(1, most_requests)), int(rng.integers(1, 4)), int(rng.integers(1, 2049))
    extra = int(rng.integers(1, 1025)) if rng.integers(2) else 0
    has_length, has_extra_length = (bool(draw) for draw in rng.integers(2, size=2))
    return Selection(
        batch * s_q,
        {"s_q": s_q, "topk": topk, "extra_topk": extra, "has_length": has_length, "has_extra_length": has_extra_length},
        draw_lengths(rng, batch, topk),
        draw_lengths(rng, batch, extra) if extra else None,
    )


ONCE = pytest.mark.once  # what the Hopper path does in numpy
both_plans = pytest.mark.parametrize(
    "plan", [pytest.param(plan_decode, id="program-per-item"), pytest.param(plan_dense, id="persistent", marks=ONCE)]
)


@both_plans
@pytest.mark.parametrize("programs", [1, 2, 3, 7, 16, 17])
@pytest.mark.parametrize("seed", range(2))
def test_few_programs(programs, seed, plan):
    rng = np.random.default_rng([programs, seed])
    for _ in range(40):
        batch = int(rng.integers(1, 60 if plan is plan_dense else 20))
        assert_valid(run(plan_of(batch, programs, pages=64, plan=plan), draw_lengths(rng, batch, 4096)))


@both_plans
@pytest.mark.parametrize("programs", [66, 108, 132, 264])
@pytest.mark.parametrize("seed", range(2))
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
@pytest.mark.parametrize(
    "plan", [pytest.param(plan_decode, id="program-per-item"), pytest.param(plan_sparse, id="persistent", marks=ONCE)]
)
def test_queries_with_indices_and_an_extra_scope(programs, plan):
    rng = np.random.default_rng(programs)
    for _ in range(40):
        case = draw_selection(rng, most_requests=40)
        if plan is plan_decode and not case.options["has_length"]:  # without any lengths it makes no schedule
            case.options["has_extra_length"] = True
            case.options["has_length"] = not case.options["extra_topk"]
        made = plan_of(case.items, programs, **case.options, plan=plan)
        assert plan is plan_decode or not refusals(made.problem, made.facts)
        assert_valid(run(made, case.lengths, case.extra_lengths))


@pytest.mark.parametrize("programs", [6, 132])
def test_the_sparse_hopper_plan_without_lengths(programs):
    """Every query has the same keys: whole where they fill the card evenly, split where there are too few.

    Neither needs a schedule, nor does the former any merging.
    """
    for topk, extra_topk in ((2048, 0), (1, 0), (128, 1024)):
        options = {"s_q": 2, "topk": topk, "extra_topk": extra_topk, "has_length": False, "has_extra_length": False}
        for items in (2, programs, 2 * programs, 2 * programs + 2):
            plan = plan_of(items, programs, **options, plan=plan_sparse)
            schedule = run(plan, np.full(items // 2, GUARD))
            if items <= 2 * programs:
                assert scalars_of(plan.launches[0])["num_splits"] > 0
                assert len(plan.launches) == 1 + (not schedule.whole)
            assert (schedule.units == sum(-(-keys // 128) for keys in (topk, extra_topk))).all()
            assert schedule.whole or items % programs
            assert_valid(schedule)
    schedule = run(plan_of(2, programs, s_q=2, topk=2048, has_length=False, plan=plan_sparse), np.full(1, GUARD))
    assert [item for item, _, _ in schedule.splits] == [0, 1]
    assert min(pieces for _, _, pieces in schedule.splits) >= min(programs // 2, 16)


def assert_fixed(plan, lengths, extra_lengths=None) -> None:
    """Every item in exactly `num_splits` ranges of as many units; the last of them may have fewer, or none."""
    step, problem = plan.launches[0], plan.problem
    extra = lengths if extra_lengths is None else extra_lengths
    work = stretches(step, lengths, extra)
    splits, units = problem.num_splits, units_of(problem, step.constexprs["UNIT"], lengths, extra)
    assert len(work) == step.grid[0] == splits * len(units)
    for item, count in enumerate(units.tolist()):
        programs = range(item * splits, (item + 1) * splits)
        ranges = []
        for program in programs:
            first, last, lo, hi, first_slot, last_slot = work[program]
            assert first == last == item
            assert first_slot == last_slot == (program if splits > 1 else -1)
            ranges.append((lo, hi))
        assert [lo for lo, _ in ranges] == [0, *(hi for _, hi in ranges[:-1])]
        assert ranges[-1][1] == count
        sizes = [hi - lo for lo, hi in ranges]
        each = -(-count // splits)
        full = count // each
        assert sizes[:full] == [each] * full
        assert sum(sizes[full : full + 1]) == count - full * each
        assert not any(sizes[full + 1 :])


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 64])
def test_a_fixed_number_of_splits(num_splits):
    """The Hopper kernels divide an item into pages, or into indices."""
    rng = np.random.default_rng(num_splits)
    for _ in range(10):
        batch = int(rng.integers(1, 12))
        plan = plan_of(batch, 132, num_splits=num_splits, plan=plan_dense)
        assert plan.launches[0].constexprs["UNIT"] == PAGE_SIZE
        assert_fixed(plan, draw_lengths(rng, batch, PAGES * PAGE_SIZE))
        case = draw_selection(rng, most_requests=6)
        plan = plan_of(case.items, 132, **case.options, num_splits=num_splits, plan=plan_sparse)
        assert plan.launches[0].constexprs["UNIT"] == 1
        assert_fixed(plan, case.lengths, case.extra_lengths)


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
@pytest.mark.parametrize("plan", [plan_dense, plan_sparse], ids=["dense", "sparse"])
def test_the_longest_line_of_the_hopper_path(programs, lengths, plan):
    """It counts in 32 bits, and refuses what could be too long for them."""
    table = {"pages": 2**31 // PAGE_SIZE - 64}
    if plan is plan_sparse:
        table = {"s_q": 1, "topk": 2**30, "extra_topk": 2**30 - 4096}
    plans = [plan_of(items, programs, **table, plan=plan) for items in (63, 65)]
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
