"""A small Hub on loopback, in memory: enough to push a model, load it back, and read data sets.

``with HubServer() as hub`` serves repositories at ``hub.url``; data sets come from ``add_dataset``.
Two tokens are known, the user's and a stranger's; each may write to what its owner has, a public
repository can be read without one, and a private one does not exist for others. Uploads take the
git-LFS road, so a client must set HF_HUB_DISABLE_XET=1; what came by it is handed out by another
host, as from the Hub's CDN. ``hub.requests`` records what was asked, ``hub.ranges`` which parts of
files, ``hub.leaks`` the tokens that a client showed where none belongs.

``hub.faults`` makes requests fail, each fault the first request that it matches: see ``Fault``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import responses
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit

import yaml

REPO = r"(?P<repo>[^/]+/[^/]+)"
READING_POSTS = ("/api/validate-yaml", "/api/datasets/")
LARGE = 10_000_000  # bytes from which a file goes through LFS; safetensors always do


@dataclass(frozen=True)
class Blob:
    """One file's content, and whether it came through LFS."""

    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def git_oid(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_oid


@dataclass
class Repo:
    """A repository: trees by commit, commits by branch and by tag."""

    private: bool
    trees: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, tree: dict[str, Blob]) -> str:
        content = "".join(f"{path}\0{blob.sha256}\n" for path, blob in sorted(tree.items()))
        oid = hashlib.sha1(f"{len(self.trees)}\n{content}".encode()).hexdigest()
        self.trees[oid] = tree
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str:
        oid = self.branches.get(revision) or self.tags.get(revision, revision)
        if oid not in self.trees:
            raise Refusal(404, "RevisionNotFound", f"no revision {revision}")
        return oid


