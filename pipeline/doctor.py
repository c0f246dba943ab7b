"""`draftforge doctor`: checks of this machine (packages, CUDA, memory, disk, MLflow store), each with its remedy.

Heavy packages are imported inside the checks: a broken or missing one is a finding, not a crash.
"""

import ctypes
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from packaging.version import Version
from rich.markup import escape
from rich.table import Table

from ..errors import DraftforgeError
from ..masking import masked
from ..progress import Console, say
from ..registry.settings import RegistrySettings
from ..registry.store_address import resolve_uri
from ..storage import size_text

MINIMUM = {
    "torch": "2.11",
    "transformers": "5.17",
    "accelerate": "1.10",
    "peft": "0.18",
    "mlflow": "3.10",
    "deepspeed": "0.18",
}
OPTIONAL = {"deepspeed"}
PYTHON_MINIMUM = "3.11"
LOW_DISK_BYTES, NO_DISK_BYTES, LOW_MEMORY_BYTES = 5e9, 1e9, 4e9
PROBE_SECONDS = 5.0

Status = Literal["OK", "WARN", "FAIL"]
STYLE: dict[Status, str] = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


class Check(NamedTuple):
    """Check of one thing: its name, its status, what was found, and what mends it."""

    name: str
    status: Status
    found: str
    remedy: str = ""


class Gpu(NamedTuple):
    """A CUDA device as torch sees it."""

    name: str
    capability: tuple[int, int]
    free_bytes: float
    total_bytes: float


def doctor(workdir: Path, tracking_uri: str | None = None, as_json: bool = False) -> int:
    """Print the checks to standard output. Returns the exit code: 1 if any of them failed, else 0."""
    say("looking at this machine (a few seconds)")
    checks = examine(workdir, tracking_uri)
    failed = any(check.status == "FAIL" for check in checks)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [check._asdict() for check in checks]}, indent=2))
    else:
        _print_table(checks)
    return 1 if failed else 0


def examine(workdir: Path, tracking_uri: str | None = None) -> list[Check]:
    """Run all checks, in the order in which a person would mend things."""
    packages = list(check_packages())
    gpus, cuda = check_cuda()
    # The interpreter and packages first: later checks import them.
    checks = [check_python(), *packages, *cuda, check_processor(), check_memory(), check_disk(workdir)]
    checks.append(check_engine(gpus, installed("deepspeed")))
    checks.append(check_tracking(tracking_uri, workdir))
    return checks


def check_python() -> Check:
    """Check the version of the Python interpreter."""
    found = platform.python_version()
    good = Version(found) >= Version(PYTHON_MINIMUM)
    return Check("python", "OK" if good else "FAIL", found, "" if good else f"use Python {PYTHON_MINIMUM} or later")


