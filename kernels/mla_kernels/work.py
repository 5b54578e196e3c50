"""How the work of a call is shared out and merged again: what the plans of all implementations have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from .combine import SHAPES, combine_kernel, shape_for
from .device import DeviceFacts
from .launch import Buffer, Launch
from .problem import Problem, row_major_strides
from .schedule import WORK_FIELDS, num_slots, schedule_kernel, schedule_size

T = TypeVar("T", bound=Any)


def power_of_two(n: int) -> int:
    """The least power of two that is not below n; 0 for none."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def overridden(chosen: T, overrides: Mapping[str, int] | None) -> T:
    """A dataclass of a plan with some fields replaced; ValueError for a name that it does not have."""
    if not overrides:
        return chosen
    known = asdict(chosen)
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ValueError(f"overrides: {', '.join(unknown)} unknown, known are {', '.join(known)}")
    return replace(chosen, **overrides)


ITEM_CHUNK = 1024  # items that a schedule looks at at once
NARROWEST = 64  # columns of a task of the combine kernel


@dataclass(frozen=True)
class Geometry:
    """How a problem falls into items, rows and columns.

    Attributes:
      items: independent softmaxes over one list of keys: requests, or (request, query) pairs.
      queries: items per request.
      group: query heads per key-value head.
      rows: packed rows of an item and key-value head.
      block_c: columns of the value part, padded to a power of two.
      block_r: columns of the rest of the key, padded; 0 if there is none.
    """

    items: int
    queries: int
    group: int
    rows: int
    block_c: int
    block_r: int

    @staticmethod
    def of(problem: Problem) -> Geometry:
        group = problem.h_q // problem.h_kv
        rest = problem.d_qk - problem.d_v
        return Geometry(
            items=problem.batch * (problem.s_q if problem.sparse else 1),
            queries=problem.s_q if problem.sparse else 1,
            group=group,
            rows=group if problem.sparse else group * problem.s_q,
            block_c=max(power_of_two(problem.d_v), 16),
            block_r=max(power_of_two(rest), 16) if rest else 0,
        )


