"""Metrics of a real (tiny) champion: as a file, over HTTP, beside an engine's counters, and with nothing to tell."""

import base64
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from draftforge import storage
from draftforge.cli import main
from draftforge.errors import AcceptanceMismatchError, InputError, MissingFileError, ServedError
from draftforge.eval.counts import where
from draftforge.eval.engine_metrics import Counters, expected_acceptance
from draftforge.eval.leaderboard import serving
from draftforge.pipeline import monitoring
from draftforge.pipeline.cli_options import MetricsOptions
from draftforge.pipeline.distill import distill
from draftforge.pipeline.listener import Handler
from draftforge.pipeline.monitoring import ChampionCollector, read_counters, write_metrics
from draftforge.pipeline.promotion import kept_counts
from draftforge.pipeline.workspace import Workspace
from draftforge.recipe import load_recipe
from draftforge.specdec.targets import Target
from draftforge.storage import read_json, write_json

WriteRecipe = Callable[..., Path]


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type == "gauge"
        for sample in family.samples:
            found.setdefault(sample.name.removeprefix("draftforge_"), []).append((sample.labels, sample.value))
    return found


def scraped(space: Workspace, **options: Any) -> dict[str, Any]:
    """What one scrape gives, by name."""
    return samples(str(write_metrics(space, MetricsOptions(**options))))


