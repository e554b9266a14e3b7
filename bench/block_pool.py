"""The block allocator of vLLM v1 as an algorithm, written afresh in pure Python, to compare with: not part of pagedkv.

The parts and their work are those of its `vllm/v1/core`: a dataclass with slots for each block, whose hash is reached
through a property; a doubly linked queue of free blocks with a fake head and a fake tail; a map from hash to block, or
to several blocks of one hash. Blocks that are free but hold a known prefix stay on the queue with their hash and are
evicted when they are taken; a hit takes them out of the middle in O(1). A freed sequence goes to the far end, its last
block first. Left out, because a plain set-up has them switched off: metrics, events, several cache groups.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KVCacheBlock:
    """One block. Only the queue touches the two neighbours, only the pool the rest."""

    block_id: int
    ref_cnt: int = 0
    _block_hash: bytes | None = None
    prev_free_block: KVCacheBlock | None = None
    next_free_block: KVCacheBlock | None = None
    is_null: bool = False

    @property
    def block_hash(self):
        return self._block_hash

    @block_hash.setter
    def block_hash(self, value):
        assert self._block_hash is None
        self._block_hash = value

    def reset_hash(self):
        self._block_hash = None


class FreeBlockQueue:
    """Free blocks, next to be taken first."""

    def __init__(self, blocks):
        self.head, self.tail = KVCacheBlock(-1), KVCacheBlock(-1)
        self.head.next_free_block, self.tail.prev_free_block = self.tail, self.head
        self.n_free = 0
        self.append_n(blocks)

    def popleft_n(self, n):
        """The first n blocks, which must be there."""
        if n == 0:
            return []
        assert self.n_free >= n
        self.n_free -= n
        taken = []
        block = self.head.next_free_block
        for _ in range(n):
            assert block is not None
            taken.append(block)
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            block = following
        if block is not None:
            self.head.next_free_block = block
            block.prev_free_block = self.head
        return taken

    def append_n(self, blocks):
        """Put blocks behind all others, in order."""
        if not blocks:
            return
        last = self.tail.prev_free_block
        assert last is not None
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = self.tail
        self.tail.prev_free_block = last
        self.n_free += len(blocks)

    def remove(self, block):
        """Take a block out of the middle."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"block {block.block_id} is not free")
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.n_free -= 1


class BlockPool:
    """Takes, shares, frees and finds blocks. Block 0 is the null block, which nobody takes."""

    def __init__(self, n_blocks):
        self.blocks = [KVCacheBlock(i) for i in range(n_blocks)]
        self.free_block_queue = FreeBlockQueue(self.blocks)
        self.cached = {}
        self.null_block = self.free_block_queue.popleft_n(1)[0]
        self.null_block.is_null = True

    def get_num_free_blocks(self):
        return self.free_block_queue.n_free

    def get_new_blocks(self, n):
        """n blocks, oldest free ones first, each with one reference."""
        if n > self.get_num_free_blocks():
            raise ValueError(f"{n} blocks wanted, {self.get_num_free_blocks()} free")
        taken = self.free_block_queue.popleft_n(n)
        for block in taken:
            self._maybe_evict(block)
            assert block.ref_cnt == 0
            block.ref_cnt += 1
        return taken

    def _maybe_evict(self, block):
        block_hash = block.block_hash
        if block_hash is None:
            return False
        known = self.cached.pop(block_hash, None)
        if isinstance(known, dict):
            known.pop(block.block_id, None)
            if known:
                self.cached[block_hash] = known
        elif known is not block:
            if known is not None:
                self.cached[block_hash] = known
            return False
        block.reset_hash()
        return True

    def cache_block(self, block, block_hash):
        """Make a full block findable by the hash of the prefix it ends."""
        block.block_hash = block_hash
        known = self.cached.get(block_hash)
        if known is None:
            self.cached[block_hash] = block
        elif isinstance(known, dict):
            known[block.block_id] = block
        else:
            self.cached[block_hash] = {known.block_id: known, block.block_id: block}

    def get_cached_block(self, block_hash):
        """A block of this hash, or None."""
        known = self.cached.get(block_hash)
        return next(iter(known.values())) if isinstance(known, dict) else known

    def touch(self, blocks):
        """One more reference to each, which takes those without out of the queue."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks):
        """One reference less to each; those without go back, in this order. A sequence passes its last block first."""
        ordered = list(ordered_blocks)
        for block in ordered:
            block.ref_cnt -= 1
        self.free_block_queue.append_n([block for block in ordered if block.ref_cnt == 0 and not block.is_null])
