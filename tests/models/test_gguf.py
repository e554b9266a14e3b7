"""The GGUF reader against files of our own writer, of the gguf package, and against thousands of damaged ones."""

import math
import os
import random
import struct
import subprocess
import sys
import tracemalloc

import gguf
import gguf_writer as w
import numpy as np
import pytest

from pagedkv.models.errors import ModelError
from pagedkv.models.gguf import TENSOR_TYPES, GGUFFile, StringArray


def opened(tmp_path, raw: bytes) -> GGUFFile:
    return GGUFFile(w.write(tmp_path / "m.gguf", raw))


def refused(tmp_path, raw: bytes) -> str:
    with pytest.raises(ModelError) as caught:
        opened(tmp_path, raw)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    return message


class TestGoodFiles:
    @pytest.mark.parametrize("version", [2, 3])
    def test_every_scalar_type(self, tmp_path, version):
        values = {
            "u8": (w.U8, 255), "i8": (w.I8, -128), "u16": (w.U16, 65535), "i16": (w.I16, -32768),
            "u32": (w.U32, 2**32 - 1), "i32": (w.I32, -(2**31)), "u64": (w.U64, 2**64 - 1), "i64": (w.I64, -(2**63)),
            "f32": (w.F32, 0.5), "f64": (w.F64, 0.1), "yes": (w.BOOL, 1), "no": (w.BOOL, 0),
            "text": (w.STRING, "héé ☕"), "empty": (w.STRING, ""),
        }  # fmt: skip
        raw = w.assemble([w.entry(k, *v) for k, v in values.items()], [], version=version)
        with opened(tmp_path, raw) as file:
            assert file.version == version
            assert file.metadata == {k: v[1] for k, v in values.items()}
            assert file.metadata["yes"] is True
            assert file.tensors == {}

    def test_arrays(self, tmp_path):
        arrays = {
            "u8": (w.U8, [1, 2, 255]), "i32": (w.I32, [-1, 0, 7]), "f32": (w.F32, [0.25, -1.0]),
            "u64": (w.U64, [2**64 - 1]), "none": (w.I16, []), "flags": (w.BOOL, [1, 0, 1]),
            "texts": (w.STRING, ["a", "", "zwölf", "☕"]),
            "nested": (w.ARRAY, [(w.U8, [1, 2]), (w.STRING, ["x"]), (w.ARRAY, [])]),
        }  # fmt: skip
        file = opened(tmp_path, w.assemble([w.entry(k, w.ARRAY, v) for k, v in arrays.items()], []))
        file.close()
        for key in ("u8", "i32", "f32", "u64", "none", "flags"):
            assert file.metadata[key].tolist() == arrays[key][1]
        assert file.metadata["flags"].dtype == bool
        texts = file.metadata["texts"]
        assert isinstance(texts, StringArray)
        assert list(texts) == ["a", "", "zwölf", "☕"] == [texts[i] for i in range(4)] == texts[0:4]
        assert texts[-1] == "☕" and texts[::2] == ["a", "zwölf"] and "zwölf" in texts and texts.index("☕") == 3
        with pytest.raises(IndexError, match="4"):
            texts[4]
        nested = file.metadata["nested"]
        assert nested[0].tolist() == [1, 2] and list(nested[1]) == ["x"] and nested[2] == []

    def test_tensor_bytes_and_shapes(self, tmp_path):
        rows = np.arange(12, dtype=np.float32).reshape(3, 4)
        infos = [w.tensor_entry("a", [4, 3], 0, 0), w.tensor_entry("b", [32, 2, 1], 2, 64)]
        q = bytes(range(36))
        with opened(tmp_path, w.assemble([], infos, rows.tobytes() + bytes(16) + q)) as file:
            assert list(file.tensors) == ["a", "b"]
            a, b = file.tensors["a"], file.tensors["b"]
            assert (a.shape, a.type_name, a.n_bytes) == ((3, 4), "F32", 48)
            assert (b.shape, b.type_name, b.n_bytes) == ((1, 2, 32), "Q4_0", 36)
            assert np.frombuffer(file.data("a"), np.float32).reshape(3, 4).tolist() == rows.tolist()
            assert file.data("b") == q
            assert file.file("b").read("b", b.offset + 30, 6) == q[30:]
            with pytest.raises(KeyError):
                file.data("c")

    def test_alignment_of_the_file(self, tmp_path):
        raw = w.model(
            {"a": ((1, 32), "F32"), "b": ((3,), "F32")}, [("general.alignment", w.U32, 4096)], 7, alignment=4096
        )
        with opened(tmp_path, raw) as file:
            assert [t.offset for t in file.tensors.values()] == [4096, 8192]
            assert bytes(file.data("b")) == b"\7" * 12

    def test_a_closed_file_is_not_read(self, tmp_path):
        file = opened(tmp_path, w.model({"a": ((8,), "F32")}, [("k", w.STRING, "v")], fill=3))
        file.close()
        file.close()
        assert file.metadata == {"k": "v"}
        with pytest.raises(ModelError, match=r"m\.gguf: tensor a: Bad file descriptor"):
            file.data("a")

    def test_metadata_larger_than_what_is_read_at_once(self, tmp_path, monkeypatch):
        """Values of every kind across the ends of windows of every size."""
        texts = ["x" * i for i in range(40)] + ["", "☕" * 30]
        entries = [
            w.entry("a", w.ARRAY, (w.STRING, texts)), w.entry("b", w.STRING, "y" * 100), w.entry("c", w.F64, 0.1),
            w.entry("d", w.ARRAY, (w.U32, list(range(50)))), w.entry("e", w.ARRAY, (w.STRING, texts)),
            w.entry("f", w.BOOL, 1), w.entry("g", w.ARRAY, (w.ARRAY, [(w.U8, [1, 2]), (w.STRING, texts)])),
        ]  # fmt: skip
        raw = w.assemble(entries, [w.tensor_entry(f"t{i}", [8], 0, 32 * i) for i in range(9)], bytes(32 * 9))
        for window in (1, 2, 7, 64, 1000, 1 << 20):
            monkeypatch.setattr("pagedkv.models.gguf._WINDOW", window)
            with opened(tmp_path, raw) as file:
                found = file.metadata
                assert list(found["a"]) == list(found["e"]) == list(found["g"][1]) == texts
                assert (found["b"], found["c"], found["f"]) == ("y" * 100, 0.1, True)
                assert found["d"].tolist() == list(range(50)) and found["g"][0].tolist() == [1, 2]
                assert [t.offset for t in file.tensors.values()] == [len(raw) - 32 * (9 - i) for i in range(9)]

    def test_type_table_is_the_published_one(self):
        for kind, (block, block_bytes) in gguf.GGML_QUANT_SIZES.items():
            if int(kind) in TENSOR_TYPES:
                assert TENSOR_TYPES[int(kind)] == (kind.name, block, block_bytes)
        assert {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"} <= {t[0] for t in TENSOR_TYPES.values()}

    def test_file_of_the_gguf_package(self, tmp_path):
        path = tmp_path / "other.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint32("n", 7)
        writer.add_float64("x", math.pi)
        writer.add_bool("flag", True)
        writer.add_array("texts", ["ä", "b" * 300, ""])
        writer.add_array("numbers", [1, -2, 3])
        a, b = np.random.default_rng(0).standard_normal((2, 5, 64)).astype(np.float32)
        writer.add_tensor("a", a)
        writer.add_tensor(
            "b", gguf.quantize(b, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
        )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with GGUFFile(path) as file:
            assert file.metadata["general.architecture"] == "llama"
            assert (file.metadata["n"], file.metadata["x"], file.metadata["flag"]) == (7, math.pi, True)
            assert list(file.metadata["texts"]) == ["ä", "b" * 300, ""]
            assert file.metadata["numbers"].tolist() == [1, -2, 3]
            assert file.tensors["a"].shape == file.tensors["b"].shape == (5, 64)
            assert bytes(file.data("a")) == a.tobytes()
            assert bytes(file.data("b")) == gguf.quantize(b, gguf.GGMLQuantizationType.Q8_0).tobytes()

    def test_the_real_model_as_the_gguf_package_reads_it(self, smollm2_path):
        reader = gguf.GGUFReader(smollm2_path)
        with GGUFFile(smollm2_path) as file:
            fields = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
            assert list(file.metadata) == list(fields)
            for key, field in fields.items():
                ours, theirs = file.metadata[key], field.contents()
                assert (list(ours) if isinstance(ours, StringArray | np.ndarray) else ours) == theirs, key
            assert list(file.tensors) == [t.name for t in reader.tensors]
            for theirs in reader.tensors:
                ours = file.tensors[theirs.name]
                assert ours.shape == tuple(theirs.shape[::-1].tolist())
                assert (ours.type_name, ours.offset, ours.n_bytes) == (
                    theirs.tensor_type.name, theirs.data_offset, theirs.n_bytes,
                )  # fmt: skip
                assert bytes(file.data(theirs.name)[-64:]) == theirs.data.tobytes()[-64:]


class TestBadFiles:
    def test_missing_directory_and_pipe(self, tmp_path):
        with pytest.raises(ModelError, match=r"nowhere\.gguf: No such file"):
            GGUFFile(tmp_path / "nowhere.gguf")
        with pytest.raises(ModelError, match=r"Is a directory|not a regular file"):
            GGUFFile(tmp_path)
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ModelError, match="not a regular file"):
            GGUFFile(tmp_path / "pipe")

    def test_header(self, tmp_path):
        assert "0 bytes" in refused(tmp_path, b"")
        assert "23 bytes" in refused(tmp_path, b"GGUF" + bytes(19))
        assert "not a GGUF file: it starts with b'PK" in refused(tmp_path, b"PK\3\4" + bytes(100))
        assert "version 1 " in refused(tmp_path, w.assemble([], [], version=1))
        assert "version 4 " in refused(tmp_path, w.assemble([], [], version=4))
        assert "big-endian" in refused(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0))

    @pytest.mark.parametrize("count", [1, 1000, 2**31, 2**32, 2**63, 2**64 - 1])
    def test_lying_counts(self, tmp_path, count):
        assert f"metadata entries: a count of {count} " in refused(tmp_path, w.assemble([], [], n_entries=count))
        assert f"tensors: a count of {count} " in refused(tmp_path, w.assemble([], [], n_tensors=count))
        for kind in (w.U8, w.F64, w.BOOL, w.STRING, w.ARRAY):
            lie = w.string("k") + struct.pack("<IIQ", w.ARRAY, kind, count)
            assert f"k: a count of {count} " in refused(tmp_path, w.assemble([lie], [], alignment=1))

    @pytest.mark.parametrize("length", [100, 2**26 + 1, 2**63, 2**64 - 1])
    def test_lying_lengths(self, tmp_path, length):
        pad = bytes(16)
        assert str(length) in refused(tmp_path, w.assemble([struct.pack("<Q", length) + pad], []))
        lie = w.string("k") + struct.pack("<IQ", w.STRING, length) + pad
        message = refused(tmp_path, w.assemble([lie], []))
        assert "k: " in message and str(length) in message
        lie = (
            w.string("k") + struct.pack("<IIQ", w.ARRAY, w.STRING, 2) + w.string("ok") + struct.pack("<Q", length) + pad
        )
        message = refused(tmp_path, w.assemble([lie], []))
        assert "k[1]: " in message and str(length) in message

    def test_values(self, tmp_path):
        def with_entry(raw):
            return refused(tmp_path, w.assemble([raw], []))

        assert "k: unknown value type 13" in with_entry(w.string("k") + struct.pack("<I", 13) + bytes(9))
        assert "k: unknown array element type 99" in with_entry(w.string("k") + struct.pack("<IIQ", w.ARRAY, 99, 0))
        assert "k: boolean 2" in with_entry(w.entry("k", w.BOOL, 2))
        assert "k: boolean 3" in with_entry(w.entry("k", w.ARRAY, (w.BOOL, [1, 3])))
        assert "is not UTF-8" in with_entry(w.entry(b"\xff\xfe", w.U8, 1))
        assert "k: b'ab\\xff' is not UTF-8" in with_entry(w.entry("k", w.STRING, b"ab\xff"))
        assert "is empty" in with_entry(w.entry("", w.U8, 1))
        assert "65536 bytes" in with_entry(w.entry("n" * 65536, w.U8, 1))
        assert "'k' appears twice" in refused(tmp_path, w.assemble([w.entry("k", w.U8, 1)] * 2, []))

    def test_string_arrays_that_are_not_utf8_say_which_element(self, tmp_path):
        texts = opened(
            tmp_path, w.assemble([w.entry("k", w.ARRAY, (w.STRING, [b"ok", b"\xc3(", b"ok"]))], [])
        ).metadata["k"]
        for read in (lambda: texts[1], lambda: list(texts)):
            with pytest.raises(ModelError, match=r"k\[1\]: .* is not UTF-8"):
                read()
        assert texts[2] == "ok"

    def test_nesting_is_bounded(self, tmp_path):
        item = (w.U8, [1])
        for _ in range(3):
            item = (w.ARRAY, [item])
        opened(tmp_path, w.assemble([w.entry("k", w.ARRAY, item)], []))
        assert "k: arrays nested" in refused(tmp_path, w.assemble([w.entry("k", w.ARRAY, (w.ARRAY, [item]))], []))
        assert "k: arrays nested" in refused(
            tmp_path, w.assemble([w.entry("k", w.ARRAY, (w.ARRAY, [(w.U8, [])] * 5000))], [])
        )
        deep = struct.pack("<IQ", w.ARRAY, 1) * 50_000
        assert "k: arrays nested" in refused(
            tmp_path, w.assemble([w.string("k") + struct.pack("<I", w.ARRAY) + deep], [])
        )

    @pytest.mark.parametrize(
        ("dims", "kind", "offset", "says"),
        [
            ([], 0, 0, "0 dimensions"),
            ([1] * 5, 0, 0, "5 dimensions"),
            ([0], 0, 0, "is zero"),
            ([32, 0], 2, 0, "is zero"),
            ([16], 2, 0, "row length 16 is not a multiple of Q4_0's block of 32"),
            ([48, 2], 2, 0, "row length 48 is not a multiple"),
            ([8], 4, 0, "unknown type 4"),
            ([8], 2**32 - 1, 0, "unknown type 4294967295"),
            ([2**32, 2**32], 0, 0, "the file has"),
            ([2**63, 2, 2], 0, 0, "the file has"),
            ([2**64 - 1] * 4, 0, 0, "the file has"),
            ([65], 0, 0, "pass the end of the file"),
            ([8], 0, 4, "offset 4 is not a multiple of the alignment 32"),
            ([8], 0, 256, "pass the end of the file"),
            ([8], 0, 2**64 - 32, "pass the end of the file"),
        ],
    )
    def test_tensors(self, tmp_path, dims, kind, offset, says):
        message = refused(tmp_path, w.assemble([], [w.tensor_entry("blk.w", dims, kind, offset)], bytes(256)))
        assert "tensor blk.w: " in message and says in message

    def test_overlap_and_duplicate(self, tmp_path):
        a, b = w.tensor_entry("a", [16], 0, 0), w.tensor_entry("b", [8], 0, 32)
        assert (
            "tensor b at offset " in (m := refused(tmp_path, w.assemble([], [a, b], bytes(64)))) and "overlaps a" in m
        )
        assert "overlaps" in refused(tmp_path, w.assemble([], [b, a], bytes(64)))
        assert "'a' appears twice" in refused(tmp_path, w.assemble([], [a, a], bytes(64)))
        opened(tmp_path, w.assemble([], [w.tensor_entry("a", [8], 0, 0), b], bytes(64)))

    @pytest.mark.parametrize("bad", [0, 3, 33, 2**31, 2**20])
    def test_alignment(self, tmp_path, bad):
        assert f"general.alignment: {bad} " in refused(
            tmp_path, w.assemble([w.entry("general.alignment", w.U32, bad)], [])
        )
        assert "general.alignment: 'x'" in refused(
            tmp_path, w.assemble([w.entry("general.alignment", w.STRING, "x")], [])
        )

    def test_names_with_control_characters_stay_on_one_line(self, tmp_path):
        message = refused(tmp_path, w.assemble([], [w.tensor_entry("a\nb\x1b[31m", [0], 0, 0)]))
        assert "a\\nb\\x1b[31m" in message


