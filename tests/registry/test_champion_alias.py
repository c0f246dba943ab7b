"""Promotion and rollback: records, races with other processes and hosts, and which champion a rollback returns to."""

import json
import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from draftforge import storage
from draftforge.errors import LockedError, RegistryError
from draftforge.eval.counts import to_table
from draftforge.pipeline.promotion import keep_counts, kept_counts
from draftforge.registry import champion_alias
from draftforge.registry.champion_alias import (
    HISTORY_TAG,
    MOVE_TAG,
    ROLLED_BACK_TAG,
    SPEEDUP_TAG,
    TAU_TAG,
    UNDONE_TAG,
    decisions,
    history,
    move_champion,
    promote,
    rollback,
    set_alias,
    undo_rollback,
)
from draftforge.registry.connect import Tracking
from draftforge.registry.gate import Decision, Evidence, Figures, Interval, Numbers
from draftforge.registry.lineage import DRAFT_TAG, Version, get_version
from draftforge.registry.store_address import sqlite_file
from draftforge.registry.versions import CANDIDATE, CHAMPION, PREVIOUS, aliases

Register = Callable[..., Version]
TARGET = "a" * 64


def verdict(compared: str | None, yes: bool = True) -> Decision:
    return Decision(promote=yes, reasons=["because"], compared=compared)


def crown(tracking: Tracking, version: Version) -> None:
    number = aliases(tracking, version.name).get(CHAMPION)
    assert promote(tracking, verdict(f"{version.name}/{number}" if number else None), version).promote


@pytest.mark.slow
def test_no_rollback_returns_to_a_champion_whose_files_are_gone(tracking: Tracking, register: Register) -> None:
    one, two, three = register("one"), register("two"), register("three")
    crown(tracking, one)
    crown(tracking, two)
    lost = Decision(promote=True, reasons=["x"], compared=two.reference, champion_lost=True)
    assert promote(tracking, lost, three).promote
    assert aliases(tracking, one.name) == {CHAMPION: 3, PREVIOUS: 1}
    assert rollback(tracking, TARGET).number == 1


def test_promotion_moves_aliases_and_leaves_a_record(tracking: Tracking, register: Register, tmp_path: Path) -> None:
    one = register("one")
    crown(tracking, one)
    two = register("two")
    assert aliases(tracking, one.name) == {CHAMPION: 1, CANDIDATE: 2}
    crown(tracking, two)
    assert aliases(tracking, one.name) == {CHAMPION: 2, PREVIOUS: 1}
    tags = tracking.client.get_model_version(two.name, "2").tags
    assert tags["draftforge.decision"] == "promote" and tags["draftforge.compared"] == one.reference
    path = tracking.client.download_artifacts(two.run_id, tags["draftforge.decision_record"], str(tmp_path))
    record = json.loads(Path(path).read_text())
    assert record["version"] == two.reference and record["compared"] == one.reference
    assert record["format"] == 3 and record["numbers"]["more_clusters"] is None
    assert [(event["event"], event["from"], event["to"]) for event in history(tracking, one.name)] == [
        ("promote", None, 1),
        ("promote", 1, 2),
    ]


