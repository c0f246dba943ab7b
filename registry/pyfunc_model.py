"""A registered draft as an MLflow model: `mlflow.pyfunc` loads it, and it answers through the decoder.

The target is not in the registry. It is taken from, in this order: `model_config={"target": …}` at loading, the
environment's DRAFTFORGE_TARGET_MODEL, and what the recipe called it when the draft was registered. Whichever it is,
its fingerprint must be the one that the draft was made for.

Only the code file beside a registered draft (`versions.wrap`) imports this: it loads MLflow's pyfunc.
"""

import ast
import logging
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import pandas as pd
from pydantic import ValidationError

from ..data.chat_template import render
from ..data.records import messages_of
from ..errors import InputError, StaleInputError, refused_value
from ..eval.settings import ScoreSettings
from ..fingerprint import short
from ..specdec.answers import answer_run, answers
from ..specdec.formats import read_meta
from ..specdec.sampling_settings import SamplingSettings
from ..specdec.stored_draft import StoredDraft
from ..specdec.target_settings import TargetSettings
from ..specdec.targets import Target
from .versions import DRAFT, PARAMETERS, TARGET_VARIABLE

_DROPPED = re.compile(r"Unrecognized params (\[.*?\]) are ignored for inference\. Supported params are: (\{.*?\})\.")


class DraftModel(mlflow.pyfunc.PythonModel):  # type: ignore[misc, name-defined]
    """A target and its draft as an MLflow `PythonModel`."""

    def load_context(self, context: Any) -> None:
        """Load target and draft. Raises StaleInputError for a target that the draft was not made for."""
        # Parameters that the signature lacks would be dropped with a warning only: the filter makes an error of it.
        warnings = logging.getLogger("mlflow.models.utils")
        warnings.setLevel(logging.WARNING)  # filters see them, whether or not they are shown
        warnings.addFilter(_refuse_dropped)
        # The target, and whether it is the one that the draft was trained on.
        folder = Path(context.artifacts[DRAFT])
        settings: Mapping[str, Any] = context.model_config or {}
        self.target = Target.load(_target_settings(settings))
        made_for = read_meta(folder).target_fingerprint
        if made_for != self.target.fingerprint:
            raise StaleInputError(
                f"target {self.target.settings.model}: is {short(self.target.fingerprint)}, the draft was made for "
                f"{short(made_for)}; name that one, {TARGET_VARIABLE} or model_config['target']"
            )
        # The draft, ready to propose for this target by the plan among its files.
        self._draft = StoredDraft.load(folder, self.target)

    # No type hint on `model_input`: MLflow would take it for a schema. It comes as the signature says.
    def predict(self, context: Any, model_input, params: dict[str, Any] | None = None) -> list[dict[str, Any]]:  # type: ignore[no-untyped-def]
        """Answer each row: a prompt (text), or a conversation (list of messages, or `{"messages": […]}`).

        Gives, for each, text, tokens, rounds, tau, and how many drafted tokens were accepted of how many.
        """
        # 1) Check the parameters that the signature lets through.
        asked = params or {}
        _require_known(asked)
        sampling = SamplingSettings(temperature=asked.get("temperature", 0.0))
        longest, plan = int(asked.get("max_new_tokens", 128)), self._draft.plan_for(asked.get("draft_tokens"))
        # 2) The prompts, which must fit the draft's context.
        rows = [messages_of(_content(row), f"row {index}") for index, row in enumerate(_rows(model_input))]
        prompts = [render(self.target.tokenizer, messages) for messages in rows]
        self._draft.check_context(max(map(len, prompts), default=0) + longest)
        # 3) Decode all of them, and answer in the order of the rows.
        run = answer_run(
            self.target,
            self._draft.proposer(plan.tree),
            plan,
            prompts,
            sampling,
            ScoreSettings().sampled_rules,
            max_new_tokens=longest,
            seed=int(asked.get("seed", 0)),
        )
        return [answer.record() for answer in answers(self.target, run)]


def _require_known(asked: Iterable[str]) -> None:
    unknown = sorted(set(asked) - set(PARAMETERS))
    if unknown:
        raise InputError(f"params: {', '.join(unknown)}: not known; must be among {', '.join(PARAMETERS)}")


def _refuse_dropped(record: logging.LogRecord) -> bool:
    """A filter of MLflow's log. MLflow drops parameters that a signature lacks before a model sees them, and warns: an
    error where it is our signature. Raises InputError."""
    found = _DROPPED.match(record.getMessage())
    if found is not None and ast.literal_eval(found[2]) == set(PARAMETERS):
        _require_known(map(str, ast.literal_eval(found[1])))
    return record.levelno >= logging.getLogger("mlflow").getEffectiveLevel()


def _target_settings(config: Mapping[str, Any]) -> TargetSettings:
    # The caller's target goes before the environment's, and that before the recorded one.
    recorded, named = dict(config.get("recorded_target") or {}), config.get("target")
    named = named or os.environ.get(TARGET_VARIABLE)
    if named:  # another place, and so another revision, file or adapter, unless they are given with it
        recorded = dict(named) if isinstance(named, Mapping) else {"model": str(named)}
    if not recorded:
        raise InputError(f"{TARGET_VARIABLE}: must name the target; none was recorded with this draft")
    try:
        return TargetSettings.model_validate(recorded)
    except ValidationError as error:
        raise refused_value(error, "target.") from None


def _rows(given: Any) -> list[Any]:
    """Rows of the input: MLflow hands over a table of one column, or the caller's own list or single value."""
    if isinstance(given, pd.DataFrame):
        if given.shape[1] != 1 or given.columns[0] not in (0, "prompt", "messages"):
            raise InputError(f"columns {list(given.columns)}: must be one, prompt or messages")
        return list(given.iloc[:, 0])
    return [given] if isinstance(given, str | Mapping) else list(given)


def _content(row: Any) -> Any:
    """Prompt of a row: the row itself, or what a mapping holds of it."""
    return row.get("messages", row.get("prompt")) if isinstance(row, Mapping) else row
