"""Changes of JSON files that keep them JSON, mostly."""

import copy
import json
import random

VALUES = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 1e30, -0.5, "", " ", "a", "▁", "Ġ", "<s>", "<0x41>", "\x00",
    "x" * 600, [], {}, [[]], "ByteLevel", "Metaspace", "Sequence", "Replace", "Prepend", "Strip", "ByteFallback",
    "Fuse", "Split", "Isolated", "NFC", "BPE", "Unigram", "WordPiece", "WordLevel", "TemplateProcessing",
    "Precompiled", "(a+)+$", "[", "\\p{L}+", "(?=", ["a", "b"], {"Regex": "(a*)*b"}, {"String": ""},
    {"type": "Strip", "content": " ", "start": 2**40, "stop": 1}, {"type": "NFKC"},
]  # fmt: skip


class Mutator:
    """Changes JSON texts, drawing from one generator."""

    values = tuple(VALUES)

    def __init__(self, rng: random.Random):
        self.rng = rng

    def mutate(self, raw: bytes, other: bytes | None = None) -> bytes:
        """Another text, from `raw` and perhaps parts of `other`."""
        try:
            tree = json.loads(raw)
            donor = json.loads(other) if other is not None else tree
        except (ValueError, RecursionError):
            return self.damage(raw)
        for _ in range(self.rng.choice([1, 1, 1, 2, 4])):
            tree = self.changed(tree, donor)
        written = json.dumps(tree, ensure_ascii=self.rng.random() < 0.2).encode("utf-8", "replace")
        return written if self.rng.random() < 0.95 else self.damage(written)

    def damage(self, raw: bytes) -> bytes:
        bad = bytearray(raw) or bytearray(b"{}")
        at = self.rng.randrange(len(bad))
        match self.rng.randrange(4):
            case 0:
                bad[at] = self.rng.randrange(256)
            case 1:
                del bad[at : at + self.rng.randrange(1, 9)]
            case 2:
                bad[at:at] = self.rng.choice([b"[" * 3000, b"NaN", b"\\ud800", b"1e999", b"\xff", b'{"a":1,"a":2}'])
            case _:
                del bad[at:]
        return bytes(bad)

    def changed(self, tree, donor):
        tree = copy.deepcopy(tree)
        place, key = self.pick(tree)
        if place is None:
            return self.rng.choice(self.values)
        match self.rng.randrange(5):
            case 0:
                del place[key]
            case 1 if isinstance(place, list):
                place.insert(key, copy.deepcopy(self.rng.choice([place[key], self.rng.choice(self.values)])))
            case 1:
                place[self.rng.choice(["a", "type", "content", "", "▁a", str(key) + "x"])] = place[key]
            case 2:
                there, name = self.pick(donor)
                place[key] = copy.deepcopy(there[name]) if there is not None else None
            case 3 if type(place[key]) is int:
                place[key] = self.rng.choice([0, 1, -1, 5, place[key] + 1, 2**20, 2**21, 2**31, 2**32, 2**40, 2**64])
            case _:
                place[key] = copy.deepcopy(self.rng.choice(self.values))
        return tree

    def pick(self, tree):
        """(container, key) of some place in the tree; (None, None) where it has none. Shallow places are likelier."""
        found = None, None
        while isinstance(tree, dict | list) and tree:
            key = self.rng.choice(list(tree)) if isinstance(tree, dict) else self.rng.randrange(len(tree))
            found = tree, key
            if self.rng.random() < 0.25:
                break
            tree = tree[key]
        return found


class HubMutator(Mutator):
    """With what a hostile hub would say."""

    values = (
        *VALUES[:16], "../../secret", "/etc/passwd", "a/../../../secret.gguf", "..", ".", "./m.gguf", "m.gguf",
        "m.gguf/", "a//m.gguf", "x/m.gguf", "m.gguf/n.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf",
        "b-00001-of-99999.gguf", "b-00000-of-00000.gguf", "config.json", "model.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "c:\\m.gguf", "a\nb.gguf", "\x1b[2J.gguf", "\ud800.gguf",
        "\u202em.gguf", "n" * 300 + ".gguf", "=", "a" * 40, "A" * 64, "f" * 64, "../" * 9 + "tmp/x", 3, 1 << 70,
        "hf:owner/one", "hf:owner/one@main/m.gguf", "hf:../..", "hf:a--b/c", "hf:./.", "hf:owner/one/config.json",
        "hf:owner/../m.gguf", "hf:owner/one@../m.gguf", {"text": "abc", "cut": 1}, {"text": "abcdef", "cut": 3},
        '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": "model-1.safetensors"}}', '{"weight_map": {"a": "x/y"}}',
    )  # fmt: skip
