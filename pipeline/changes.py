"""Where a changed target is noticed: the newest revision of a hub id, before any work starts.

A folder is noticed by its content (its fingerprint), and `models:/NAME@alias` of MLflow by the version that the alias
names, which `Workspace.target_settings` resolves anew in every process. A hub id must be asked for.
"""

import os
import re
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

from ..errors import HubError, MissingFileError, one_line
from ..progress import say
from ..recipe import Recipe
from ..registry.resolve import is_models_uri

_ASK_SECONDS = 10.0
_COMMIT = re.compile(r"[0-9a-f]{40}")


def pinned(recipe: Recipe) -> Recipe:
    """The recipe with a hub target pinned to the commit that its revision names now; any other recipe as it is.

    Raises HubError where the hub cannot be asked: whether the target changed is then unknown, and nothing is done.
    """
    target = recipe.target
    if not is_hub_id(target.model) or (target.revision and _COMMIT.fullmatch(target.revision)):
        return recipe
    commit = newest(target.model, target.revision)
    say(f"target.model {target.model}: {target.revision or 'its default branch'} is at {commit[:12]}")
    return recipe.model_copy(update={"target": target.model_copy(update={"revision": commit})})


def is_hub_id(model: str) -> bool:
    """Whether this names a repository on the hub: owner/name, and nothing here or in MLflow."""
    here = model.startswith(("/", ".", "~")) or Path(model).exists() or Path(model).suffix == ".gguf"
    return not here and not is_models_uri(model) and model.count("/") == 1


def newest(model: str, revision: str | None) -> str:
    """The commit that a branch or tag of a hub repository names now. HubError, MissingFileError."""
    cure = "pin target.revision to a commit to work without it"
    where = f"target.model {model}"
    try:
        commit = HfApi().model_info(model, revision=revision, timeout=_ASK_SECONDS).sha
    except RevisionNotFoundError:
        raise MissingFileError(f"target.revision: {revision}: {model} has no such branch, tag or commit") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise MissingFileError(
            f"{where}: no such folder, and no such repository on the hub (or it is private)"
        ) from None
    except Exception as error:  # its transport has changed, and each has errors of its own
        offline = "it is switched off by HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else one_line(error)
        raise HubError(f"{where}: the hub cannot be asked for its newest revision ({offline}); {cure}") from error
    if commit is None:
        raise HubError(f"{where}: the hub names no commit; {cure}")
    return str(commit)
