"""Verdicts and exceptions: one enum shared by C, Cython and Python, one exception class per refusing verdict."""

from enum import IntEnum


class Verdict(IntEnum):
    """Outcome of an arena or sequence call. C functions return an index or the negated verdict."""

    OK = 0
    BAD_INPUT = 1
    POOL_EXHAUSTED = 2
    SEQ_FULL = 3
    TAMPER = 4
    NOT_FOUND = 5


class PagedKVError(Exception):
    """Base of every exception the core raises; `verdict` is the status code behind it."""

    verdict = Verdict.OK


class BadInput(PagedKVError, ValueError):
    """An argument is outside its range; the message names the field, the value and the bound. Nothing changed."""

    verdict = Verdict.BAD_INPUT


class PoolExhausted(PagedKVError):
    """No page can be had, or the system refused memory. Nothing changed."""

    verdict = Verdict.POOL_EXHAUSTED


class SequenceFull(PagedKVError):
    """The sequence holds its `max_pages` already. Nothing changed."""

    verdict = Verdict.SEQ_FULL


class Tampered(PagedKVError):
    """A canary, count, link or guard word is wrong, or the arena is closed; every later call refuses as well."""

    verdict = Verdict.TAMPER


class NotFound(PagedKVError):
    """The page named is free and so holds nothing to share. Nothing changed."""

    verdict = Verdict.NOT_FOUND


ERRORS = {e.verdict: e for e in (BadInput, PoolExhausted, SequenceFull, Tampered, NotFound)}
