"""SentencePiece BPE the slow and obvious way: join the best-scored neighbours until nothing joins."""

MARK = "\u2581"


class ReferenceSPM:
    """tokens, scores and types as in a GGUF file; `prefix`: text gets a space in front."""

    def __init__(self, tokens: list[str], scores: list[float], types: list[int], prefix: bool):
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == 1}
        self.prefix = prefix

    def encode(self, text: str) -> list[int]:
        parts = list((MARK + text if self.prefix and text else text).replace(" ", MARK))
        while True:
            best = None
            for i in range(len(parts) - 1):
                score = self.scores.get(parts[i] + parts[i + 1])
                if score is not None and (best is None or score > best[0]):
                    best = score, i
            if best is None:
                break
            i = best[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids = []
        for part in parts:
            whole = part in self.scores
            ids += [self.ids[part]] if whole else [self.ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        return ids