def value(found: dict[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    ((_, number),) = found[name]
    return number


def vllm(drafts: float, accepted: float, drafted: float) -> str:
    lines = {"drafts": drafts, "accepted_tokens": accepted, "draft_tokens": drafted}
    return "".join(
        f'# TYPE vllm:spec_decode_num_{name}_total counter\nvllm:spec_decode_num_{name}_total{{m="x"}} {number}\n'
        for name, number in lines.items()
    )


@pytest.fixture
def engine() -> Iterator[tuple[str, dict[str, Any]]]:
    """An address, and what is said there: `text` and `status`."""
    said: dict[str, Any] = {"text": "", "status": 200}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said.update(path=self.path, authorization=self.headers.get("Authorization"))
            self.send_response(said["status"])
            if "location" in said:
                self.send_header("Location", said["location"])
            self.end_headers()
            self.wfile.write(said["text"].encode())

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", said
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_champion_is_told_of(
    write_recipe: WriteRecipe,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    engine: tuple[str, dict[str, Any]],
) -> None:
    path = write_recipe()
    space = Workspace(load_recipe(path))
    before = scraped(space)
    assert value(before, "champion_exists") == 0 and "champion_info" not in before
    started = time.time()
    outcome = distill(space)
    assert outcome is not None

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(Target, "load", refuse)
    write_json(
        space.root / "staleness.json",
        {
            "champion": outcome.version.reference,
            "checked_at": 1.5e9,
            "stale": True,
            "causes": ["target", {"kind": "drift"}, {"kind": "files", "verdict": "held"}],
        },
    )
    with pytest.raises(SystemExit) as ended:
        main(["metrics", str(path), "--out", str(tmp_path / "d.prom")])
    assert not ended.value.code
    found = samples((tmp_path / "d.prom").read_text())
    ((about, one),) = found["champion_info"]
    assert one == 1 and about["version"] == "1" and about["target"] == space.target_fingerprint[:12]
    assert about["family"] == outcome.version.lineage.family and value(found, "champion_exists") == 1
    table = kept_counts(space.tracking, outcome.version)
    assert table is not None
    settings = space.recipe.score
    promise = expected_acceptance(serving(table, settings), settings.confidence)
    assert value(found, "champion_tau") == promise.taus["rounds"].value
    assert [labels["position"] for labels, _ in found["champion_acceptance"]] == ["1", "2"][: promise.draft_tokens]
    assert value(found, "champion_expected_speedup") > 0
    assert started - 1 <= value(found, "champion_promoted_timestamp_seconds") <= time.time()
    assert 0 <= value(found, "champion_age_seconds") < 600
    assert value(found, "champion_stale") == 1 and value(found, "staleness_checked_timestamp_seconds") == 1.5e9
    assert [labels["cause"] for labels, _ in found["champion_stale_cause"]] == ["drift", "target"]
    assert found["last_decision"][0][0]["decision"] == "promote" and value(found, "last_retrain_success") == 1
    assert abs(value(found, "last_decision_timestamp_seconds") - started) < 600

    address, said = engine
    K = promise.draft_tokens
    said["text"] = vllm(1000, 900 * K, 1000 * K)  # far more than this random draft accepts
    told = scraped(space, served=[address])
    assert said["path"] == "/metrics" and value(told, "served_up") == 1 and value(told, "served_rounds") == 1000
    assert value(told, "served_tau") == pytest.approx(1 + 0.9 * K) and value(told, "acceptance_mismatch") == 1
    assert value(told, "promised_tau") == promise.taus["unclipped"].value
    assert "WARNING: served: vllm has tau" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(AcceptanceMismatchError, match="is not as expected"):
        write_metrics(space, MetricsOptions(out=tmp_path / "e.prom", served=[address], fail_on_mismatch=True))
    assert "draftforge_acceptance_mismatch" in (tmp_path / "e.prom").read_text()  # written all the same
    right = 1000 * (promise.taus["unclipped"].value - 1)
    said["status"] = 500
    with pytest.raises(ServedError, match="answers 500"):
        write_metrics(space, MetricsOptions(out=tmp_path / "f.prom", served=[address]))
    assert value(samples((tmp_path / "f.prom").read_text()), "served_up") == 0
    said |= {"text": vllm(1000, right, 1000 * K), "status": 200}
    assert value(scraped(space, served=[address], fail_on_mismatch=True), "acceptance_mismatch") == 0

    # Responses of single requests: as expected in one domain, not in the other, of no domain, without counts.
    lines, of_all = list[dict[str, Any]](), serving(table, settings)
    for domain, added in (("code", 0), ("support", 900), ("", 0), ("elsewhere", 0)):
        own = (
            expected_acceptance(where(of_all, domain="support" if added else "code"), settings.confidence)
            .taus["unclipped"]
            .value
        )
        accepted = round(1000 * (own - 1)) + added
        rounds = {"acceptance_histogram": [1000 - accepted, accepted], "num_spec_steps": 1000}
        rounds |= {"num_accepted_draft_tokens": accepted, "num_draft_tokens": 1000 * K}
        answer = {"choices": [], "metrics": {"speculative_decoding": rounds}}
        lines.append({"request": {"metadata": {"domain": domain}} if domain else {}, "response": answer})
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"response": {"choices": []}}])))
    capsys.readouterr()
    told = scraped(space, served=[str(tmp_path / "log.jsonl")])
    assert value(told, "served_requests") == 4 and value(told, "served_requests_without_domain") == 1
    assert value(told, "served_responses_without_counts") == 1 and value(told, "served_rounds") == 4000
    rounds_of = {labels["domain"]: count for labels, count in told["served_domain_rounds"]}
    assert rounds_of == {"code": 1000, "support": 1000, "elsewhere": 1000}
    assert {labels["domain"] for labels, _ in told["promised_domain_tau"]} == {"code", "support"}
    judged = {labels["domain"]: count for labels, count in told.get("domain_acceptance_mismatch", [])}
    assert judged.get("code", 0) == 0 and judged.get("support", 1) == 1
    said_now = " ".join(capsys.readouterr().err.split())
    assert "domain 'code': vllm has tau" in said_now and "domain 'support': vllm has tau" in said_now
    assert "4 responses with counts, 1 of them of no known domain; 1 without counts; not on the holdout" in said_now

    record = read_json(space.root / "staleness.json")
    write_json(space.root / "staleness.json", record | {"champion": "another/1"})  # the check was of the one before
    assert "champion_stale" not in scraped(space)
    write_json(space.root / "staleness.json", ["not", "it"])
    told = scraped(space)
    assert "champion_stale" not in told and "its staleness has no sample" in " ".join(capsys.readouterr().err.split())


