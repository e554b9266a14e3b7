"""The block allocator of vLLM v1 as an algorithm, written afresh in pure Python, to compare with: not part of pagedkv.

Blocks are objects on a doubly linked free queue with a fake head and tail. Free blocks that still hold a known prefix
stay on the same queue and keep their hash until they are taken; a hit unlinks them in O(1). Freed blocks go to the far
end, last first.
"""


class Block:
    """One block: refcount, hash of the prefix it ends, neighbours on the free queue."""

    __slots__ = ("hash", "index", "next", "prev", "refs")

    def __init__(self, index):
        self.index = index
        self.refs = 0
        self.hash = None
        self.prev = self.next = None


class BlockPool:
    """Takes, shares, frees and finds blocks."""

    def __init__(self, n_blocks):
        self.blocks = [Block(i) for i in range(n_blocks)]
        self.head, self.tail = Block(-1), Block(-2)
        self.head.next, self.tail.prev = self.tail, self.head
        self.n_free = 0
        self.by_hash = {}
        self._put_back(self.blocks)

    def _put_back(self, blocks):
        last = self.tail.prev
        for block in blocks:
            last.next, block.prev = block, last
            last = block
            self.n_free += 1
        last.next, self.tail.prev = self.tail, last

    def _unlink(self, block):
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self.n_free -= 1

    def _forget(self, block):
        if block.hash is not None:
            del self.by_hash[block.hash]
            block.hash = None

    def take(self, n):
        """n blocks, oldest free ones first, each with one reference."""
        if n > self.n_free:
            raise ValueError(f"{n} blocks wanted, {self.n_free} free")
        taken = []
        for _ in range(n):
            block = self.head.next
            self._unlink(block)
            self._forget(block)
            block.refs = 1
            taken.append(block)
        return taken

    def share(self, blocks):
        """One more reference to each."""
        for block in blocks:
            if block.refs == 0:
                self._unlink(block)
            block.refs += 1

    def free(self, blocks):
        """One reference less to each; those without go back, last block first."""
        idle = []
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs == 0:
                idle.append(block)
        self._put_back(idle)
