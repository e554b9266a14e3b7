"""SentencePiece vocabularies against an independent merger, known ids of the real Gemma, and their promises."""

import json
import random
from pathlib import Path

import corpus
import gguf_writer as w
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from library_spm import library_spm
from reference_spm import MARK, ReferenceSPM

from pagedkv.models.errors import ModelError
from pagedkv.models.gguf import GGUFFile
from pagedkv.models.streaming import StreamDecoder
from pagedkv.models.tokenizer import Tokenizer

SPECIAL = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]
BYTES = [(f"<0x{byte:02X}>", 6) for byte in range(256)]
LETTERS = [(c, 1) for c in [MARK, *"abcdehlorwé<>/s\n"]]
WORDS = [
    "he", "ll", "llo", "hello", f"{MARK}hello", "wor", "world", "ld", "or", f"{MARK}w", f"{MARK}world", "ab", "abab",
    "ba", "<s", "s>", "</s", f"{MARK}{MARK}", f"{MARK}{MARK}{MARK}",
]  # fmt: skip
MERGED = [(word, 1) for word in WORDS]
TABLE = [*SPECIAL, *BYTES, *LETTERS, *MERGED]
TOKENS, TYPES = [text for text, _ in TABLE], [kind for _, kind in TABLE]
SCORES = [-float(i) if kind == 1 else 0.0 for i, (_, kind) in enumerate(TABLE)]


