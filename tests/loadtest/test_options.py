"""The command line: refused options and their messages; profiles, and options that override them."""

from __future__ import annotations

import pytest

from loadtest.cli import joined
from loadtest.settings import LoadSettings, load_profile, shipped_profiles

BASE = ("--rate", 1, "--duration", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no rate is given; give --rate, or --capacity with --overload"),
        (("--rate", 1), "the run would never end; give --duration, --requests or both"),
        (("--rate", 0, "-d", 1), "--rate 0.0; allowed: 1e-06 to 1e+06"),
        ((*BASE, "--arrivals", "weekly"), "--arrivals 'weekly'; allowed: poisson, gamma, constant, ramp, trace"),
        ((*BASE, "--burstiness", 2), "--burstiness has no effect without --arrivals gamma"),
        ((*BASE, "--arrivals", "gamma"), "--arrivals gamma needs --burstiness"),
        (("--rate", 1, "--requests", 5, "--arrivals", "ramp", "--rate-end", 2), "--arrivals ramp needs --duration"),
        ((*BASE, "--arrivals", "trace", "--trace", "x"), "--rate has no effect with --arrivals trace"),
        (("--arrivals", "trace"), "--arrivals trace needs --trace"),
        (("--arrivals", "trace", "--trace", "/nowhere/x", "--serve"), "No such file or directory: '/nowhere/x'"),
        ((*BASE, "--prompts", "/nowhere/x", "--serve"), "No such file or directory: '/nowhere/x'"),
        (
            (*BASE, "--prompts", "x", "--prompt-length", 5),
            "--prompts and --prompt-length exclude each other",
        ),
        ((*BASE, "--output-length", "long"), "--output-length 'long'; allowed: COUNT, uniform:LOW-HIGH"),
        ((*BASE, "--method", "magic"), "--method 'magic'; allowed: smc, exact, target, draft"),
        ((*BASE, "--particles", "4,65"), "--particles '65'; allowed: 1..64"),
        ((*BASE, "--method", "target", "-n", 4), "--particles has no effect without method smc or exact"),
        ((*BASE, "--cancel-share", 0.5), "--cancel-share 0.5 needs one of --cancel-after and --cancel-after-tokens"),
        ((*BASE, "--cancel-after", 1), "--cancel-after has no effect without --cancel-share"),
        (
            (*BASE, "--cancel-share", 0.5, "--cancel-after", 1, "--cancel-by", "fax"),
            "--cancel-by 'fax'; allowed: leave, abort",
        ),
        ((*BASE, "--cancel-by", "abort"), "--cancel-by has no effect without --cancel-share"),
        ((*BASE, "--slow-share", 0.5), "--slow-share 0.5 needs --slow-pause"),
        (
            (*BASE, "--slow-share", 0.6, "--slow-pause", 1, "--cancel-share", 0.6, "--cancel-after", 1),
            "are 1.2 together",
        ),
        (
            (*BASE, "--goodput", "ttft:fast"),
            "--goodput 'ttft:fast'; allowed: NAME:MILLISECONDS, each of ttft, tpot, e2el at most once",
        ),
        ((*BASE, "--goodput", "ttft:500", "itl:50"), "--goodput 'itl:50'; allowed: NAME:MILLISECONDS"),
        ((*BASE, "--capacity", 1), "--capacity has no effect without --goodput"),
        (("--profile", "overload"), "no rate is given"),
        (
            ("--profile", "overload", "--overload", 3, "--capacity", 2, "--rate", 5),
            "--rate 5 is not --overload 3 times --capacity 2",
        ),
        (
            ("--profile", "calm"),
            "--profile 'calm'; allowed: smoke, steady, burst, ramp, capacity, soak, overload, or a file",
        ),
        ((*BASE, "--precision", 0.2), "--precision has no effect without --find-capacity"),
        (("--find-capacity", "--precision", 5), "--precision 5; allowed: 0.01 to 1"),
        (("--find-capacity", "--arrivals", "ramp", "--rate-end", 9), "--find-capacity needs arrivals of one rate"),
        (("--find-capacity", "--profile", "ramp", "--arrivals", "poisson"), "--find-capacity needs --goodput"),
        (
            ("--find-capacity", "--profile", "overload", "--rate", 3),
            "--capacity has no effect with --find-capacity",
        ),
        ((*BASE, "--serve", "--address", "x:1"), "--address has no effect with --serve"),
        ((*BASE, "--serve", "--wait", 5), "--wait has no effect with --serve"),
        ((*BASE, "--wait", -1), "--wait -1; allowed: 0 to 86400"),
        ((*BASE, "--", "--max-queue", "4"), "'--max-queue 4' has no effect without --serve"),
        ((*BASE, "--json", "/nowhere/x.json"), "its directory does not exist"),
        ((*BASE, "--picture", "/nowhere/x.png"), "its directory does not exist"),
        ((*BASE, "--tls-key", "key.pem"), "tls_key is given without tls_cert"),
        ((*BASE, "--serve", "--token-file", "/nowhere/x"), "give a file that can be read"),
        ((*BASE, "--speed", 3), "No such option"),
    ],
)
def test_mistakes_are_found_before_anything_is_sent(loadtest, arguments, message):
    ran = loadtest(*arguments)
    assert (ran.code, ran.out) == (2, "") and message in ran.err


