"""A hub of models on a loopback port, with the few answers that huggingface_hub asks for."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 100  # bytes from which a file has a SHA-256, not git's hash


class Hub:
    """Use as a context manager. repos: {"owner/name": {file name: bytes}}; the rest is how it misbehaves.

    .requests    (method, path, Range header) of every request so far
    .gated       repositories whose files want a login
    .cut         {file name: bytes after which its next download breaks off}
    .refuse      {file name: how often it is refused after that}
    .wrong       file names that are served with other bytes
    .redirect    {file name: where its downloads are sent to}
    .message     what errors say
    .describe_file   what is said of each file of a listing
    """

    def __init__(self, repos: dict[str, dict[str, bytes]]):
        self.repos, self.requests = repos, []
        self.gated, self.wrong = set(), set()
        self.cut, self.refuse, self.redirect = {}, {}, {}
        self.message, self.describe_file = "no", describe_file
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, handler) -> None:
        path = handler.path.partition("?")[0].strip("/")
        self.requests.append((handler.command, path, handler.headers.get("Range")))
        if path.startswith("api/models/"):
            repo, _, revision = path.removeprefix("api/models/").partition("/revision/")
            return self.describe(handler, repo, revision or "main")
        repo, _, rest = path.partition("/resolve/")
        revision, _, name = rest.partition("/")
        if repo in self.gated:
            return self.fail(handler, 401, "GatedRepo")
        if name in self.redirect:
            return self.send(handler, 302, b"", {"Location": self.redirect[name]})
        if name not in self.repos.get(repo, {}):
            return self.fail(handler, 404, "EntryNotFound" if repo in self.repos else "RepoNotFound")
        self.serve(handler, name, self.repos[repo][name])

    def describe(self, handler, repo: str, revision: str) -> None:
        if repo not in self.repos:
            return self.fail(handler, 404, "RepoNotFound")
        if revision not in ("main", "v2", COMMIT):
            return self.fail(handler, 404, "RevisionNotFound")
        siblings = [self.describe_file(*item) for item in self.repos[repo].items()]
        body = json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode()
        self.send(handler, 200, body, {"Content-Type": "application/json"})

    def serve(self, handler, name: str, data: bytes) -> None:
        if name in self.wrong:
            data = bytes(byte ^ 1 for byte in data)
        status, start = 200, 0
        if wanted := handler.headers.get("Range"):
            status, start = 206, int(wanted.removeprefix("bytes=").partition("-")[0])
        if name not in self.cut and self.refuse.get(name, 0):
            self.refuse[name] -= 1
            return self.fail(handler, 503, None)
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.send(handler, status, data[start:], headers, self.cut.pop(name, None))

    def fail(self, handler, status: int, code: str | None) -> None:
        self.send(handler, status, b"{}", {"X-Error-Code": code, "X-Error-Message": self.message} if code else {})

    def send(self, handler, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        handler.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body[:cut])
        if cut is not None:
            handler.wfile.flush()
            handler.close_connection = True


def describe_file(name: str, data: bytes) -> dict:
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    found = {"rfilename": name, "size": len(data), "blobId": git}
    if len(data) >= LARGE:
        found["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return found
