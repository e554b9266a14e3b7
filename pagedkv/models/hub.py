"""Models of the Hugging Face Hub, named hf:owner/repo[@revision][/file], kept in the cache directory."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from pagedkv.models.errors import ModelError
from pagedkv.models.gguf_split import part_names
from pagedkv.models.hub_files import Bounded, HubFile, Record, is_inside, line_of, replace_text
from pagedkv.models.safetensors import INDEX, SINGLE, read_json
from pagedkv.process import tell

PREFIX = "hf:"
_NAME = re.compile(r"hf:([\w.-]+)/([\w.-]+)(?:@([\w.-]+))?(?:/(.+\.gguf|config\.json))?")
_DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_MAX_CHOICES = 12


class _Repository:
    """One revision of a repository on the hub. Every method raises ModelError in one line."""

    def __init__(self, name: str, repo: str, revision: str | None):
        try:
            import huggingface_hub
        except ImportError:
            raise ModelError(f"{name}: needs the huggingface_hub package: pip install 'pagedkv[hf]'") from None
        self.name, self.repo = name, repo
        # read here and not at import, which may have been long ago
        self.endpoint = os.environ.get("HF_ENDPOINT") or None
        with self.errors():
            api = huggingface_hub.HfApi(endpoint=self.endpoint, library_name="pagedkv")
            info = api.model_info(repo, revision=revision, files_metadata=True)
            commit = info.sha or revision or "main"
            self.files: dict[str, HubFile] = {}
            for file in info.siblings or ():
                digest = file.lfs.sha256 if file.lfs else file.blob_id
                # the hub is not believed: a digest becomes the name of a file here, too
                found = HubFile.checked(file.rfilename, file.size, digest, commit)
                if found is not None:
                    self.files[found.name] = found

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        from huggingface_hub import errors

        try:
            yield
        except (ModelError, MemoryError):
            raise
        except errors.GatedRepoError:
            raise ModelError(
                f"{self.name}: gated; accept its terms on the hub, then log in with `hf auth login`"
            ) from None
        except errors.RepositoryNotFoundError:
            raise ModelError(
                f"{self.name}: no such repository on the hub, or a private one (`hf auth login`)"
            ) from None
        except errors.RevisionNotFoundError:
            raise ModelError(f"{self.name}: no such revision") from None
        except errors.HFValidationError as error:
            raise ModelError(f"{self.name}: {line_of(error)}") from None
        except OSError as error:
            raise ModelError(f"{self.name}: {error.strerror or line_of(error)}") from None
        except Exception as error:
            # the HTTP library behind the hub's client has its own exceptions, not the same in every version
            raise ModelError(f"{self.name}: the hub cannot be reached: {line_of(error)}") from None

    def fetch(self, file: HubFile, scratch: Path) -> Path:
        """The file in `scratch`, checked; goes on where an earlier call was interrupted."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        whole, part = scratch / file.digest, scratch / f"{file.digest}.part"
        if whole.exists():
            return whole
        if part.exists() and part.stat().st_size > file.n_bytes:
            part.unlink()

        def too_long() -> ModelError:
            part.unlink(missing_ok=True)
            return ModelError(f"{self.name}: {file.name} is longer than the {file.n_bytes} bytes that the hub states")

        with self.errors(), open(part, "ab") as out:
            bounded: Any = Bounded(out, file.n_bytes, too_long)
            url = hf_hub_url(self.repo, file.name, revision=file.commit, endpoint=self.endpoint)
            http_get(
                url,
                bounded,
                resume_size=out.tell(),
                headers=build_hf_headers(library_name="pagedkv"),
                expected_size=file.n_bytes,
                displayed_filename=file.name,
            )
            out.flush()
            os.fsync(out.fileno())
        if not file.is_whole(part):
            part.unlink()
            raise ModelError(f"{self.name}: {file.name} does not have the hash {file.digest} that the hub states")
        part.replace(whole)
        return whole

    def choose(self) -> str:
        """The one model of the repository: a GGUF file, the first of its parts, or config.json for a directory."""
        choices = [name for name in sorted(self.files) if name.endswith(".gguf") and _is_first(name)]
        choices = [name for name in choices if not PurePosixPath(name).name.startswith("mmproj")]
        if "config.json" in self.files and not self.files.keys().isdisjoint((SINGLE, INDEX)):
            choices.append("config.json")
        if len(choices) == 1:
            return choices[0]
        if not choices:
            raise ModelError(f"{self.name}: neither a GGUF file nor a directory of safetensors")
        more = f" and {len(choices) - _MAX_CHOICES} more" if len(choices) > _MAX_CHOICES else ""
        raise ModelError(
            f"{self.name}: holds several models; add one after a slash: {', '.join(choices[:_MAX_CHOICES])}{more}"
        )

    def named(self, name: str) -> HubFile:
        if name not in self.files:
            raise ModelError(f"{self.name}: no file {name} in the repository")
        return self.files[name]


