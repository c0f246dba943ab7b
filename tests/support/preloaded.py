"""What processes that are forked find imported: the server that they come from imports this module first."""

import gc
import importlib

from frozen import frozen
from unsynced import unsynced

gc.disable()  # imports make no garbage to look for
for name in (
    "pytest",
    "transformers",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # with torch's compiler, which every engine of DeepSpeed imports
    "draftforge.cli",
    "draftforge.train.loop",
    "draftforge.pipeline.retrain",
    "alembic.command",
    "mlflow.pyfunc",
    "mlflow.store.tracking.sqlalchemy_workspace_store",
    "mlflow.store.model_registry.sqlalchemy_workspace_store",
    "pyarrow.dataset",
    "sqlalchemy.dialects.sqlite",
):
    importlib.import_module(name)
unsynced()
frozen()  # a collection in a fork does not go through all of that again
gc.enable()