def test_without_a_champion_there_is_nothing_to_compare_with(
    write_recipe: WriteRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds: dict[str, Any] = {"acceptance_histogram": [82, 30], "num_spec_steps": 112}
    rounds |= {"num_accepted_draft_tokens": 30, "num_draft_tokens": 112}
    answer = {"choices": [], "metrics": {"speculative_decoding": rounds}}
    line = {"request": {"metadata": {"domain": "support"}}, "response": answer}
    (tmp_path / "log.jsonl").write_text(json.dumps(line))
    told = scraped(Workspace(load_recipe(write_recipe())), served=[str(tmp_path / "log.jsonl")])
    assert value(told, "champion_exists") == 0 and "acceptance_mismatch" not in told
    said = " ".join(capsys.readouterr().err.split())
    assert "served: no champion: nothing to compare with; served tau 1.27 over 112 rounds" in said
    assert "1 responses with counts" in said and "not on the holdout" not in said


def test_the_port_answers_until_it_is_stopped(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch, engine: tuple[str, dict[str, Any]]
) -> None:
    space = Workspace(load_recipe(write_recipe()))
    address, said = engine
    opened: list[Any] = []
    inner, asked, stopped = monitoring.listening_on, threading.Event(), threading.Event()

    @contextmanager
    def start(handler: type[Handler], host: str, port: int, option: str) -> Iterator[int]:
        with inner(handler, host, 0, option) as bound:  # a free one
            opened.append((host, bound))
            asked.set()
            yield bound

    monkeypatch.setattr(monitoring, "listening_on", start)
    monkeypatch.setattr(monitoring, "CACHE_SECONDS", 0.0)
    monkeypatch.setattr(monitoring, "wait_until_stopped", lambda: stopped.wait(300))
    options = MetricsOptions(listen="127.0.0.1:9109", served=[address], interval_seconds=60.0)
    run = threading.Thread(target=lambda: write_metrics(space, options), daemon=True)
    run.start()
    assert asked.wait(60)
    ((host, port),) = opened
    url = f"http://{host}:{port}/metrics"
    for path in ("", "/", "/metrics/", "/other"):
        assert requests.get(f"http://{host}:{port}{path}", timeout=60).status_code == 404
    assert "path" not in said  # and the engine was not asked
    said["text"] = vllm(100, 50, 400)
    first = samples(requests.get(url, timeout=60).text)
    assert value(first, "served_up") == 1 and value(first, "served_rounds") == 0  # the window begins
    said["text"] = vllm(130, 80, 520)
    second = samples(requests.get(url, timeout=60).text)
    assert value(second, "served_rounds") == 30 and value(second, "served_tau") == 2.0
    said["text"] = vllm(10, 0, 40)  # the engine was started again
    assert value(samples(requests.get(url, timeout=60).text), "served_rounds") == 40
    said["status"] = 503
    down = samples(requests.get(url, timeout=60).text)
    assert value(down, "served_up") == 0 and value(down, "champion_exists") == 0
    stopped.set()
    run.join(60)
    assert not run.is_alive()


def test_a_decision_at_no_time_has_no_time() -> None:
    tags = {monitoring.DECISION_TAG: "promote", monitoring.RECORD_TAG: "decisions/m-v1-99999999T999999.json"}
    client = SimpleNamespace(search_model_versions=lambda *_, **__: [SimpleNamespace(tags=tags, version=1)])
    tracking: Any = SimpleNamespace(uri="http://x", client=client)
    assert [one.name for one in monitoring._last_decision(tracking, "m", {})] == ["draftforge_last_decision"]


def test_metrics_are_made_once_for_many_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = [100.0], []
    monkeypatch.setattr(monitoring.time, "monotonic", lambda: now[0])

    def make() -> bytes:
        made.append(now[0])
        return str(len(made)).encode()

    cached = monitoring.CachedText(make)
    assert [cached.text() for _ in range(3)] == [b"1"] * 3
    now[0] += monitoring.CACHE_SECONDS
    assert cached.text() == b"2" and made == [100.0, 105.0]


def test_the_window_moves_on(write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    space, now = Workspace(load_recipe(write_recipe())), [0.0]
    monkeypatch.setattr(monitoring.time, "monotonic", lambda: now[0])
    source = tmp_path / "scrape.prom"
    told = ChampionCollector(space, MetricsOptions(served=[str(source)], interval_seconds=60.0))
    registry = CollectorRegistry()
    registry.register(told)
    seen = []
    for second, drafts in ((0, 100), (30, 110), (60, 130), (90, 170), (400, 171)):
        now[0] = float(second)
        source.write_text(vllm(drafts, drafts, 4 * drafts))
        seen.append(value(samples(generate_latest(registry).decode()), "served_rounds"))
    assert seen == [0, 10, 30, 60, 1]


def test_two_files_give_what_lies_between(
    write_recipe: WriteRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "before.prom", tmp_path / "after.prom"
    before.write_text(vllm(100, 50, 400))
    after.write_text(vllm(300, 250, 1200))
    path = write_recipe()
    with pytest.raises(SystemExit) as ended:
        main(["metrics", str(path), "--served", str(after), "--since", str(before)])
    assert not ended.value.code
    found = samples(capsys.readouterr().out)
    assert value(found, "served_rounds") == 200 and value(found, "served_tau") == 2.0
    both = read_counters([str(before), str(after)])
    assert both.rounds == 400


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"served": ["a"], "since": ["b", "c"]}, "--since: 2 given for 1 --served"),
        ({"served": ["a"], "since": ["b"], "interval_seconds": 5.0}, "--interval: looks twice"),
        ({"served": ["a"], "interval_seconds": math.inf}, "--interval inf: must be 0 to 3.1536e[+]07 seconds"),
        ({"served": ["a"], "interval_seconds": math.nan}, "--interval nan: must be"),
        ({"fail_on_mismatch": True}, "need --served"),
        ({"out": Path("x"), "listen": "127.0.0.1:9"}, "--listen: serves until stopped"),
        ({"listen": "9109"}, "--listen 9109: must be HOST:PORT"),
        ({"listen": "127.0.0.1:99999"}, "must be HOST:PORT"),
    ],
)
def test_options_that_do_not_go_together_are_named(
    write_recipe: WriteRecipe, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        write_metrics(Workspace(load_recipe(write_recipe())), MetricsOptions(**options))


def test_engines_that_do_not_answer_are_named_without_their_passwords(engine: tuple[str, dict[str, Any]]) -> None:
    address, said = engine
    with pytest.raises(MissingFileError, match="--served no-such-file: no such file"):
        read_counters(["no-such-file"])
    said["status"] = 401
    with pytest.raises(ServedError, match="answers 401"):
        read_counters([f"{address}/custom"])
    assert said["path"] == "/custom"
    with pytest.raises(ServedError) as found:
        read_counters(["http://someone:secret@127.0.0.1:9/metrics"])
    assert "secret" not in str(found.value) and "does not answer (connection refused)" in str(found.value)
    with pytest.raises(InputError, match=r"--served http://\[::1: is no address"):
        read_counters(["http://[::1"])
    said |= {"status": 200, "text": json.dumps({"no": "timings"})}
    with pytest.raises(InputError, match="has no timings"):
        read_counters([address])


def test_a_scrape_follows_no_redirect_sends_no_netrc_and_reads_no_more_than_it_may(
    engine: tuple[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, said = engine
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    said["text"] = json.dumps({"timings": {"predicted_n": 3, "draft_n": 2, "draft_n_accepted": 1}})
    assert (read_counters([address]).accepted, said["authorization"]) == (1, None)
    read_counters([address.replace("//", "//me:p%40ss@")])
    assert said["authorization"] == "Basic " + base64.b64encode(b"me:p@ss").decode()
    said.update(status=302, location=f"{address}/elsewhere")
    with pytest.raises(ServedError, match="answers 302"):
        read_counters([address])
    assert said["path"] == "/metrics"
    said.update(status=200, text=" " * 2000)
    monkeypatch.setattr(monitoring, "MOST_SCRAPE_BYTES", 1000)
    monkeypatch.setattr(storage, "MOST_TEXT_BYTES", 1000)
    with pytest.raises(ServedError, match=r"the reply has more than 1\.00 kB"):
        read_counters([address])
    (tmp_path / "saved").write_text(" " * 2000)
    with pytest.raises(InputError, match=r"has more than 1\.00 kB"):
        read_counters([str(tmp_path / "saved")])
    position = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="4000000000"} 1\n'
    (tmp_path / "saved").write_text(f"vllm:spec_decode_num_drafts_total 1\n{position}")
    with pytest.raises(InputError, match="position '4000000000' of a draft: must be a number below 10000"):
        read_counters([str(tmp_path / "saved")])


def test_labels_of_strangers_control_no_terminal_and_are_utf_8() -> None:
    """Domains of logged requests and tags of a registry stand in them: half a character was a traceback."""
    odd = {"a\x1b[31m\n\u009b\ud800é": 1.0}
    counters = Counters(
        "vllm",
        "unclipped",
        1.0,
        1.0,
        requests=1.0,
        domains={next(iter(odd)): Counters("vllm", "unclipped", 1.0, 1.0, requests=1.0)},
    )
    registry = CollectorRegistry(auto_describe=False)
    families = [*monitoring.request_families(counters, {}), *monitoring.served_families(counters, None)]

    class Told(Collector):
        def collect(self) -> list[Metric]:
            return families

    registry.register(Told())
    text = generate_latest(registry).decode()
    assert text.replace("\n", "").isprintable() and "é" in text and "\\\\x1b[31m" in text
