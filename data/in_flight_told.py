"""What a mix's manifest says of the requests that its logs had in flight."""

from typing import Any

from .in_flight import Level, Traffic, in_flight_report
from .redact import Redactor
from .settings import MixSettings

_ENGINES = {"vllm", "sglang"}  # kinds of sources that an engine writes itself


def in_flight_told(traffic: Traffic, settings: MixSettings) -> dict[str, Any] | None:
    """Requests that ran at once, and the load that they propose; None: the log does not tell when any ended."""
    found = in_flight_report(traffic)
    if found.pooled is None:
        return None
    redactor = Redactor(settings.redact)  # replicas go by addresses

    def told(level: Level) -> dict[str, Any]:
        return {
            "p50": level.p50,
            "p95": level.p95,
            "most": level.most,
            "mean": level.mean,
            "busy_seconds": level.busy_seconds,
        }

    replicas = {
        name if redactor.text(name) == name else f"{redactor.text(name)} {number}": told(level)
        for number, (name, level) in enumerate(found.replicas.items(), start=1)
    }
    counts = {name: getattr(found, name) for name in ("requests", "untimed", "zero_length", "skewed")}
    return {**counts, "replicas": replicas, "all": told(found.pooled), "load": found.yaml(engine_of(settings))}


def engine_of(settings: MixSettings) -> str | None:
    """The engine whose own logs the sources are; None: no engine's, or several ones'."""
    found = {source.kind for source in settings.sources} & _ENGINES
    return found.pop() if len(found) == 1 else None
