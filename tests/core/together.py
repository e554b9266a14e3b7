"""Threads that start together."""

import threading


def in_threads(work, n):
    """Run work(k) in n threads; the first exception of any is raised here."""
    failures = []
    start = threading.Barrier(n)

    def guarded(k):
        start.wait()
        try:
            work(k)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(k,)) for k in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]