def test_decisions_are_read_back_in_order(tracking: Tracking, register: Register) -> None:
    one = register("one")
    speedup = Interval(value=1.5, low=1.2, high=1.9, clusters=7, error=0.1, freedom=6.0)
    figures = Figures(tau=2.125, speedup=speedup)
    evidence = Evidence(
        candidate=figures,
        conversations=9,
        clusters=7,
        confidence=0.95,
        lossless=None,
        export_reads_back=True,
        holdout_overlap=0,
    )
    asked = [
        Decision(promote=False, reasons=["too few"], numbers=Numbers(evidence=evidence)),
        Decision(promote=True, reasons=["first"], numbers=Numbers(evidence=evidence)),
    ]
    for decision in asked:
        promote(tracking, decision, one)
    two = register("two")
    assert decisions(tracking, two) == []
    found = decisions(tracking, one)
    assert [(one.promote, one.reasons, one.numbers) for one in found] == [
        (one.promote, one.reasons, one.numbers) for one in asked
    ]
    assert {record.version for record in found} == {one.reference} and found[0].at < found[1].at
    tags = tracking.client.get_model_version(one.name, "1").tags
    assert (tags[TAU_TAG], tags[SPEEDUP_TAG]) == ("2.1250", "1.5000")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"version": "m/1", "promote": true}', "is a decision of format 1; this draftforge reads format 3"),
        ('{"format": 3, "version": "m/1"}', "promote: Field required"),
        ("[]", "format None"),
        ("{", "not valid JSON"),
    ],
)
def test_a_record_of_another_format_is_said(tracking: Tracking, register: Register, text: str, words: str) -> None:
    one = register("one")
    tracking.client.log_text(one.run_id, text, f"decisions/{one.name}-v1-20250101T000000.json")
    with pytest.raises(RegistryError, match=words):
        decisions(tracking, one)


def test_promoting_twice_changes_nothing(tracking: Tracking, register: Register) -> None:
    one = register("one")
    crown(tracking, one)
    before = history(tracking, one.name)
    assert promote(tracking, verdict("someone/9"), one).reasons == ["is the champion already"]
    assert history(tracking, one.name) == before and aliases(tracking, one.name) == {CHAMPION: 1}


def test_refusal_is_recorded_and_moves_nothing(tracking: Tracking, register: Register) -> None:
    one = register("one")
    assert not promote(tracking, verdict(None, yes=False), one).promote
    assert aliases(tracking, one.name) == {CANDIDATE: 1}
    assert tracking.client.get_model_version(one.name, "1").tags["draftforge.decision"] == "refuse"


def test_champion_that_changed_since_the_comparison(tracking: Tracking, register: Register) -> None:
    one, two, three = register("one"), register("two"), register("three")
    crown(tracking, one)
    crown(tracking, two)
    with pytest.raises(RegistryError, match=f"lost a race: the decision compared {one.reference}, .* {two.reference}"):
        promote(tracking, verdict(one.reference), three)
    with pytest.raises(RegistryError, match="compared no champion"):
        promote(tracking, verdict(None), three)
    assert aliases(tracking, one.name)[CHAMPION] == 2


class OtherHost:
    """A client beside which another host moves `champion` at the worst moment, after a tag or an alias was set."""

    def __init__(self, tracking: Tracking, steals: Version, when: str) -> None:
        self._client, self._steals, self._when = tracking.client, steals, when

    def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
        self._client.set_registered_model_alias(name, alias, version)
        self._steal(name, alias)

    def set_registered_model_tag(self, name: str, tag: str, value: str) -> None:
        self._client.set_registered_model_tag(name, tag, value)
        self._steal(name, tag)

    def _steal(self, name: str, written: str) -> None:
        if written == self._when:
            self._client.set_registered_model_alias(name, CHAMPION, str(self._steals.number))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@pytest.mark.parametrize("when", [MOVE_TAG, CHAMPION])
def test_race_with_another_host_is_reported(tracking: Tracking, register: Register, when: str) -> None:
    one, two, three = register("one"), register("two"), register("three")
    crown(tracking, one)
    raced = Tracking(**{**vars(tracking), "client": OtherHost(tracking, three, when)})
    with pytest.raises(RegistryError, match=r"lost a race: champion was version \d and is now version 3"):
        promote(raced, verdict(one.reference), two)
    assert aliases(tracking, one.name) == {CHAMPION: 3, CANDIDATE: 3} and len(history(tracking, one.name)) == 1
    assert MOVE_TAG not in tracking.client.get_registered_model(one.name).tags


