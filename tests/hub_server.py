"""A local server that speaks the parts of the Hugging Face Hub's API that uploads and range requests use.

    with HubServer() as hub:
        run a process with hub.environment(); hub.repos["me/model"] then has its files

Routes are rows of `ROUTES`: method, pattern of the path, and the method that answers. `hub.fail[name] = status` makes a
route answer with an error. Uploads without the token get 401, as on the Hub. Large files are sent by a second host, to
which the Hub redirects; `hub.sent` has (path, range, Authorization) of each request to it. `hub.faults` names what the
server does wrong when it sends files: one of `FAULTS`.
"""

import base64
import hashlib
import json
import re
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_secretTOKENofTheTests"
USER = "me"
LARGE = (".safetensors", ".bin", ".gguf", ".onnx", ".data")  # ends of names that the Hub stores as large files
FAULTS = {
    "no commit": "the listing names none",
    "long listing": "the listing has a hundred thousand and one files",
    "no json": "the listing is a page",
    "no ranges": "ranges are ignored",
    "other range": "another range is sent than was asked for",
    "other size": "the size in the range differs from the listing",
    "cut short": "the connection closes inside the body",
    "other etag": "each answer has another ETag",
    "other commit": "each answer is of another commit",
    "compressed": "the body is compressed, and longer than it looks",
    "too long": "the body goes on without end",
    "silent": "no answer comes",
    "long headers": "an answer has a header of 80,000 bytes",
    "slow": "the body comes byte by byte",
    "slow headers": "the headers come byte by byte",
    "slow chunks": "the body is in chunks, and the size of the first comes byte by byte",
    "informational": "informational answers come without end",
    "slow informational": "an informational answer comes now and then",
    "loop": "each redirect leads to itself",
    "odd redirect": "a redirect leads to a file",
    "no location": "a redirect has no address",
}
OK = b"HTTP/1.1 200 OK\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# {fault: (first bytes, bytes that follow without end, seconds between these)}
ENDLESS = {
    "slow headers": (OK + b"X-Long: ", b"x", 0.3),
    "slow chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x", 0.3),
    "informational": (b"", CONTINUE * 100, 0),
    "slow informational": (b"", CONTINUE, 0.3),
}


class HubServer:
    """Server on a free port, with its repositories as {id: {path: bytes}} and a list of (method, path) requests."""

    def __init__(self):
        self.repos, self.large, self.commits, self.requests, self.fail = {}, {}, [], [], {}
        self.revisions = {}  # {(repo, name of a branch or tag): files}
        self.gated, self.private, self.faults, self.error_codes, self.sent = set(), set(), set(), {}, []
        self.fail_once = {}  # as `fail`, for the next request alone
        self.body_bytes = 0  # of all answers
        self.endless = 0  # answers without end that some client still reads
        self.delay, self.at_once, self.most_at_once = 0, 0, 0  # seconds before an answer; requests at a time
        self._servers = [ThreadingHTTPServer((host, 0), _Handler) for host in ("127.0.0.1", "127.0.0.2")]
        for server in self._servers:
            server.hub = self
        self.url, self.large_url = (f"http://{host}:{port}" for host, port in (s.server_address for s in self._servers))

    def __enter__(self):
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception):
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def files_at(self, repo, revision):
        """Return the files of a repository at a branch, tag or commit; None if it has no such revision."""
        named = {"main": self.repos[repo]}
        named |= {name: files for (other, name), files in self.revisions.items() if other == repo}
        return (named | {commit_of(files): files for files in named.values()}).get(revision)

    def environment(self, folder, token=TOKEN):
        """Return variables for a process that uses this server, with its cache in a folder."""
        variables = {"HF_ENDPOINT": self.url, "HF_HOME": str(Path(folder) / "hf"), "HF_HUB_OFFLINE": "0"}
        variables |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return variables | ({"HF_TOKEN": token} if token else {})


