"""Models in pods: the objects that each source renders to, and the download program against faulty servers."""

from __future__ import annotations

import hashlib
import http.server
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import CHART, all_of_kind, config_of, containers, of_kind, render, templates

# A single process renders each variant of the chart once.
pytestmark = pytest.mark.xdist_group("chart")

SCRIPTS = CHART / "files/scripts"
POD = {"topology": "pod"}
COMMIT = "c0ffee" + "0" * 34
CLAIM = {"persistentVolumeClaim": {"claimName": "models"}}


def models(target: dict, draft: dict, **rest: object) -> dict:
    return {"models": {"target": {"source": target}, "draft": {"source": draft}, **rest}}


def hub(**more: str) -> dict:
    return {"huggingFace": {"repository": "org/model", "revision": COMMIT, **more}}


def sums(kind: str, where: str, **more: str) -> dict:
    return {kind: {"url" if kind == "http" else "uri": where, "sha256": "0" * 64, **more}}


def config(objects: list[dict]) -> dict:
    return yaml.safe_load(config_of(objects, "serve"))


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (models(hub(), hub()), "models.volume is empty; a model that is downloaded needs a volume"),
        (models(hub(), {}, volume=CLAIM), "give both, or neither"),
        (
            {"models": {"target": {"path": "/a", "source": hub()}, "draft": {"path": "/b"}}},
            'models.target.path="/a" has no effect',
        ),
        (
            models({"huggingFace": {"repository": "a/b", "revision": "main"}}, hub(), volume=CLAIM),
            "/models/target/source/huggingFace/revision",
        ),
        (models({"http": {"url": "https://a"}}, hub(), volume=CLAIM), "missing property 'sha256'"),
        (models({**hub(), **sums("s3", "s3://a/b")}, hub(), volume=CLAIM), "/models/target/source"),
        (models({"git": {"url": "https://a"}}, hub(), volume=CLAIM), "git"),
        (
            {"models": {"download": {"retries": 3}}},
            "models.download.retries=3 has no effect with models that are not downloaded",
        ),
    ],
)
def test_wrong_sources_are_refused(layer, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        render(layer)


@pytest.mark.parametrize(("layer", "gateway"), [({"device": "cuda"}, "head"), (POD, "replica")])
def test_pods_wait_for_what_a_job_downloads(layer, gateway):
    objects = render(
        layer, models(hub(tokenSecret="hub"), sums("s3", "s3://b/c", credentialsSecret="keys"), volume=CLAIM)
    )
    job = of_kind(objects, "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    asked = {each["side"]: each for each in map(json.loads, container["args"])}
    assert asked["target"].items() >= {"kind": "huggingFace", "repository": "org/model", "revision": COMMIT}.items()
    assert "Secret" not in str(container["args"])
    secrets = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in container["env"] if "valueFrom" in each}
    assert secrets["TARGET_TOKEN"] == {"name": "hub", "key": "token"}
    assert secrets["DRAFT_AWS_SECRET_ACCESS_KEY"] == {"name": "keys", "key": "AWS_SECRET_ACCESS_KEY", "optional": False}
    assert {"name": "models", "mountPath": "/models"} in container["volumeMounts"], "the job alone may write"
    given = config(objects)
    for name, template in templates(objects).items():
        if name in ("test", "models"):
            continue
        waits = {each["name"]: each for each in template["spec"]["initContainers"]}["models"]
        assert (
            waits["command"][-2:]
            == [given["target"], given["draft"]]
            == [asked["target"]["directory"], asked["draft"]["directory"]]
        )
        for each in containers(template["spec"]):
            assert all(mount.get("readOnly") for mount in each["volumeMounts"] if mount["name"] == "models")


def test_another_source_has_another_directory_and_another_job():
    """A running replica keeps its files while those of the next one are downloaded. A Job cannot be changed, not even
    its image, so a new image needs a new Job."""

    def of(layer: dict, **more: object) -> tuple[str, str]:
        objects = render(layer, POD, more)
        return config(objects)["target"], of_kind(objects, "Job")["metadata"]["name"]

    first = models(hub(), hub(), volume=CLAIM)
    other = models({"huggingFace": {"repository": "org/model", "revision": "b" * 40}}, hub(), volume=CLAIM)
    directory, job = of(first)
    assert of(first) == (directory, job)
    assert (
        of(models(hub(tokenSecret="next", endpoint="https://mirror.example"), hub(), volume=CLAIM))[0] == directory
    ), "the same files"
    assert of(other)[0] != directory and of(other)[1] != job
    assert of(first, image={"tag": "next"})[0] == directory and of(first, image={"tag": "next"})[1] != job


def test_models_of_a_claim_or_an_image_are_mounted_as_they_are():
    objects = render(
        models({"persistentVolumeClaim": {"claimName": "w", "directory": "a/b"}}, {"image": {"reference": "r/draft:1"}})
    )
    assert not all_of_kind(objects, "Job")
    given = config(objects)
    assert (given["target"], given["draft"]) == ("/models-target/a/b", "/models-draft")
    for side in ("head", "draft", "target"):
        pod = templates(objects)[side]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["model-target"]["persistentVolumeClaim"] == {"claimName": "w", "readOnly": True}
        assert volumes["model-draft"]["image"] == {"reference": "r/draft:1", "pullPolicy": "IfNotPresent"}
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][-1]["volumeMounts"]}
        assert (mounts["model-target"], mounts["model-draft"]) == ("/models-target", "/models-draft")