def installed(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_packages() -> Iterator[Check]:
    """Check each package against the least version that draftforge works with."""
    for name, minimum in MINIMUM.items():
        found = installed(name)
        package = f"draftforge[{name}]" if name in OPTIONAL else f"{name}>={minimum}"
        remedy = f"pip install '{package}'"
        # An optional package may be missing; one that is installed but too old is a failure all the same.
        if found is not None and Version(found) >= Version(minimum):
            yield Check(name, "OK", f"{found} (needs {minimum})")
        elif found is None and name in OPTIONAL:
            yield Check(name, "WARN", "not installed; needed for CUDA and for several processes", remedy)
        else:
            yield Check(name, "FAIL", f"{found or 'not installed'} (needs {minimum})", remedy)


def gpu_driver() -> bool:
    """Whether a driver of NVIDIA (Linux, WSL) or AMD is on this machine."""
    places = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
    return shutil.which("nvidia-smi") is not None or any(Path(place).exists() for place in places)


def torch_library_loads() -> bool:
    """Whether torch's own library, without its Python modules, can be loaded: a tenth of the time of its import."""
    package = find_spec("torch")
    if package is None or package.origin is None:
        return False
    try:
        ctypes.CDLL(str(Path(package.origin).with_name("lib") / "libtorch_python.so"))
    except OSError:
        return False
    return True


def check_cuda() -> tuple[list[Gpu], list[Check]]:
    """Find and check CUDA devices; none is fine, except where a driver is there that torch cannot use."""
    none = Check("cuda", "OK", "no device: everything runs on the CPU; target.dtype is float32 there unless set")
    # Without a driver there is no device, and torch need not be asked.
    driver = gpu_driver()
    if not driver and torch_library_loads():
        return [], [none]
    try:
        import torch
    except (ImportError, OSError) as error:
        return [], [Check("cuda", "FAIL", f"torch cannot be imported: {error}", "install torch again")]
    # No device: a machine without one, or a torch that does not fit its driver?
    if not torch.cuda.is_available():
        if not driver:
            return [], [none]
        found = f"a driver is there, but torch {torch.__version__} sees no device"
        return [], [Check("cuda", "WARN", found, "install a CUDA build of torch that fits the driver (nvidia-smi)")]
    # Devices, each with its memory as it is at this moment.
    gpus = []
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        capability = torch.cuda.get_device_capability(i)
        gpus.append(Gpu(torch.cuda.get_device_name(i), capability, free, total))
    return gpus, [check_gpu(i, gpu) for i, gpu in enumerate(gpus)]


def check_gpu(index: int, gpu: Gpu) -> Check:
    """Check one CUDA device: bfloat16 needs compute capability 8.0, and half its memory should be free."""
    major, minor = gpu.capability
    found = f"{gpu.name}, capability {major}.{minor}, {size_text(gpu.free_bytes)} of {size_text(gpu.total_bytes)} free"
    # Both are warnings: float32 works on any device, and another process may end.
    if gpu.capability < (8, 0):
        return Check(
            f"cuda:{index}", "WARN", found, "no bfloat16: set precision float32, or use capability 8.0 or later"
        )
    if gpu.free_bytes < gpu.total_bytes / 2:
        return Check(f"cuda:{index}", "WARN", found, "another process holds most of the memory")
    return Check(f"cuda:{index}", "OK", found)


def check_engine(gpus: list[Gpu], deepspeed: str | None) -> Check:
    """Check which training engine would be used here (plain torch or DeepSpeed), and that it can be imported."""
    # Without a GPU, one process trains in plain torch; several, or a GPU, need DeepSpeed.
    if not gpus:
        several = "DeepSpeed under torchrun" if deepspeed else "several processes would need DeepSpeed"
        return Check("engine", "OK", f"plain torch: one process, no CUDA ({several})")
    if deepspeed is None:
        return Check("engine", "FAIL", "DeepSpeed is missing and CUDA is there", "pip install 'draftforge[deepspeed]'")
    # In a process of its own: its import may compile, print, or end the process.
    load = [sys.executable, "-P", "-c", "import deepspeed"]
    done = subprocess.run(load, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Check("engine", "FAIL", f"DeepSpeed {deepspeed} cannot be imported: {reason}", "mend its installation")
    start = f"torchrun --nproc-per-node {len(gpus)} -m draftforge.cli" if len(gpus) > 1 else "draftforge"
    return Check("engine", "OK", f"DeepSpeed {deepspeed}: CUDA is there; start with {start} train …")


def check_processor() -> Check:
    """Check the number of CPU threads that this process may use."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cpu", "OK", f"{threads} threads ({platform.machine()})")


def check_memory() -> Check:
    """Check the main memory of the machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    found = size_text(total)
    # Not every system says what is unused.
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        found += f", {size_text(page * os.sysconf('SC_AVPHYS_PAGES'))} unused"
    if total < LOW_MEMORY_BYTES:
        return Check("memory", "WARN", found, "use a small target, or lower capture.batch_size")
    return Check("memory", "OK", found)


def check_disk(workdir: Path) -> Check:
    """Check free space and write access where runs are written; the folder may not exist yet."""
    existing = workdir.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    found = f"{size_text(free)} free for {workdir}"
    # Access first, then space.
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        return Check("disk", "FAIL", f"{existing} cannot be written to", "choose another --workdir")
    if free < LOW_DISK_BYTES:
        remedy = "free some, or choose another --workdir"
        return Check("disk", "FAIL" if free < NO_DISK_BYTES else "WARN", found, remedy)
    return Check("disk", "OK", found)


def check_tracking(tracking_uri: str | None, workdir: Path) -> Check:
    """Check whether the MLflow store answers. Nothing is made there."""
    # The address, as a recipe without a `registry` section would resolve it.
    try:
        uri = resolve_uri(RegistrySettings(tracking_uri=tracking_uri), workdir)
    except DraftforgeError as error:
        return Check("tracking", "FAIL", str(error), "correct --tracking-uri or MLFLOW_TRACKING_URI")
    except ImportError as error:
        return Check("tracking", "FAIL", f"MLflow's database cannot be opened: {error}", "pip install 'sqlalchemy>=2'")
    # SQLite needs a folder that can be written to; a server is asked; of other databases only the port is tried.
    parts = urlsplit(uri)
    if parts.scheme.startswith("sqlite"):
        folder = check_disk(Path(uri.split("///", 1)[1]).parent)
        return folder._replace(name="tracking", found=uri if folder.status == "OK" else folder.found)
    # Addresses may hold a password, and connection errors repeat the address: both are shown masked.
    shown = masked(uri)
    try:
        if parts.scheme in ("http", "https"):
            return _check_server(uri, shown)
        if parts.hostname is None or parts.port is None:
            return Check("tracking", "WARN", f"{shown}: not probed", "run a small recipe to see whether it answers")
        socket.create_connection((parts.hostname, parts.port), timeout=PROBE_SECONDS).close()
    except (OSError, ValueError) as error:
        reason = re.sub(r".*(\[Errno -?\d+\] )", "", masked(str(error))).strip("'\")")
        return Check("tracking", "FAIL", f"{shown}: {reason}", "start the server, or correct MLFLOW_TRACKING_URI")
    return Check("tracking", "OK", f"{shown} accepts connections")


def _check_server(uri: str, shown: str) -> Check:
    """Check an MLflow server by its /health endpoint; `shown`: its address without a password."""
    from ..http_replies import bounded_session

    with bounded_session() as session:
        code = session.get(f"{uri.rstrip('/')}/health", timeout=PROBE_SECONDS, allow_redirects=False).status_code
    # A refusal means that a server is there and credentials are missing; any other error, that it is no MLflow server.
    if code in (401, 403):
        remedy = "set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        return Check("tracking", "WARN", f"{shown} answers {code}", remedy)
    if code >= 300:
        return Check("tracking", "FAIL", f"{shown} answers {code}", "correct the address: this is no MLflow server")
    return Check("tracking", "OK", f"{shown} answers")


def _print_table(checks: list[Check]) -> None:
    """Print the checks as a table, and how many stand how. An address stays on one line, to be copied."""
    table = Table(box=None, pad_edge=False)
    address = max((len(word) for check in checks for word in check.found.split() if "://" in word), default=0)
    for title in ("check", "", "found", "remedy"):
        table.add_column(title, overflow="fold", min_width=address if title == "found" else None)
    for check in checks:
        status = f"[{STYLE[check.status]}]{check.status}[/]"
        table.add_row(check.name, status, escape(check.found), escape(check.remedy))
    console = Console()
    console.print(table, crop=False)
    counts = {status: sum(check.status == status for check in checks) for status in STYLE}
    console.print(f"{counts['OK']} OK, {counts['WARN']} WARN, {counts['FAIL']} FAIL", highlight=False)
