"""MLflow tracking, versions and aliases, the promotion gate, lineage.

MLflow reads its environment variables when it is first imported, so defaults are set here, before any file of this
folder imports it. A variable that the user has set keeps its value.
"""

import os

_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # what it logs as an error it also raises, and we say it in one line
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
for _name, _value in _QUIET.items():
    os.environ.setdefault(_name, _value)
