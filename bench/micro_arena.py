"""Micro-benchmarks of the page arena: one JSON object a line, with all samples.

    python bench/micro_arena.py [--samples 101] [--operations 10000000] [--write]

`from C` rows run a C loop over the C functions; `from Python` rows run a Python loop over the methods and include the
loop. The peer is bench/block_pool.py: the algorithm of vLLM's BlockPool in pure Python, which is what an engine written
in Python pays. One call of ours is compared with one call of the peer: single blocks with single pages, lists of 250
and 1,000 with sequences of as many. Their bias: the peer is timed without the rest of its engine and takes no lock. A
sample is about a millisecond of processor time, so that on a shared machine most are not interrupted and none pays for
the wait.
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import results
from block_pool import BlockPool

from pagedkv import Arena
from pagedkv.core import _testing


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def timed(function, n):
    start = time.thread_time()
    function(n)
    return time.thread_time() - start


def rows(samples, n_operations):
    """(name, unit, samples, bound or None) of each benchmark."""
    arena = Arena(4096, 64)
    seq, prefix, other = arena.sequence(), arena.sequence(max_pages=1000), arena.sequence(max_pages=1000)
    prefix.append_pages(1000)
    quarter = arena.sequence(max_pages=512)
    peer = BlockPool(4096)
    peer_prefix = peer.get_new_blocks(1000)

    def append_truncate(n):
        append, truncate = seq.append_page, seq.truncate_pages
        for _ in range(n):
            append()
            truncate(0)

    def snapshot(n):
        for _ in range(n):
            quarter.snapshot()

    def peer_take_free(n):
        take, free = peer.get_new_blocks, peer.free_blocks
        for _ in range(n):
            free(reversed(take(1)))

    def peer_take_free_250(n):
        take, free = peer.get_new_blocks, peer.free_blocks
        for _ in range(n):
            free(reversed(take(250)))

    def append_free_250(n):
        append, free = quarter.append_pages, quarter.free
        for _ in range(n):
            append(250)
            free()

    def peer_share_free(n):
        for _ in range(n):
            peer.touch(peer_prefix)
            peer.free_blocks(reversed(peer_prefix))

    def sampled(timer, n, unit):
        """Time of one call in each sample of n calls."""
        return [timer(n) / n * {"ns": 1e9, "us": 1e6}[unit] for _ in range(samples)]

    def looped(function):
        return partial(timed, function)

    ours = partial(_testing.time_append_truncate, seq)
    yield "allocate + free a page, from C", "ns", sampled(ours, 50_000, "ns"), 40
    yield "allocate + free a page, from Python", "ns", sampled(looped(append_truncate), 10_000, "ns"), 150
    yield "allocate + free a block, peer", "ns", sampled(looped(peer_take_free), 1000, "ns"), None
    ours = partial(_testing.time_append_free, quarter, 250)
    yield "allocate + free 250 pages, from C", "us", sampled(ours, 800, "us"), None
    yield "allocate + free 250 pages, from Python", "us", sampled(looped(append_free_250), 200, "us"), None
    yield "allocate + free 250 blocks, peer", "us", sampled(looped(peer_take_free_250), 15, "us"), None
    ours = partial(_testing.time_share_release, prefix, other)
    yield "share + release 1,000 pages, from C", "us", sampled(ours, 600, "us"), 5
    yield "share + release 1,000 blocks, peer", "us", sampled(looped(peer_share_free), 15, "us"), None
    quarter.append_pages(250)
    ours = partial(_testing.time_snapshot, quarter)
    yield "snapshot 250 pages, from C", "us", sampled(ours, 2000, "us"), 20
    yield "snapshot 250 pages, from Python", "us", sampled(looped(snapshot), 1500, "us"), 20

    pool = Arena(512, 4096, guard=True)
    _testing.random_operations(pool, 32, n_operations // 10, 1)
    before = resident_bytes()
    seconds, _ = _testing.random_operations(pool, 32, n_operations, 2)
    grown = resident_bytes() - before
    if pool.check(3):
        sys.exit("the arena is damaged")
    yield f"random operation, mean of {n_operations:,}", "ns", [seconds / n_operations * 1e9], None
    yield f"resident memory grown in {n_operations:,} random operations", "bytes", [grown], 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=101)
    parser.add_argument("--operations", type=int, default=10_000_000)
    parser.add_argument("--write", action="store_true", help="append to bench/results/micro_arena.jsonl")
    options = parser.parse_args()
    medians, found = {}, []
    for name, unit, samples, bound in rows(options.samples, options.operations):
        medians[name] = statistics.median(samples)
        found.append({"benchmark": name, "unit": unit, "bound": bound, **results.summary(samples)})
        print(json.dumps(found[-1]), flush=True)
    for ours, peers in (
        ("allocate + free a page, from C", "allocate + free a block, peer"),
        ("allocate + free a page, from Python", "allocate + free a block, peer"),
        ("allocate + free 250 pages, from C", "allocate + free 250 blocks, peer"),
        ("allocate + free 250 pages, from Python", "allocate + free 250 blocks, peer"),
        ("share + release 1,000 pages, from C", "share + release 1,000 blocks, peer"),
    ):
        found.append({"ratio": f"{peers} / {ours}", "value": round(medians[peers] / medians[ours], 2)})
        print(json.dumps(found[-1]))
    if options.write:
        print(results.write("micro_arena", found, threads=1).name)


if __name__ == "__main__":
    main()