def pull(name: str, home: Path, lock: Callable, progress: bool = True, verify: bool = False) -> Path:
    """Bring what hf:owner/repo[@revision][/file] names into `home` and return its path; blocks unless it is there.

    A file that ends in .gguf is that model (the first part brings the others); `config.json` or nothing the directory
    of safetensors; nothing is enough where the repository holds one model. Downloads go on where they were
    interrupted; what is complete, and has the hash the hub states, appears under its name at once. Files that are
    there must have the size that the hub stated when they were pulled and, with `verify`, the hash; those that have
    not are pulled again from the same commit, and standard error tells so. lock: as `catalogue.lock`. Raises
    ModelError, one line.
    """
    match = _NAME.fullmatch(name)
    if match is None or any("--" in part for part in match.groups()[:2]):
        raise ModelError(f"{name}: not hf:owner/repo[@revision][/file.gguf]")
    owner, repo, revision, file = match.groups()
    if file is not None and not is_inside(file):
        raise ModelError(f"{name}: {file} is no path inside a repository")
    if file is not None and not _is_first(file):
        raise ModelError(f"{name}: one part of several; give the first one")
    base = home / "hub" / "--".join([owner, repo, *([revision] if revision else [])])
    chosen = base / "chosen"  # what the name without a file stands for
    try:
        if file is None and chosen.exists():
            file = _kept_choice(chosen)
        if file is not None and (target := _target(base, file)).exists() and not _damaged(base, target, verify):
            return target
        base.mkdir(parents=True, exist_ok=True)
        with lock(base / ".lock", name, progress), _bars(progress):
            scratch = base / ".partial"
            if file is None or not (target := _target(base, file)).exists():
                repository = _Repository(name, f"{owner}/{repo}", revision)
                wanted = file or repository.choose()
                target = _target(base, wanted)
                if not target.exists():
                    scratch.mkdir(exist_ok=True)
                    (_pull_directory if wanted == "config.json" else _pull_gguf)(repository, wanted, scratch, target)
                    shutil.rmtree(scratch)
                if file is None:
                    replace_text(chosen, wanted)
            elif damaged := _damaged(base, target, verify):
                scratch.mkdir(exist_ok=True)
                _mend(name, f"{owner}/{repo}", damaged, scratch)
                shutil.rmtree(scratch)
        return target
    except OSError as error:
        raise ModelError(f"cannot pull {name} into {base}: {error.strerror or error}") from None


def _target(base: Path, file: str) -> Path:
    return base / "directory" if file == "config.json" else base / "files" / file


def _kept_choice(chosen: Path) -> str | None:
    """The file that a name without one stands for, None where what was kept of it cannot be."""
    with contextlib.suppress(UnicodeDecodeError):
        text = chosen.read_text(encoding="utf-8")
        if is_inside(text) and (text == "config.json" or text.endswith(".gguf")):
            return text
    return None


def _damaged(base: Path, target: Path, verify: bool) -> dict[Path, HubFile]:
    """The files of a model that is there which are not what was pulled; with `verify` every byte of them is read."""
    names = part_names(target.name) or [target.name]
    files = Record(base).under([target.with_name(part) for part in names])
    if verify and not files:
        tell(f"{target} was not checked: there is no record of its hash; delete it to have it pulled again")
    return {path: file for path, file in files.items() if not file.is_whole(path, verify)}


def _mend(name: str, repo: str, damaged: dict[Path, HubFile], scratch: Path) -> None:
    """Pull damaged files again, from the commit they came from, and put each in its place."""
    for path, file in damaged.items():
        try:
            whole = _Repository(name, repo, file.commit).fetch(file, scratch)
        except ModelError as error:
            raise ModelError(f"{path} was damaged: {error}") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        whole.replace(path)
        tell(f"{path} was damaged and has been downloaded again")


def _pull_gguf(repository: _Repository, name: str, scratch: Path, target: Path) -> None:
    names = part_names(PurePosixPath(name).name) or [PurePosixPath(name).name]
    files = [repository.named(str(PurePosixPath(name).with_name(part))) for part in names]
    whole = [repository.fetch(file, scratch) for file in files]
    target.parent.mkdir(parents=True, exist_ok=True)
    places = [target.with_name(part) for part in names]
    Record(scratch.parent).add(dict(zip(places, files, strict=True)))
    # the first part comes last: where it is, all are
    for path, place in reversed(list(zip(whole, places, strict=True))):
        path.replace(place)


def _pull_directory(repository: _Repository, name: str, scratch: Path, target: Path) -> None:
    names = [name for name in _DESCRIPTIONS if name in repository.files or name == "config.json"]
    if SINGLE in repository.files:
        weights = [SINGLE]
    else:
        index = read_json(repository.fetch(repository.named(INDEX), scratch)).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise ModelError(f"{repository.name}: {INDEX}: weight_map is not a table of file names")
        weights = [INDEX, *sorted(set(index.values()))]
    files = [repository.named(name) for name in [*names, *weights]]
    for file in files:
        if PurePosixPath(file.name).name != file.name:
            raise ModelError(f"{repository.name}: {INDEX}: {file.name} is not beside it")
    whole = [repository.fetch(file, scratch) for file in files]
    ready = scratch / "directory"
    shutil.rmtree(ready, ignore_errors=True)
    ready.mkdir()
    for path, file in zip(whole, files, strict=True):
        os.link(path, ready / file.name)
    Record(scratch.parent).add({target / file.name: file for file in files})
    ready.replace(target)


def _is_first(name: str) -> bool:
    names = part_names(PurePosixPath(name).name)
    return names is None or names[0] == PurePosixPath(name).name


@contextlib.contextmanager
def _bars(progress: bool) -> Iterator[None]:
    """The client's own progress bars, or none."""
    try:
        from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    except ImportError:  # which is reported where the client is needed
        yield
        return
    if progress or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