def build(tmp_path, tokens=TOKENS, types=TYPES, scores=SCORES, prefix=None, **changes) -> Tokenizer:
    keys = {
        "tokenizer__ggml__model": (w.STRING, "llama"),
        "tokenizer__ggml__pre": (w.STRING, "default"),
        "tokenizer__ggml__tokens": (w.ARRAY, (w.STRING, tokens)),
        "tokenizer__ggml__token_type": (w.ARRAY, (w.I32, types)),
        "tokenizer__ggml__scores": (w.ARRAY, (w.F32, scores)),
        "tokenizer__ggml__merges": None,
        "tokenizer__ggml__unknown_token_id": (w.U32, 0),
        "tokenizer__ggml__add_space_prefix": None if prefix is None else (w.BOOL, prefix),
        **changes,
    }
    raw = w.assemble([w.entry(*item) for item in tiny.entries(**keys)], [])
    with GGUFFile(w.write(tmp_path / "m.gguf", raw)) as file:
        return Tokenizer(file.metadata)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return build(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return build(tmp_path_factory.mktemp("bare"), prefix=0)


TEXT = st.text(alphabet="abcdehlorwé<>/s \n☕x\x00" + MARK, max_size=40)


class TestEncoding:
    @given(text=TEXT)
    def test_against_the_reference(self, llama, bare, text):
        for tokenizer, prefix in ((llama, True), (bare, False)):
            reference = ReferenceSPM(TOKENS, SCORES, TYPES, prefix)
            assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)

    def test_random_vocabularies(self, tmp_path):
        rng = random.Random(5)
        for _ in range(20):
            words = sorted({"".join(rng.choices("ab" + MARK, k=rng.randrange(2, 6))) for _ in range(25)})
            rng.shuffle(words)
            table = [*SPECIAL, *BYTES, *[(c, 1) for c in "ab" + MARK], *[(word, 1) for word in words]]
            tokens, types = [t for t, _ in table], [k for _, k in table]
            scores = [-float(i) for i in range(len(table))]
            tokenizer, reference = build(tmp_path, tokens, types, scores), ReferenceSPM(tokens, scores, types, True)
            for _ in range(50):
                text = "".join(rng.choices("ab ", k=rng.randrange(20)))
                assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text), (tokens, text)

    @pytest.mark.parametrize("bytes_too", [True, False])
    def test_against_the_library(self, tmp_path, bytes_too):
        """Random vocabularies of every type of token, many scores equal, against the `tokenizers` library."""
        rng = random.Random(7)
        letters = "ab<" + MARK + "é☕"
        for i in range(60):
            words = sorted({"".join(rng.choices(letters, k=rng.randrange(1, 6))) for _ in range(40)})
            rng.shuffle(words)
            kinds = {word: rng.choice([1, 1, 1, 1, 1, 4, 5]) for word in words}
            table = [*SPECIAL, *(BYTES if bytes_too else []), *kinds.items(), ("  ", 4), ("x" * rng.randrange(1, 9), 4)]
            tokens, types = [t for t, _ in table if t != MARK * 2], [k for t, k in table if t != MARK * 2]
            scores = [float(rng.randrange(-9, 2)) for _ in tokens]
            unknown = None if i % 3 == 0 else 0
            keys = {} if i % 3 else {"tokenizer__ggml__unknown_token_id": None}
            tokenizer = build(tmp_path, tokens, types, scores, prefix=i % 2, **keys)
            library = library_spm(tokens, scores, types, bool(i % 2), unknown)
            for _ in range(60):
                text = "".join(rng.choices("aaabb< é☕xy\x00" + MARK, k=rng.randrange(30)))
                assert tokenizer.encode(text, add_special_tokens=False) == library(text), (table, scores, text)

    def test_long_texts(self, bare):
        """The work grows with the length of a text, and its buffers hold the worst of them."""
        reference = ReferenceSPM(TOKENS, SCORES, TYPES, False)
        for unit in ("hello world", " ", "☕", "ababab", "\U0001f600 "):
            many = bare.encode(unit * 20000, add_special_tokens=False)
            some = reference.encode(unit * 40)
            assert many[: len(some) // 2] == some[: len(some) // 2]
            assert bare.decode(many) == unit * 20000

    def test_unknown_characters_become_bytes(self, bare):
        assert bare.encode("☕", add_special_tokens=False) == [
            TOKENS.index(f"<0x{byte:02X}>") for byte in "☕".encode()
        ]

    def test_bos_is_the_default(self, llama):
        assert llama.add_bos
        assert llama.encode("hello") == [1, TOKENS.index(f"{MARK}hello")]
        assert llama.encode("<s>hello", allow_special=True) == llama.encode("hello")


class TestDecoding:
    @given(text=TEXT)
    def test_round_trip(self, llama, bare, text):
        # the marker itself cannot be told from a space
        assert llama.decode(llama.encode(text)) == bare.decode(bare.encode(text)) == text.replace(MARK, " ")

    @given(ids=st.lists(st.integers(0, len(TOKENS) + 2), max_size=30), skip=st.booleans())
    def test_streamed_pieces_join_to_decode(self, llama, bare, ids, skip):
        for tokenizer in (llama, bare):
            decoder = StreamDecoder(tokenizer, skip)
            assert "".join([*map(decoder.push, ids), decoder.flush()]) == tokenizer.decode(ids, skip)

    def test_only_the_first_space_is_taken_off(self, llama, bare):
        ids = [TOKENS.index(MARK), TOKENS.index(f"{MARK}hello"), TOKENS.index(f"{MARK}world")]
        assert llama.decode(ids) == " hello world" and bare.decode(ids) == "  hello world"

    def test_bytes(self, bare):
        assert bare.token_bytes(TOKENS.index("<0xE2>")) == b"\xe2"
        assert bare.token_bytes(TOKENS.index(f"{MARK}w")) == b" w"
        assert bare.token_bytes(1) == b"" and bare.token_bytes(1, False) == b"<s>"


class TestSpecialTokens:
    @given(text=st.text(alphabet="</s>un k", max_size=30))
    def test_user_text_never_becomes_one(self, llama, text):
        # "<s" + ">" and "</s" + ">" are cuts into tokens, but no merge may end in a control token
        assert llama.special_ids.isdisjoint(llama.encode(text, add_special_tokens=False))

    def test_on_request(self, bare):
        assert bare.encode("ab</s>", add_special_tokens=False, allow_special=True) == [TOKENS.index("ab"), 2]

    def test_byte_tokens_are_not_made_from_their_names(self, tmp_path):
        letters = [(c, 1) for c in "<0x41>"] + [("<0", 1), ("x4", 1), ("1>", 1), ("<0x4", 1)]
        table = [*SPECIAL, *BYTES, *sorted(set(letters), key=letters.index)]
        tokens, types = [t for t, _ in table], [k for _, k in table]
        tokenizer = build(tmp_path, tokens, types, [-float(i) for i in range(len(table))], prefix=0)
        assert tokenizer.decode(tokenizer.encode("<0x41>")) == "<0x41>"

    def test_user_defined_runs_of_spaces(self, tmp_path):
        table = [*SPECIAL, *BYTES, *LETTERS, ("  ", 4), ("   ", 4), ("<tool>", 4), (f"{MARK}a", 1)]
        tokens, types = [t for t, _ in table], [k for _, k in table]
        tokenizer = build(
            tmp_path, tokens, types, [-1000.0 if k == 4 else -float(i) for i, (_, k) in enumerate(table)], prefix=0
        )
        assert tokenizer.encode("   a", add_special_tokens=False) == [tokens.index("   "), tokens.index("a")]
        assert tokenizer.encode(" a<tool>", add_special_tokens=False) == [
            tokens.index(f"{MARK}a"),
            tokens.index("<tool>"),
        ]
        assert tokenizer.decode([tokens.index("   ")]) == "   "


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scores": SCORES[:-1]}, f"tokenizer.ggml.scores: {len(TABLE) - 1} values of float32, must be {len(TABLE)}"),
        ({"scores": [float("nan"), *SCORES[1:]]}, "finite numbers"),
        ({"tokenizer__ggml__scores": None}, "tokenizer.ggml.scores: missing"),
        ({"tokenizer__ggml__scores": (w.ARRAY, (w.I32, [0] * len(TABLE)))}, "values of int32"),
        ({"tokenizer__ggml__unknown_token_id": (w.U32, len(TABLE))}, "tokenizer.ggml.unknown_token_id: "),
        (
            {"tokens": ["<0xZZ>" if t == "<0x41>" else t for t in TOKENS]},
            "tokenizer.ggml.tokens[68]: '<0xZZ>' is not a byte",
        ),
        (
            {"tokens": [*TOKENS[:-1], "x" * 513]},
            f"tokenizer.ggml.tokens[{len(TABLE) - 1}]: 513 characters, at most 512",
        ),
        ({"tokenizer__ggml__add_space_prefix": (w.U8, 1)}, "tokenizer.ggml.add_space_prefix: 1 is not a boolean"),
    ],
)
def test_bad_metadata(tmp_path, changes, says):
    with pytest.raises(ModelError) as caught:
        build(tmp_path, **changes)
    assert says in str(caught.value)


