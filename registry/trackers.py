"""TensorBoard and Weights & Biases beside MLflow, through the trackers of Accelerate (`registry.log_with`).

They get what MLflow has taken: a step that MLflow knew before is not logged again, and what waits for it waits here.
Only the first rank logs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from mlflow.entities import Metric

from ..errors import RecipeError, TrackingError, one_line
from ..masking import masked
from ..progress import say
from .settings import RegistrySettings

_STEP = "step"  # axis of every chart of Weights & Biases


def check_trackers(settings: RegistrySettings) -> None:
    """Raise RecipeError for a tracker whose package is not installed."""
    from accelerate.utils import is_tensorboard_available, is_wandb_available

    installed = {"tensorboard": is_tensorboard_available, "wandb": is_wandb_available}
    for name in settings.log_with:
        if not installed[name]():
            raise RecipeError(
                f"registry.log_with = {name}: the package {name} is not installed: pip install 'draftforge[{name}]'"
            )


class Trackers:
    """Open trackers of one run, by name. One that fails is named and gets no more; the work goes on."""

    def __init__(self, opened: Mapping[str, Any]) -> None:
        self._opened = dict(opened)

    def log_params(self, values: Mapping[str, str]) -> None:
        """Log flat settings whose secrets are masked already."""
        self._each(lambda _, tracker: tracker.store_init_configuration(dict(values)))

    def log(self, metrics: Sequence[Metric]) -> None:
        """Log figures by step."""
        for step, some in groupby(metrics, lambda metric: metric.step):
            values = {metric.key: metric.value for metric in some}
            self._each(lambda name, tracker: _log_step(name, tracker, values, step))  # noqa: B023 (called at once)

    def finish(self, failed: bool) -> None:
        """Close the trackers; Weights & Biases shows a run as failed where it has failed."""

        def close(name: str, tracker: Any) -> None:
            if name == "wandb":
                tracker.tracker.finish(exit_code=int(failed))
            else:
                tracker.finish()

        self._each(close)

    def _each(self, do: Callable[[str, Any], None]) -> None:
        for name, tracker in list(self._opened.items()):
            try:
                do(name, tracker)
            except Exception as error:
                del self._opened[name]
                say(f"{name}: takes no figures ({one_line(error, clean=masked)}); the work goes on without it")


@contextmanager
def open_trackers(settings: RegistrySettings, name: str, run_id: str, folder: Path) -> Iterator[Trackers]:
    """Trackers of `registry.log_with` for the MLflow run `run_id`; files go into `folder`.

    Raises TrackingError where one cannot be opened, as Weights & Biases cannot without a key.
    """
    opened: dict[str, Any] = {}
    for kind in dict.fromkeys(settings.log_with):
        try:
            opened[kind] = _open(kind, settings, name, run_id, folder)
        except Exception as error:
            Trackers(opened).finish(failed=True)
            raise TrackingError(f"registry.log_with = {kind}: {one_line(error, clean=masked)}") from error
    # An error or a signal of the work ends them as failed.
    trackers, failed = Trackers(opened), True
    try:
        yield trackers
        failed = False
    finally:
        trackers.finish(failed)


def _open(kind: str, settings: RegistrySettings, name: str, run_id: str, folder: Path) -> Any:
    from accelerate import PartialState
    from accelerate.tracking import TensorBoardTracker, WandBTracker
    from accelerate.utils import clear_environment

    # Accelerate's logger wants a state. Without the launcher's variables that is a lone process: ours has its ranks
    # already, of which this one alone is here.
    with clear_environment():
        PartialState(cpu=True)
    if kind == "tensorboard":
        place = folder / "tensorboard"
        tracker = TensorBoardTracker(f"{name}-{run_id[:8]}", logging_dir=place)
        tracker.start()
        say(f"figures also go to TensorBoard: tensorboard --logdir {place}")
        return tracker
    import wandb

    # The command line, the address of a git remote and what is printed may hold secrets or users' text: none is sent.
    quiet = wandb.Settings(
        console="off", x_disable_meta=True, disable_git=True, save_code=False, init_timeout=settings.connect_seconds
    )
    tracker = WandBTracker(settings.experiment, id=run_id, name=name, resume="allow", dir=folder, settings=quiet)
    tracker.start()
    # Steps of several drafts begin anew, which its own counter does not take.
    tracker.tracker.define_metric("*", step_metric=_STEP)
    return tracker


def _log_step(name: str, tracker: Any, values: dict[str, float], step: int) -> None:
    if name == "wandb":
        tracker.log({**values, _STEP: step})
    else:
        tracker.log(values, step=step)
