"""The command line: what is parsed reaches the verbs, help is quick and complete, errors are one line."""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import draftforge.pipeline
from draftforge import __version__, cli
from draftforge.errors import InputError, LockedError, TrainingDivergedError

STAGES = ["distill", "mix", "capture", "train", "score"]
REGISTRY = ["promote", "rollback", "fetch", "registry", "retrain"]
VERBS = [*STAGES, *REGISTRY, "skip-layers", "export", "generate", "bench", "doctor"]
VERBS += ["inspect-mix"]
