"""What processes that are forked find imported: the server that they come from imports this module first."""

import atexit
import gc
import importlib

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
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
):
    importlib.import_module(name)
unsynced()
gc.enable()
gc.freeze()  # a collection in a fork does not go through all of that again
atexit.register(gc.unfreeze)  # what is frozen at the end of the server is reported as a leak
