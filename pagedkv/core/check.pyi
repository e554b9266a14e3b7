from typing import NamedTuple

from pagedkv.core.arena import Arena

class Violation(NamedTuple):
    what: str
    where: int
    expected: int
    found: int

def check(arena: Arena, level: int = 3) -> list[Violation]: ...