def commit_of(files):
    """Return the id of a commit with these files."""
    digest = hashlib.sha1()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each small answer waits 40 ms

    def log_message(self, *arguments):
        """Print nothing."""

    def _serve(self):
        hub, path = self.server.hub, urlsplit(self.path).path
        self.query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append((self.command, path))
        hub.at_once += 1
        hub.most_at_once = max(hub.most_at_once, hub.at_once)
        time.sleep(hub.delay)
        try:
            return self._answer(hub, path)
        finally:
            hub.at_once -= 1

    def _answer(self, hub, path):
        for method, pattern, answer in ROUTES:
            match = re.fullmatch(pattern, path)
            if method != self.command or not match:
                continue
            if answer in hub.fail_once:
                return self._send(hub.fail_once.pop(answer), {"error": "this once"})
            if answer in hub.fail:
                return self._send(hub.fail[answer], {"error": "as the test wants"}, hub.error_codes)
            if answer not in OPEN and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._send(
                    401,
                    {"error": "Invalid credentials"},
                    {"X-Error-Message": "Invalid credentials in Authorization header"},
                )
            return getattr(self, answer)(hub, **match.groupdict())
        return self._send(404, {"error": f"no route for {self.command} {path}"})

    do_GET = do_POST = do_PUT = _serve

    def _send(self, status, record=None, headers=()):
        data = json.dumps(record).encode()
        self.send_response(status)
        for name, value in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **dict(headers),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        self.server.hub.body_bytes += len(data)

    def _missing(self, repo):
        self._send(404, {"error": f"no repository {repo}"}, {"X-Error-Code": "RepoNotFound"})

    def create(self, hub):
        asked = json.loads(self.body)
        repo = f"{asked.get('organization') or USER}/{asked['name']}"
        url = f"{hub.url}/{repo}"
        if repo in hub.repos:
            return self._send(409, {"error": "You already created this model repo", "url": url})
        hub.repos[repo] = {".gitattributes": b"*.safetensors filter=lfs\n"}
        return self._send(200, {"url": url, "name": repo, "id": repo})

    def validate_yaml(self, hub):
        import yaml

        block = re.match(r"---\n(.*?)\n---\n", json.loads(self.body)["content"], re.DOTALL)
        errors = [] if block and isinstance(yaml.safe_load(block[1]), dict) else [{"message": "no YAML block"}]
        self._send(400 if errors else 200, {"errors": errors, "warnings": []})

    def tree(self, hub, repo):
        if repo not in hub.repos:
            return self._missing(repo)
        files = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in sorted(hub.repos[repo].items())
        ]
        return self._send(200, files)

    def preupload(self, hub, repo):
        if repo not in hub.repos:
            return self._missing(repo)
        files = [
            {
                "path": file["path"],
                "shouldIgnore": False,
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
            }
            for file in json.loads(self.body)["files"]
        ]
        return self._send(200, {"files": files})

    def large_batch(self, hub, repo):
        objects = []
        for one in json.loads(self.body)["objects"]:
            upload = {"href": f"{hub.url}/large/{one['oid']}"}
            objects.append(one if one["oid"] in hub.large else {**one, "actions": {"upload": upload}})
        self._send(200, {"transfer": "basic", "objects": objects})

    def put_large(self, hub, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self._send(400, {"error": "other bytes than their hash"})
        hub.large[oid] = self.body
        return self._send(200)

    def commit(self, hub, repo):
        if repo not in hub.repos:
            return self._missing(repo)
        lines = [json.loads(line) for line in self.body.splitlines()]
        files, summary = dict(hub.repos[repo]), ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        hub.repos[repo] = files
        hub.commits.append((repo, summary))
        commit = f"{len(hub.commits):040x}"
        return self._send(200, {"commitUrl": f"{hub.url}/{repo}/commit/{commit}", "commitOid": commit})

    def listing(self, hub, repo, revision=None):
        """Answer with the files of a revision, as `HfApi.model_info(files_metadata=True)` wants it."""
        repo, revision = unquote(repo), unquote(revision or "main")
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo not in hub.repos or (repo in hub.private and not has_token):
            return self._send(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        files = hub.files_at(repo, revision)
        if files is None:
            return self._send(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        if "no json" in hub.faults:
            return self._send_bytes(b"<html>" * 100)
        siblings = [{"rfilename": name, "size": len(data), "blobId": _blob_id(data)} for name, data in files.items()]
        if "long listing" in hub.faults:
            siblings += [{"rfilename": str(number), "size": 1} for number in range(100_001)]
        commit = "main" if "no commit" in hub.faults else commit_of(files)
        return self._send(200, {"id": repo, "sha": commit, "siblings": siblings})

    def resolve(self, hub, repo, commit, name):
        """Send a small file, or redirect to the host of large files."""
        repo, name = unquote(repo), unquote(name)
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo in hub.gated and not has_token:
            return self._send(401, {"error": "Access is restricted"}, {"X-Error-Code": "GatedRepo"})
        files = hub.files_at(repo, commit) if repo in hub.repos else None
        if files is None or name not in files:
            return self._send(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        self.tags = {"X-Repo-Commit": "0" * 40 if "other commit" in hub.faults else commit}
        if not name.endswith(LARGE):
            return self._send_file(files[name])
        location = f"{hub.large_url}/large/{hashlib.sha256(files[name]).hexdigest()}?signature=1"
        hub.large[hashlib.sha256(files[name]).hexdigest()] = files[name]
        targets = {"loop": self.path, "odd redirect": "file:///etc/passwd", "no location": None}
        for fault in hub.faults & targets.keys():
            location = targets[fault]
        etag = hashlib.sha256(files[name] + self._salt()).hexdigest()
        headers = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": len(files[name]), **self.tags}
        return self._send(302, None, headers | ({"Location": location} if location else {}))

    def get_large(self, hub, oid):
        """Send a large file, whose address is its own permission."""
        hub.sent.append((self.path, self.headers.get("Range"), self.headers.get("Authorization")))
        self.tags = {}
        return self._send_file(hub.large[oid])

    def _salt(self):
        return str(time.monotonic_ns()).encode() if "other etag" in self.server.hub.faults else b""

    def _send_file(self, data):
        """Send a file or the requested range of it."""
        faults, span = self.server.hub.faults, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        etag = hashlib.md5(data + self._salt()).hexdigest()
        headers = {"ETag": f'"{etag}"', "Accept-Ranges": "bytes", **self.tags}
        if span is None or "no ranges" in faults:
            return self._send_bytes(data, 200, headers)
        first, last = int(span[1]), min(int(span[2]), len(data) - 1)
        if first >= len(data):
            return self._send_bytes(b"", 416, {"Content-Range": f"bytes */{len(data)}"})
        if "other range" in faults:
            first += 1
        total = len(data) + ("other size" in faults)
        return self._send_bytes(
            data[first : last + 1], 206, headers | {"Content-Range": f"bytes {first}-{last}/{total}"}
        )

    def _send_bytes(self, data, status=200, headers=()):
        """Send a body, with the fault that the test wants."""
        hub = self.server.hub
        length = len(data)
        if "silent" in hub.faults:
            return time.sleep(6)
        for fault in hub.faults & ENDLESS.keys():
            return self._send_endlessly(*ENDLESS[fault])
        if "compressed" in hub.faults:
            headers = {**dict(headers), "Content-Encoding": "gzip"}
        if "too long" in hub.faults:
            length = 2**40
        self.send_response(status)
        for name, value in {"Content-Length": length, **dict(headers)}.items():
            self.send_header(name, str(value))
        if "long headers" in hub.faults:
            self.send_header("X-Long", "x" * 80_000)
        self.end_headers()
        hub.body_bytes += len(data)
        if "cut short" in hub.faults:
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return None
        if "slow" in hub.faults:
            return self._drip(data)
        while "too long" in hub.faults:
            self.wfile.write(bytes(2**16))
        return self.wfile.write(data)

    def _send_endlessly(self, beginning, repeated, pause):
        """Send bytes, then others again and again until the client leaves."""
        self.server.hub.endless += 1
        with suppress(OSError):
            self.wfile.write(beginning)
            while True:
                self.wfile.write(repeated)
                time.sleep(pause)
        self.server.hub.endless -= 1
        self.close_connection = True

    def _drip(self, data):
        for byte in data:
            self.wfile.write(bytes([byte]))
            time.sleep(0.3)


def _blob_id(data):
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


REPO = r"(?P<repo>[^/]+/[^/]+)"
OPEN = ("put_large", "listing", "resolve", "get_large")  # routes that need no token
ROUTES = (
    ("GET", rf"/api/models/{REPO}(/revision/(?P<revision>[^/]+))?", "listing"),
    ("GET", rf"/{REPO}/resolve/(?P<commit>[^/]+)/(?P<name>.+)", "resolve"),
    ("GET", r"/large/(?P<oid>[0-9a-f]{64})", "get_large"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("GET", rf"/api/models/{REPO}/tree/main", "tree"),
    ("POST", rf"/api/models/{REPO}/preupload/main", "preupload"),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "large_batch"),
    ("PUT", r"/large/(?P<oid>[0-9a-f]{64})", "put_large"),
    ("POST", rf"/api/models/{REPO}/commit/main", "commit"),
)
