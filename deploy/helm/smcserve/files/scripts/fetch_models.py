"""Downloads models into directories that pods share: fetch_models.py MODEL.. Each MODEL is JSON with "side", "kind",
"directory" and the fields of its source.

A file is downloaded to a name that ends in `.part` and renamed when its hash has been checked; a partial file is
resumed. A directory is complete when it contains `.complete`. Uses only the standard library, so that it runs in any
image."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import hmac
import http.client
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote, urlsplit

HUB = "https://huggingface.co"
MODEL_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")
DUPLICATE_PREFIX = "consolidated"
"""Files of a hub repository that are downloaded: those with these suffixes, except second copies of the weights, whose
names begin with this prefix."""
SUMS, COMPLETE, TOTAL = "SHA256SUMS", ".complete", ".total"
ATTEMPTS, PAUSE_S, TIMEOUT_S, CHUNK, AT_ONCE = 8, 2.0, 60.0, 1 << 20, 4


@dataclass(frozen=True)
class File:
    """A file to download. `algorithm` of the digest: sha256, or git (sha1 over a header and the bytes). `size` in
    bytes, None if unknown."""

    name: str
    url: str
    algorithm: str
    digest: str
    size: int | None = None


class WithinHost(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but drops the Authorization header if the host changes."""

    def redirect_request(self, request: urllib.request.Request, *rest: object) -> urllib.request.Request | None:
        new = super().redirect_request(request, *rest)
        if new and urlsplit(new.full_url)[:2] != urlsplit(request.full_url)[:2]:
            new.remove_header("Authorization")
        return new


OPEN = urllib.request.build_opener(WithinHost).open


class RemoteModel:
    """A model at its source: a hub repository, an HTTP directory or an S3 prefix. Methods raise ValueError if the
    source is invalid."""

    def __init__(self, given: Mapping[str, str], environment: Mapping[str, str]) -> None:
        self._given = given
        self._secrets = {name.removeprefix(f"{given['side'].upper()}_"): value for name, value in environment.items()}

    def headers(self, url: str) -> dict[str, str]:
        """Headers that authenticate a GET of `url`."""
        if self._given["kind"] == "s3" and "AWS_ACCESS_KEY_ID" in self._secrets:
            return signed(url, self._given.get("region", "us-east-1"), self._secrets)
        return {"Authorization": f"Bearer {self._secrets['TOKEN']}"} if "TOKEN" in self._secrets else {}

    def files(self) -> list[File]:
        found = list(self._hub_files() if self._given["kind"] == "huggingFace" else self._summed_files())
        if not found:
            raise ValueError(f"{self._given['directory']}: the source holds no file that a model is loaded from")
        return found

    def _hub_files(self) -> Iterator[File]:
        """Files in the repository's top folder. The hub's API provides the hash of each."""
        hub, repository, revision = self._given.get("endpoint", HUB), self._given["repository"], self._given["revision"]
        page: str | None = f"{hub}/api/models/{repository}/tree/{revision}"
        while page:
            with read(page, self) as response:
                entries, links = json.load(response), response.headers.get("Link", "")
            for entry in entries:
                if (
                    entry["type"] == "file"
                    and entry["path"].endswith(MODEL_SUFFIXES)
                    and not entry["path"].startswith(DUPLICATE_PREFIX)
                ):
                    url = f"{hub}/{repository}/resolve/{revision}/{quote(entry['path'])}"
                    large = entry.get("lfs")
                    yield File(
                        entry["path"],
                        url,
                        *(("sha256", large["oid"]) if large else ("git", entry["oid"])),
                        entry["size"],
                    )
            page = links.split(">")[0].removeprefix("<") if 'rel="next"' in links else None

    def _summed_files(self) -> Iterator[File]:
        """Files listed in SHA256SUMS, in the format of `sha256sum *`. The hash of SHA256SUMS itself is configured."""
        base = self._base()
        with read(f"{base}/{SUMS}", self) as response:
            sums = response.read()
        check_hash(SUMS, hashlib.sha256(sums).hexdigest(), self._given["sha256"])
        for line in sums.decode().splitlines():
            digest, _, name = line.partition(" ")
            name = name.lstrip(" *")
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not name:
                raise ValueError(f"{base}/{SUMS} names {name!r}; allowed: files of its own folder and below")
            yield File(name, f"{base}/{quote(name)}", "sha256", digest)

    def _base(self) -> str:
        if self._given["kind"] == "http":
            return self._given["url"].rstrip("/")
        bucket, _, prefix = self._given["uri"].removeprefix("s3://").strip("/").partition("/")
        region = self._given.get("region", "us-east-1")
        host = (
            f"{self._given['endpoint'].rstrip('/')}/{bucket}"
            if self._given.get("endpoint")
            else f"https://{bucket}.s3.{region}.amazonaws.com"
        )
        return f"{host}/{quote(prefix)}".rstrip("/")


