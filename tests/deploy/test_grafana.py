"""The dashboards equal the output of build.py, every panel explains itself, and pictures can be made of them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from deploy.grafana.units import format_value
from tests.deploy.sources import DASHBOARDS, GRAFANA, PROMETHEUS, dashboards, panels

BOARDS = dashboards()
SHOWN = [
    pytest.param(panel, id=f"{name}-{panel['title']}") for name, board in BOARDS.items() for panel in panels(board)
]


def test_the_files_are_current(tmp_path):
    subprocess.run([sys.executable, GRAFANA / "build.py", "--out", tmp_path], check=True)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in DASHBOARDS}, "run `python deploy/grafana/build.py`"


def test_there_are_four_for_grafana_11():
    assert list(BOARDS) == ["capacity", "groups", "particles", "traffic"]
    assert len({board["uid"] for board in BOARDS.values()}) == 4
    assert min(board["schemaVersion"] for board in BOARDS.values()) >= 39


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_fits_every_installation(name):
    board = BOARDS[name]
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "namespace", "job"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in panels(board)]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("name", BOARDS)
def test_panels_fill_the_grid_without_overlap(name):
    taken = set()
    for panel in BOARDS[name]["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken and grid["x"] + grid["w"] <= 24, panel["title"]
        taken |= cells
    assert len(taken) == 24 * (1 + max(y for _, y in taken)), "there is a hole"


@pytest.mark.parametrize("panel", SHOWN)
def test_a_panel_explains_itself(panel):
    assert panel["description"].endswith(".")
    unit = panel["options"]["yAxis"]["unit"] if panel["type"] == "heatmap" else panel["fieldConfig"]["defaults"]["unit"]
    assert unit
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        assert 'namespace=~"$namespace", job=~"$job"' in target["expr"]
        assert target["legendFormat"] or panel["type"] in ("stat", "gauge")
        if "rate(" in target["expr"]:
            assert "[$__rate_interval]" in target["expr"]


def test_provisioning_names_what_is_there():
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    interval = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["type"] == "prometheus" and source["jsonData"]["timeInterval"] == interval
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/smcserve.yml").read_text())["providers"]
    assert provider["type"] == "file" and provider["options"]["path"]


class Made(BaseHTTPRequestHandler):
    """Answers every query with two series over the requested range."""

    empty = False

    def do_GET(self) -> None:
        question = {
            name: values[0] for name, values in urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query).items()
        }
        begin, end, step = (float(question[name]) for name in ("start", "end", "step"))
        times = [begin + i * step for i in range(int((end - begin) / step))]
        found = (
            []
            if self.empty
            else [
                {"metric": {"le": le, "group": le}, "values": [[t, str(size * (1 + math.sin(t)))] for t in times]}
                for le, size in (("0.5", 2), ("+Inf", 3))
            ]
        )
        body = json.dumps({"data": {"result": found}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("empty", [False, True])
def test_pictures_are_drawn_and_holes_in_them_are_told(tmp_path, empty):
    from matplotlib.image import imread

    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Answers", (Made,), {"empty": empty}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        command = [
            sys.executable,
            GRAFANA / "render.py",
            "--prometheus",
            f"http://127.0.0.1:{server.server_port}",
            "--out",
            tmp_path,
        ]
        ran = subprocess.run(command, capture_output=True, text=True)
    finally:
        server.shutdown()
        server.server_close()
    assert (ran.returncode, ran.stderr) == (int(empty), "")
    assert ran.stdout.count("no data: ") == (len(SHOWN) if empty else 0)
    for path in DASHBOARDS:
        height, width, _ = imread(tmp_path / f"{path.stem}.png").shape
        assert width == 1600 and height > 1000


def test_pictures_in_the_documentation_are_small():
    docs = GRAFANA.parents[1] / "docs/dashboards"
    sizes = {path.stem: path.stat().st_size for path in docs.glob("*.png")}
    assert set(sizes) == set(BOARDS) and max(sizes.values()) <= 200_000


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "s", "0"),
        (0.0123, "s", "12.3 ms"),
        (90.0, "s", "1.5 min"),
        (0.5, "percentunit", "50%"),
        (3 * 2**20, "bytes", "3 MiB"),
        (1234.0, "none", "1.23 K"),
        (0.25, "reqps", "0.25 req/s"),
        (344.0, "suffix: tok/s", "344 tok/s"),
        (math.nan, "s", "no data"),
    ],
)
def test_numbers_are_written_as_in_grafana(value, unit, text):
    assert format_value(value, unit) == text


def test_a_unit_that_nobody_can_write_is_refused():
    with pytest.raises(ValueError, match="unit='furlongs'; allowed: percentunit, s, bytes"):
        format_value(1, "furlongs")
