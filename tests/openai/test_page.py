"""The web page of `serve`, in a headless browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from services.gateway.config import GatewayConfig
from services.gateway.status import ServiceStatus, WorkerGroupStatus
from services.openai.pages import ELSEWHERE, settings_document
from smc.api.sampling_params import SETTINGS, Method, SamplingParams, methods_of
from smc.local_engine import ModelPair
from smc.scheduler.stats import EngineStats
from tests.gateway.harness import Service, serving
from tests.openai.asking import ask
from tests.openai.test_tool_calls import TOOLS, with_template

CHROMIUM = shutil.which("chromium")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; apt-get install chromium")
QUESTION = "Mia has 12 apples. She buys 30 more. How many now?"
STATES = "[...document.querySelectorAll('.answer > header span')].map(one => one.textContent)"
TOKEN = "open-sesame"
SECONDS = 60_000
"""Time limit in milliseconds, with room for a busy machine."""


@pytest.fixture(scope="module")
def browser():
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    with sync_playwright() as playwright:
        # Chromium's sandbox needs rights that containers lack; this browser visits only this page.
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--renderer-process-limit=1"]
        )
        yield browser.new_context()
        browser.close()


@pytest.fixture(scope="module")
def secured(pair, tmp_path_factory) -> Iterator[Service]:
    """A service that requires a token and whose chat template renders tools."""
    tokens = tmp_path_factory.mktemp("page") / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    changed = ModelPair(pair.target, pair.draft, with_template(pair.tokenizer, "hermes"), pair.max_context)
    with serving(changed, http_port=0, auth_token_file=tokens) as service:
        yield service


@pytest.fixture
def visit(browser) -> Iterator[Callable]:
    """Opens the page of a service in a new tab. At the end, no error may have occurred in it, and no request may have
    gone to another address."""
    pages, faults = [], []

    def open_page(service: Service, width: int = 1200, theme: str = "light"):
        page = browser.new_page()
        pages.append(page)
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=theme)
        page.set_default_timeout(SECONDS)
        origin = service.url.removesuffix("/v1")
        page.on("pageerror", lambda error: faults.append(str(error)))
        # The browser itself logs every response with status 4xx.
        page.on("console", lambda line: "status of 4" in line.text or faults.append(line.text))
        page.on("request", lambda request: request.url.startswith(f"{origin}/") or faults.append(request.url))
        page.goto(origin)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert faults == []


@pytest.fixture
def page(visit, service):
    """The page of the service, with its settings loaded."""
    page = visit(service)
    page.wait_for_selector("#setting-seed")
    return page


def say(page, text: str = QUESTION) -> None:
    page.fill("#question", text)
    page.press("#question", "Enter")


def wait_for_end(page) -> None:
    page.wait_for_selector("#stop", state="hidden")


def long_answers(page) -> None:
    """Change the settings so that further answers take seconds."""
    page.select_option("#method-0", "smc")
    page.fill("#setting-max_tokens", "400")
    page.fill("#setting-particles", "16")
    page.evaluate("document.querySelectorAll('aside details').forEach(one => one.open = true)")
    page.select_option("#setting-ignore_eos", "true")


def test_every_setting_is_offered_with_what_is_allowed_for_it():
    found = {one["name"]: one for one in settings_document()}
    assert found.keys() == SETTINGS.keys() - ELSEWHERE
    assert found["particles"] | {"help": ""} == {
        "name": "particles",
        "kind": "integer",
        "allowed": "1..64",
        "default": None,
        "help": "",
        "methods": ["smc", "exact"],
        "report": False,
    }
    assert found["resampling"]["choices"] == ["systematic", "stratified", "residual", "multinomial", "ssp"]
    assert found["stop"]["kind"] == "texts" and found["logit_bias"]["kind"] == "biases"
    # The allowed range equals the one in the error message.
    for name, wrong in (("temperature", -1), ("top_p", 2), ("particles", 65), ("alpha", 0), ("population", "all")):
        with pytest.raises(ValueError) as error:
            SamplingParams(method="smc", **{name: wrong})
        assert f"allowed: {found[name]['allowed']}" in str(error.value)


@pytest.mark.parametrize("name", ["particles", "verification", "alpha", "draft_temperature", "ess_threshold"])
def test_a_setting_is_offered_for_the_methods_that_it_has_an_effect_with(name):
    """The methods that the page lists for a setting are those for which `SamplingParams` accepts it."""
    given = {"particles": 4, "verification": "walk", "alpha": 2.0, "draft_temperature": 0.7, "ess_threshold": 0.2}[name]
    more = {"draft_temperature": {"verification": "rejection"}}.get(name, {})
    for method in Method:
        fields = {"method": method.value, name: given} | (more if method is Method.EXACT else {})
        if method in methods_of(SETTINGS[name]):
            SamplingParams(**fields)
        else:
            with pytest.raises(ValueError, match=f"{name}=.* has no effect with"):
                SamplingParams(**fields)


def test_files_of_the_page_may_load_nothing_else(service):
    for path, kind in (("/", "html"), ("/page/page.css", "css"), ("/page/page.js", "javascript")):
        said = ask(service, "GET", path)
        assert said.status == 200 and kind in said.headers["content-type"]
        policy = said.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'" in policy and "unsafe" not in policy
        assert b"https://" not in said.data and b"<script>" not in said.data and b" style=" not in said.data
    said = ask(service, "GET", "/page/settings")
    assert said.json["model"] == "demo" and said.json["tools"] is False and said.json["context"] == 512


@in_a_browser
def test_worker_groups_are_named(visit, service, monkeypatch):
    """Several worker groups: how many are ready is beside the model's name, and what each does in its tooltip."""
    load = EngineStats(running=3, queued=1)
    groups = (WorkerGroupStatus(1, load, has_draft=False), WorkerGroupStatus(2, has_target=False))
    monkeypatch.setattr(service.gateway.handler, "status", lambda: ServiceStatus(groups))
    page = visit(service)
    page.wait_for_function("document.getElementById('model').textContent", timeout=SECONDS)
    assert page.text_content("#model") == "demo, 1 of 2 worker groups"
    about = page.get_attribute("#model", "title").splitlines()
    assert about[1:] == ["worker group 0: 3 running, 1 waiting, no draft", "worker group 1: not ready"]


