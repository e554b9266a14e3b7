"""Lines of text that every tokenizer is held to."""

import random
import unicodedata
from pathlib import Path

POOLS = [
    "abcXYZ", "   \t\n\r", "0123½²", "日本語", "👩\u200d👦☕🎉", "éüßñ", "'sdtrevml", "_-#!.,;\"<>|",
    "\u00a0\u2009\u3000\u200b\x00", "عربيहिन्दी", "e\u0301o\u0308",
]  # fmt: skip


def lines(n: int) -> list[str]:
    """Mixed text: this repository's own sources, and seeded strings over many scripts and all of assigned Unicode."""
    rng = random.Random(7)
    code = [line for path in sorted(Path(__file__).parent.glob("*.py")) for line in path.read_text().splitlines()]
    mixed = ["".join(rng.choice(rng.choice(POOLS)) for _ in range(rng.randrange(40))) for _ in range(n // 2)]
    # code points that this Python's Unicode tables do not know may be letters in newer ones
    known = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cs", "Cn", "Co")]
    return code[: n // 4] + mixed + ["".join(rng.choices(known, k=12)) for _ in range(n // 4)]
