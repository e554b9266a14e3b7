"""load_model: from a name or a path to packed weights, configuration and tokenizer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pagedkv.core._kernels import ThreadPool
from pagedkv.core.forward import ACTIVATIONS, ForwardModel
from pagedkv.models.catalogue import resolve
from pagedkv.models.config import ModelConfig
from pagedkv.models.packing import QUANTIZATIONS, Packer
from pagedkv.models.source import open_model
from pagedkv.models.tokenizer import Tokenizer


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run: `forward` holds the packed weights, the file is closed."""

    name: str
    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    forward: ForwardModel

    def close(self) -> None:
        """Free the workspace; the weights go with the last reference."""
        self.forward.close()


def load_model(
    model: str | os.PathLike,
    *,
    threads: int | None = None,
    quantization: str | None = None,
    activations: str = "int8",
    context: int | None = None,
    progress: bool = False,
) -> LoadedModel:
    """Load a catalogue name (pulled at first use), a GGUF file or a Hugging Face directory.

    threads: of packing and of every later step (None: see `pagedkv.core.cpus.default_threads`). quantization: "q8_0"
    for float matrices, None: as in the file. context: the longest sequence that will be run, None: the model's own; it
    chooses between the rotation tables of models that have several (docs/models.md). progress: bars on standard error.
    Raises ModelError or ValueError in one line that names what is wrong. Weights are read once, and no
    byte of a file is mapped: one that others cut short or write into while it is read is such an error too.
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations: {activations!r} is not one of {', '.join(ACTIVATIONS)}")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization: {quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    from tqdm import tqdm

    pool = ThreadPool(threads)
    path = resolve(model, progress=progress)
    with open_model(path) as opened:
        config, n = opened.config, len(opened.tensors.tensors)
        with tqdm(total=n, desc="packing weights", unit="tensor", disable=not progress, leave=False, delay=1) as bar:
            packer = Packer(
                opened.tensors,
                config,
                pool,
                adjacent_pairs=opened.adjacent_pairs,
                norm_offset=opened.norm_offset,
                quantization=quantization,
                done=bar.update,
            )
            forward = packer.model(context or config.context_length, activations)
        return LoadedModel(config.name, path, config, opened.tokenizer, forward)