@pytest.mark.parametrize("layers", [["values-cpu"], ["values-8b"], ["values-cpu", models(hub(), hub(), volume=CLAIM)]])
def test_nothing_that_serves_asks_a_hub(layers):
    objects = render(*layers)
    assert len(all_of_kind(objects, "Job")) == len(layers) - 1
    for template in templates(objects).values():
        for container in template["spec"]["containers"]:
            assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]


def test_pods_wait_until_all_are_complete(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    waiting = subprocess.Popen(["bash", SCRIPTS / "wait-models.sh", first, second], stdout=subprocess.PIPE, text=True)
    assert waiting.stdout.readline() == f"waiting for the job that downloads {first}: 0 MiB\n"
    first.mkdir()
    (first / "model.part").write_bytes(bytes(3 << 20))
    (first / ".total").write_text(str(12 << 10))
    assert waiting.stdout.readline() == f"waiting for the job that downloads {first}: 3 of 12 MiB, 25%\n"
    for directory in (second, first):
        assert waiting.poll() is None
        directory.mkdir(exist_ok=True)
        (directory / ".complete").touch()
    assert waiting.wait(30) == 0
    waiting.stdout.close()


@pytest.fixture
def fetch(monkeypatch):
    spec = importlib.util.spec_from_file_location("fetch_models", SCRIPTS / "fetch_models.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fetch_models", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the chart includes all files in its folders
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    return module


class Files(http.server.ThreadingHTTPServer):
    """A server of files by path, with ranges. `cut`: number of answers of more than 1,000 bytes that end in the middle.
    `moved`: address to which requests are redirected."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cut = 0
        self.moved = ""
        self.asked: Counter[tuple[str, str]] = Counter()
        self.tokens: set[str | None] = set()
        self.next_pages: dict[str, str] = {}
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Files = self.server
        begin = int((self.headers["Range"] or "bytes=0-")[6:-1])
        server.asked[self.path, str(begin)] += 1
        server.tokens.add(self.headers["Authorization"])
        if server.moved and "/resolve/" in self.path:
            self.send_response(302)
            self.send_header("Location", server.moved + self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = server.files.get(self.path)
        if body is None or (begin and begin >= len(body)):
            self.send_error(404 if body is None else 416)
            return
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(body) - begin))
        if self.path in server.next_pages:
            self.send_header("Link", f'<{server.url}{server.next_pages[self.path]}>; rel="next"')
        self.end_headers()
        sent = body[begin:]
        if server.cut and len(sent) > 1000:
            server.cut -= 1
            sent = sent[: len(sent) // 2]
        self.wfile.write(sent)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Files]:
    with Files() as files:
        yield files
        files.shutdown()


WEIGHTS = bytes(range(256)) * 40
CONFIG = b'{"hidden_size": 8}'


def of_the_hub(server: Files) -> None:
    """Serve a repository whose file list has two pages, with additional files that are not needed to load the model."""
    tree, resolve = f"/api/models/org/model/tree/{COMMIT}", f"/org/model/resolve/{COMMIT}"
    git = hashlib.sha1(b"blob %d\0" % len(CONFIG) + CONFIG).hexdigest()
    small = {"type": "file", "path": "config.json", "oid": git, "size": len(CONFIG)}
    large = {"oid": hashlib.sha256(WEIGHTS).hexdigest(), "size": len(WEIGHTS)}
    weights = {"type": "file", "path": "model.safetensors", "oid": "x", "size": len(WEIGHTS), "lfs": large}
    other = [
        {"type": "file", "path": name, "oid": "x", "size": 9} for name in ("weights.pth", "consolidated.safetensors")
    ]
    other.append({"type": "directory", "path": "original", "oid": "x"})
    server.files |= {tree: json.dumps([small, *other]).encode(), f"{tree}2": json.dumps([weights]).encode()}
    server.files |= {f"{resolve}/config.json": CONFIG, f"{resolve}/model.safetensors": WEIGHTS}
    server.next_pages[tree] = f"{tree}2"


def of_a_folder(server: Files, path: str = "/m") -> str:
    """Serve a folder, and return the hash of its SHA256SUMS."""
    files = {"config.json": CONFIG, "sub/model.safetensors": WEIGHTS}
    text = "".join(f"{hashlib.sha256(body).hexdigest()}  {name}\n" for name, body in files.items()).encode()
    server.files |= {f"{path}/{name}": body for name, body in files.items()} | {f"{path}/SHA256SUMS": text}
    return hashlib.sha256(text).hexdigest()


def there(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_a_repository_comes_whole_and_once(fetch, server, tmp_path):
    of_the_hub(server)
    given = {
        "side": "target",
        "kind": "huggingFace",
        "directory": str(tmp_path / "m"),
        "endpoint": server.url,
        "repository": "org/model",
    }
    fetch.download(given | {"revision": COMMIT}, {})
    found = there(tmp_path / "m")
    assert (
        found.keys() - {".lock", ".complete", ".total"} == {"config.json", "model.safetensors"}
        and found["model.safetensors"] == WEIGHTS
    )
    before = server.asked.total()
    fetch.download(given | {"revision": COMMIT}, {})
    assert server.asked.total() == before


def test_a_token_goes_to_the_hub_and_to_nobody_else(fetch, server, tmp_path):
    of_the_hub(server)
    with Files() as elsewhere:
        elsewhere.files = server.files
        server.moved = elsewhere.url
        given = {
            "side": "draft",
            "kind": "huggingFace",
            "directory": str(tmp_path),
            "endpoint": server.url,
            "repository": "org/model",
        }
        fetch.download(given | {"revision": COMMIT}, {"DRAFT_TOKEN": "secret", "TARGET_TOKEN": "other"})
        assert (server.tokens, elsewhere.tokens) == ({"Bearer secret"}, {None})
        elsewhere.shutdown()
    assert there(tmp_path)["model.safetensors"] == WEIGHTS


def test_a_download_goes_on_where_it_was_cut_off(fetch, server, tmp_path):
    """A download resumes after a broken connection, and after the death of its pod."""
    digest = of_a_folder(server)
    server.cut = 2
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/model.safetensors.part").write_bytes(WEIGHTS[:100])
    fetch.download(
        {"side": "target", "kind": "http", "directory": str(tmp_path), "url": f"{server.url}/m/", "sha256": digest}, {}
    )
    assert there(tmp_path)["sub/model.safetensors"] == WEIGHTS
    begins = sorted(int(begin) for (path, begin) in server.asked if path.endswith("safetensors"))
    assert begins[0] == 100 and len(begins) == 3, "no byte is asked for twice"


def test_a_part_that_was_all_of_it_is_taken(fetch, server, tmp_path):
    digest = of_a_folder(server)
    (tmp_path / "config.json.part").write_bytes(CONFIG)
    fetch.download(
        {"side": "target", "kind": "http", "directory": str(tmp_path), "url": f"{server.url}/m", "sha256": digest}, {}
    )
    assert there(tmp_path)["config.json"] == CONFIG


@pytest.mark.parametrize("what", ["a file", "the sums", "a part of the last attempt"])
def test_what_has_another_hash_is_not_kept(fetch, server, tmp_path, what):
    digest = of_a_folder(server)
    given = {"side": "target", "kind": "http", "directory": str(tmp_path), "url": f"{server.url}/m", "sha256": digest}
    if what == "a part of the last attempt":
        (tmp_path / "config.json.part").write_bytes(b"?" * (len(CONFIG) - 1))
    else:
        server.files["/m/config.json" if what == "a file" else "/m/SHA256SUMS"] += b"\n"
    with pytest.raises(ValueError, match=r"its hash is [0-9a-f]{64}, and [0-9a-f]{64} was promised"):
        fetch.download(given, {})
    assert not there(tmp_path).keys() & {".complete", "config.json", "config.json.part"}
    if what == "a part of the last attempt":  # the next pod starts again
        fetch.download(given, {})
        assert there(tmp_path)["config.json"] == CONFIG


def test_names_that_leave_the_folder_are_refused(fetch, server, tmp_path):
    text = f"{'0' * 64}  ../../etc/passwd\n".encode()
    server.files["/m/SHA256SUMS"] = text
    given = {
        "side": "target",
        "kind": "http",
        "directory": str(tmp_path),
        "url": f"{server.url}/m",
        "sha256": hashlib.sha256(text).hexdigest(),
    }
    with pytest.raises(ValueError, match=r"names '\.\./\.\./etc/passwd'; allowed: files of its own folder"):
        fetch.download(given, {})


def test_a_bucket_is_asked_with_a_signature(fetch, server, tmp_path):
    digest = of_a_folder(server, "/bucket/some%20where")
    given = {
        "side": "draft",
        "kind": "s3",
        "directory": str(tmp_path),
        "uri": "s3://bucket/some where",
        "endpoint": server.url,
        "sha256": digest,
    }
    fetch.download(given, {"DRAFT_AWS_ACCESS_KEY_ID": "AKID", "DRAFT_AWS_SECRET_ACCESS_KEY": "s"})
    assert there(tmp_path)["sub/model.safetensors"] == WEIGHTS
    assert all(token.startswith("AWS4-HMAC-SHA256 Credential=AKID/") for token in server.tokens)


def test_the_signature_is_that_of_amazons_documents(fetch):
    """The first example of Amazon's 'Signature Calculations for the Authorization Header'."""
    headers = {
        "host": "examplebucket.s3.amazonaws.com",
        "range": "bytes=0-9",
        "x-amz-content-sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "x-amz-date": "20130524T000000Z",
    }
    made = fetch.authorization(
        "/test.txt", headers, "us-east-1", "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    )
    assert made.endswith("Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41")


def test_a_mistake_is_told_at_once_and_ends_the_pod(server, tmp_path):
    asked = {
        "side": "target",
        "kind": "http",
        "directory": str(tmp_path),
        "url": f"{server.url}/none",
        "sha256": "0" * 64,
    }
    begin = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", (SCRIPTS / "fetch_models.py").read_text(), json.dumps(asked)],
        capture_output=True,
        text=True,
    )
    assert (
        ran.returncode == 1
        and "404" in ran.stderr
        and "is the name right?" in ran.stderr
        and "Traceback" not in ran.stderr
    )
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("engine", "micro_batches"),
    [({}, None), ({"form": "lockstep"}, None), ({"form": "lockstep", "microBatches": 3}, 3)],
)
def test_micro_batches_are_the_commands_own_unless_they_are_given(engine, micro_batches):
    """By default the command decides: one micro-batch in look-ahead, where both models are busy anyway, two in
    lockstep."""
    assert config(render(POD, {"engine": engine})).get("micro-batches") == micro_batches
