"""Startup probe of a gateway: startup_probe.py PORT. Says how far the start is, which Kubernetes shows among the pod's
events. Uses only the standard library, because it runs every few seconds."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def main(port: str) -> None:
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"http://127.0.0.1:{port}/health", timeout=TIMEOUT_S
        ).close()
    except urllib.error.HTTPError as error:
        sys.exit(json.load(error)["error"]["message"])
    except OSError as error:
        sys.exit(f"the gateway does not answer yet: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
