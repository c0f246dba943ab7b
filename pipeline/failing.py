"""Which stage an error came from, and a failed MLflow run for what failed outside of one."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import LockedError
from ..registry.connect import Tracking, quick_requests
from ..registry.tracking import TrackedRun, start_run

STAGE_TAG = "draftforge.failed_stage"
_STAGE, _RECORDED = "in stage: ", "recorded in MLflow"
_PATIENCE_SECONDS = 5


@contextmanager
def at(stage: str) -> Iterator[None]:
    """Note the stage on whatever error passes through here first."""
    try:
        yield
    except BaseException as error:
        if not stage_of(error):
            error.add_note(_STAGE + stage)
        raise


def stage_of(error: BaseException) -> str:
    """The stage that `at` noted; empty: none."""
    notes: list[str] = getattr(error, "__notes__", [])
    return next((note.removeprefix(_STAGE) for note in notes if note.startswith(_STAGE)), "")


@contextmanager
def told(run: TrackedRun) -> Iterator[None]:
    """Tag an open run, which an error is about to end as FAILED with its reason, with the stage."""
    if run.resumed:
        run.set_tags({STAGE_TAG: ""})
    try:
        yield
    except BaseException as error:
        with suppress(Exception), quick_requests(_PATIENCE_SECONDS):
            run.set_tags({STAGE_TAG: stage_of(error)})
            error.add_note(_RECORDED)
        raise


@contextmanager
def recorded(tracking: Tracking, name: str) -> Iterator[None]:
    """Leave a FAILED run of this name, with reason and stage, for an error that no run has recorded.

    A lock that somebody else holds is no failure. A store that does not answer records nothing, and hides no error.
    """
    try:
        yield
    except LockedError:
        raise
    except BaseException as error:
        if _RECORDED not in getattr(error, "__notes__", []):
            with (
                suppress(BaseException),
                quick_requests(_PATIENCE_SECONDS),
                start_run(tracking, name) as run,
                told(run),
            ):
                raise error
        raise
