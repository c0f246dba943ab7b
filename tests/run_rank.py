"""One rank of a distributed test: join the gloo group, call a function, write down what it returned.

    run_rank.py RESULT.json MODULE FUNCTION ARGS-AS-JSON

MODULE is a Python file (a test's own `__file__`) or an importable name. The ranks' places come from the environment,
as torchrun sets them.
"""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType


def load(name: str) -> ModuleType:
    """The module of a file or of a dotted name."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Run one call and leave its result as JSON."""
    import torch.distributed as dist

    sys.path.append(str(Path(__file__).resolve().parent / "support"))  # as pytest has it
    result, module, function, args = sys.argv[1:]
    dist.init_process_group("gloo")
    try:
        value = getattr(load(module), function)(*json.loads(args))
        Path(result).write_text(json.dumps(value))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