@in_a_browser
def test_a_chat(page):
    page.select_option("#method-0", "smc")
    page.fill("#setting-seed", "9007199254740993")  # more digits than a JavaScript number holds
    say(page)
    wait_for_end(page)
    stored = json.loads(page.evaluate("sessionStorage.getItem('smcserve.chat')"))
    (answer,) = stored["turns"][0]["answers"]
    text = "".join(answer["pieces"])
    assert text == page.text_content(".answer .text") and len(answer["pieces"]) > 1
    assert answer["facts"]["seed"] == "9007199254740993"
    # Every piece is shaded by its number of tokens, and every token is shown.
    counts = page.eval_on_selector_all(
        ".answer .piece", "all => all.map(one => [one.className, one.querySelectorAll('.token').length])"
    )
    assert len(counts) == len(answer["pieces"]) and all(name == f"piece d{min(count, 8)}" for name, count in counts)
    names = page.eval_on_selector_all(".numbers dt", "all => all.map(one => one.textContent)")
    assert names == ["First token", "Tokens / second", "Tokens / round", "Tokens"]
    page.click(".particles summary")
    assert page.is_visible(".particle meter")
    # The second request contains the first answer, and the code that the page shows for it works.
    say(page, "And with one more?")
    wait_for_end(page)
    page.click("#show-code")
    curl = page.text_content("#code-text")
    body = json.loads(curl[curl.index("{") : curl.rindex("}") + 1].replace("'\\''", "'"))
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"] == text and body["seed"] == 9007199254740993
    page.select_option("#language", "python")
    python = page.text_content("#code-text")
    page.click("#copy")
    page.wait_for_selector("text=Copied")
    second = page.text_content(".turn:last-child .text")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(python, "page", "exec"), {})
    assert out.getvalue() == f"{second}\n"
    if shutil.which("curl"):
        ran = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=True)
        assert ran.stdout.endswith("data: [DONE]\n\n")
    page.click("#close-code")
    page.click("#new-chat")
    assert page.is_visible("#empty") and page.locator(".turn").count() == 0