def small_model() -> bytes:
    entries = [
        ("general.architecture", w.STRING, "llama"),
        ("general.alignment", w.U32, 32),
        ("tokens", w.ARRAY, (w.STRING, ["a", "bc", "", "☕"])),
        ("types", w.ARRAY, (w.I32, [1, 3, 6, 2])),
        ("nested", w.ARRAY, (w.ARRAY, [(w.BOOL, [1, 0]), (w.F64, [1.5])])),
        ("flag", w.BOOL, 1),
        ("x", w.F32, 1e-5),
    ]
    return w.model(
        {"a.weight": ((3, 32), "Q4_1"), "b.weight": ((2, 2, 8), "F32"), "c": ((5,), "F16")}, entries, fill=17
    )


def test_every_truncation_is_an_error(tmp_path):
    raw = small_model().rstrip(b"\0")
    opened(tmp_path, raw).close()
    for n in range(len(raw)):
        refused(tmp_path, raw[:n])


def test_damaged_files(tmp_path):
    """Seeded mutations: each gives a ModelError or a file whose every byte can be read, never anything else."""
    seed = int(os.environ.get("PAGEDKV_TEST_SEED", "20240607"))
    rng, raw = random.Random(seed), small_model()
    extremes = [0, 1, 0x7F, 0x80, 0xFF]
    header = raw.index(b"\x11" * 16)
    accepted = 0
    tracemalloc.start()
    try:
        for round_number in range(6000):
            bad = bytearray(raw)
            for _ in range(rng.choice([1, 1, 1, 2, 4])):
                at = rng.randrange(4, header)
                choice = rng.randrange(6)
                if choice == 0:
                    bad[at] ^= 1 << rng.randrange(8)
                elif choice == 1:
                    bad[at] = rng.choice(extremes)
                elif choice == 2:
                    bad[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]))
                elif choice == 3:
                    bad[at : at + 4] = struct.pack(
                        "<I", rng.randrange(2**32) if rng.random() < 0.3 else rng.randrange(40)
                    )
                elif choice == 4:
                    del bad[at : at + rng.randrange(1, 24)]
                else:
                    bad[at:at] = bad[rng.randrange(header) :][: rng.randrange(1, 24)]
            tracemalloc.reset_peak()
            try:
                file = opened(tmp_path, bytes(bad))
            except ModelError as error:
                assert "\n" not in str(error)
            else:
                accepted += 1
                for name, info in file.tensors.items():
                    assert len(bytes(file.data(name))) == info.n_bytes <= len(bad)
                    assert 1 <= len(info.shape) <= 4 and min(info.shape) >= 1
                file.close()
            assert tracemalloc.get_traced_memory()[1] < 1 << 20, f"seed {seed}, round {round_number}"
    except BaseException:
        print(f"seed {seed}, round {round_number}")
        raise
    finally:
        tracemalloc.stop()
    assert 100 < accepted < 5900  # the mutations are neither harmless nor hopeless


def test_truncated_real_model_never_faults(smollm2_path, tmp_path):
    """In a process of its own: a file cut inside its tensors must end in an error, not in a signal."""
    path = tmp_path / "cut.gguf"
    with open(smollm2_path, "rb") as file:
        path.write_bytes(file.read(60_000_000))
    code = f"from pagedkv.models.gguf import GGUFFile\nGGUFFile({str(path)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pass the end of the file at 60000000" in result.stderr.splitlines()[-1]
