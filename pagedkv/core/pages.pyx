"""Pages handed out and taken back in O(1). Every function here is called with the arena's lock held.

Page states and the one function that performs each transition (the checker mirrors this list):

    state    refcount  indexed  on list     content
    FREE     0         0        free list   meaningless
    IN_USE   > 0       0 or 1   none        owned by the sequences that hold it
    CACHED   0         1        LRU list    findable through the prefix index, evictable

    (uncommitted) -> FREE     pkv_held_grow    pool creation, reserve, or a take that finds the free list empty
    FREE     -> IN_USE        pkv_held_take    refcount 1 (take_free: several)
    IN_USE   -> IN_USE        share, drop      refcount +1, -1
    IN_USE   -> FREE          pkv_held_drop    the last holder leaves and the prefix index does not know the page
    IN_USE   -> CACHED        pkv_held_drop    the last holder leaves and the prefix index knows it
    CACHED   -> IN_USE        pkv_held_revive  a prefix hit, refcount 1
    CACHED   -> FREE          pkv_held_uncache eviction, or its entry is dropped from the index

n_free + n_in_use + n_cached == n_pages at all times. A take looks for a page in this order: free list, growth,
eviction.
"""

from libc.stdint cimport int64_t, uint32_t

from pagedkv.core.internal cimport *
from pagedkv.core.memory cimport pkv_commit
from pagedkv.core.structs cimport *


cdef int64_t pkv_held_grow(pkv_arena *a, int64_t step) noexcept nogil:
    """Commit `step` more pages and put them at the far end of the free list; POOL_EXHAUSTED when max_pages or the
    system forbids.
    """
    cdef int64_t start = a.n_pages
    cdef uint32_t i
    if step <= 0 or step > a.max_pages - start:
        return -PKV_POOL_EXHAUSTED
    if pkv_commit(a.storage, start * a.page_stride, (start + step) * a.page_stride):
        return -PKV_POOL_EXHAUSTED
    if not linked(a, free_head(a)):
        return poison(a, PKV_FAULT_LINK, -1)
    for i in range(<uint32_t>start, <uint32_t>(start + step)):
        a.pages[i].state = PKV_PAGE_FREE
        insert_after(a, decode(a, free_head(a), a.pages[free_head(a)].prev), i)
    pkv_hide(page_at(a, start), step * a.page_stride)
    a.n_pages += step
    a.n_free += step
    a.num_grown += 1
    return 0


cdef int64_t pkv_held_can_take(pkv_arena *a, int64_t n) noexcept nogil:
    """OK when n pages can be taken one after another, committing memory for those that need growth; else
    POOL_EXHAUSTED.
    """
    cdef int64_t short_of = n - a.n_free
    cdef int64_t step
    if short_of <= 0:
        return 0
    if short_of > a.max_pages - a.n_pages + a.n_cached:
        return -PKV_POOL_EXHAUSTED
    step = min(short_of, a.max_pages - a.n_pages)
    return pkv_held_grow(a, min(max(step, a.growth_pages), a.max_pages - a.n_pages)) if step else 0


