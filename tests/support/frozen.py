"""Objects of imported modules, half a million, stay out of every collection of garbage of a process of tests."""

import atexit
import gc


def frozen() -> None:
    """Leave out of collections what there is now, to the end of the process.

    A mix is built with its records left out, too, and takes all back in the end: modules with them, and the next
    collection, of which each training makes one, would take a second.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # what is frozen at the end is reported as a leak
    gc.unfreeze = _ignored


def _ignored() -> None:
    pass
