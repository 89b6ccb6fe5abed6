"""A local server that speaks the hub's interface, for the hub's own client in another process."""

import contextlib
import http.server
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import urllib.parse

from tests.support.paths import ROOT


class Hub(http.server.BaseHTTPRequestHandler):
    """The hub's interface for one repository, as its client asks for it.

    `refused` is (status, X-Error-Code) of every answer; `cut` is a file of which the connection breaks in the middle.
    """

    kind, name, files = "datasets", "", {}
    commit = "0123456789abcdef0123456789abcdef01234567"
    refused, cut = None, ""
    asked: list = []  # (method, path, headers) of every request

    def do_GET(self):  # noqa: N802
        path = urllib.parse.unquote(self.path).partition("?")[0]
        self.asked.append((self.command, path, dict(self.headers)))
        prefix = f"/{self.name}/resolve/" if self.kind == "models" else f"/{self.kind}/{self.name}/resolve/"
        if self.refused:
            return self.answer(self.refused[0], b"{}", {"X-Error-Code": self.refused[1]})
        if path.startswith(f"/api/{self.kind}/{self.name}/tree/"):
            listed = [
                {"type": "file", "path": path, "size": len(raw), "oid": "0" * 40} for path, raw in self.files.items()
            ]
            return self.answer(200, json.dumps(listed).encode())
        if path.startswith(prefix):
            revision, _, file = path.removeprefix(prefix).partition("/")
            if file in self.files and revision in ("main", self.commit):
                return self.send(file)
            return self.answer(
                404,
                b"{}",
                {"X-Error-Code": "EntryNotFound" if revision in ("main", self.commit) else "RevisionNotFound"},
            )
        if path in (f"/api/{self.kind}/{self.name}", f"/api/{self.kind}/{self.name}/revision/main"):
            siblings = [{"rfilename": path} for path in self.files]
            return self.answer(
                200, json.dumps({"id": self.name, "sha": self.commit, "siblings": siblings, "private": False}).encode()
            )
        return self.answer(
            404, b"{}", {"X-Error-Code": "RepoNotFound" if self.name not in path else "RevisionNotFound"}
        )

    do_HEAD = do_GET

    def send(self, file):
        raw = self.files[file]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{hash(raw):x}"', "X-Repo-Commit": self.commit, "Content-Length": str(len(raw) - start)}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(raw) - 1}/{len(raw)}"
        if file != self.cut or self.command == "HEAD":
            return self.answer(206 if start else 200, raw[start:], headers)
        self.answer(200, raw[: len(raw) // 2], headers)
        self.wfile.flush()
        self.connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # as a line that goes dead
        return self.connection.close()

    def answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **(headers or {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(**about):
    """(handler class, address) of a hub with one repository: its `kind`, `name` and `files`."""
    handler = type("One", (Hub,), {"asked": [], **about})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield handler, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def python(*arguments, endpoint, home, cwd=ROOT, **environ):
    """Python in another process, whose hub is at `endpoint` and whose cache is in `home`."""
    environ = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "NO_PROXY": "*",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "0",
        **environ,
    }
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )
