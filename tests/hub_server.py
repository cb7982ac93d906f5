"""A local server that speaks the parts of the Hugging Face Hub's API that an upload uses.

    with HubServer() as hub:
        run a process with hub.environment(); hub.repos["me/model"] then has its files

Routes are rows of `ROUTES`: method, pattern of the path, and the method that answers. `hub.fail[name] = status` makes a
route answer with an error. Requests without the token get 401, as on the Hub.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

TOKEN = "hf_secretTOKENofTheTests"
USER = "me"
LARGE = (".safetensors", ".bin")  # ends of names that the Hub stores as large files


class HubServer:
    """Server on a free port, with its repositories as {id: {path: bytes}} and a list of (method, path) requests."""

    def __init__(self):
        self.repos, self.large, self.commits, self.requests, self.fail = {}, {}, [], [], {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._server.server_close()

    def environment(self, folder, token=TOKEN):
        """Return variables for a process that uses this server, with its cache in a folder."""
        variables = {"HF_ENDPOINT": self.url, "HF_HOME": str(Path(folder) / "hf"), "HF_HUB_OFFLINE": "0"}
        variables |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return variables | ({"HF_TOKEN": token} if token else {})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        """Print nothing."""

    def _serve(self):
        hub, path = self.server.hub, urlsplit(self.path).path
        self.query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append((self.command, path))
        for method, pattern, answer in ROUTES:
            match = re.fullmatch(pattern, path)
            if method != self.command or not match:
                continue
            if answer in hub.fail:
                return self._send(hub.fail[answer], {"error": "as the test wants"})
            if answer != "put_large" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
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


REPO = r"(?P<repo>[^/]+/[^/]+)"
ROUTES = (
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("GET", rf"/api/models/{REPO}/tree/main", "tree"),
    ("POST", rf"/api/models/{REPO}/preupload/main", "preupload"),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "large_batch"),
    ("PUT", r"/large/(?P<oid>[0-9a-f]{64})", "put_large"),
    ("POST", rf"/api/models/{REPO}/commit/main", "commit"),
)