def test_there_is_no_service(loadtest):
    ran = loadtest(*BASE, "--address", "127.0.0.1:1")
    assert (ran.code, ran.out) == (3, "") and "no service at 127.0.0.1:1: UNAVAILABLE" in ran.err


def test_waiting_for_a_service_has_an_end(loadtest):
    ran = loadtest(*BASE, "--address", "127.0.0.1:1", "--wait", 0.6)
    assert (ran.code, ran.out) == (3, "") and "no service at 127.0.0.1:1 within 0.6 s: UNAVAILABLE" in ran.err


def test_a_service_that_does_not_start(loadtest):
    """The service's own error message is shown."""
    ran = loadtest(*BASE, "--serve", "--", "--link", "carrier")
    assert ran.code == 3 and "ended with exit code 2" in ran.err and "link='carrier'; allowed: nccl, grpc" in ran.err


def test_goodput_is_written_as_for_vllm():
    assert joined(["--goodput", "ttft:5", "e2el:7", "--rate", "3"]) == ["--goodput", "ttft:5 e2el:7", "--rate", "3"]
    assert joined(["--goodput", "ttft:5 e2el:7", "tpot:1"]) == ["--goodput", "ttft:5 e2el:7 tpot:1"]
    assert joined(["--goodput"]) == ["--goodput"]


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_are_sound(name):
    missing = {"capacity": 2.0} if name == "overload" else {}
    settings = LoadSettings.of(load_profile(name), missing)
    assert (settings.goodput is None) is (name == "ramp") and settings.rate > 0


def test_an_option_overrides_a_profile_and_what_hangs_on_it():
    burst = load_profile("burst")
    assert LoadSettings.of(burst, {}).burstiness == 0.25
    assert LoadSettings.of(burst, {"rate": 9.0}).rate == 9.0
    assert LoadSettings.of(burst, {"arrivals": "constant"}).burstiness is None
    smoke = LoadSettings.of(load_profile("smoke"), {"cancel_after": 0.5})
    assert (smoke.cancel_after, smoke.cancel_after_tokens) == (0.5, None)


def test_rate_capacity_and_overload():
    overload = load_profile("overload")
    assert LoadSettings.of(overload, {"capacity": 2.0}).rate == 6.0
    assert LoadSettings.of(overload, {"rate": 6.0}).capacity == 2.0
    both = LoadSettings.of(overload, {"rate": 10.0, "capacity": 2.0})
    assert (both.rate, both.capacity, both.overload) == (10.0, 2.0, None)


def test_a_profile_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('about = "mine"\nrate = 2.5\nduration = 3\nparticles = "4"\n')
    assert LoadSettings.of(load_profile(str(path)), {}).rate == 2.5
    path.write_text("speed = 3")
    with pytest.raises(ValueError, match="sets speed; allowed: about, arrivals, attainment"):
        load_profile(str(path))
    path.write_text('rate = "fast"\nduration = 3')
    with pytest.raises(ValueError, match="--rate fast; allowed"):
        LoadSettings.of(load_profile(str(path)), {})
    path.write_text("rate = ")
    with pytest.raises(ValueError, match="give a TOML file of settings"):
        load_profile(str(path))
