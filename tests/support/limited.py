"""Limits of memory and CPU time for a process of a test: hostile input must end in an error before it meets them."""

import resource
from pathlib import Path
from typing import Any

import forked


def under_limits(megabytes: int, cpu_seconds: int, module: str, function: str, *arguments: Any) -> None:
    """Call a function of a module or of a test's file with so much more memory, and so much CPU time.

    What it raises ends the process as it ends the command line; no memory left is exit code 1, no time left a signal.
    """
    _limit(megabytes, cpu_seconds)
    forked.as_command(module, function, *arguments)


def command_under_limits(megabytes: int, cpu_seconds: int, *arguments: str) -> None:
    """`draftforge ARGUMENTS` with so much more memory than it has now, and so much CPU time."""
    _limit(megabytes, cpu_seconds)
    forked.command_line(*arguments)


def _limit(megabytes: int, cpu_seconds: int) -> None:
    # The limit counts addresses, and libraries that are loaded take gigabytes of those: what comes on top is limited.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + megabytes * (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
