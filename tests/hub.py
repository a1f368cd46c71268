"""A hub of Hugging Face on this machine: the paths of its HTTP interface that downloads use."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse


class Hub:
    """Repositories by name, each a list of commits (folders); `main` is the last of them."""

    def __init__(self):
        self.commits, self.asked = {}, []

    def push(self, name, folder):
        """Make a folder the new `main` of a repository; returns the commit's name."""
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        sha = hashlib.sha1(b"".join([name.encode(), *files.values()])).hexdigest()
        self.commits.setdefault(name, {})[sha] = files
        return sha

    def commit(self, name, revision):
        commits = self.commits[name]
        sha = [*commits][-1] if revision == "main" else revision
        return sha, commits[sha]

    def answer(self, path):
        """Headers and body for a path."""
        owner, repo, *rest = path.removeprefix("/api/models/").lstrip("/").split("/")
        match rest:
            case ["revision", revision]:
                sha, files = self.commit(f"{owner}/{repo}", revision)
                siblings = [{"rfilename": file} for file in files]
                return {}, json.dumps({"id": f"{owner}/{repo}", "sha": sha, "siblings": siblings})
            case ["tree", revision]:
                _, files = self.commit(f"{owner}/{repo}", revision)
                named = [
                    {"type": "file", "path": f, "size": len(files[f]), "oid": f} for f in files
                ]
                return {}, json.dumps(named)
            case ["resolve", revision, file]:
                sha, files = self.commit(f"{owner}/{repo}", revision)
                digest = hashlib.sha1(files[file]).hexdigest()
                return {"X-Repo-Commit": sha, "ETag": f'"{digest}"'}, files[file]
        raise KeyError(path)

    @contextmanager
    def served(self):
        """Within this context, the hub's address."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = unquote(urlparse(self.path).path)
                hub.asked.append(path)
                try:
                    headers, body = hub.answer(path)
                    status = 200
                except (KeyError, IndexError, ValueError):
                    status, headers, body = 404, {"X-Error-Code": "RepoNotFound"}, ""
                body = body.encode() if isinstance(body, str) else body
                self.send_response(status)
                for key, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
