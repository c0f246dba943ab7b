"""Results of `bench_served.py`: kept as they come, served beside promised, checkpoints in order, table and figure."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from draftforge import storage
from draftforge.errors import InputError
from draftforge.eval.report import charts, svg
from draftforge.progress import say
from draftforge.scripts.vllm_servers import PLAIN, Setup

Json = dict[str, Any]


class Bench:
    """The results so far, written after each part."""

    def __init__(self, out: Path, settings: Json) -> None:
        self.out, self.file = out, out / "results.json"
        self.found: Json = storage.read_object(self.file) if self.file.is_file() else {}
        before = self.found.setdefault("settings", settings)
        wrong = next((name for name in settings if before.get(name) != settings[name]), None)
        if wrong is not None:
            raise InputError(f"{self.file}: was measured with another {wrong}; name another folder")
        for part in ("drafts", "servers", "served", "again", "ours", "failed"):
            self.found.setdefault(part, {})

    def keep(self, part: str, key: str, value: Any) -> None:
        """Write a figure down at once: the machine may be gone before the next."""
        self.found[part][key] = value
        storage.write_json(self.file, self.found)

    def failed(self, key: str, why: str) -> None:
        """Note why a server, or our own part, could not be measured."""
        say(f"{key} failed: {why}")
        self.keep("failed", key, why)

    def answers(self, key: str) -> list[tuple[int, list[int]]]:
        """What was answered in a measurement: number of the prompt, and ids."""
        return [(int(number), ids) for number, ids in storage.read_object(self._place(key))["answers"]]

    def keep_answers(self, key: str, answers: Sequence[tuple[int, list[int]]]) -> None:
        storage.write_bytes(self._place(key), json.dumps({"answers": answers}).encode())

    def _place(self, key: str) -> Path:
        return self.out / "answers" / f"{key}.json"


def measured_key(setup: Setup, concurrency: int) -> str:
    """Key of a measurement."""
    return f"{setup.key}-c{concurrency}"


def compare(bench: Bench, setups: Sequence[Setup], sizes: Sequence[int]) -> None:
    """Rows and rankings of the results, kept with them."""
    served, rows = bench.found["served"], list[Json]()
    for setup in setups:
        server = bench.found["servers"].get(setup.key, {})
        for size in sizes:
            key, draft = measured_key(setup, size), setup.draft
            about: Json = {"engine": server.get("engine", "vLLM"), "draft": draft.name if draft else PLAIN}
            about |= {"step": draft.step if draft and draft.folder else None}
            about |= {"draft_tokens": setup.draft_tokens, "concurrency": size}
            if key not in served:
                rows.append(about | {"failed": bench.found["failed"].get(setup.key, "was not measured")})
                continue
            mine = served[key]
            about |= {"tokens_per_second": mine.get("tokens_per_second")}
            if draft is None:
                about["tokens_per_second_again"] = bench.found["again"].get(key, {}).get("tokens_per_second")
                rows.append(about)
                continue
            ours = bench.found["ours"].get(draft.key, {}).get("measurements", {}).get(key, {})
            plain = served.get(measured_key(Setup(None, 0), size))
            speedup = about["tokens_per_second"] / plain["tokens_per_second"] if plain else None
            about |= {"tau_served": mine["tau"], "tau_ours": ours.get("tau"), "accepted_served": mine["accepted_at"]}
            about |= {"tau_low": ours.get("tau_low"), "tau_high": ours.get("tau_high")}
            about |= {"accepted_ours": ours.get("accepted_at"), "speedup_served": speedup}
            about |= {"speedup_promised": ours.get("promised_by_engine"), "equal_answers": ours.get("equal_answers")}
            about["speedup_by_own_rounds"] = ours.get("promised_speedup")
            about["tau_percent"] = percent(about["tau_ours"], about["tau_served"])
            about["speedup_percent"] = percent(about["speedup_promised"], about["speedup_served"])
            rows.append(about)
    bench.found["rows"], bench.found["rankings"] = rows, rankings(rows)
    storage.write_json(bench.file, bench.found)


def percent(ours: float | None, served: float | None) -> float | None:
    """How far ours lies above the served one, in percent of it."""
    return None if ours is None or not served else 100 * (ours / served - 1)


def rankings(rows: Sequence[Json]) -> list[Json]:
    """Order of the checkpoints of each draft, best first, by what is served and by ours, at each K and concurrency."""
    found, groups = list[Json](), dict[tuple[Any, ...], list[Json]]()
    for row in rows:
        if row["step"] is not None and "failed" not in row:
            groups.setdefault((row["draft"], row["draft_tokens"], row["concurrency"]), []).append(row)
    for (draft, K, size), group in groups.items():
        if len(group) < 2:
            continue
        entry: Json = {"draft": draft, "draft_tokens": K, "concurrency": size}
        for figure in ("tau", "speedup"):
            ours = "ours" if figure == "tau" else "promised"
            pair = [f"{figure}_served", f"{figure}_{ours}"]
            order = [
                [row["step"] for row in sorted(group, key=lambda row: -row[name])]
                if all(row[name] is not None for row in group)
                else None
                for name in pair
            ]
            entry |= dict(zip(pair, order, strict=True))
            entry[f"{figure}_equal"] = None if None in order else order[0] == order[1]
        entry["tau_ties"] = ties(group)
        found.append(entry)
    return found


def ties(group: Sequence[Json]) -> list[list[int]]:
    """Neighbouring checkpoints by our tau whose intervals overlap."""
    known = [row for row in group if row.get("tau_low") is not None and row["tau_ours"] is not None]
    ranked = sorted(known, key=lambda row: -row["tau_ours"])
    return [[one["step"], two["step"]] for one, two in pairwise(ranked) if one["tau_low"] <= two["tau_high"]]


def show(found: Json, console: Console) -> None:
    """Print the table, the rankings, notes and what failed."""
    table = Table(title=f"{found['settings']['new_tokens']} tokens an answer, T = 0; {found['hardware']}")
    columns = "engine|draft|step|K|conc.|tau served|ours|%|accepted served|ours|tokens/s|speed-up served"
    for title in f"{columns}|promised|%|by own rounds|equal".split("|"):
        table.add_column(title)
    for row in found["rows"]:
        about = [row["engine"], row["draft"], number(row["step"], ".0f"), row["draft_tokens"] or "-"]
        cells = [escape(str(one)) for one in (*about, row["concurrency"])]
        if "failed" in row:
            table.add_row(*cells, "", escape(row["failed"]))
            continue
        cells += [number(row.get("tau_served")), number(row.get("tau_ours"))]
        cells += [number(row.get("tau_percent"), "+.1f")]
        cells += [" ".join(map(number, row.get(f"accepted_{side}") or [])) for side in ("served", "ours")]
        cells += [number(row.get("tokens_per_second"), ",.0f"), number(row.get("speedup_served"))]
        cells += [number(row.get("speedup_promised")), number(row.get("speedup_percent"), "+.1f")]
        cells += [number(row.get("speedup_by_own_rounds"))]
        table.add_row(*cells, number(row.get("equal_answers"), ".0%"))
    console.print(table)
    for row in found["rows"]:
        if row.get("tokens_per_second_again") is not None:
            once, again = row["tokens_per_second"], row["tokens_per_second_again"]
            speeds = f"{number(once, ',.0f')} tokens/s, and {number(again, ',.0f')} when all others had been measured"
            console.print(
                f"plain, concurrency {row['concurrency']}: {speeds} ({number(percent(again, once), '+.1f')} %)"
            )
    for one in found["rankings"]:
        parts = [
            f"{name.replace('_', ' ')} {' > '.join(map(str, order)) if order else '-'}"
            for name, order in one.items()
            if name.endswith(("_served", "_ours", "_promised"))
        ]
        alike = {True: "equal", False: "not equal", None: "not known"}
        tied = ", ".join(" = ".join(map(str, pair)) for pair in one["tau_ties"])
        ends = f"tau {alike[one['tau_equal']]}, speed-up {alike[one['speedup_equal']]}{tied and f'; ties: {tied}'}"
        where = f"steps of {one['draft']}, K={one['draft_tokens']}, concurrency {one['concurrency']}"
        console.print(f"{where}: {'; '.join(parts)} ({ends})", markup=False)
    for note in Counter(note for one in found["servers"].values() for note in one["notes"]):
        console.print(f"note: {note}", markup=False)
    for of, why in found["failed"].items():
        console.print(f"{of} failed: {why}", markup=False)


def draw(found: Json) -> str | None:
    """SVG figure of speed-ups over requests at once: dots served, lines promised by the engine's times, a colour a
    checkpoint and K. None where nothing was promised."""
    rows = [row for row in found["rows"] if row.get("speedup_promised") is not None]
    sizes = sorted({row["concurrency"] for row in rows})
    if not rows:
        return None
    # 1) One frame, with plain decoding's speed.
    sides = ("speedup_served", "speedup_promised")
    y_axis = svg.numeric_axis([row[side] for row in rows for side in sides], "speed-up over plain decoding", "x", [1.0])
    frame = svg.Frame(svg.category_axis([*map(str, sizes)], "requests at once"), y_axis, charts.HEIGHT, svg.WIDTH)
    elements = [charts.break_even(frame)]
    # 2) A line and its dots for each draft and K, named where speculation gains least: at the right, from the top.
    lines = dict.fromkeys((row["draft"], row["step"], row["draft_tokens"]) for row in rows)
    for place, (draft, step, K) in enumerate(lines):
        mine = [row for row in rows if (row["draft"], row["step"], row["draft_tokens"]) == (draft, step, K)]
        served, promised = (
            [(frame.x(sizes.index(row["concurrency"]) + 1.0), frame.y(row[side])) for row in mine] for side in sides
        )
        name, y = f"{draft}{f' step {step}' if step else ''}, K = {K}", svg.TOP + 12 + 18 * place
        marks = [svg.polyline(promised, "curve"), *(svg.circle(x, y, 4.5, "dot") for x, y in served)]
        marks += [svg.line(frame.right - 150, y, frame.right - 126, y, "whisker")]
        marks += [svg.circle(frame.right - 138, y, 4.5, "dot"), svg.text(frame.right - 118, y + 4, name)]
        elements.append(svg.group(marks, name, charts.colour(place)))
    # 3) Dots and lines, in words, and the colours of a page.
    described = "Dots: served; lines: promised by the engine's own times."
    elements.append(svg.text(frame.left + 10, frame.bottom - 10, described, "tick"))
    drawn = str(svg.picture("promised-and-served", described, frame, elements))
    style = Path(charts.__file__).with_name("chart.css").read_text(encoding="utf-8")
    return drawn.replace("><title", f"><style>{style}</style><title", 1)


def number(value: float | None, form: str = ".2f") -> str:
    """A figure, or a dash where it is not known."""
    return "-" if value is None else format(value, form)