@pytest.mark.slow
@in_a_browser
def test_two_methods_answer_one_question(page):
    page.select_option("#method-0", "exact")
    page.check("#compare")
    page.select_option("#method-1", "target")
    say(page)
    wait_for_end(page)
    texts = page.eval_on_selector_all(".answer .text", "all => all.map(one => one.textContent)")
    assert len(texts) == 2 and texts[0] == texts[1]
    assert all("the same text" in state for state in page.evaluate(STATES))
    assert page.locator(".answer.target .note").count() == 0
    left, right = page.locator(".answer").all()
    assert left.bounding_box()["y"] == right.bounding_box()["y"]
    rounds = page.eval_on_selector_all(".numbers div:nth-child(3) dd", "all => all.map(one => +one.textContent)")
    assert rounds[0] > 1 == rounds[1]
    # Settings that only SMC has are not sent for other methods.
    assert "idle" in page.get_attribute("[data-setting=alpha]", "class")


@pytest.mark.slow
@in_a_browser
def test_an_exact_answer_says_what_holds(page):
    def note() -> str:
        say(page)
        wait_for_end(page)
        return page.text_content(".turn:last-child .answer .note")

    def in_one_order(route) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, body=answer.text().replace('"fastest"', '"invariant"'))

    page.select_option("#method-0", "exact")
    assert note() == "The target's answer, but for near ties between tokens."
    page.route("**/v1/chat/completions", in_one_order)
    assert note() == "The target's answer, bit for bit."
    page.evaluate("document.querySelectorAll('aside details').forEach(one => one.open = true)")
    page.select_option("#setting-verification", "rejection")
    assert note() == "Follows the target's distribution."


@in_a_browser
@pytest.mark.slow
def test_page_constraints(page):
    page.click("#format-section summary")
    page.select_option("#format", "choice")
    page.fill("#format-text", "yes\nno")
    say(page, "Is 17 even?")
    wait_for_end(page)
    assert page.text_content(".answer .text") in ("yes", "no")
    page.select_option("#format", "json_schema")
    page.fill("#format-text", "{")
    say(page)
    page.wait_for_selector(".failed")
    assert "constraint.json_schema: it is not JSON: Expecting property name" in page.text_content(".failed")
    assert "wrong" in page.get_attribute("#format-text", "class")


@pytest.mark.slow
@in_a_browser
def test_stop(page, service):
    long_answers(page)
    for way in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        say(page)
        page.wait_for_selector(".turn:last-child .piece")
        way()
        wait_for_end(page)
        assert page.evaluate(STATES)[-1] == "stopped" and page.text_content(".turn:last-child .text")
        service.wait_until_free()
    assert page.locator(".failed").count() == 0 and page.is_enabled("#send")


@pytest.mark.slow
@in_a_browser
def test_an_error_is_shown_as_the_server_words_it(page):
    page.fill("#setting-particles", "65")
    say(page)
    page.wait_for_selector(".failed")
    assert page.text_content(".failed") == "particles=65; allowed: 1..64400 invalid"
    assert page.get_attribute("#setting-particles", "aria-invalid") == "true"
    page.fill("#setting-particles", "4")
    assert page.get_attribute("#setting-particles", "aria-invalid") is None
    say(page)
    wait_for_end(page)
    page.wait_for_selector(".numbers")


@in_a_browser
@pytest.mark.slow
def test_a_reload_keeps_the_conversation(page, service):
    long_answers(page)
    say(page)
    page.fill("#system", "Be short.")
    page.wait_for_selector(".answer .piece:nth-child(3)")
    page.reload()
    page.wait_for_selector("#setting-seed")
    assert page.evaluate(STATES) == ["stopped by a reload"] and page.text_content(".question") == QUESTION
    assert page.locator(".answer .piece").count() >= 3 and page.locator(".failed").count() == 0
    assert page.input_value("#system") == "Be short." and page.input_value("#setting-particles") == "16"
    service.wait_until_free()
    page.fill("#system", "")  # the demo pair's template does not accept a system message
    page.fill("#setting-max_tokens", "4")
    say(page, "And now?")
    wait_for_end(page)
    assert page.evaluate(STATES)[1] == "length"


