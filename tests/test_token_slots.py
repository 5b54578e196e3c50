"""`token_slots` of both front ends: where tokens lie, where there is none, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.test_cache import convert
from tests.writer_calls import FRAMEWORKS, module_of

TABLE = np.array([[5, 0, -1], [2, 7, 2147480000]], np.int32)


def slots_of(framework: str, table: Any, positions: Any, page_size: Any = 16) -> np.ndarray:
    found = module_of(framework).token_slots(convert(framework, table), convert(framework, positions), page_size)
    assert str(found.dtype).endswith("int32")
    return np.asarray(found)


@pytest.mark.parametrize("framework", FRAMEWORKS)
class TestBoth:
    @pytest.mark.parametrize("index", ["int32", "int64"])
    @pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 7), (2, 3, 5), (2, 0), (2, 4, 0)])
    def test_slots(self, framework: str, shape: tuple[int, ...], index: str) -> None:
        positions = np.random.default_rng(0).integers(-3, 32, shape).astype(index)
        expected = np.full(shape, -1)
        for at, position in np.ndenumerate(positions):
            if position >= 0:
                expected[at] = TABLE[at[0], position // 16] * 16 + position % 16
        np.testing.assert_array_equal(slots_of(framework, TABLE, positions), expected)

    def test_where_there_is_none(self, framework: str) -> None:
        """Below 0; on a page below 0, or one whose slots int32 does not hold; behind the table."""
        positions = np.array([[-1, -(2**31), 15, 16, 31, 32, 47, 48, 2**31 - 1]] * 2, np.int32)
        expected = [[-1, -1, 95, 0, 15, -1, -1, -1, -1], [-1, -1, 47, 112, 127, -1, -1, -1, -1]]
        np.testing.assert_array_equal(slots_of(framework, TABLE, positions), expected)

    def test_positions_beyond_int32(self, framework: str) -> None:
        """As numpy has them: JAX without 64-bit types would take them for others."""
        positions = np.array([[2**32 + 1, 2**32, -(2**32), 1]] * 2, np.int64)
        table = TABLE if framework == "jax" else convert(framework, TABLE)
        given = positions if framework == "jax" else convert(framework, positions)
        found = module_of(framework).token_slots(table, given, 16)
        np.testing.assert_array_equal(np.asarray(found), [[-1, -1, -1, 81], [-1, -1, -1, 33]])

    def test_the_largest_slots(self, framework: str) -> None:
        table = np.array([[2**31 - 1, 2**31 // 64 - 1, 2**31 // 64]], np.int32)
        ones = slots_of(framework, table, np.array([[0, 1, 2]], np.int32), page_size=1)
        np.testing.assert_array_equal(ones, table)
        found = slots_of(framework, table, np.array([[0, 64, 127, 128]], np.int32), page_size=64)
        np.testing.assert_array_equal(found, [[-1, 2**31 - 64, 2**31 - 1, -1]])

    @pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
    def test_no_tables(self, framework: str, shape: tuple[int, int]) -> None:
        found = slots_of(framework, np.zeros(shape, np.int32), np.zeros((shape[0], 4), np.int32))
        np.testing.assert_array_equal(found, np.full((shape[0], 4), -1))

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"block_table": [[1, 2]]}, "^block_table: expected a "),
            ({"block_table": TABLE.astype(np.int64)}, r"^block_table: expected int32 of shape \[b, max_pages\], got int64 "),
            ({"block_table": TABLE[0]}, r"^block_table: expected int32 of shape \[b, max_pages\], got int32 \[3\]"),
            ({"positions": 3}, "^positions: expected a "),
            ({"positions": np.zeros((2, 1), np.float32)}, r"^positions: expected int32 or int64 of .*, got float32"),
            ({"positions": np.zeros((3, 2), np.int32)}, r"^positions: expected .* \[b=2, ...\], got int32 \[3, 2\]"),
            ({"positions": np.zeros((), np.int32)}, r"^positions: expected .* \[b=2, ...\], got int32 \[\]"),
            ({"page_size": 0}, "^page_size: expected a positive int, got 0"),
            ({"page_size": 16.0}, r"^page_size: expected a positive int, got 16\.0"),
            ({"page_size": 2**31}, r"^page_size: expected at most 2\*\*31 - 1, got 2147483648"),
        ],
    )
    def test_wrong_calls(self, framework: str, changed: dict[str, Any], message: str) -> None:
        if framework == "jax" and getattr(changed.get("block_table"), "dtype", None) == np.int64:
            changed = {"block_table": TABLE.astype(np.int64)}  # as numpy has it; jax.numpy would make int32 of it
        else:
            changed = {k: convert(framework, v) if isinstance(v, np.ndarray) else v for k, v in changed.items()}
        given = {"block_table": convert(framework, TABLE), "positions": convert(framework, np.zeros((2, 1), np.int32))}
        with pytest.raises(ValueError, match=message):
            module_of(framework).token_slots(**{**given, "page_size": 16, **changed})

    def test_a_token_is_found_where_it_was_put(self, framework: str) -> None:
        """`append` at these slots, `decode` by the block table and by these slots as indices: one result."""
        module = module_of(framework)
        rng = np.random.default_rng(1)
        arrays = {"q": rng.standard_normal((2, 1, 4, 24)), "latent": rng.standard_normal((60, 24))}
        q, latent = (convert(framework, x.astype(np.float16)) for x in arrays.values())
        cache = convert(framework, np.zeros((8, 16, 1, 24), np.float16))
        table = convert(framework, np.array([[5, 0, 3], [2, 7, 4]], np.int32))
        positions = np.where(np.arange(30) < [[30], [19]], np.arange(30), -1).astype(np.int32)
        slots = module.token_slots(table, convert(framework, positions), 16)
        cache = module.append(cache, latent, None, slots.reshape(-1))
        lengths = convert(framework, np.array([30, 19], np.int32))
        dense = module.decode(q, cache, table, lengths, head_dim_v=16, implementation="reference")
        sparse = module.decode(q, cache, indices=slots[:, None], head_dim_v=16, implementation="reference")
        for x, y in zip(dense, sparse, strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2**-10)  # fp16, of fp32 sums in any order


def test_on_the_device_without_waiting() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    mla_torch = module_of("torch")
    table, positions = torch.from_numpy(TABLE), torch.tensor([[3, 17], [-1, 33]])
    expected = mla_torch.token_slots(table, positions, 16)
    wide = torch.stack([table, table], -1)[..., 0]
    assert torch.equal(mla_torch.token_slots(wide, positions.t().contiguous().t(), 16), expected)
    found = mla_torch.token_slots(table.to("meta"), positions.to("meta"), 16)  # so it reads no value
    assert found.shape == (2, 2) and found.dtype == torch.int32
    with pytest.raises(ValueError, match=r"^positions: expected device cpu, as block_table has, got meta"):
        mla_torch.token_slots(table, positions.to("meta"), 16)


@pytest.mark.gpu
def test_in_a_graph() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from tests.gpu_tools import capture

    mla_torch = module_of("torch")
    table, positions = torch.from_numpy(TABLE).cuda(), torch.zeros((2, 5), dtype=torch.int32, device="cuda")
    replay, found = capture(lambda: mla_torch.token_slots(table, positions, 16))
    for start in (0, 14, 30):
        positions.copy_(torch.arange(start, start + 5))
        replay()
        assert torch.equal(found.cpu(), mla_torch.token_slots(table.cpu(), positions.cpu(), 16))


def test_under_transformations() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    mla_jax = module_of("jax")
    positions = np.array([[3, 17, -1], [0, 33, 20]], np.int32)
    expected = np.array([[83, 1, -1], [32, -1, 116]])
    jitted = jax.jit(mla_jax.token_slots, static_argnums=2)
    np.testing.assert_array_equal(jitted(TABLE, positions, 16), expected)
    columns = jax.vmap(lambda p: mla_jax.token_slots(TABLE, p, 16), in_axes=1, out_axes=1)
    np.testing.assert_array_equal(columns(positions), expected)
    with pytest.raises(ValueError, match=r"^positions: expected"):
        jitted(TABLE, positions[:1], 16)
