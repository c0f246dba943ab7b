"""Schedule of objectives: the recipe's `objective`, one weighted mix of objectives or several mixes in turn."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

CHAINED = "expected_length"
"""Objective that no single position has: minus the expected tokens a round (see expected_length.py)."""
FULL = frozenset({"reverse_kl", "jsd", "lk", "lk_hybrid", CHAINED})
"""Objectives that need the target's whole distribution."""
ObjectiveName = Literal["kl", "ce", "tv", "reverse_kl", "jsd", "lk", "lk_hybrid", "expected_length"]


class Section(BaseModel):
    """A section of the recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Weighted(Section):
    """Weight and temperature of one objective of a mix."""

    weight: float = 1.0
    """Weight in the sum."""
    temperature: float = Field(default=1.0, gt=0)
    """Both distributions are those of logits divided by it; gradients shrink with it, and the weight makes up."""


Objective = Mapping[str, float | Weighted]
"""Objectives that are summed, by name: a weight, or a weight and a temperature."""


def _kind(value: Any) -> str:
    return "several" if isinstance(value, list | dict | Weighted) else "number"


def _phased(value: Any) -> str:
    return "phases" if isinstance(value, list) else "mix"


Weight = Annotated[Annotated[float, Tag("number")] | Annotated[Weighted, Tag("several")], Discriminator(_kind)]
Mix = dict[ObjectiveName, Weight]
Positive = Annotated[float, Field(gt=0)]
StepWeights = Annotated[
    Annotated[Positive, Tag("number")] | Annotated[list[Positive], Tag("several")], Discriminator(_kind)
]
KL: Mix = {"kl": 1.0}
A_TENTH_KL: Mix = {"kl": 0.1}


class Phase(Section):
    """A stretch of the training with one objective."""

    until: int | None = Field(default=None, ge=1)
    """The last step of it; only the last phase has none."""
    objective: Mix
    """Objective that is minimised in this phase."""

    @property
    def mix(self) -> Objective:
        """The phase's objective with plain strings as names."""
        return {str(name): value for name, value in self.objective.items()}


Schedule = Annotated[Annotated[Mix, Tag("mix")] | Annotated[list[Phase], Tag("phases")], Discriminator(_phased)]


def phases_of(schedule: "Mapping[Any, Any] | list[Phase]") -> list[Phase]:
    """Phases of a schedule; a mix alone is one phase."""
    return schedule if isinstance(schedule, list) else [Phase.model_construct(until=None, objective=dict(schedule))]


def phase_at(phases: list[Phase], step: int) -> int:
    """Index, from 0, of the phase to which the step after `step` done ones belongs."""
    return next((at for at, phase in enumerate(phases) if phase.until is None or step < phase.until), len(phases) - 1)


def check(phases: list[Phase], steps: int) -> None:
    """Raise ValueError, with field, value and rule, for phases that cannot be trained."""
    if not phases:
        raise ValueError("objective []: needs at least one phase")

    # Every phase minimises something.
    for phase in phases:
        if not phase.objective or any(weight <= 0 for weight, _ in map(parts_of, phase.objective.values())):
            raise ValueError(f"objective {plain(phase.mix)}: needs at least one entry, and weights above 0")

    # Phases follow each other, and the last one lasts until the end.
    ends = [phase.until for phase in phases]
    if ends[-1] is not None or None in ends[:-1]:
        raise ValueError(f"objective until {ends}: all phases but the last must say until which step they last")
    numbers = [end for end in ends if end is not None]
    if numbers != sorted(set(numbers)) or (numbers and numbers[-1] >= steps):
        raise ValueError(f"objective until {numbers}: must be ascending and below steps {steps}")


def parts_of(value: float | Weighted) -> tuple[float, float]:
    """Weight and temperature of one entry of a mix; a plain number has temperature 1."""
    return (value.weight, value.temperature) if isinstance(value, Weighted) else (value, 1.0)


class LossPlan(NamedTuple):
    """An objective, sorted by the temperatures at which the two distributions are compared."""

    temperatures: tuple[float, ...]
    """The first is 1: acceptance is reported there."""
    terms: tuple[Mapping[str, float], ...]
    """Weights of the objectives at each temperature; none at the first where all have another."""
    lk_eta: float
    """Rate of lk_hybrid."""

    @classmethod
    def from_objective(cls, objective: Objective, lk_eta: float) -> "LossPlan":
        """Group the terms of the objective by their temperature."""
        # Temperature 1 comes first, even without terms.
        found: dict[float, dict[str, float]] = {1.0: {}}
        for name, value in objective.items():
            weight, temperature = parts_of(value)
            found.setdefault(temperature, {})[name] = weight
        return cls(tuple(found), tuple(found.values()), lk_eta)

    def has(self, *names: str) -> bool:
        """Whether one of these objectives is part of the plan, at any temperature."""
        return any(name in terms for terms in self.terms for name in names)


def plain(objective: Objective) -> dict[str, Any]:
    """Objective as JSON values; a temperature of 1 is left out."""
    return {
        name: weight if temperature == 1.0 else {"weight": weight, "temperature": temperature}
        for name, (weight, temperature) in ((name, parts_of(value)) for name, value in objective.items())
    }


def identity(phases: list[Phase]) -> Any:
    """Identity of a schedule as JSON values: equal ones train the same draft."""
    if len(phases) == 1:
        return plain(phases[0].mix)
    return [{"until": phase.until, "objective": plain(phase.mix)} for phase in phases]


def describe(objective: Objective) -> str:
    """Objective as text for the log, e.g. "0.1 ce + 0.9 tv at temperature 2"."""
    parts = []
    for name, value in objective.items():
        weight, temperature = parts_of(value)
        # A weight or temperature of 1 goes without saying.
        scale = "" if weight == 1.0 else f"{weight:g} "
        parts.append(f"{scale}{name}" + ("" if temperature == 1.0 else f" at temperature {temperature:g}"))
    return " + ".join(parts)
