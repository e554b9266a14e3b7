"""GGUF files as documents that can be read, changed and written again: what makes mutations reach past the header.

Reads only what it writes or what is as well-formed; knows nothing of the reader under test.
"""

import math
import random
import struct

import gguf_writer as w

SIZES = {w.U8: 1, w.I8: 1, w.BOOL: 1, w.U16: 2, w.I16: 2, w.U32: 4, w.I32: 4, w.F32: 4, w.U64: 8, w.I64: 8, w.F64: 8}
NUMBERS = [
    0,
    1,
    2,
    3,
    7,
    31,
    32,
    33,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
REALS = [0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, math.inf, math.nan]
STRINGS = [
    b"", b" ", b"  ", b"a", b"ab", "▁".encode(), "▁▁".encode(), "▁a".encode(),
    "Ġ".encode(), b"<0x41>", b"<0xFF>", b"<0xZZ>", b"<s>", b"<unk>", b"<|im_end|>", b"\xff", b"\xe2\x96", b"\x81",
    b"\0", "é☕\U0001f600".encode(), b"x" * 513, b"a b", b"a b c", b"llama", b"gpt2", b"gemma3", b"qwen3", b"phi3",
    b"qwen2", b"qwen3moe", b"smollm", b"tekken", b"gpt-4o", b"llama-bpe", b"default", b"bert", b"linear",
    b"yarn", b"longrope", b"none",
]  # fmt: skip
KEYS = [
    b"general.architecture", b"general.alignment", b"general.name", b"split.count", b"split.no",
    b"split.tensors.count", b"tokenizer.ggml.model", b"tokenizer.ggml.pre", b"tokenizer.ggml.tokens",
    b"tokenizer.ggml.scores", b"tokenizer.ggml.merges", b"tokenizer.ggml.token_type", b"tokenizer.ggml.bos_token_id",
    b"tokenizer.ggml.eos_token_id", b"tokenizer.chat_template", b"tokenizer.ggml.unknown_token_id",
    b"tokenizer.ggml.add_bos_token", b"tokenizer.ggml.add_eos_token", b"tokenizer.ggml.add_space_prefix",
    b"llama.attention.sliding_window", b"llama.rope.scaling.type", b"llama.expert_count",
    b"llama.attention.key_length", b"llama.rope.scaling.factor", b"llama.feed_forward_length",
    b"llama.rope.dimension_count", b"llama.expert_used_count", b"llama.expert_gating_func",
    b"llama.expert_weights_norm", b"llama.expert_shared_count", b"qwen3moe.expert_count", b"qwen3moe.expert_used_count",
    b"qwen3moe.expert_weights_norm", b"qwen3moe.expert_feed_forward_length",
]  # fmt: skip
NAMES = [
    b"token_embd.weight", b"output.weight", b"output_norm.weight", b"rope_freqs.weight", b"blk.0.attn_q.weight",
    b"blk.1.x", b"", b"blk.0.ffn_gate_inp.weight", b"blk.0.ffn_gate_exps.weight", b"blk.0.ffn_down_exps.weight",
    b"blk.0.ffn_up.1.weight", b"blk.0.ffn_gate.4294967296.weight", b"blk.0.ffn_down.weight",
]  # fmt: skip


class Document:
    """Entries [key, kind, value], tensors [name, dims, type, offset], and the bytes of the tensors.

    A value is the raw bytes of a number, the bytes of a string, or [element kind, list of values] of an array.
    """

    def __init__(self, entries: list, tensors: list, data: bytes, version: int = 3):
        self.entries, self.tensors, self.data, self.version = entries, tensors, data, version
        self.lies = {"entries": 0, "tensors": 0}  # by how much the counts are wrong

    def write(self) -> bytes:
        entries = [w.string(key) + struct.pack("<I", kind) + _write(kind, value) for key, kind, value in self.entries]
        tensors = [
            w.string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
            for name, dims, kind, offset in self.tensors
        ]
        counts = {f"n_{x}": max(len(getattr(self, x)) + lie, 0) for x, lie in self.lies.items()}
        return w.assemble(entries, tensors, self.data, version=self.version, **counts)

    @classmethod
    def read(cls, raw: bytes) -> "Document":
        """Raises struct.error, IndexError, KeyError or ValueError for what it cannot read."""
        reader = _Reader(raw)
        version, n_tensors, n_entries = reader.unpack("<4xIQQ")
        if n_tensors > 1000 or n_entries > 1000:
            raise ValueError(n_tensors, n_entries)
        entries, tensors = [], []
        for _ in range(n_entries):
            key, (kind,) = reader.string(), reader.unpack("<I")
            entries.append([key, kind, reader.value(kind)])
        for _ in range(n_tensors):
            name, (n,) = reader.string(), reader.unpack("<I")
            if n > 8:
                raise ValueError(n)
            dims = list(reader.unpack(f"<{n}Q"))
            tensors.append([name, dims, *reader.unpack("<IQ")])
        return cls(entries, tensors, raw[reader.at + -reader.at % 32 :], version)


class _Reader:
    def __init__(self, raw: bytes):
        self.raw, self.at = raw, 0

    def unpack(self, form: str) -> tuple:
        found = struct.unpack_from(form, self.raw, self.at)
        self.at += struct.calcsize(form)
        return found

    def take(self, n: int) -> bytes:
        if self.at + n > len(self.raw):
            raise ValueError(n)
        self.at += n
        return self.raw[self.at - n : self.at]

    def string(self) -> bytes:
        return self.take(self.unpack("<Q")[0])

    def value(self, kind: int):
        if kind == w.STRING:
            return self.string()
        if kind == w.ARRAY:
            element, n = self.unpack("<IQ")
            if n > len(self.raw):
                raise ValueError(n)
            return [element, [self.value(element) for _ in range(n)]]
        return self.take(SIZES[kind])


def _write(kind: int, value) -> bytes:
    """What the value is decides, not `kind`: a document may lie about it."""
    if isinstance(value, list):
        element, items = value
        return struct.pack("<IQ", element, len(items)) + b"".join(_write(element, item) for item in items)
    return w.string(value) if kind == w.STRING else value


class Mutator:
    """Changes documents, drawing from one generator."""

    def __init__(self, rng: random.Random):
        self.rng = rng

    def mutate(self, raw: bytes, other: bytes | None = None) -> bytes:
        """Another file, from `raw` and perhaps parts of `other`."""
        try:
            document = Document.read(raw)
            donor = Document.read(other) if other is not None else document
        except (struct.error, IndexError, KeyError, ValueError, RecursionError):
            return self.damage(raw)
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            change = self.rng.choice([
                self.change_value, self.change_value, self.change_value, self.change_value, self.change_entries,
                self.change_entries, self.change_tensor, self.change_tensor, self.change_tensors, self.lie,
            ])  # fmt: skip
            change(document, donor)
        written = document.write()
        return written if self.rng.random() < 0.9 else self.damage(written)

    def damage(self, raw: bytes) -> bytes:
        """Changes of bytes, whatever they mean."""
        bad = bytearray(raw) or bytearray(b"GGUF")
        for _ in range(self.rng.choice([1, 1, 2, 4])):
            at = self.rng.randrange(len(bad)) if bad else 0
            match self.rng.randrange(5):
                case 0 if bad:
                    bad[at] ^= 1 << self.rng.randrange(8)
                case 1:
                    bad[at : at + 8] = struct.pack("<Q", self.rng.choice(NUMBERS))
                case 2:
                    bad[at : at + 4] = struct.pack("<I", self.rng.choice(NUMBERS) & 0xFFFFFFFF)
                case 3:
                    del bad[at : at + self.rng.randrange(1, 24)]
                case _:
                    del bad[at:]
        return bytes(bad)

    def lie(self, document: Document, donor: Document) -> None:
        if self.rng.random() < 0.3:
            document.version = self.rng.choice([0, 1, 2, 3, 4, 2**31])
        else:
            document.lies[self.rng.choice(["entries", "tensors"])] = self.rng.choice([-1, 1, 2**16, 2**32, 2**60])

    def change_entries(self, document: Document, donor: Document) -> None:
        entries = document.entries
        at = self.rng.randrange(len(entries) + 1)
        match self.rng.randrange(5):
            case 0 if at < len(entries):
                del entries[at]
            case 1 if donor.entries:
                entries.insert(at, list(self.rng.choice(donor.entries)))
            case 2 if at < len(entries):
                entries[at][0] = self.rng.choice([*KEYS, *STRINGS])
            case 3 if at < len(entries) and donor.entries:
                entries[at][1:] = self.rng.choice(donor.entries)[1:]
            case _:
                kind = self.rng.choice([w.STRING, w.BOOL, w.U32, w.F32, w.ARRAY])
                entries.insert(at, [self.rng.choice(KEYS), kind, self.fresh(kind)])

    def change_value(self, document: Document, donor: Document) -> None:
        if not document.entries:
            return
        entry = self.rng.choice(document.entries)
        if self.rng.random() < 0.1:
            entry[1] = self.rng.randrange(15)
            if entry[1] in SIZES and self.rng.random() < 0.8:
                entry[2] = self.fresh(entry[1])
        else:
            entry[2] = self.changed(entry[1], entry[2])

    def changed(self, kind: int, value):
        if isinstance(value, list):
            return self.changed_array(*value)
        if kind != w.STRING:
            return self.fresh(kind) if kind in SIZES else value
        if self.rng.random() < 0.5:
            return self.rng.choice(STRINGS)
        at = self.rng.randrange(len(value) + 1)
        if self.rng.random() < 0.5:
            return value[:at] + self.rng.choice(STRINGS) + value[at:]
        return value[:at] + value[at + self.rng.randrange(1, 5) :]

    def changed_array(self, element: int, items: list) -> list:
        items = list(items)
        for _ in range(self.rng.choice([1, 1, 1, 3, 9])):
            at = self.rng.randrange(len(items) + 1)
            match self.rng.randrange(8):
                case 0 if at < len(items):
                    del items[at]
                case 1 if items:
                    items.insert(at, self.rng.choice(items))
                case 2:
                    items.insert(at, self.fresh(element))
                case 3 if len(items) > 1:
                    i, j = self.rng.randrange(len(items)), self.rng.randrange(len(items))
                    items[i], items[j] = items[j], items[i]
                case 4 if self.rng.random() < 0.1:
                    element = self.rng.randrange(15)
                case 5 if self.rng.random() < 0.05:
                    items = items * self.rng.choice([2, 10]) if len(items) < 1000 else items[:1]
                case _ if at < len(items):
                    items[at] = self.changed(element, items[at])
        return [element, items]

    def fresh(self, kind: int):
        if kind == w.STRING:
            return self.rng.choice(STRINGS)
        if kind == w.ARRAY:
            element = self.rng.choice([w.STRING, w.F32, w.I32, w.U8, w.BOOL, w.U64, w.ARRAY])
            depth = self.rng.randrange(3) if element == w.ARRAY else self.rng.randrange(20)
            return [element, [self.fresh(element) for _ in range(depth)]]
        if kind in (w.F32, w.F64):
            number = self.rng.choice([*REALS, self.rng.gauss(0, 9)])
            return struct.pack("<f" if kind == w.F32 else "<d", number)
        number = self.rng.choice(NUMBERS) if self.rng.random() < 0.5 else self.rng.randrange(8)
        return struct.pack("<Q", number)[: SIZES.get(kind, 4)]

    def change_tensor(self, document: Document, donor: Document) -> None:
        if not document.tensors:
            return
        tensor = self.rng.choice(document.tensors)
        match self.rng.randrange(5):
            case 0:
                tensor[0] = self.rng.choice([*NAMES, self.rng.choice(donor.tensors or [tensor])[0]])
            case 1 if tensor[1]:
                dims = list(tensor[1])
                dims[self.rng.randrange(len(dims))] = self.rng.choice(NUMBERS)
                tensor[1] = dims
            case 2:
                tensor[1] = [self.rng.choice(NUMBERS) for _ in range(self.rng.randrange(6))]
            case 3:
                tensor[2] = self.rng.randrange(45)
            case _:
                tensor[3] = self.rng.choice([*NUMBERS, tensor[3] + 32, tensor[3] ^ 1])

    def change_tensors(self, document: Document, donor: Document) -> None:
        at = self.rng.randrange(len(document.tensors) + 1)
        match self.rng.randrange(3):
            case 0 if at < len(document.tensors):
                del document.tensors[at]
            case 1 if donor.tensors:
                document.tensors.insert(at, list(self.rng.choice(donor.tensors)))
            case _:
                document.data = document.data[: self.rng.randrange(len(document.data) + 1)]
