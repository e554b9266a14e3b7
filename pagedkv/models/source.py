"""open_model: a GGUF file or a Hugging Face directory, ready to be described or packed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pagedkv.models.architectures import ARCHITECTURES
from pagedkv.models.config import END_TOKENS, ModelConfig
from pagedkv.models.gguf_split import open_gguf
from pagedkv.models.huggingface import DirectoryConfig
from pagedkv.models.packing import TensorSource
from pagedkv.models.safetensors import SafetensorsFiles
from pagedkv.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OpenModel:
    """What a container holds, checked; tensors can be read while it is open.

    container        what it is, for people; n_bytes: its size
    tokenizer_kind   the family of its tokenizer, for people
    adjacent_pairs   rows of q and k keep the two values of a rotation pair side by side
    norm_offset      added to every norm weight
    """

    path: Path
    container: str
    n_bytes: int
    config: ModelConfig
    tokenizer: Tokenizer
    tokenizer_kind: str
    tensors: TensorSource
    adjacent_pairs: bool
    norm_offset: float = 0.0


@contextmanager
def open_model(path: Path) -> Iterator[OpenModel]:
    """Open a GGUF file or a Hugging Face directory. Reads no weights. Raises ModelError, one line; also at the end,
    when a file was written into meanwhile, so that nothing is made of two versions of a file.
    """
    if path.is_dir():
        directory = DirectoryConfig(path)
        with SafetensorsFiles(path, directory.tensor_names) as files:
            directory.tie(files)
            tokenizer = Tokenizer.from_directory(path)
            shapes = {name: tensor.shape for name, tensor in files.tensors.items()}
            stops = {i for i, text in tokenizer.special_texts().items() if text in END_TOKENS}
            config = directory.model(shapes, tokenizer.add_bos, stops)
            tokenizer.check_rows(config.vocab_size)
            offset = directory.architecture.norm_offset
            kind = f"tokenizer.json, {tokenizer.vocab_size} tokens"
            yield OpenModel(
                path, "Hugging Face directory", files.n_bytes, config, tokenizer, kind, files, False, offset
            )
            files.check_unchanged()
    else:
        with open_gguf(path) as file:
            config = ModelConfig.from_gguf(file)
            tokenizer = Tokenizer(file.metadata)
            kind = f"{file.metadata['tokenizer.ggml.model']}, pre-tokenizer "
            kind += file.metadata.get("tokenizer.ggml.pre", "default")
            adjacent = ARCHITECTURES[config.architecture].adjacent_pairs
            container = f"GGUF version {file.version}"
            yield OpenModel(path, container, file.n_bytes, config, tokenizer, kind, file, adjacent)
            file.check_unchanged()
