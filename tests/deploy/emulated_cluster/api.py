"""The part of Kubernetes' API with which a router discovers pods: a list of pods, and a watch of changes. Plain HTTP
without authorisation."""

from __future__ import annotations

import json
import queue
import threading
import urllib.parse
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.deploy.emulated_cluster.pod import Pod


def selected(labels: dict[str, str], selector: str) -> bool:
    """Return whether labels match a selector, which may contain equalities only."""
    return all(
        labels.get(name) == value.lstrip("=")
        for name, _, value in (each.partition("=") for each in selector.split(",") if each)
    )


class PodsApi:
    def __init__(self, host: str, pods: Callable[[], Iterable[Pod]]) -> None:
        self._pods, self._watchers, self._guard = pods, [], threading.Lock()
        self._server = ThreadingHTTPServer((host, 0), type("Handler", (_Handler,), {"api": self}))
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def tell(self, kind: str, pod: Pod) -> None:
        """Send an event to all watchers; `kind` is `ADDED`, `MODIFIED` or `DELETED`."""
        event = {"type": kind, "object": pod.as_object()}
        with self._guard:
            for watcher in self._watchers:
                watcher.put(event)

    def kubeconfig(self) -> str:
        named = {"clusters": [{"name": "c", "cluster": {"server": self.url}}], "users": [{"name": "u", "user": {}}]}
        contexts = [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "llm"}}]
        return json.dumps({"apiVersion": "v1", "kind": "Config", **named, "contexts": contexts, "current-context": "x"})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: PodsApi

    def do_GET(self) -> None:
        address = urllib.parse.urlparse(self.path)
        asked = {name: values[0] for name, values in urllib.parse.parse_qs(address.query).items()}
        if address.path != "/api/v1/namespaces/llm/pods":
            return self._answer(
                404, {"kind": "Status", "status": "Failure", "code": 404, "message": f"no {self.path} here"}
            )
        selector = asked.get("labelSelector", "")
        if asked.get("watch") in ("true", "1"):
            return self._watch(selector)
        with self.api._guard:
            items = [pod.as_object() for pod in self.api._pods() if selected(pod.labels, selector)]
        return self._answer(
            200, {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}
        )

    def _answer(self, code: int, body: dict) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _watch(self, selector: str) -> None:
        """Stream changes. The stream begins with all present pods, so that no change between list and watch is lost."""
        events: queue.Queue[dict] = queue.Queue()
        with self.api._guard:
            for pod in self.api._pods():
                events.put({"type": "MODIFIED", "object": pod.as_object()})
            self.api._watchers.append(events)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            while True:
                event = events.get()
                if selected(event["object"]["metadata"]["labels"], selector):
                    line = json.dumps(event).encode() + b"\n"
                    self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        except OSError:
            with self.api._guard:
                self.api._watchers.remove(events)

    def log_message(self, *_: object) -> None:
        pass