@pytest.fixture(scope="module")
def gemma(gemma3_path):
    with GGUFFile(gemma3_path) as file:
        return Tokenizer(file.metadata)


class TestRealGemma:
    @pytest.mark.parametrize("case", ["one_token", "short", "chat", "code", "unicode", "exact_page_multiple"])
    def test_known_ids(self, gemma, case):
        known = json.loads(Path(__file__).with_name("gemma3_ids.json").read_text())[case]
        assert gemma.encode(known["text"]) == known["ids"]
        assert gemma.decode(known["ids"]) == known["text"]

    def test_five_thousand_lines(self, gemma, gemma3_path):
        with GGUFFile(gemma3_path) as file:
            tokens, scores, types = (file.metadata[f"tokenizer.ggml.{x}"] for x in ("tokens", "scores", "token_type"))
            prefix = file.metadata["tokenizer.ggml.add_space_prefix"]
            unknown = file.metadata["tokenizer.ggml.unknown_token_id"]
            library = library_spm(list(tokens), scores.tolist(), types.tolist(), prefix, unknown)
        for line in corpus.lines(5000):
            assert gemma.encode(line, add_special_tokens=False) == library(line)

    def test_facts(self, gemma):
        assert (gemma.vocab_size, gemma.bos_token_id, gemma.eos_token_id, gemma.add_bos) == (262144, 2, 1, True)
        assert not gemma.has_chat_template
        assert gemma.encode("<bos>hi", allow_special=True) == gemma.encode("hi")
        assert gemma.special_ids.isdisjoint(gemma.encode("<eos><pad><start_of_turn>")[1:])
        # runs of line feeds and of spaces are single tokens
        assert [len(gemma.encode(text)) for text in ("\n\n\n", "     x", "x     ")] == [2, 3, 3]