def test_race_on_this_host_has_one_winner(tracking: Tracking, register: Register) -> None:
    one, two, three = register("one"), register("two"), register("three")
    crown(tracking, one)
    outcomes: list[str] = []

    def attempt(version: Version) -> None:
        try:
            promote(tracking, verdict(one.reference), version)
            outcomes.append("won")
        except RegistryError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=attempt, args=(version,)) for version in (two, three)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("won") == 1 and sum("lost a race" in outcome for outcome in outcomes) == 1
    assert aliases(tracking, one.name)[PREVIOUS] == 1


def test_held_lock_is_named(tracking: Tracking, register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    one = register("one")
    real = storage.lock
    monkeypatch.setattr(storage, "lock", lambda path, timeout_seconds, what: real(path, 0.1, what))
    with real(tracking.lock_folder / f"{one.name}.lock"), pytest.raises(LockedError, match="another promotion"):
        promote(tracking, verdict(None), one)


def test_what_was_rolled_back_stays_so(tracking: Tracking, register: Register) -> None:
    one, two = register("one"), register("two")
    crown(tracking, one)
    crown(tracking, two)
    rollback(tracking, TARGET, "users complained")
    outcome = promote(tracking, verdict(one.reference), two)
    assert not outcome.promote and outcome.reasons[0].startswith("version 2 was rolled back (users complained)")
    undo_rollback(tracking, TARGET)
    assert aliases(tracking, one.name)[CHAMPION] == 2


def test_what_was_rolled_back_stays_so_when_it_is_registered_again(tracking: Tracking, register: Register) -> None:
    one, two = register("one"), register("two")
    crown(tracking, one)
    crown(tracking, two)
    rollback(tracking, TARGET, "users complained")
    shutil.rmtree(two.source.removeprefix("file://"))
    again = register("two")
    outcome = promote(tracking, verdict(one.reference), again)
    assert again.number == 3 and not outcome.promote and outcome.reasons[0].startswith("version 2 was rolled back")


@pytest.fixture
def three(tracking: Tracking, register: Register) -> list[Version]:
    """Three versions that became champion one after the other."""
    versions = [register(word) for word in ("one", "two", "three")]
    for version in versions:
        crown(tracking, version)
    return versions


def now(tracking: Tracking, name: str) -> tuple[int | None, int | None]:
    known = aliases(tracking, name)
    return known.get(CHAMPION), known.get(PREVIOUS)


def test_rollback_twice_goes_further_back(tracking: Tracking, three: list[Version]) -> None:
    name = three[0].name
    assert rollback(tracking, TARGET, "slow for users").number == 2
    assert now(tracking, name) == (2, 1)
    assert rollback(tracking, TARGET).number == 1
    assert now(tracking, name) == (1, None)
    with pytest.raises(RegistryError, match="version 1 is the champion and there is no earlier one"):
        rollback(tracking, TARGET)
    with pytest.raises(RegistryError, match="has no champion"):
        rollback(tracking, "b" * 64)
    last = history(tracking, name)[-2:]
    assert [(event["event"], event["from"], event["to"]) for event in last] == [("rollback", 3, 2), ("rollback", 2, 1)]
    assert last[0]["why"] == "slow for users" and last[0]["at"]


@pytest.mark.slow
def test_an_undo_takes_back_one_rollback_after_the_other(tracking: Tracking, three: list[Version]) -> None:
    name = three[0].name
    rollback(tracking, TARGET, "slow for users")
    rollback(tracking, TARGET, "slow still")
    assert undo_rollback(tracking, TARGET, "it was the network").number == 2 and now(tracking, name) == (2, 1)
    assert undo_rollback(tracking, TARGET).number == 3 and now(tracking, name) == (3, 2)
    with pytest.raises(RegistryError, match=f"no rollback to undo: champion {name}/3 is not there by one"):
        undo_rollback(tracking, TARGET)
    events = [(event["event"], event["from"], event["to"], event["why"]) for event in history(tracking, name)[-2:]]
    assert events == [("undo", 1, 2, "it was the network"), ("undo", 2, 3, "")]
    # The reasons stay; a rollback goes back along the same line, and may be undone as well.
    tags = tracking.client.get_model_version(name, "2").tags
    assert tags[UNDONE_TAG] == "slow still; undone: it was the network" and ROLLED_BACK_TAG not in tags
    assert rollback(tracking, TARGET).number == 2 and undo_rollback(tracking, TARGET).number == 3


@pytest.mark.slow
def test_what_was_promoted_since_stays(tracking: Tracking, three: list[Version], register: Register) -> None:
    rollback(tracking, TARGET)
    crown(tracking, register("four"))
    with pytest.raises(RegistryError, match=r"no rollback to undo: champion .*/4 is not there by one"):
        undo_rollback(tracking, TARGET)
    with pytest.raises(RegistryError, match="has no champion, so no rollback to undo"):
        undo_rollback(tracking, "b" * 64)
    rollback(tracking, TARGET)
    tracking.client.set_registered_model_alias(three[0].name, CHAMPION, "1")  # by hand
    with pytest.raises(RegistryError, match="no rollback to undo"):
        undo_rollback(tracking, TARGET)


def test_a_rollback_that_lost_a_race_bars_nothing(tracking: Tracking, three: list[Version]) -> None:
    raced = Tracking(**{**vars(tracking), "client": OtherHost(tracking, three[0], CHAMPION)})
    with pytest.raises(RegistryError, match="lost a race"):
        rollback(raced, TARGET, "slow")
    assert ROLLED_BACK_TAG not in (tracking.client.get_model_version(three[0].name, "3").tags or {})


@pytest.mark.slow
def test_line_continues_after_a_rollback(tracking: Tracking, three: list[Version], register: Register) -> None:
    rollback(tracking, TARGET)
    crown(tracking, register("four"))
    assert now(tracking, three[0].name) == (4, 2)
    rollback(tracking, TARGET)
    assert now(tracking, three[0].name) == (2, 1)


def test_deleted_versions_are_skipped(tracking: Tracking, three: list[Version]) -> None:
    tracking.client.delete_model_version(three[0].name, "1")
    rollback(tracking, TARGET)
    assert now(tracking, three[0].name) == (2, None)


def test_alias_moved_by_hand_is_followed(tracking: Tracking, three: list[Version]) -> None:
    tracking.client.set_registered_model_alias(three[0].name, CHAMPION, "1")
    tracking.client.set_registered_model_alias(three[0].name, PREVIOUS, "3")
    assert rollback(tracking, TARGET).number == 3


@pytest.mark.slow
@pytest.mark.parametrize("text", ["not JSON", "[1, 2]"])
def test_spoiled_history_does_not_stop_a_rollback(tracking: Tracking, three: list[Version], text: str) -> None:
    tracking.client.set_registered_model_tag(three[0].name, HISTORY_TAG, text)
    rollback(tracking, TARGET)
    assert now(tracking, three[0].name) == (2, None)


def test_aliases_moved_onto_one_version_by_hand_are_told_apart_by_the_history(
    tracking: Tracking, three: list[Version]
) -> None:
    set_alias(tracking, three[0].name, PREVIOUS, 3)
    assert rollback(tracking, TARGET).number == 2 and now(tracking, three[0].name) == (2, 1)


class Store:
    """One registered model, copied into memory: what happens to it is forgotten, or cut off before its n-th write."""

    def __init__(self, tracking: Tracking, name: str, last: int) -> None:
        model = tracking.client.get_registered_model(name)
        self.aliases, self.tags, self.writes_left = dict(model.aliases), dict(model.tags), -1
        self.versions = {str(one): tracking.client.get_model_version(name, str(one)) for one in range(1, last + 1)}
        self.get_run, self.get_experiment = tracking.client.get_run, tracking.client.get_experiment
        self.search_experiments = tracking.client.search_experiments

    def get_registered_model(self, name: str) -> Any:
        return SimpleNamespace(aliases=dict(self.aliases), tags=dict(self.tags))

    def get_model_version(self, name: str, number: str) -> Any:
        return deepcopy(self.versions[number])

    def search_model_versions(self, text: str) -> list[Any]:
        return [deepcopy(one) for one in self.versions.values() if one.tags[DRAFT_TAG] in text]

    def set_registered_model_alias(self, name: str, alias: str, number: str) -> None:
        self.write(self.aliases, alias, number)

    def delete_registered_model_alias(self, name: str, alias: str) -> None:
        self.write(self.aliases, alias)

    def set_registered_model_tag(self, name: str, tag: str, value: str) -> None:
        self.write(self.tags, tag, value)

    def delete_registered_model_tag(self, name: str, tag: str) -> None:
        self.write(self.tags, tag)

    def set_model_version_tag(self, name: str, number: str, tag: str, value: str) -> None:
        self.write(self.versions[number].tags, tag, value)

    def delete_model_version_tag(self, name: str, number: str, tag: str) -> None:
        self.write(self.versions[number].tags, tag)

    def log_text(self, run_id: str, text: str, path: str) -> None:
        self.write({}, path)

    def write(self, where: dict[str, str], key: str, value: str | None = None) -> None:
        self.writes_left -= 1
        if self.writes_left == 0:
            raise KeyboardInterrupt
        if value is None:
            where.pop(key, None)
        else:
            where[key] = value


def crown_four(tracking: Tracking, name: str) -> None:
    current = aliases(tracking, name)[CHAMPION]
    promote(tracking, verdict(f"{name}/{current}"), get_version(tracking, f"{name}/4"))


def back(tracking: Tracking, name: str) -> None:
    rollback(tracking, TARGET, "slow")


def undo(tracking: Tracking, name: str) -> None:
    undo_rollback(tracking, TARGET, "it was the network")


def test_a_move_that_is_killed_at_any_write_is_whole(
    tracking: Tracking, three: list[Version], register: Register
) -> None:
    """The next verb does what it does after the whole move, or before any of it, as the champion tells; the same verb
    again makes it whole."""
    name = register("four").name

    def run(store: Store, verb: Callable[[Tracking, str], None], writes: int = -1) -> tuple[Store, list[Any]]:
        """Do this with a copy of the store, killed before its n-th write; the copy, and what it holds then."""
        store = deepcopy(store)
        store.writes_left, said, copied = writes, "", Tracking(**{**vars(tracking), "client": store})
        try:
            verb(copied, name)
        except RegistryError as error:
            said = str(error)
        except KeyboardInterrupt:
            said = "killed"
        events = [tuple(event[key] for key in ("event", "from", "to", "why")) for event in history(copied, name)]
        bars = [
            (number, one.tags.get(ROLLED_BACK_TAG), one.tags.get(UNDONE_TAG)) for number, one in store.versions.items()
        ]
        return store, [said, store.aliases, events, bars]

    start = Store(tracking, name, 4)
    returned, _ = run(start, back)
    for before, verb, other in ((start, crown_four, back), (start, back, undo), (returned, undo, back)):
        after, whole = run(before, verb)
        assert MOVE_TAG not in after.tags and after.writes_left <= -6
        for write in range(1, -after.writes_left):
            cut, found = run(before, verb, write)
            moved = cut.aliases[CHAMPION] == after.aliases[CHAMPION]
            assert found[0] == "killed" and found[2] == (whole if moved else run(before, lambda *_: None)[1])[2]
            assert run(cut, verb)[1] == whole, (verb, write)
            assert run(cut, other)[1] == run(after if moved else before, other)[1], (verb, write)


def test_history_stays_within_the_tag(
    tracking: Tracking, three: list[Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(champion_alias, "_MAX_TAG", 1000)
    name = three[0].name
    for number in (1, 2) * 3:
        move_champion(tracking, name, aliases(tracking, name)[CHAMPION], number, "promote", "w" * 500)
    events = history(tracking, name)
    assert 3 < len(events) < 8 and events[-1]["to"] == 2 and len(events[-1]["why"]) == 100


MOVE: dict[str, object] = {"at": "", "event": "promote", "from": None, "to": 1, "why": "", "previous": None}
WRONG_EVENTS: list[dict[str, object]] = [{"from": 10**30}, {"to": "1"}, {"to": -1}, {"to": True}]
WRONG_MOVES: list[dict[str, object]] = [{"why": 5}, {"event": []}, {"at": {}}, {"previous": "x"}, {"previous": 10**30}]


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 4900, "[[[", "5", '{"to": 1}', "9" * 4900),
        *(json.dumps([MOVE | change]) for change in WRONG_EVENTS),
        *(json.dumps(MOVE | change) for change in WRONG_MOVES),
    ],
)
@pytest.mark.parametrize("tag", [MOVE_TAG, HISTORY_TAG])
def test_tags_of_strangers_are_no_moves(tag: str, text: str) -> None:
    model: Any = SimpleNamespace(tags={tag: text}, aliases={CHAMPION: "1"})
    assert champion_alias._events(model, champion_alias._made_move(model)) == []


