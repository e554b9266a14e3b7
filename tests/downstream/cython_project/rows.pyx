"""A table of float32 rows kept in pages: what a stranger's Cython project builds on the arena.

Rows of `width` floats, `page_rows` of them a page. Forks share pages and copy on write; a prefix index finds rows by key.
"""

from libc.stdint cimport int32_t, int64_t, uint32_t

from pagedkv.core.arena cimport Arena, pkv_arena
from pagedkv.core.check cimport pkv_check
from pagedkv.core.prefix cimport PrefixIndex, pkv_prefix_insert, pkv_prefix_match
from pagedkv.core.sequence cimport (
    Sequence,
    pkv_seq,
    pkv_seq_append_page,
    pkv_seq_share_pages,
    pkv_seq_snapshot,
    pkv_seq_truncate_pages,
    pkv_seq_write_page,
)


cdef float *row_at(pkv_seq *s, int64_t row, int64_t width, int64_t page_rows) noexcept nogil:
    cdef pkv_arena *a = s.arena
    cdef uint32_t page = s.page_indices[row // page_rows]
    return <float *>(a.storage + page * a.page_stride) + row % page_rows * width


cdef class RowPool(Arena):
    """An arena whose pages hold rows."""
    cdef readonly int64_t width, page_rows

    def __init__(self, n_pages, width, page_rows):
        super().__init__(n_pages, 4 * width * page_rows, guard=True)
        self.width = width
        self.page_rows = page_rows

    def table(self, max_pages=64):
        return RowTable(self, 0, max_pages)

    def violations(self):
        cdef int64_t n
        with nogil:
            n = pkv_check(self.ptr, 3, NULL, 0)
        return n


cdef class RowTable(Sequence):
    """Rows 0, 1, 2 ... of one fork; n_tokens of the C struct counts them."""

    def __len__(self):
        return self.ptr.n_tokens

    def extend(self, const float[:, ::1] rows):
        """Append rows; returns 0 or the negated verdict of the first page that could not be had."""
        cdef RowPool pool = self.arena
        cdef int64_t width = pool.width
        cdef int64_t page_rows = pool.page_rows
        cdef int64_t n = rows.shape[0]
        cdef int64_t k, j, row
        cdef int64_t status = 0
        cdef float *to
        with nogil:
            for k in range(n):
                row = self.ptr.n_tokens
                if row % page_rows == 0:
                    status = pkv_seq_append_page(self.ptr)
                else:
                    status = pkv_seq_write_page(self.ptr, row // page_rows)
                if status < 0:
                    break
                to = row_at(self.ptr, row, width, page_rows)
                for j in range(width):
                    to[j] = rows[k, j]
                self.ptr.n_tokens += 1
        return min(status, <int64_t>0)

    def column_sums(self, float[::1] out):
        """Sum of each column over all rows, read through the page table."""
        cdef RowPool pool = self.arena
        cdef int64_t width = pool.width
        cdef int64_t page_rows = pool.page_rows
        cdef int64_t k, j
        cdef float *row
        with nogil:
            for j in range(width):
                out[j] = 0
            for k in range(self.ptr.n_tokens):
                row = row_at(self.ptr, k, width, page_rows)
                for j in range(width):
                    out[j] += row[j]

    def fork(self):
        cdef RowTable copy = RowTable.__new__(RowTable)
        cdef int64_t status
        with nogil:
            status = pkv_seq_snapshot(&copy.ptr, self.ptr)
        copy.arena = self.arena
        return copy if status == 0 else status

    def borrow(self, RowTable other, int64_t n_pages):
        """Start with the first pages of another table."""
        cdef RowPool pool = self.arena
        cdef int64_t status
        with nogil:
            status = pkv_seq_share_pages(self.ptr, other.ptr.page_indices, n_pages)
            if status == 0:
                self.ptr.n_tokens = n_pages * pool.page_rows
        return status

    def cut(self, int64_t n_pages):
        cdef RowPool pool = self.arena
        cdef int64_t status
        with nogil:
            status = pkv_seq_truncate_pages(self.ptr, n_pages)
            if status == 0:
                self.ptr.n_tokens = n_pages * pool.page_rows
        return status


def publish(PrefixIndex index, RowTable table, const int32_t[::1] keys):
    """Pages of the table that can now be found by these keys."""
    cdef int64_t status
    with nogil:
        status = pkv_prefix_insert(index.ptr, table.ptr, &keys[0], keys.shape[0])
    return status


def find(PrefixIndex index, RowTable table, const int32_t[::1] keys):
    """Pages found for these keys, now shared by the table."""
    cdef int64_t status
    with nogil:
        status = pkv_prefix_match(index.ptr, table.ptr, &keys[0], keys.shape[0])
    return status
