"""Reads and restores the state of Lightning's Trainer, and holds every private name of Lightning in use.

`PRIVATE` lists the names. All other access to the Trainer is by its public attributes and hooks.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from typing import Any

import torch

from ..errors import Unsupported

PRIVATE = (
    "_logger_connector._callback_metrics",
    "_logger_connector._current_fx",
    "_logger_connector._first_loop_iter",
    "_logger_connector._logged_metrics",
    "_logger_connector._progress_bar_metrics",
    "_signal_connector.teardown",
    "_val_check_time_interval",
    "fit_loop._combined_loader",
    "fit_loop._data_fetcher",
    "fit_loop._data_source.dataloader",
    "fit_loop._restarting",
    "fit_loop.epoch_loop._results",
    "fit_loop.epoch_loop.automatic_optimization.on_iteration_done",
    "fit_loop.epoch_loop.batch_progress.current.ready",
    "fit_loop.epoch_loop.load_state_dict",
    "fit_loop.epoch_loop.manual_optimization.on_iteration_done",
    "fit_loop.epoch_loop.on_iteration_done",
    "fit_loop.epoch_loop.state_dict",
    "fit_loop.epoch_loop.val_loop._combined_loader",
    "fit_loop.epoch_loop.val_loop.on_iteration_done",
    "fit_loop.epoch_progress.load_state_dict",
    "fit_loop.epoch_progress.state_dict",
    "fit_loop.max_batches",
    "fit_loop.on_advance_end",
    "fit_loop.on_advance_start",
    "fit_loop.run",
    "fit_loop.setup_data",
)
"""The private names, as paths from the Trainer."""
PRIVATE_OF_MODULES = (
    "core.optimizer._MockOptimizer",
    "loops.fetchers._DataLoaderIterDataFetcher",
    "trainer.connectors.logger_connector.result._Metadata",
    "trainer.connectors.logger_connector.result._ResultMetric",
    "trainer.connectors.logger_connector.result._Sync",
)
"""The private names in modules of Lightning."""
PRIVATE_OF_OBJECTS = {
    "CombinedLoader": ("_iterator", "_state_dicts"),
    "DataFetcher": ("_start_profiler", "_stop_profiler"),
    "Metric": ("_computed", "_defaults", "_forward_cache", "_update_count"),
    "Running": ("_num_vals_seen",),
}
"""The private names of other objects; `Metric` and `Running` are of torchmetrics."""

_CONNECTOR = (
    "_callback_metrics",
    "_logged_metrics",
    "_progress_bar_metrics",
    "_first_loop_iter",
    "_current_fx",
)
_METADATA = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
_ABSENT = object()


def missing(trainer: Any) -> list[str]:
    """Return the private names that these releases of Lightning and torchmetrics lack."""
    lacking = [path for path in PRIVATE if _follow(trainer, path) is _ABSENT]
    for path in PRIVATE_OF_MODULES:
        name, _, attribute = path.rpartition(".")
        lacking += [] if hasattr(module(trainer, name), attribute) else [path]
    objects = _objects(trainer)
    for kind, names in PRIVATE_OF_OBJECTS.items():
        lacking += [f"{kind}.{name}" for name in names if not hasattr(objects[kind], name)]
    return lacking


def _objects(trainer: Any) -> dict[str, Any]:
    metrics = import_module("torchmetrics")
    return {
        "CombinedLoader": module(trainer, "utilities.combined_loader").CombinedLoader([]),
        "DataFetcher": module(trainer, "loops.fetchers")._DataFetcher(),
        "Metric": metrics.MeanMetric(),
        "Running": metrics.wrappers.Running(metrics.MeanMetric(), 1),
    }


def _follow(start: Any, path: str) -> Any:
    return reduce(lambda at, name: getattr(at, name, _ABSENT), path.split("."), start)


def module(trainer: Any, name: str) -> Any:
    """Return a module of the package that the Trainer is of: `lightning.pytorch` or `pytorch_lightning`."""
    return import_module(f"{type(trainer.fit_loop).__module__.partition('.loops')[0]}.{name}")


# Between the Trainer's loops and its data.


@contextmanager
def unopened_loader(trainer: Any, check: Callable[[Any], None]) -> Iterator[None]:
    """Let the Trainer prepare its training loader without iterating it, until the context ends.

    `check` is called with the loader that the script gave.
    """
    source = trainer.fit_loop._data_source
    combined: Any = module(trainer, "utilities.combined_loader").CombinedLoader
    original = source.dataloader

    class Unopened(combined):
        """A loader whose batches are not loaded here."""

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            raise StopIteration

        def _state_dicts(self) -> list[Any]:
            # The run has the place in the data, and some loaders draw when they are asked for theirs.
            return []

        def __len__(self) -> int:
            found = len(self.flattened[0]) if _length(self.flattened[0]) is not None else float("inf")
            length = min([found, *(self.limits or ())])
            if length == float("inf"):
                raise TypeError("the loader has no length")
            return int(length)

    def dataloader() -> Any:
        check(loader := original())
        return Unopened(loader, "max_size_cycle")

    source.dataloader = dataloader
    try:
        yield
    finally:
        source.dataloader = original


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def prepare_loader(trainer: Any) -> tuple[Any, int | None]:
    """Let the Trainer prepare its loader; return that, and how many batches of it make an epoch.

    There is no loader if there is nothing to train.
    """
    trainer.fit_loop.setup_data()
    combined = trainer.fit_loop._combined_loader
    if combined is None or trainer.fit_loop.max_batches == 0:
        return None, None
    return combined.flattened[0], _length(combined)


def optimizers(trainer: Any) -> list[Any]:
    """Return the optimizers of the training, without the mock of a module that has none."""
    mock = module(trainer, "core.optimizer")._MockOptimizer
    return [one for one in trainer.optimizers if not isinstance(one, mock)]


def takes_iterator(trainer: Any) -> bool:
    """Whether `training_step` takes the iterator itself, and asks it for batches."""
    fetchers = module(trainer, "loops.fetchers")
    return isinstance(trainer.fit_loop._data_fetcher, fetchers._DataLoaderIterDataFetcher)


def fetch_from(trainer: Any, fetcher: Any) -> None:
    """Make the epoch loop ask this object for its batches."""
    trainer.fit_loop._data_fetcher = fetcher


@contextmanager
def wrapped(trainer: Any, name: str, around: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """Replace a method of the fit loop until the context ends: `around` is called with the method."""
    loop = trainer.fit_loop
    original = getattr(loop, name)
    setattr(loop, name, lambda: around(original))
    try:
        yield
    finally:
        delattr(loop, name)


class Profiled:
    """A data fetcher's functions that measure how long a batch takes to load; the epoch loop sets them."""

    def __init__(self) -> None:
        self._start_profiler: Callable[[], None] = _do_nothing
        self._stop_profiler: Callable[[], None] = _do_nothing

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Measure what is done in the context."""
        self._start_profiler()
        try:
            yield
        finally:
            self._stop_profiler()


def _do_nothing() -> None:
    """Measure nothing, where the Trainer has no profiler."""


def leave_signals(trainer: Any) -> None:
    """Remove Lightning's signal handlers: on SIGTERM they would end the training before it is saved."""
    trainer._signal_connector.teardown()