class Refusal(Exception):
    """An answer other than success, in the form the Hub gives it."""

    def __init__(self, status: int, code: str, message: str, body: object = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.body = body if body is not None else {"error": message}


@dataclass(frozen=True)
class Fault:
    """How one request fails: with a status, or by a connection that is cut.

    A status is answered with a page of HTML, as the machines before a Hub do. A cut is in the
    request, of which ``after`` bytes of content are read and nothing is done, or in the answer, of
    which ``after`` bytes of content are sent when everything is done; ``then`` is called before it.
    """

    request: str  # a regular expression for all of "METHOD path"
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: Literal["request", "answer"] | None = None
    after: int = 0
    then: Callable[[], object] = lambda: None


class HubServer:
    """The server; a context manager. See the module's text."""

    def __init__(self, token: str = "hf_loopback_token", user: str = "tester") -> None:
        self.token, self.user = token, user
        self.stranger_token = "hf_strangers_token"
        self.accounts = {token: user, self.stranger_token: "stranger"}
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.ranges: list[str] = []
        self.leaks: list[str] = []
        self._lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.url, self.cdn = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """Return what a revision of a repository holds."""
        found = self.repos[repo]
        tree = found.trees[found.resolve(revision)]
        return {path: blob.content for path, blob in tree.items()}

    def add_dataset(self, repo: str, files: dict[str, bytes]) -> str:
        """Commit a data set's files, all that it holds then, and return the commit."""
        found = self.repos.setdefault(f"datasets/{repo}", Repo(private=False))
        return found.commit("main", {path: Blob(raw, lfs=False) for path, raw in files.items()})

    def next_fault(self, request: _Handler) -> Fault | None:
        """Record a request, and take the first fault that is meant for it off the list."""
        asked = f"{request.command} {urlsplit(request.path).path}"
        with self._lock:
            self.requests.append(asked)
            for fault in self.faults:
                if re.fullmatch(fault.request, asked):
                    self.faults.remove(fault)
                    return fault
        return None

    def answer(self, request: _Handler, body: bytes) -> None:
        method, path = request.command, urlsplit(request.path).path
        with self._lock:
            sent = request.headers.get("Authorization")
            if sent and path.startswith("/lfs/") and not path.endswith("/verify"):
                self.leaks.append(f"{method} {path}: {sent}")
            for methods, pattern, action in ROUTES:
                match = re.fullmatch(pattern, path)
                if match and method in methods.split():
                    parts = {k: unquote(v) for k, v in match.groupdict().items() if v}
                    writes = method in ("POST", "DELETE") and not path.startswith(READING_POSTS)
                    self._authorise(request, writes, parts.get("repo"))
                    return action(self, request, body, **parts)
        raise Refusal(404, "NotFound", f"no endpoint {method} {path}")

    def _reader(self, request: _Handler) -> str | None:
        """Return whose token came with a request, None without one."""
        sent = request.headers.get("Authorization")
        if sent is None:
            return None
        if sent.removeprefix("Bearer ") not in self.accounts:
            raise Refusal(401, "", "Invalid credentials in Authorization header")
        return self.accounts[sent.removeprefix("Bearer ")]

    def _authorise(self, request: _Handler, writes: bool, repo: str | None) -> None:
        reader = self._reader(request)
        if writes and reader is None:
            raise Refusal(401, "", "Invalid username or password.")
        if writes and repo and self._find(request, repo) and reader != repo.split("/")[0]:
            raise Refusal(403, "", f"no right to write to {repo}")

    def _find(self, request: _Handler, repo: str) -> Repo:
        found, reader = self.repos.get(repo), self._reader(request)
        if found is None or (found.private and reader != repo.split("/")[0]):
            raise Refusal(404 if reader else 401, "RepoNotFound", f"no repository {repo}")
        return found

    # accounts and repositories

    def whoami(self, request: _Handler, body: bytes) -> None:
        if "Authorization" not in request.headers:
            raise Refusal(401, "", "Invalid username or password.")
        access = {"displayName": "loopback", "role": "write"}
        name = self._reader(request)
        request.reply({"name": name, "type": "user", "orgs": [], "auth": {"accessToken": access}})

    def create(self, request: _Handler, body: bytes) -> None:
        asked, user = json.loads(body), self._reader(request)
        owner = asked.get("organization") or user
        repo = f"{owner}/{asked['name'].split('/')[-1]}"
        if owner != user:
            raise Refusal(403, "", f"no right to create a repository under {owner}")
        if asked.get("type") not in (None, "model"):
            raise Refusal(400, "", "this server holds models only")
        made = {"url": f"{self.url}/{repo}", "name": repo, "id": repo}
        if repo in self.repos:
            raise Refusal(
                409, "", "You already created this model repo", {**made, "error": "exists"}
            )
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.repos[repo] = Repo(private)
        attributes = Blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", lfs=False)
        self.repos[repo].commit("main", {".gitattributes": attributes})
        request.reply(made)

    def branch(self, request: _Handler, body: bytes, repo: str, name: str) -> None:
        found = self._find(request, repo)
        if name in found.branches:
            raise Refusal(409, "", f"Reference already exists: {name}")
        start = json.loads(body or b"{}").get("startingPoint") or "main"
        found.branches[name] = found.resolve(start)
        request.reply({})

    def tag(self, request: _Handler, body: bytes, repo: str, revision: str) -> None:
        found, name = self._find(request, repo), json.loads(body)["tag"]
        if name in found.tags:
            raise Refusal(409, "", f"Tag already exists: {name}")
        found.tags[name] = found.resolve(revision)
        request.reply({})

    def untag(self, request: _Handler, body: bytes, repo: str, name: str) -> None:
        if self._find(request, repo).tags.pop(name, None) is None:
            raise Refusal(404, "RevisionNotFound", f"no tag {name}")
        request.reply({})

    def refs(self, request: _Handler, body: bytes, repo: str) -> None:
        found = self._find(request, repo)
        kinds = {"branches": ("heads", found.branches), "tags": ("tags", found.tags)}
        request.reply(
            {"converts": []}
            | {
                kind: [
                    {"name": name, "ref": f"refs/{folder}/{name}", "targetCommit": oid}
                    for name, oid in refs.items()
                ]
                for kind, (folder, refs) in kinds.items()
            }
        )

    def validate_yaml(self, request: _Handler, body: bytes) -> None:
        errors = metadata_errors(json.loads(body)["content"])
        if errors:
            messages = {"errors": [{"message": error} for error in errors], "warnings": []}
            raise Refusal(400, "", "; ".join(errors), messages)
        request.reply({"errors": [], "warnings": []})

    # uploads

    def preupload(self, request: _Handler, body: bytes, repo: str, revision: str) -> None:
        found = self._find(request, repo)
        held = found.trees[found.resolve(revision)]
        request.reply(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs"
                        if file["size"] >= LARGE or file["path"].endswith(".safetensors")
                        else "regular",
                        "shouldIgnore": False,
                        "oid": held[file["path"]].etag if file["path"] in held else None,
                    }
                    for file in json.loads(body)["files"]
                ]
            }
        )

    def lfs_batch(self, request: _Handler, body: bytes, repo: str) -> None:
        self._find(request, repo)
        objects = []
        for wanted in json.loads(body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.lfs:
                href = f"{self.url}/lfs/{wanted['oid']}"
                entry["actions"] = {
                    "upload": {"href": href, "header": {}},
                    "verify": {"href": f"{href}/verify", "header": {}},
                }
            objects.append(entry)
        request.reply({"transfer": "basic", "objects": objects})

    def lfs_put(self, request: _Handler, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refusal(400, "", "the content does not match its oid")
        self.lfs[oid] = body
        request.reply({})

    def lfs_verify(self, request: _Handler, body: bytes, oid: str) -> None:
        if oid not in self.lfs or len(self.lfs[oid]) != json.loads(body)["size"]:
            raise Refusal(404, "", "not uploaded")
        request.reply({})

    def commit(self, request: _Handler, body: bytes, repo: str, revision: str) -> None:
        found = self._find(request, repo)
        if revision not in found.branches:
            raise Refusal(404, "RevisionNotFound", f"no branch {revision}")
        tree = dict(found.trees[found.resolve(revision)])
        for line in body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "file":
                tree[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
            elif key == "lfsFile":
                if value["oid"] not in self.lfs:
                    raise Refusal(400, "", f"{value['path']} was not uploaded")
                tree[value["path"]] = Blob(self.lfs[value["oid"]], lfs=True)
            elif key == "deletedFile":
                if tree.pop(value["path"], None) is None:
                    raise Refusal(404, "EntryNotFound", f"no file {value['path']}")
            elif key != "header":
                raise Refusal(400, "", f"unknown operation {key}")
        card = tree.get("README.md")
        if card and (errors := metadata_errors(card.content.decode())):
            raise Refusal(400, "", "; ".join(errors))
        oid = found.commit(revision, tree)
        url = f"{self.url}/{repo}/commit/{oid}"
        request.reply({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    # downloads

    def info(self, request: _Handler, body: bytes, repo: str, revision: str = "main") -> None:
        found = self._find(request, repo)
        oid = found.resolve(revision)
        siblings = [{"rfilename": path} for path in found.trees[oid]]
        request.reply(
            {
                "_id": "0",
                "id": repo,
                "modelId": repo,
                "sha": oid,
                "private": found.private,
                "gated": False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": siblings,
            }
        )

    def tree(
        self, request: _Handler, body: bytes, repo: str, revision: str, under: str | None = None
    ) -> None:
        found = self._find(request, repo)
        prefix = f"{under.rstrip('/')}/" if under else ""
        entries = []
        for path, blob in found.trees[found.resolve(revision)].items():
            if not path.startswith(prefix):
                continue
            entry: dict[str, object] = {
                "type": "file",
                "path": path,
                "size": len(blob.content),
                "oid": blob.git_oid,
            }
            if blob.lfs:
                size = len(blob.content)
                entry["lfs"] = {"oid": blob.sha256, "size": size, "pointerSize": 134}
            entries.append(entry)
        if prefix and not entries:
            raise Refusal(404, "EntryNotFound", f"no folder {under}")
        request.reply(entries)

    def paths_info(self, request: _Handler, body: bytes, repo: str, revision: str) -> None:
        found = self._find(request, repo)
        tree = found.trees[found.resolve(revision)]
        paths = parse_qs(body.decode())["paths"]
        request.reply(
            [
                {
                    "type": "file",
                    "path": path,
                    "size": len(tree[path].content),
                    "oid": tree[path].git_oid,
                }
                for path in paths
                if path in tree
            ]
        )

    def resolve(self, request: _Handler, body: bytes, repo: str, revision: str, path: str) -> None:
        found = self._find(request, repo)
        oid = found.resolve(revision)
        blob = found.trees[oid].get(path)
        if blob is None:
            raise Refusal(404, "EntryNotFound", f"no file {path}")
        headers = {"X-Repo-Commit": oid, "ETag": f'"{blob.etag}"'}
        if blob.lfs:
            headers |= {"X-Linked-Size": str(len(blob.content)), "X-Linked-Etag": headers["ETag"]}
            self.lfs[blob.sha256] = blob.content  # of repositories that a test has made itself
            headers["Location"] = f"{self.cdn}/lfs/{blob.sha256}?file={quote(path)}"
            return request.reply(b"", 302, headers)
        return self._hand_out(request, blob.content, headers)

    def lfs_get(self, request: _Handler, body: bytes, oid: str) -> None:
        if oid not in self.lfs:
            raise Refusal(404, "", f"no object {oid}")
        self._hand_out(request, self.lfs[oid], {"ETag": f'"{oid}"'})

    def _hand_out(self, request: _Handler, content: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if asked is None:
            return request.reply(content, headers=headers)
        self.ranges.append(f"{urlsplit(request.path).path} {asked[0]}")
        first, last = int(asked[1]), int(asked[2] or len(content) - 1)
        part = content[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        return request.reply(part, 206, headers)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer
    fault: Fault | None = None

    def log_message(self, *args: object) -> None:
        """Stay silent: the server records requests itself."""

    def _serve(self) -> None:
        self.fault = fault = self.server_hub.next_fault(self)
        if fault and fault.cut == "request":
            self.rfile.read(fault.after)
            return self._cut(fault)
        body = self._body()
        if fault and fault.status:
            page = f"<html><h1>{fault.status} {responses[fault.status]}</h1></html>"
            return self.reply(page, fault.status, {"Content-Type": "text/html", **fault.headers})
        try:
            self.server_hub.answer(self, body)
        except Refusal as refusal:
            headers = {"X-Error-Message": refusal.message}
            if refusal.code:
                headers["X-Error-Code"] = refusal.code
            self.reply(refusal.body, refusal.status, headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _cut(self, fault: Fault) -> None:
        """End the connection without a word; what was written before goes out."""
        fault.then()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def reply(
        self, content: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        if not isinstance(content, bytes):
            content = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        cut = self.fault if self.fault and self.fault.cut == "answer" else None
        if self.command != "HEAD":
            self.wfile.write(content[: cut.after] if cut else content)
        if cut:
            self._cut(cut)


def metadata_errors(card: str) -> list[str]:
    """Return what the Hub would refuse in a card's metadata: its YAML, and its model-index."""
    block = re.match(r"\s*---[ \t]*\n(.*?)\n---[ \t]*(\n|$)", card, re.DOTALL)
    if block is None:
        return []
    try:
        metadata = yaml.safe_load(block[1]) or {}
    except yaml.YAMLError as error:
        return [f"invalid YAML: {error}"]
    if not isinstance(metadata, dict):
        return ["metadata must be a mapping"]
    errors = []
    for name in ("library_name", "pipeline_tag"):
        if name in metadata and not isinstance(metadata[name], str):
            errors.append(f"{name} must be a string")
    if not all(isinstance(tag, str) for tag in metadata.get("tags", [])):
        errors.append("tags must be strings")
    for model in metadata.get("model-index", []):
        if not isinstance(model.get("name"), str):
            errors.append("model-index[].name must be a string")
        for result in model.get("results", []):
            where = "model-index[].results[]"
            if not result.get("task", {}).get("type"):
                errors.append(f"{where}.task.type is missing")
            dataset = result.get("dataset", {})
            errors += [
                f"{where}.dataset.{key} is missing"
                for key in ("type", "name")
                if not dataset.get(key)
            ]
            if not result.get("metrics"):
                errors.append(f"{where}.metrics is empty")
            for metric in result.get("metrics", []):
                errors += [
                    f"{where}.metrics[].{key} is missing"
                    for key in ("type", "value")
                    if key not in metric
                ]
    return errors


Action = Callable[..., None]


def of_dataset(action: Action) -> Action:
    """Let an action serve data sets as it serves models."""

    def act(hub: HubServer, request: _Handler, body: bytes, repo: str, **parts: str) -> None:
        action(hub, request, body, repo=f"datasets/{repo}", **parts)

    return act


ROUTES: list[tuple[str, str, Action]] = [
    ("GET", r"/api/whoami-v2", HubServer.whoami),
    ("POST", r"/api/repos/create", HubServer.create),
    ("POST", r"/api/validate-yaml", HubServer.validate_yaml),
    ("POST", rf"/api/models/{REPO}/branch/(?P<name>[^/]+)", HubServer.branch),
    ("POST", rf"/api/models/{REPO}/tag/(?P<revision>[^/]+)", HubServer.tag),
    ("DELETE", rf"/api/models/{REPO}/tag/(?P<name>[^/]+)", HubServer.untag),
    ("GET", rf"/api/models/{REPO}/refs", HubServer.refs),
    ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", HubServer.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", HubServer.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", HubServer.lfs_put),
    ("GET HEAD", r"/lfs/(?P<oid>[0-9a-f]{64})", HubServer.lfs_get),
    ("POST", r"/lfs/(?P<oid>[0-9a-f]{64})/verify", HubServer.lfs_verify),
    ("POST", rf"/api/models/{REPO}/commit/(?P<revision>[^/]+)", HubServer.commit),
    ("GET", rf"/api/models/{REPO}", HubServer.info),
    ("GET", rf"/api/models/{REPO}/revision/(?P<revision>[^/]+)", HubServer.info),
    ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)(/(?P<under>.+))?", HubServer.tree),
    ("GET", rf"/api/datasets/{REPO}", of_dataset(HubServer.info)),
    ("GET", rf"/api/datasets/{REPO}/revision/(?P<revision>[^/]+)", of_dataset(HubServer.info)),
    (
        "GET",
        rf"/api/datasets/{REPO}/tree/(?P<revision>[^/]+)(/(?P<under>.+))?",
        of_dataset(HubServer.tree),
    ),
    (
        "POST",
        rf"/api/datasets/{REPO}/paths-info/(?P<revision>[^/]+)",
        of_dataset(HubServer.paths_info),
    ),
    (
        "GET HEAD",
        rf"/datasets/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
        of_dataset(HubServer.resolve),
    ),
    ("GET HEAD", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", HubServer.resolve),
]
