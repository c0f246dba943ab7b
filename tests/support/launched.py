"""What a launcher starts in a test, in the place of a module that takes long to import.

`python -m launched FOLDER ARGUMENTS` writes what it was given to `FOLDER/RANK.told`, and ends with `FOLDER/RANK.code`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def read(path: Path, seconds: float = 200) -> Any:
    """JSON that another process writes."""
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path}: did not come"
        time.sleep(0.05)
    return json.loads(path.read_text())


def write(path: Path, value: Any) -> None:
    """JSON that another process reads, at once as a whole."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(value))
    beside.rename(path)


if __name__ == "__main__":
    place = Path(sys.argv[1], os.environ["RANK"])
    write(place.with_suffix(".told"), [sys.argv[2:], dict(os.environ)])
    raise SystemExit(read(place.with_suffix(".code")))
