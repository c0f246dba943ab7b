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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import pandas as pd
from pydantic import ValidationError

from ..data.chat_template import render
from ..data.conversation import Message
from ..errors import InputError, StaleInputError
from ..eval.settings import ScoreSettings
from ..fingerprint import short
from ..progress import say
from ..specdec.accept_rules import choose_rule
from ..specdec.decoder import Generation, Request, generate
from ..specdec.formats import read_meta
from ..specdec.proposers.tree_settings import MOST_LEVELS
from ..specdec.sampling_settings import SamplingSettings
from ..specdec.serving_plan import ServingPlan
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
        if self._draft.found_plan.assumed:
            say(self._draft.found_plan.assumed)

    # No type hint on `model_input`: MLflow would take it for a schema. It comes as the signature says.
    def predict(self, context: Any, model_input, params: dict[str, Any] | None = None) -> list[dict[str, Any]]:  # type: ignore[no-untyped-def]
        """Answer each row: a prompt (text), or a conversation (list of messages, or `{"messages": […]}`).

        Gives, for each, text, tokens, rounds, tau, and how many drafted tokens were accepted of how many.
        """
        # 1) Check the parameters that the signature lets through.
        asked = params or {}
        _require_known(asked)
        sampling = SamplingSettings(temperature=asked.get("temperature", 0.0))
        longest, plan = int(asked.get("max_new_tokens", 128)), self._plan(asked.get("draft_tokens"))
        if longest < 1:
            raise InputError(f"max_new_tokens {longest}: must be at least 1")
        # 2) One request a row, each with a seed of its own, so that equal prompts may get different samples.
        requests = []
        for index, row in enumerate(_rows(model_input)):
            ids = render(self.target.tokenizer, _messages(row, index))
            self.target.check_ids(ids)
            self._draft.check_context(len(ids) + longest)
            requests.append(Request(ids, sampling, int(asked.get("seed", 0)) + index, longest, self.target.stop_ids))
        # 3) Decode all of them, and answer in the order of the rows.
        proposer = self._draft.proposer(plan.tree)
        rule = choose_rule(sampling, proposer, plan.prefer(ScoreSettings().sampled_rules))
        done = dict(generate(self.target, proposer, requests, rule=rule, draft_tokens=plan.draft_tokens))
        return [self._answer(done[index]) for index in range(len(requests))]

    def _plan(self, draft_tokens: int | None) -> ServingPlan:
        """Plan of the version; chains of `draft_tokens` where that is given, which is said if it is another plan."""
        own = self._draft.plan
        if draft_tokens is None:
            return own
        if not 1 <= draft_tokens <= MOST_LEVELS:
            raise InputError(f"draft_tokens {draft_tokens}: must be 1 to {MOST_LEVELS}")
        if own.tree is not None or own.draft_tokens != draft_tokens:
            say(f"draft_tokens {draft_tokens}, as asked, not the {own} of the version's plan")
        return ServingPlan.chain(int(draft_tokens), own.rule)

    def _answer(self, generation: Generation) -> dict[str, Any]:
        # Stop tokens count as tokens and are not shown.
        rounds, tokens = len(generation.rounds), generation.tokens
        shown = [token for token in tokens if token not in self.target.stop_ids]
        return {
            "text": self.target.tokenizer.decode(shown, skip_special_tokens=True),
            "finish": generation.finish,
            "tokens": len(tokens),
            "rounds": rounds,
            "tau": (len(tokens) - 1) / rounds if rounds else None,  # the first token comes with the prompt's pass
            "drafted": sum(one.drafted for one in generation.rounds),
            "accepted": sum(one.accepted for one in generation.rounds),
        }


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
        problem = error.errors()[0]
        raise InputError(f"target.{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


def _rows(given: Any) -> list[Any]:
    """Rows of the input: MLflow hands over a table of one column, or the caller's own list or single value."""
    if isinstance(given, pd.DataFrame):
        if given.shape[1] != 1 or given.columns[0] not in (0, "prompt", "messages"):
            raise InputError(f"columns {list(given.columns)}: must be one, prompt or messages")
        return list(given.iloc[:, 0])
    return [given] if isinstance(given, str | Mapping) else list(given)


def _messages(row: Any, index: int) -> list[Message]:
    # A plain text is one user message.
    row = row.get("messages", row.get("prompt")) if isinstance(row, Mapping) else row
    if isinstance(row, str) and row.strip():
        return [Message(role="user", content=row)]
    # Anything else must be a list of messages with a role and content.
    listed = isinstance(row, Sequence) or hasattr(row, "tolist")  # a table keeps lists as arrays
    if not listed or isinstance(row, str) or not len(row):
        raise InputError(f"row {index}: must be a prompt, or a list of messages with role and content")
    try:
        return [Message.model_validate(message) for message in row]
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "message"
        raise InputError(f"row {index}: {where}: {problem['msg']}") from None
