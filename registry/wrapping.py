"""The two files that make a registered draft an MLflow model: MLmodel, and a line of code that imports draftforge.

They lie beside the draft's own files, under the same source, and belong to the version and not to the draft: what a
draft is (its digest), and what `fetch` copies, is without them. No pickle: the model is MLflow's "model from code".
"""

from pathlib import Path
from typing import Any

from mlflow.models import Model, ModelSignature
from mlflow.pyfunc import add_to_model
from mlflow.types import DataType, ParamSchema, ParamSpec, Schema
from mlflow.types.schema import AnyType, ColSpec

from ..errors import FormatError
from ..fingerprint import of_file
from ..specdec.settings import TargetSettings
from .lineage import Lineage

DRAFT = "draft"
TARGET_VARIABLE = "DRAFTFORGE_TARGET_MODEL"
MODEL_FILE, CODE_FILE = "MLmodel", "draftforge_model.py"
PARAMETERS = ("max_new_tokens", "temperature", "draft_tokens", "seed")
"""How an answer may be asked for: all that the signature names."""
_CODE = """\
import warnings

from mlflow.models import set_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # MLflow asks for type hints; the signature says what the model reads
    from draftforge.registry.answering import DraftModel

set_model(DraftModel())
"""


def wrap(folder: Path, lineage: Lineage, target: TargetSettings | None) -> dict[str, str]:
    """Write both files into a folder of their own; name -> SHA-256. FormatError where the draft has such a file.

    `target`: where the draft's target lies, for whoever loads the model without naming it.
    """
    for taken in (MODEL_FILE, CODE_FILE):
        if taken in lineage.files:
            raise FormatError(f"{taken}: the name of a file that the registry puts beside a draft's own")
    recorded = None if target is None else target.model_dump(mode="json", exclude_defaults=True)
    config = {"recorded_target": recorded, "target": None}  # only keys that are here can be set at loading
    # The same draft gives the same file: no time, and an identity made of its content.
    model = Model(utc_time_created="1970-01-01 00:00:00", model_uuid=lineage.content[:32], signature=signature(lineage))
    add_to_model(  # type: ignore[no-untyped-call]
        model,
        loader_module="mlflow.pyfunc.model",
        model_config=config,
        model_code_path=CODE_FILE,
        artifacts={DRAFT: {"path": ".", "uri": "."}},
    )
    model.save(str(folder / MODEL_FILE))
    (folder / CODE_FILE).write_text(_CODE)
    return {name: of_file(folder / name) for name in (MODEL_FILE, CODE_FILE)}


def signature(lineage: Lineage) -> ModelSignature:
    """One column of prompts or conversations; how to answer, K being what the draft was chosen at."""

    def param(name: str, kind: DataType, default: Any) -> ParamSpec:
        return ParamSpec(name, kind, default)

    kinds = (DataType.long, DataType.double, DataType.long, DataType.long)
    defaults = (128, 0.0, lineage.draft_tokens or 4, 0)
    params = [param(*one) for one in zip(PARAMETERS, kinds, defaults, strict=True)]
    anything = AnyType()  # type: ignore[no-untyped-call]
    return ModelSignature(inputs=Schema([ColSpec(anything)]), params=ParamSchema(params))