@in_a_browser
@pytest.mark.slow
def test_a_token_is_asked_for_and_stays_in_the_tab(visit, secured):
    page = visit(secured)
    page.wait_for_selector("#banner:not([hidden])")
    assert "a valid token is needed" in page.text_content("#banner")
    assert page.evaluate("document.activeElement.id") == "token"
    page.keyboard.type(TOKEN)
    page.keyboard.press("Tab")
    page.wait_for_selector("#setting-seed")
    assert page.is_hidden("#banner")
    page.fill("#setting-max_tokens", "4")
    page.click("#tools-section summary")
    page.fill("#tools", json.dumps(TOOLS))
    say(page)
    wait_for_end(page)
    assert page.evaluate(STATES) == ["length"]
    page.click("#show-code")
    code = page.text_content("#code-text")
    assert TOKEN not in page.text_content("body") and "$SMCSERVE_TOKEN" in code and '"tools": [' in code
    page.click("#close-code")
    page.fill("#tools", "[")
    say(page)
    page.wait_for_selector(".failed")
    assert "tools='['; allowed: a list" in page.text_content(".failed")
    assert page.evaluate("localStorage.length") == 0 and page.context.cookies() == []
    page.reload()
    page.wait_for_selector("#setting-seed")


def test_the_settings_need_a_token_and_the_files_do_not(secured):
    assert ask(secured, "GET", "/").status == ask(secured, "GET", "/page/page.js").status == 200
    assert ask(secured, "GET", "/page/settings").status == 401
    said = ask(secured, "GET", "/page/settings", authorization=f"Bearer {TOKEN}")
    assert said.status == 200 and said.json["tools"] is True


@in_a_browser
@pytest.mark.slow
def test_a_narrow_screen_does_not_scroll_sideways(visit, service):
    page = visit(service, width=400)
    page.wait_for_selector("#setting-seed", state="attached")
    assert page.is_hidden("#settings")
    page.click("#show-settings")
    page.fill("#setting-max_tokens", "8")
    page.keyboard.press("Escape")
    page.check("#compare")
    say(page, "word" * 60)
    wait_for_end(page)
    left, right = page.locator(".answer").all()
    assert left.bounding_box()["y"] < right.bounding_box()["y"]

    def is_narrow() -> bool:
        return page.evaluate("document.documentElement.scrollWidth <= 400 && document.body.scrollWidth <= 400")

    assert is_narrow()
    page.click("#show-settings")
    assert page.is_visible("#setting-seed") and is_narrow()
    page.keyboard.press("Escape")
    assert page.is_hidden("#settings")
    page.click("#show-code")
    assert is_narrow()


@in_a_browser
@pytest.mark.slow
def test_both_themes_and_the_switch(visit, service):
    def lightness(page) -> float:
        colors = page.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
        back, ink = (sum(map(int, color[4:-1].split(","))) for color in colors)
        assert abs(back - ink) > 400
        return back

    light, dark = visit(service), visit(service, theme="dark")
    assert lightness(light) > 600 > 150 > lightness(dark)
    light.select_option("#theme", "dark")
    assert lightness(light) == lightness(dark)
    light.reload()
    assert lightness(light) == lightness(dark)
    # The focus is visible for keyboard users.
    light.focus("#question")
    assert light.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_without_a_page_there_is_none(pair):
    with pytest.raises(ValueError, match="no_page has no effect without http_port"):
        GatewayConfig(page=False)
    with serving(pair, http_port=0, page=False) as service:
        connection = http.client.HTTPConnection("127.0.0.1", service.gateway.http_port, timeout=60)
        for path in ("/", "/page/page.js", "/page/settings"):
            connection.request("GET", path)
            reply = connection.getresponse()
            assert reply.status == 404 and b"not_found" in reply.read()
        connection.close()