def test_texts_of_moves_are_such_as_files_and_databases_hold() -> None:
    """JSON can name half a character, and a number that it has not."""
    odd = MOVE | {"why": "a\ud800", "at": float("nan"), "more": "\ud800"}
    model: Any = SimpleNamespace(tags={HISTORY_TAG: json.dumps([odd])}, aliases={CHAMPION: "1"})
    assert champion_alias._events(model, None) == [{"event": "promote", "why": "a\\ud800", "from": None, "to": 1}]
    model.tags = {HISTORY_TAG: "[{}]"}
    assert champion_alias._events(model, None) == [{"from": None, "to": None}]
    model.tags = {MOVE_TAG: json.dumps(odd | {"at": "\ud800"})}
    made = champion_alias._made_move(model)
    assert made == MOVE | {"why": "a\\ud800", "at": "\\ud800"}


@pytest.mark.parametrize("text", ["inf", "nan", "1e999", "x", "", None])
def test_a_figure_that_is_none_is_not_known(text: str | None) -> None:
    assert champion_alias.tag_number(text) is None


def test_a_record_of_a_decision_may_hold_anything() -> None:
    for data in (b"[" * 100_000, b"\xff", b"9" * 5000, b"null", b"[]"):
        with pytest.raises(RegistryError):
            champion_alias._parse_decision("record", data)