cdef int64_t pkv_held_take_free(pkv_arena *a, int64_t n, uint32_t *out) noexcept nogil:
    """Take n pages, refcount 1, from the free list, which has that many: 0, or TAMPER with none taken."""
    cdef pkv_page *pages = a.pages
    cdef uint32_t head = free_head(a)
    cdef uint32_t before = head
    cdef uint32_t i = decode(a, head, pages[head].next)
    cdef uint32_t n_pages = <uint32_t>a.n_pages
    cdef uint32_t key = a.link_key
    cdef bint guarded = a.flags & PKV_ARENA_GUARD
    cdef int64_t visible = a.page_bytes + (8 if guarded else 0)
    cdef int64_t k = 0
    cdef uint32_t step, salted
    cdef pkv_page *page
    while k < n:
        page = pages + i
        if i >= n_pages or page.state != PKV_PAGE_FREE or page.refcount or decode(a, i, page.prev) != before:
            put_back(a, out, k, i)
            return poison(a, PKV_FAULT_LINK, <int64_t>i if i < n_pages else -1)
        step = decode(a, i, page.next) - i
        salted = salt(i)
        # Pages that were given back together are as a rule equally far apart. While they are, both links of a page are known
        # without looking, and nobody waits for one page to learn where the next is.
        while True:
            page.refcount = 1
            page.next = page.prev = (i ^ key) + salted
            pkv_set_kind(page, PKV_KIND(PKV_PAGE_IN_USE))
            pkv_show(page_at(a, i), visible)
            if guarded:
                write_guard(a, i)
            out[k] = before = i
            k += 1
            i += step
            page = pages + i
            salted = salt(i)
            if (k >= n or i >= n_pages or page.next != ((i + step) ^ key) + salted or page.prev != (before ^ key) + salted
                    or page.refcount or pkv_kind(page) != PKV_KIND(PKV_PAGE_FREE)):
                break
    if i > head or decode(a, i, pages[i].prev) != before:
        put_back(a, out, k, i)
        return poison(a, PKV_FAULT_LINK, <int64_t>before if before != head else -1)
    pages[head].next = encode(a, head, i)
    pages[i].prev = encode(a, i, head)
    a.n_free -= n
    a.n_in_use += n
    a.num_allocated += n
    return 0


cdef void put_back(pkv_arena *a, const uint32_t *taken, int64_t n, uint32_t following) noexcept nogil:
    """Undo a take that met damage behind its n-th page: as they were, in front of `following`, so that only what is damaged
    looks so.
    """
    cdef uint32_t before = free_head(a)
    cdef int64_t k
    for k in range(n):
        a.pages[taken[k]].prev = encode(a, taken[k], before)
        a.pages[taken[k]].next = encode(a, taken[k], taken[k + 1] if k + 1 < n else following)
        a.pages[taken[k]].refcount = 0
        a.pages[taken[k]].state = PKV_PAGE_FREE
        pkv_hide(page_at(a, taken[k]), a.page_stride)
        before = taken[k]


cdef int64_t pkv_held_take(pkv_arena *a) noexcept nogil:
    """A page with refcount 1 that no table holds yet; POOL_EXHAUSTED with nothing changed."""
    cdef uint32_t page
    cdef int64_t status = 0
    if a.n_free == 0:
        status = pkv_held_grow(a, min(a.growth_pages, a.max_pages - a.n_pages))
        if status == -PKV_POOL_EXHAUSTED and a.n_cached and a.evict != NULL:
            status = a.evict(a) if lists_hold(a) else -PKV_TAMPER
        if status < 0:
            return status
    status = pkv_held_take_free(a, 1, &page)
    return status if status else <int64_t>page


cdef int64_t pkv_held_drop(pkv_arena *a, uint32_t i, uint32_t *cursor) noexcept nogil:
    """One holder of page i leaves. A page that becomes free goes on the free list behind *cursor, which then names it:
    start at free_head(a) and drop the last page of a table first, and it is the first to be taken again."""
    cdef pkv_page *page
    if not holdable(a, i):
        return poison(a, PKV_FAULT_PAGE, i)
    page = a.pages + i
    if page.refcount > 1:
        page.refcount -= 1
        return 0
    if not guard_holds(a, i):
        return poison(a, PKV_FAULT_GUARD, i)
    if page.indexed:
        if a.prefix == NULL:
            return poison(a, PKV_FAULT_PAGE, i)
        if not insert_after(a, decode(a, lru_head(a), a.pages[lru_head(a)].prev), i):
            return poison(a, PKV_FAULT_LINK, i)
        page.state = PKV_PAGE_CACHED
        a.n_cached += 1
    else:
        if not insert_after(a, cursor[0], i):
            return poison(a, PKV_FAULT_LINK, i)
        page.state = PKV_PAGE_FREE
        a.n_free += 1
        cursor[0] = i
        pkv_hide(page_at(a, i), a.page_stride)
    page.refcount = 0
    a.n_in_use -= 1
    return 0


