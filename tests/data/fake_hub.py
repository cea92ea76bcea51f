"""A fake Hugging Face hub on a local port, with one dataset of parquet files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "1234567890abcdef1234567890abcdef12345678"


@contextmanager
def fake_hub(root: Path, *, dataset: str) -> Iterator[str]:
    """Serve the files below `root` as `dataset`; yields the value for HF_ENDPOINT."""
    with serving(type("Hub", (Hub,), {"root": root, "dataset": dataset})) as endpoint:
        yield endpoint


@contextmanager
def serving(handler: type[Hub]) -> Iterator[str]:
    """Serve on a local port; yields the value for HF_ENDPOINT."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    # By default `shutdown` waits up to half a second.
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Hub(BaseHTTPRequestHandler):
    """The paths of the hub's API that its client requests for one dataset."""

    root: Path
    dataset: str
    commit = COMMIT
    protocol_version = "HTTP/1.1"
    # Otherwise the body waits 40 ms for the acknowledgement of the headers.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_POST(self) -> None:
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        found = [e for e in tree(self.root) if e["path"] in wanted.get("paths", [])]
        self.send(json.dumps(found).encode(), {}, with_body=True)

    def answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        prefix = f"/datasets/{self.dataset}/resolve/"
        if path.startswith(prefix):
            name = path.removeprefix(prefix).partition("/")[2]
            self.send_repo_file(self.root / name, with_body=with_body)
        elif path.startswith(f"/api/datasets/{self.dataset}/tree/"):
            folder = path.removeprefix(f"/api/datasets/{self.dataset}/tree/").partition("/")[2]
            within = [e for e in tree(self.root) if str(e["path"]).startswith(folder)]
            self.send(json.dumps(within).encode(), {}, with_body=with_body)
        elif path.startswith(f"/api/datasets/{self.dataset}"):
            info = {"id": self.dataset, "sha": COMMIT, "private": False, "tags": []}
            info["siblings"] = [{"rfilename": entry["path"]} for entry in tree(self.root)]
            self.send(json.dumps(info).encode(), {}, with_body=with_body)
        else:
            self.send(b"{}", {"X-Error-Code": "RepoNotFound"}, with_body=with_body, status=404)

    def send_repo_file(self, file: Path, *, with_body: bool) -> None:
        if not file.is_file():
            code = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit}
            self.send(b"", code, with_body=with_body, status=404)
            return
        content, status = file.read_bytes(), 200
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": self.commit}
        if "Range" in self.headers:
            start, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
            last = min(int(end or len(content) - 1), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
            content, status = content[int(start) : last + 1], 206
        self.send(content, headers, with_body=with_body, status=status)

    def send(
        self, body: bytes, headers: dict[str, str], *, with_body: bool, status: int = 200
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def tree(root: Path) -> list[dict[str, object]]:
    entries: list[dict[str, object]] = []
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        oid = hashlib.sha1(name.encode()).hexdigest()
        if path.is_dir():
            entries.append({"type": "directory", "path": name, "size": 0, "oid": oid})
        else:
            size = path.stat().st_size
            entries.append({"type": "file", "path": name, "size": size, "oid": oid})
    return entries
