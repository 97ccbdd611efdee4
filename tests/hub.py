"""A hub of our own on the loopback, as much of it as snapshot_download asks: one model, one commit, branch main.

with serve({"config.json": b"{}"}) as hub:
    environment = os.environ | hub.environment(home)        # of a process whose files lie under home
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

ID, COMMIT = "owner/tiny", "0123456789" * 4


@dataclass(frozen=True)
class Served:
    port: int
    asked: list[str]  # paths, in order

    def environment(self, home: Path, *, offline: bool = False, port: int | None = None) -> dict[str, str]:
        """Of a process that is to ask this hub, or another port, and no other."""
        return {
            "HF_ENDPOINT": f"http://127.0.0.1:{port or self.port}",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_OFFLINE": str(int(offline)),
        }


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Served]:
    handler = type("OneHub", (Hub,), {"asked": [], "files": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Served(server.server_port, handler.asked)
    finally:
        server.shutdown()
        server.server_close()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Hub(BaseHTTPRequestHandler):
    files: dict[str, bytes]
    asked: list[str]

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(self.path.partition("?")[0])
        self.asked.append(path)
        if path.startswith("/api/models/owner/closed"):
            return self._say(403, b"{}", {"X-Error-Code": "GatedRepo"})
        if not path.removeprefix("/api/models").startswith(f"/{ID}/"):
            return self._say(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        head, _, rest = path.removeprefix("/api/models").removeprefix(f"/{ID}/").partition("/")
        revision, _, name = rest.partition("/")
        if revision not in (COMMIT, "main"):
            return self._say(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if head == "revision":
            return self._say(200, json.dumps({"id": ID, "modelId": ID, "sha": COMMIT, "siblings": []}).encode())
        if head == "tree":
            tree = [{"type": "file", "path": n, "size": len(b), "oid": _etag(b)} for n, b in self.files.items()]
            return self._say(200, json.dumps(tree).encode())
        body = self.files[name]
        return self._say(200, body, {"ETag": f'"{_etag(body)}"', "X-Repo-Commit": COMMIT})

    def _say(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        """Not on standard error."""


def _etag(body):
    return hashlib.sha1(body).hexdigest()
