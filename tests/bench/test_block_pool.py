"""The peer of bench/micro_arena.py does the work it is timed for."""

from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "bench"


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    from block_pool import BlockPool

    return BlockPool(6)


def ids(blocks):
    return [block.block_id for block in blocks]


def free_ids(pool):
    found, block = [], pool.free_block_queue.head.next_free_block
    while block is not pool.free_block_queue.tail:
        assert block.next_free_block.prev_free_block is block
        found.append(block.block_id)
        block = block.next_free_block
    assert len(found) == pool.get_num_free_blocks()
    return found


def test_oldest_free_first_and_a_sequence_goes_back_tail_first(pool):
    a = pool.get_new_blocks(3)
    assert (ids(a), free_ids(pool)) == ([1, 2, 3], [4, 5])
    pool.free_blocks(reversed(a))
    assert free_ids(pool) == [4, 5, 3, 2, 1]
    assert ids(pool.get_new_blocks(3)) == [4, 5, 3]
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        pool.get_new_blocks(3)
    assert ids(pool.get_new_blocks(2)) == [2, 1]
    assert (free_ids(pool), pool.get_new_blocks(0)) == ([], [])


def test_shared_blocks_stay_until_the_last_holder_leaves(pool):
    a = pool.get_new_blocks(2)
    pool.touch(a)
    pool.free_blocks(reversed(a))
    assert free_ids(pool) == [3, 4, 5]
    pool.free_blocks(reversed(a))
    assert free_ids(pool) == [3, 4, 5, 2, 1]


def test_a_free_block_is_found_by_its_hash_until_it_is_taken(pool):
    a = pool.get_new_blocks(2)
    pool.cache_block(a[0], b"x")
    pool.cache_block(a[1], b"x")
    pool.free_blocks(a)
    hit = pool.get_cached_block(b"x")
    pool.touch([hit])
    assert (hit.block_id, hit.ref_cnt, free_ids(pool)) == (1, 1, [3, 4, 5, 2])
    pool.get_new_blocks(4)
    assert pool.get_cached_block(b"x") is hit
    assert pool.blocks[2].block_hash is None
    pool.free_blocks([hit])
    assert ids(pool.get_new_blocks(1)) == [1]
    assert pool.get_cached_block(b"x") is None
