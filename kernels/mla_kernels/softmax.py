"""The few lines of the online softmax that the attention and the combine kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # a running maximum that is below every score and still finite


@triton.jit
def sink_factor(lse, sink):
    """What an attention sink leaves of a row whose natural log-sum-exp is `lse`."""
    return 1.0 / (1.0 + tl.exp2((sink - lse) * LOG2E))


@triton.jit
def row_coordinates(item, row, S_Q: tl.constexpr, GROUP: tl.constexpr, SPARSE: tl.constexpr):
    """Request, query and head (within a key-value head's group) of a packed row of an item."""
    if SPARSE:
        request = item // S_Q
        query = row * 0 + item % S_Q
        head = row
    else:
        request = item
        query = row // GROUP
        head = row % GROUP
    return request, query, head