def signed(url: str, region: str, secrets: Mapping[str, str]) -> dict[str, str]:
    """Headers of a signed GET for S3."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": urlsplit(url).netloc, "x-amz-content-sha256": "UNSIGNED-PAYLOAD", "x-amz-date": stamp}
    if secrets.get("AWS_SESSION_TOKEN"):
        headers["x-amz-security-token"] = secrets["AWS_SESSION_TOKEN"]
    own = authorization(
        urlsplit(url).path, headers, region, secrets["AWS_ACCESS_KEY_ID"], secrets["AWS_SECRET_ACCESS_KEY"]
    )
    return {name: value for name, value in headers.items() if name != "host"} | {"Authorization": own}


def authorization(path: str, headers: Mapping[str, str], region: str, key: str, secret: str) -> str:
    """Authorization header with Signature Version 4, for a GET without a query. `headers`: by lower-case name; all are
    signed."""
    stamp, names = headers["x-amz-date"], ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = f"GET\n{path}\n\n{lines}\n{names}\n{headers['x-amz-content-sha256']}"
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signer = f"AWS4{secret}".encode()
    for part in (*scope.split("/"), text):
        signer = hmac.digest(signer, part.encode(), "sha256")
    return f"AWS4-HMAC-SHA256 Credential={key}/{scope},SignedHeaders={names},Signature={signer.hex()}"


def read(url: str, source: RemoteModel, begin: int = 0) -> http.client.HTTPResponse:
    """Open `url` from byte `begin`. Retries temporary errors; raises ValueError for permanent ones."""
    for attempt in range(ATTEMPTS):
        headers = source.headers(url) | ({"Range": f"bytes={begin}-"} if begin else {})
        try:
            return OPEN(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the file ends at `begin`
                return error
            if error.code < 500 and error.code not in (408, 429):
                hint = {
                    401: "is a token or key missing?",
                    403: "is it allowed with this token or key?",
                    404: "is the name right?",
                }
                raise ValueError(
                    f"{url}: {error.code} {error.reason}; {hint.get(error.code, 'the source does not give it')}"
                ) from error
            reason: object = error
        except (OSError, http.client.HTTPException) as error:
            reason = error
        wait(attempt, url, reason)
    raise ValueError(f"{url}: no answer in {ATTEMPTS} attempts")


def wait(attempt: int, url: str, reason: object) -> None:
    print(f"{url}: {reason}; attempt {attempt + 1} of {ATTEMPTS}", flush=True)
    time.sleep(PAUSE_S * 2 ** min(attempt, 5))


def check_hash(name: str, found: str, promised: str) -> None:
    if found != promised:
        raise ValueError(f"{name}: its hash is {found}, and {promised} was promised")


def fetch(file: File, directory: Path, source: RemoteModel) -> None:
    """Download a file into `directory` and check its hash. An existing file is kept; a partial file is resumed."""
    target = directory / file.name
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    begin = time.monotonic()
    for attempt in range(ATTEMPTS):
        try:
            receive(file, part, source)
            break
        except (OSError, http.client.HTTPException) as error:
            wait(attempt, file.url, error)
    else:
        raise ValueError(
            f"{file.url}: lost {ATTEMPTS} times; {part.stat().st_size if part.exists() else 0} bytes are there"
        )
    try:
        check_hash(file.name, digest(part, file.algorithm), file.digest)
    except ValueError:
        part.unlink()
        raise
    sys.stdout.write(f"{file.name}: {part.stat().st_size / 1e6:.1f} MB in {time.monotonic() - begin:.1f} s\n")
    part.rename(target)


def receive(file: File, part: Path, source: RemoteModel) -> None:
    """Download the rest of a file to `part`. Raises OSError if the connection ends early."""
    have = part.stat().st_size if part.exists() else 0
    if have and have == file.size:
        return
    with read(file.url, source, have) as response, part.open("wb" if response.status == 200 else "ab") as out:
        if response.status == 416:
            return
        length = response.headers.get("Content-Length")
        start = out.tell()
        shutil.copyfileobj(response, out, CHUNK)
        if length is not None and out.tell() - start != int(length):
            raise OSError(f"{out.tell() - start} of {length} bytes came")


def digest(path: Path, algorithm: str) -> str:
    found = hashlib.sha256() if algorithm == "sha256" else hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found.update(chunk)
    return found.hexdigest()


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Lock the directory: the job of the next release may start before the last one has ended."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def download(given: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Download one model. Raises ValueError if the source is invalid or the volume too small."""
    directory = Path(given["directory"])
    with alone(directory):
        if (directory / COMPLETE).exists():
            print(f"{directory} is complete")
            return
        source = RemoteModel(given, environment)
        files = source.files()
        missing = sum(file.size or 0 for file in files if not (directory / file.name).exists())
        missing -= sum(part.stat().st_size for part in directory.rglob("*.part"))
        if missing > shutil.disk_usage(directory).free:
            raise ValueError(
                f"{directory}: {missing / 1e9:.1f} GB are missing, {shutil.disk_usage(directory).free / 1e9:.1f} GB "
                "are free"
            )
        if all(file.size is not None for file in files):
            # In KiB, for those who wait: wait-models.sh says how far it is.
            (directory / TOTAL).write_text(str(max(1, sum(file.size or 0 for file in files) >> 10)))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda file: fetch(file, directory, source), files))
        (directory / COMPLETE).write_text(json.dumps(dict(given)))


def main(models: list[str]) -> None:
    for model in models:
        try:
            download(json.loads(model), os.environ)
        except ValueError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
