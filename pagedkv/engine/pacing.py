"""How much a step may hold beside its decodes, so that nobody who reads along waits long for the next token.

Costs are counted, not measured, so a plan depends on the requests alone. The unit is a row without context times
`context_per_row`, which keeps every cost an integer: a row at position p costs context_per_row + p. A step costs
STEP_ROWS rows more than its rows do, for reading the weights.
"""

import math

STEP_ROWS = 6  # rows whose arithmetic takes as long as reading all weights once
STRETCH = (3, 2)  # work beside the decodes, as a fraction of what the decodes cost alone


class Pacing:
    """The cost of rows, and what a step may spend beside its decodes.

    width: values in all query heads of a layer. Attention over that many tokens costs about as much as the matrices of
    a row: it has a fifth of the arithmetic of theirs, in floats instead of bytes. Immutable.
    """

    def __init__(self, width: int = 576) -> None:
        self.context_per_row = max(1, width)

    def rows(self, start: int, n: int) -> int:
        """Cost of the n rows at positions [start, start + n)."""
        return n * self.context_per_row + n * start + n * (n - 1) // 2

    def step(self, positions: list[int]) -> int:
        """Cost of a step that decodes one row at each of the positions."""
        return (STEP_ROWS + len(positions)) * self.context_per_row + sum(positions)

    def beside(self, positions: list[int]) -> int:
        """What a step may spend beside such decodes: a token then comes after at most 5/2 of the time it takes
        without."""
        return self.step(positions) * STRETCH[0] // STRETCH[1]

    def fitting(self, start: int, cost: int) -> int:
        """The most rows from position `start` on that cost at most `cost`, 0 or more."""
        if cost <= 0:
            return 0
        linear = 2 * (self.context_per_row + start) - 1  # rows(start, n) <= cost is n^2 + linear * n <= 2 * cost
        return (math.isqrt(linear * linear + 8 * cost) - linear) // 2
