"""What equal answers depend on, as one short text."""

import glob
import hashlib
import re
from pathlib import Path
from typing import Any

from ..version import NUMERICS

HASH_CHARS = 16
_SUFFIXES = frozenset({".gguf", ".safetensors", ".json", ".jinja", ".model", ".txt"})


def fingerprint(llm: Any) -> str:
    """`<model hash>-n<numerics version>-<K/V format>-<settings>` of an LLM.

    Where it is equal, so are the bytes of equal requests with equal seeds, on any machine. Reads the model's files.
    """
    names = [llm.kv.format, *(str(value) for _, value in sorted(llm.settings.items()) if value is not None)]
    return f"{model_hash(llm.model.path)[:HASH_CHARS]}-n{NUMERICS}-{'-'.join(names)}"


def model_hash(path: Path) -> str:
    """SHA-256 in hex of a model file, or of a directory's model files and their names. A split file counts with all its
    parts. Blocks; reads everything once."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file())
    else:
        files = _parts(path)
    names = [file.name if path.is_dir() else str(number) for number, file in enumerate(files)]
    digests = [(name, _sha256(file)) for name, file in zip(names, files, strict=True)]
    if len(digests) == 1:
        return digests[0][1]
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in digests).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _parts(path: Path) -> list[Path]:
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    if match is None:
        return [path]
    return sorted(path.parent.glob(f"{glob.escape(match[1])}-?????-of-{match[2]}.gguf"))
