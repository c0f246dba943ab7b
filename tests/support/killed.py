"""The command line, killed by SIGKILL just before a file or folder whose path matches would get its name, or where a
function of ours is called.

    killed.py PATTERN ARGUMENTS...          PATTERN: a regular expression, or module:function
"""

import os
import re
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from draftforge.cli import main

pattern, *arguments = sys.argv[1:]


def die(*args: Any, **kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def mortal(name: str) -> None:
    whole = getattr(Path, name)

    def move(self: Path, target: Path) -> Any:
        if re.search(pattern, str(target)):
            die()
        return whole(self, target)

    setattr(Path, name, move)


if re.fullmatch(r"[\w.]+:\w+", pattern):
    module, _, function = pattern.partition(":")
    setattr(import_module(module), function, die)
else:
    mortal("rename")
    mortal("replace")
main(arguments)
