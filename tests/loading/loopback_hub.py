"""A model hub on this machine: the few answers of the real one that fetching a model takes."""

import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Mapping

LARGE_BYTES = 1000
"""Files from here on are told with a SHA-256, as the hub does for what it keeps outside git; smaller ones with git's id."""


class Hub:
    """Serves `repositories`: name -> revision -> file name -> content."""

    def __init__(self, repositories: Mapping[str, Mapping[str, Mapping[str, bytes]]]) -> None:
        self.repositories = {repo: dict(revisions) for repo, revisions in repositories.items()}
        self.refused: dict[str, tuple[int, str]] = {}
        self.breaks_at: int | None = None
        self.requests: list[tuple[str, str, str | None]] = []
        self.tokens: set[str | None] = set()
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, has_body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, has_body=False)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def bodies_sent(self, name: str) -> list[str | None]:
        """The byte ranges that were asked of a file, None for the whole."""
        return [range_ for method, path, range_ in self.requests if method == "GET" and path.endswith(f"/{name}")]

    def answer(self, request: http.server.BaseHTTPRequestHandler, *, has_body: bool) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(request.path).path)
        self.requests.append((request.command, path, request.headers.get("Range")))
        self.tokens.add(request.headers.get("Authorization"))
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        if repo in self.refused or repo not in self.repositories:
            status, code = self.refused.get(repo, (404, "RepoNotFound"))
            self._send(request, status, b"{}", {"X-Error-Code": code})
        elif is_api:
            self._answer_api(request, repo, parts[4:])
        else:
            self._answer_file(request, repo, parts[3], "/".join(parts[4:]), has_body=has_body)

    def commit(self, repo: str, revision: str) -> str:
        return hashlib.sha1(repr((repo, sorted(self.repositories[repo][revision].items()))).encode()).hexdigest()

    def _files(self, repo: str, revision: str) -> Mapping[str, bytes] | None:
        for name, files in self.repositories[repo].items():
            if revision in (name, self.commit(repo, name)):
                return files
        return None

    def _answer_api(self, request: http.server.BaseHTTPRequestHandler, repo: str, rest: list[str]) -> None:
        revision = "/".join(rest[1:]) or "main"
        files = self._files(repo, revision)
        if files is None:
            self._send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return
        listed = [{"path": name, "rfilename": name, "type": "file", **_described(content)} for name, content in files.items()]
        if rest[:1] == ["tree"]:
            body: object = listed
        else:
            name = next(name for name in self.repositories[repo] if revision in (name, self.commit(repo, name)))
            body = {"id": repo, "modelId": repo, "sha": self.commit(repo, name), "siblings": listed, "tags": [], "private": False}
        self._send(request, 200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _answer_file(self, request: http.server.BaseHTTPRequestHandler, repo: str, revision: str, name: str, *, has_body: bool) -> None:
        files = self._files(repo, revision)
        if files is None or name not in files:
            self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = files[name]
        described = _described(content)
        etag = described["lfs"]["sha256"] if "lfs" in described else described["blobId"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": revision, "Accept-Ranges": "bytes", "X-Linked-Size": str(len(content))}
        status, start = 200, 0
        if asked := request.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(request, status, content[start:], headers, has_body=has_body)

    def _send(
        self, request: http.server.BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str], *, has_body: bool = True
    ) -> None:
        try:
            request.send_response(status)
            for name, value in headers.items():
                request.send_header(name, value)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            if not has_body:
                return
            if self.breaks_at is not None and len(body) > self.breaks_at:
                request.wfile.write(body[: self.breaks_at])
                request.close_connection = True
                return
            request.wfile.write(body)
        except OSError:
            pass

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _described(content: bytes) -> dict:
    described: dict = {"size": len(content)}
    described["blobId"] = described["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if len(content) >= LARGE_BYTES:
        digest = hashlib.sha256(content).hexdigest()
        described["lfs"] = {"sha256": digest, "oid": digest, "size": len(content), "pointerSize": 130}
    return described
