"""SentencePiece BPE in the `tokenizers` library, its table of merges made as Hugging Face's converters make it."""

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, models, normalizers

MARK = "\u2581"
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def library_spm(
    tokens: list[str], scores: list[float], types: list[int], prefix: bool, unknown: int | None
) -> Callable[[str], list[int]]:
    """What makes ids of text. Arguments as in a GGUF file; no two tokens have the same text."""
    texts = [
        text.replace(" ", MARK) if kind == USER_DEFINED else text for text, kind in zip(tokens, types, strict=True)
    ]
    vocab = {text: i for i, (text, kind) in enumerate(zip(texts, types, strict=True)) if kind != CONTROL}
    merges = []
    for i, (text, kind) in enumerate(zip(texts, types, strict=True)):
        if kind in (NORMAL, USER_DEFINED):
            score = 0.0 if kind == USER_DEFINED else scores[i]
            for k in range(1, len(text)):
                left, right = text[:k], text[k:]
                if left in vocab and right in vocab:
                    merges.append((-score, -len(left), -len(right), i, left, right))
    merges.sort()
    library = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[merge[-2:] for merge in merges],
            unk_token=None if unknown is None else texts[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [normalizers.Prepend(MARK)] if prefix else []
    library.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", MARK)])
    matched = [text for text, kind in zip(texts, types, strict=True) if kind == USER_DEFINED and text]
    library.add_tokens([AddedToken(text, normalized=False) for text in matched])
    return lambda text: library.encode(text, add_special_tokens=False).ids