def test_a_history_that_is_far_too_long_is_cut_at_once(
    tracking: Tracking, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = register("one")
    events = [{"from": 1, "to": 2}] * 2000
    monkeypatch.setattr(champion_alias, "_events", lambda model, move: list(events))
    printed: list[int] = []

    def too_long(events: list[Any], **_: object) -> str:
        printed.append(len(events))
        return "x" * 6000

    monkeypatch.setattr(champion_alias.json, "dumps", too_long)
    monkeypatch.setattr(champion_alias, "_set_tag", lambda *_: None)
    move = {"at": "", "event": "promote", "from": None, "to": 1, "why": "", "previous": None}
    champion_alias._finish(tracking, one.name, move)
    assert 100 < len(printed) < 300


def test_a_run_outside_the_store_is_neither_listed_nor_written(
    tracking: Tracking, register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a version that a stranger registered."""
    one = register("one")
    (place := tmp_path / "place").mkdir()
    database = sqlite_file(tracking.uri)
    assert database is not None
    with closing(sqlite3.connect(database)) as store, store:
        store.execute("update runs set artifact_uri = ? where run_uuid = ?", (place.as_uri(), one.run_id))
    monkeypatch.setattr(LocalArtifactRepository, "list_artifacts", lambda *_: pytest.fail("was listed"))
    for act in (
        lambda: decisions(tracking, one),
        lambda: champion_alias.record_decision(tracking, verdict(None), one),
        lambda: kept_counts(tracking, one),
        lambda: keep_counts(tracking, one, to_table([])),
    ):
        with pytest.raises(RegistryError, match="outside the store's own places"):
            act()
    assert list(place.iterdir()) == []
