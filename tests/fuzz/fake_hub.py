"""Pulls from a hub whose every answer is drawn, watched for paths outside the model cache.

A document: {"names": what is pulled one after the other, "info": what the hub says of the repository, "files": {name:
text, or {"text", "cut": bytes after which the download breaks off}}, "damage": whether what was pulled is then spoilt}.
A digest "=" of the listing stands for the right one.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from pagedkv.models import hub
from pagedkv.models.catalogue import _lock

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# audit event -> which of its arguments are paths that change
_CHANGES = {
    "os.mkdir": (0,), "os.rename": (0, 1), "os.link": (0, 1), "os.symlink": (0, 1), "os.remove": (0,), "os.rmdir": (0,),
    "os.truncate": (0,), "os.utime": (0,), "os.chmod": (0,), "shutil.rmtree": (0,), "open": (0,),
}  # fmt: skip
_watched: Path | None = None
_outside: list[str] = []


def _audit(event: str, arguments: tuple) -> None:
    if _watched is None or event not in _CHANGES:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
        return
    for i in _CHANGES[event]:
        path = arguments[i]
        if isinstance(path, str | bytes | os.PathLike):
            whole = Path(os.path.normpath(os.path.join(os.getcwd(), os.fsdecode(path))))
            # shutil.rmtree removes names relative to a directory it holds open
            if os.path.isabs(os.fsdecode(path)) and not whole.is_relative_to(_watched):
                _outside.append(f"{event} {whole}")
                raise PermissionError(1, "outside the model cache", str(whole))


sys.addaudithook(_audit)


def pulls(document: dict[str, Any], root: Path, refused: Callable) -> tuple[list[str], str]:
    """(outcome of each pull, what was wrong or nothing). root: an empty directory."""
    global _watched
    home, secret = root / "home", root / "secret"
    secret.write_bytes(b"untouched")
    files = document.get("files") if isinstance(document.get("files"), dict) else {}
    names = document.get("names") if isinstance(document.get("names"), list) else []
    paths: list[Path] = []
    outcomes: list[str] = []
    told: list[str] = []
    with (
        mock.patch("huggingface_hub.HfApi.model_info", lambda *args, **kwargs: _info(document.get("info"), files)),
        mock.patch("huggingface_hub.file_download.http_get", lambda url, out, **asked: _send(files, out, **asked)),
        mock.patch.object(hub, "tell", told.append),
    ):
        _watched = home
        try:
            home.mkdir()
            for name in [name for name in names if isinstance(name, str)][:3]:
                outcomes.append(refused(lambda n=name: paths.append(hub.pull(n, home, _lock, False, bool(paths)))))
                if document.get("damage") is True and paths and paths[-1].is_file():
                    paths[-1].write_bytes(b"damaged")
        finally:
            _watched = None
    wrong, _outside[:] = list(_outside), []
    wrong += [f"returned {path}" for path in paths if not path.resolve().is_relative_to((home / "hub").resolve())]
    wrong += [f"told {line!r}" for line in told if not line.isprintable()]
    wrong += [f"link {path}" for path in root.rglob("*") if path.is_symlink()]
    if {path.name for path in root.iterdir()} != {"home", "secret"} or secret.read_bytes() != b"untouched":
        wrong.append("what lies beside the cache was changed")
    if {path.name for path in home.iterdir()} - {"hub"}:
        wrong.append("what lies beside hub/ was changed")
    return [outcome.replace(str(root), "") for outcome in outcomes], "; ".join(wrong)


def _text(entry: Any) -> bytes:
    text = entry.get("text") if isinstance(entry, dict) else entry
    return text.encode("utf-8", "replace") if isinstance(text, str) else b""


def _info(info: Any, files: dict[str, Any]) -> Any:
    from huggingface_hub.hf_api import ModelInfo

    if isinstance(info, dict) and isinstance(info.get("siblings"), list):
        info = {**info, "siblings": [_digested(entry, files) for entry in info["siblings"]]}
    return ModelInfo(**info)


def _digested(entry: Any, files: dict[str, Any]) -> Any:
    """A file of the listing with the right digests where it asks for them."""
    if not isinstance(entry, dict) or not isinstance(entry.get("rfilename"), str):
        return entry
    data = _text(files.get(entry["rfilename"]))
    entry = dict(entry)
    if entry.get("blobId") == "=":
        entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if entry.get("size") == "=":
        entry["size"] = len(data)
    if isinstance(entry.get("lfs"), dict) and entry["lfs"].get("sha256") == "=":
        entry["lfs"] = {**entry["lfs"], "sha256": hashlib.sha256(data).hexdigest()}
    return entry


def _send(files: dict[str, Any], out: Any, **asked: Any) -> None:
    name, resume_size = asked["displayed_filename"], asked["resume_size"]
    if name not in files:
        raise OSError(f"404 for {name}")
    entry = files[name]
    cut = entry.get("cut") if isinstance(entry, dict) else None
    data = _text(entry)
    out.write(data[resume_size : cut if type(cut) is int else None])
    if type(cut) is int:
        entry.pop("cut")
        raise OSError("the connection broke")
    if asked["expected_size"] != len(data):
        raise OSError("another size")