@dataclass(frozen=True)
class Work:
    """The programs of a call and the ranges of keys that they take.

    Attributes:
      num_splits: of every item, as the caller or the plan has fixed it; otherwise None.
      unit: keys that a range is counted in.
      programs: that a schedule makes equal stretches for.
      launched: programs that are launched, idle ones included.
      slots: of the scratch, for partial results; 0 if nothing can be split.
      each_makes: every program finds its own work: the schedule, of which only the list of split items is written, or `even`.
      even: pieces of every item where that is known without a schedule, though a program may have several items; or 0.
      compact: pieces are written as scaled fp16 (see `combine_kernel`).
    """

    problem: Problem
    geometry: Geometry
    num_splits: int | None
    unit: int
    programs: int
    launched: int
    slots: int
    each_makes: bool = False
    even: int = 0
    compact: bool = False

    @staticmethod
    def made(problem: Problem, unit: int, programs: int) -> Work:
        """By a schedule that a kernel makes on the device from the lengths."""
        geometry = Geometry.of(problem)
        slots = num_slots(programs, geometry.items) if programs > 1 else 0
        return Work(problem, geometry, None, unit, programs, max(programs, geometry.items), slots)

    @staticmethod
    def made_by_each(problem: Problem, unit: int, programs: int, even: int = 0) -> Work:
        """By a schedule that every program makes for itself, or in `even` pieces of every item."""
        made = Work.made(problem, unit, programs)
        slots = (made.geometry.items * even if even > 1 else 0) if even else made.slots
        return replace(made, launched=programs, slots=slots, each_makes=True, even=even)

    @staticmethod
    def fixed(problem: Problem, num_splits: int) -> Work:
        """Each item in as many ranges, of as many pages or indices."""
        geometry = Geometry.of(problem)
        launched = geometry.items * num_splits
        unit = 1 if problem.sparse else problem.cache.page_size
        return Work(problem, geometry, num_splits, unit, launched, launched, launched if num_splits > 1 else 0)

    @property
    def all_rows(self) -> int:
        """Rows of an item, of all key-value heads."""
        return self.problem.h_kv * self.geometry.rows

    @property
    def lengths(self) -> str:
        """The array of lengths; what a kernel gets in place of an absent array is one that is there."""
        return "lengths" if self.problem.has_length else "table"

    @property
    def extra_lengths(self) -> str:
        return "extra_lengths" if self.problem.has_extra_length else "table"

    @property
    def sink(self) -> str:
        return "attn_sink" if self.problem.has_sink else "softmax_scale"

    @property
    def schedule(self) -> str:
        return "table" if self.num_splits is not None else "schedule"

    def buffers(self, facts: DeviceFacts) -> dict[str, Buffer]:
        """Results and scratch."""
        problem = self.problem
        rows = self.slots * self.all_rows if self.slots else 1
        buffers = {
            "out": Buffer(problem.out_shape, "float32" if facts.interpreted else problem.dtype),
            "lse": Buffer(problem.lse_shape, "float32"),
            "partial_out": Buffer((rows, problem.d_v), "float16" if self.compact else "float32"),
            "partial_lse": Buffer((rows, 2, 2) if self.compact else (rows,), "float32"),
        }
        if self.num_splits is None and not self.even:
            size = schedule_size(self.programs, self.listed, self.geometry.items)
            buffers["schedule"] = Buffer((size,), "int32")
        return buffers

    @property
    def listed(self) -> int:
        """Programs whose work stands in the schedule."""
        return 0 if self.each_makes or self.num_splits is not None else self.launched

    def output_constants(self) -> dict[str, Any]:
        """What the kernels that write results know of them."""
        problem = self.problem
        strides = problem.out_strides or row_major_strides(problem.out_shape)[:3]
        return {
            "S_Q": problem.s_q,
            "H_Q": problem.h_q,
            "GROUP": self.geometry.group,
            "ROWS": self.geometry.rows,
            "KV_HEADS": problem.h_kv,
            "D_V": problem.d_v,
            "SPARSE": problem.sparse,
            "HAS_SINK": problem.has_sink,
            "OUT_STRIDE_B": strides[0],
            "OUT_STRIDE_S": strides[1],
            "OUT_STRIDE_H": strides[2],
            "FIXED_SPLITS": self.num_splits is not None,
        }

    def schedule_launches(self, fixed_cost: int, split_cost: int) -> tuple[Launch, ...]:
        """The making of the schedule; nothing where it is fixed.

        Args:
          fixed_cost: what starting and ending an item costs, in units.
          split_cost: what splitting costs a call, in units.
        """
        if self.num_splits is not None or self.each_makes:
            return ()
        problem, items = self.problem, self.geometry.items
        program_block = max(power_of_two(self.programs), 16)
        launch = Launch(
            kernel=schedule_kernel,
            inputs=(self.lengths, self.extra_lengths),
            scalars=(items, self.programs, problem.max_tokens, problem.extra_width),
            outputs=("schedule",),
            constexprs={
                "QUERIES": self.geometry.queries,
                "HAS_LENGTH": problem.has_length,
                "HAS_EXTRA": problem.extra is not None,
                "HAS_EXTRA_LENGTH": problem.has_extra_length,
                "UNIT": self.unit,
                "FIXED_COST": fixed_cost,
                "SPLIT_COST": split_cost,
                "ITEM_CHUNK": ITEM_CHUNK,
                "PAIR_CHUNK": max(8192 // program_block, 8),
                "PROGRAM_BLOCK": program_block,
            },
            grid=(1, 1, 1),
            num_warps=16,
            num_stages=1,
        )
        return (launch,)

    def combine_launches(self, facts: DeviceFacts) -> tuple[Launch, ...]:
        """The merging of partial results; nothing where there can be none."""
        if not self.slots:
            return ()
        items = self.geometry.items
        entries = min(items, self.slots)
        parts = 2 if self.compact else 1  # of a row, which tasks take one by one
        lines, width = self.all_rows * parts, self.problem.d_v // parts
        columns = widest = self.geometry.block_c // parts
        # The order of sums follows from the columns of a task, so that a caller's number of splits keeps the batch out of them.
        if self.compact:
            _, lines_of_task, columns = shape_for(self.num_splits or self.even or cdiv(self.programs, items))
            narrower = len(SHAPES) - 1
        else:
            # A task is little more than loads that wait for one another: rows are cut only as far as it takes to have tasks
            # for all multiprocessors, and the fewer columns a task has, the more pieces it loads at once.
            rows = lines * (1 if self.problem.num_splits is not None else entries)
            while columns > NARROWEST and rows * cdiv(width, columns) < 4 * facts.multiprocessors:
                columns //= 2
            lines_of_task, narrower = 1, max(widest // NARROWEST, 1).bit_length() - 1
        tasks = entries * cdiv(lines, lines_of_task) * cdiv(width, columns)
        most = (32 if self.compact else 16) * facts.multiprocessors
        overlaps = facts.capability >= (9, 0) and not facts.interpreted
        constants = self.output_constants()
        del constants["FIXED_SPLITS"]
        launch = Launch(
            kernel=combine_kernel,
            inputs=(self.schedule, "partial_out", "partial_lse", self.sink, "out", "lse"),
            scalars=(WORK_FIELDS.value * self.listed, items, self.num_splits or self.even, columns),
            outputs=("out", "lse"),
            constexprs={
                **constants,
                "COMPACT": self.compact,
                "WIDEST": widest,
                "NARROWER": narrower,
                "OVERLAPS": overlaps,
            },
            grid=(min(tasks, most), 1, 1),
            num_warps=1 if self.compact else 4,
            num_stages=1,
            overlaps=overlaps and items <= self.programs,  # where a call is short
        )
        return (launch,)

    def details(self) -> dict[str, Any]:
        """For `explain`."""
        return {
            "items": self.geometry.items,
            "programs": self.programs,
            "num_splits": self.num_splits or self.even or "made on the device",
        }