cdef int64_t pkv_held_drop_last(pkv_arena *a, const uint32_t *table, int64_t *used, int64_t kept) noexcept nogil:
    """Drop the entries [kept, used) of a table, last first, and say in *used how many are left: 0, or TAMPER with the entry
    that is damaged and those in front of it left.

    The pages that become free go to the front of the free list in that order, linked to each other first and to the
    rest of the list once, at the end.
    """
    cdef pkv_page *pages = a.pages
    cdef uint32_t head = free_head(a)
    cdef uint32_t after = decode(a, head, pages[head].next)
    cdef uint32_t cursor = head
    cdef uint32_t unused = head
    cdef uint32_t n_pages = <uint32_t>a.n_pages
    cdef uint32_t key = a.link_key
    cdef bint guarded = a.flags & PKV_ARENA_GUARD
    cdef int64_t n_freed = 0
    cdef int64_t left = used[0]
    cdef int64_t result = 0
    cdef int64_t start
    cdef uint32_t i
    cdef pkv_page *page
    if after > lru_head(a) or decode(a, after, pages[after].prev) != head:
        return poison(a, PKV_FAULT_LINK, -1)
    # Pages that become free and pages with other holders come in runs: a loop for each, without what the other needs.
    while left > kept:
        start = left
        while left > kept:
            i = table[left - 1]
            page = pages + i
            if i >= n_pages or page.refcount != 1 or pkv_kind(page) != PKV_KIND(PKV_PAGE_IN_USE):
                break
            if guarded and not guard_holds(a, i):
                break
            page.refcount = 0
            page.prev = (cursor ^ key) + salt(i)
            pages[cursor].next = (i ^ key) + salt(cursor)
            pkv_set_kind(page, PKV_KIND(PKV_PAGE_FREE))
            pkv_hide(page_at(a, i), a.page_stride)
            cursor = i
            left -= 1
        n_freed += start - left
        left -= count_run(pages, n_pages, table + kept, left - kept, True, 2, <uint32_t>-1)
        while left > kept and table[left - 1] < n_pages and pages[table[left - 1]].refcount > 1:
            left -= 1
            pages[table[left]].refcount -= 1
        if left == start:
            i = table[left - 1]
            if i >= n_pages or pkv_held_drop(a, i, &unused):
                result = poison(a, PKV_FAULT_PAGE, i)
                break
            left -= 1
    if n_freed:
        pages[cursor].next = encode(a, cursor, after)
        pages[after].prev = encode(a, after, cursor)
        a.n_free += n_freed
        a.n_in_use -= n_freed
    used[0] = left
    return result


cdef int64_t pkv_held_uncache(pkv_arena *a, uint32_t i) noexcept nogil:
    """A CACHED page becomes FREE, first to be taken; the caller has dropped it from the index."""
    if i >= a.n_pages or a.pages[i].state != PKV_PAGE_CACHED:
        return poison(a, PKV_FAULT_LINK, i)
    if not guard_holds(a, i):
        return poison(a, PKV_FAULT_GUARD, i)
    if not linked(a, free_head(a)) or not unlink(a, i):
        return poison(a, PKV_FAULT_LINK, i)
    if not insert_after(a, free_head(a), i):
        return poison(a, PKV_FAULT_LINK, i)
    a.pages[i].state = PKV_PAGE_FREE
    a.n_cached -= 1
    a.n_free += 1
    pkv_hide(page_at(a, i), a.page_stride)
    return 0


cdef int64_t pkv_held_revive(pkv_arena *a, uint32_t i) noexcept nogil:
    """A CACHED page becomes IN_USE with refcount 1."""
    if i >= a.n_pages or a.pages[i].state != PKV_PAGE_CACHED or a.pages[i].refcount or not unlink(a, i):
        return poison(a, PKV_FAULT_LINK, i)
    a.pages[i].state = PKV_PAGE_IN_USE
    a.pages[i].refcount = 1
    a.n_cached -= 1
    a.n_in_use += 1
    return 0