def validates_by_time(trainer: Any) -> bool:
    """Whether the clock decides when to validate."""
    return trainer._val_check_time_interval is not None


def drop_validation_iterator(trainer: Any) -> None:
    """End the pass over the validation's data: Lightning stops asking before it comes to its end."""
    iterator = trainer.fit_loop.epoch_loop.val_loop._combined_loader._iterator
    if iterator is not None:
        iterator.reset()


# How far the loops are.


def read_progress(trainer: Any) -> dict[str, Any]:
    """Return the counters of the loops."""
    fit = trainer.fit_loop
    return {
        "epoch": fit.epoch_progress.state_dict(),
        "loops": fit.epoch_loop.state_dict(),
        "should_stop": has_stopped_early(trainer),
        # A callback sets it as an epoch begins, and in mid-epoch that hook is not called again.
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
    }


def write_progress(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Set the counters of the loops."""
    fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
    fit.epoch_progress.load_state_dict(saved["epoch"])
    epoch.load_state_dict(saved["loops"])
    # Without this they would restart: they would repeat a validation, and leave out a step of a scheduler.
    for loop in (epoch, epoch.val_loop, epoch.automatic_optimization, epoch.manual_optimization):
        loop.on_iteration_done()
    trainer.should_stop = saved["should_stop"]


def has_stopped_early(trainer: Any) -> bool:
    """Whether an EarlyStopping has stopped the training, which remembers that; other callbacks need not."""
    kind = module(trainer, "callbacks").EarlyStopping
    callbacks = [one for one in trainer.callbacks if isinstance(one, kind)]
    return trainer.should_stop and any(one.stopped_epoch or one.stopping_reason.value for one in callbacks)


def is_mid_epoch(progress: Mapping[str, Any]) -> bool:
    """Whether these counters are of a place in the middle of an epoch."""
    current = progress["epoch"]["current"]
    return bool(current["started"] > current["processed"])


def enter_mid_epoch(trainer: Any, *, is_entered: bool) -> None:
    """Tell the fit loop that the epoch has begun, so that it calls no hooks for it; or that it is entered."""
    trainer.fit_loop._restarting = not is_entered


def batches_done(trainer: Any) -> int:
    """Return how many batches of the epoch are done."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


# What Lightning's checkpoints hold.


def version(trainer: Any) -> str:
    """Return the version of the package that the Trainer is of."""
    return str(import_module(type(trainer.fit_loop).__module__.partition(".loops")[0]).__version__)


def loops(trainer: Any) -> dict[str, Any]:
    """Return the states of the loops, as a checkpoint of Lightning has them."""
    names = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
    return {name: getattr(trainer, name).state_dict() for name in names}


def hyper_parameters(holder: Any) -> dict[str, Any]:
    """Return the hyperparameters of a module or data module, as a checkpoint of Lightning has them."""
    if not holder.hparams:
        return {}
    hparams = holder.hparams
    is_plain = type(hparams).__module__.partition(".")[0] != "omegaconf"
    found = {holder.CHECKPOINT_HYPER_PARAMS_KEY: dict(hparams) if is_plain else hparams}
    if hasattr(holder, "_hparams_name"):
        found[holder.CHECKPOINT_HYPER_PARAMS_NAME] = holder._hparams_name
    if not is_plain:
        found[holder.CHECKPOINT_HYPER_PARAMS_TYPE] = type(hparams)
    return found


# What was logged.


def read_logged(trainer: Any) -> dict[str, Any]:
    """Return what `self.log` has accumulated in the epoch, and the state of the model's metrics."""
    connector = {name: getattr(trainer._logger_connector, name) for name in _CONNECTOR}
    results = trainer.fit_loop.epoch_loop._results
    return {
        "connector": {k: dict(v) if isinstance(v, dict) else v for k, v in connector.items()},
        "results": {key: _read_result(result) for key, result in results.items()},
        "metrics": {name: _read_metric(metric) for name, metric in _metrics(trainer)},
    }


def write_logged(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Restore what `read_logged` returned."""
    for name, value in saved["connector"].items():
        setattr(trainer._logger_connector, name, dict(value) if isinstance(value, Mapping) else value)
    metrics = dict(_metrics(trainer))
    for name in metrics.keys() & saved["metrics"].keys():
        _write_metric(metrics[name], saved["metrics"][name])
    results = trainer.fit_loop.epoch_loop._results
    results.clear()
    for key, one in saved["results"].items():
        results[key] = _made_result(trainer, one)


def _metrics(trainer: Any) -> list[tuple[str, Any]]:
    kind = import_module("torchmetrics").Metric
    return [(n, m) for n, m in trainer.lightning_module.named_modules() if isinstance(m, kind)]


def _read_metric(metric: Any) -> dict[str, Any]:
    state = {name: getattr(metric, name) for name in metric._defaults}
    state |= {name: value for name, value in vars(metric).items() if _is_accumulated(name, value)}
    return {"state": state, "updates": metric._update_count, "last": metric._forward_cache}


def _is_accumulated(name: str, value: Any) -> bool:
    # Wrappers such as MinMaxMetric and Running keep these beside their declared state.
    is_tensor = isinstance(value, torch.Tensor) and not name.startswith("_")
    return is_tensor or name == "_num_vals_seen"


def _write_metric(metric: Any, saved: Mapping[str, Any]) -> None:
    for name, value in saved["state"].items():
        setattr(metric, name, [*value] if isinstance(value, list) else value)
    metric._update_count, metric._forward_cache = saved["updates"], saved["last"]
    metric._computed = None


def _read_result(result: Any) -> dict[str, Any]:
    meta = result.meta
    if meta.sync.group is not None:
        raise Unsupported(
            f"self.log({meta.name!r}) was given sync_dist_group=, and a process group cannot be saved.",
            fix="log it without sync_dist_group.",
        )
    reduction = meta.reduce_fx
    return {
        "meta": {name: getattr(meta, name) for name in _METADATA},
        "reduce": reduction.__name__,
        "is_builtin": getattr(builtins, reduction.__name__, None) is reduction,
        "sync": {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "has_reset": result.has_reset,
        "metric": _read_metric(result) if result.is_tensor else None,
        "last": None if result.is_tensor else result._forward_cache,
    }


def _made_result(trainer: Any, saved: Mapping[str, Any]) -> Any:
    kinds = module(trainer, "trainer.connectors.logger_connector.result")
    reduction = getattr(builtins if saved["is_builtin"] else torch, saved["reduce"])
    meta = kinds._Metadata(reduce_fx=reduction, **saved["meta"])
    meta.sync = kinds._Sync(fn=trainer.strategy.reduce, **saved["sync"])
    result = kinds._ResultMetric(meta, saved["metric"] is not None).to(trainer.strategy.root_device)
    if saved["metric"] is not None:
        _write_metric(result, saved["metric"])
    else:
        result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
        result._forward_cache = saved["last"]
    result.has_reset = saved["has_reset"]
    return result
