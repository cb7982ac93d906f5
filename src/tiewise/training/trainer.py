"""The Trainer of one job, and the callbacks of a run.

`TiewiseTrainer` is `transformers.Trainer` with the norms of both gradient paths. A step's gradient is complete after
its last micro-batch, and clipping scales it next. The paths are measured between the two, without a matrix product: the
lookup recorded the rows of its path, and the head's path is the sum minus these.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.integrations import TensorBoardCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from tiewise.boundary.ops.fast_products import ProductChoice
from tiewise.boundary.sharded.save_load import load_sharded, save_sharded
from tiewise.boundary.sharded_tables import fsdp_units, reshard
from tiewise.core import Late, ranks
from tiewise.core.errors import RunError
from tiewise.core.interrupts import NotedCtrlC, set_ctrl_c_handler, was_ctrl_c_pressed
from tiewise.core.progress import report_progress
from tiewise.core.spec import BoundarySpec
from tiewise.training.data.corpus import PreparedText
from tiewise.training.folder import METRICS, add_line, keep_lines
from tiewise.training.settings import Settings
from tiewise.training.trackers import ReportedArguments, events_folder, tracker_arguments, without_events

if TYPE_CHECKING:
    from tiewise.boundary.installation import Installed

tensorboard = Late("torch.utils.tensorboard")  # imports a package that only `report_to` needs

EVALUATED = "eval_"  # start of the names of evaluated values, by which trackers group them
ADAM_BETAS = (0.9, 0.98)
SHARDED = "sharded"  # subfolder of a checkpoint with a model that several processes hold in parts


@dataclass(frozen=True, eq=False)
class Job:
    """One arm with one seed: its settings, its text and its folder."""

    arm: str
    spec: BoundarySpec
    settings: Settings
    folder: Path
    text: PreparedText
    seed: int = 1
    feed_forward: int | None = None  # feed-forward width that `match parameters` gives the arm
    title: str = ""  # name of the run in progress lines
    measured_ids: tuple[int, ...] = ()  # ids of the tokens whose direct path is measured
    split: str = "heldout"  # split that the run is measured on
    trial: bool = False  # True if only the last loss on `split` is needed
    products: str | ProductChoice = "default"  # matrix products of its steps and measurements
    comparison: str = ""  # name and start of the comparison, which trackers show

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the trackers that the run reports to; a trial reports to none."""
        return () if self.trial else self.settings.report_to

    @property
    def tracked_as(self) -> str:
        """Name of the run in trackers: the comparison, then the folders of arm and seed."""
        return "/".join([self.comparison, *self.folder.parts[-2:]])

    def report_progress(self, step: int, nll: float | None = None) -> None:
        """Report the number of steps taken, and the training loss."""
        text = self.title
        if nll is not None:
            text += f", nll {nll:.3f}"
        report_progress(text, step, self.settings.steps)


class TiewiseTrainer(Trainer):  # type: ignore[misc, unused-ignore]  # no types
    """Trainer that logs `path_a`, `path_b` and `cosine`, noted values, and an evaluation.

    The three are means over the logging window. At every log the first of several processes calls `evaluator`; all call
    it if they hold the model in parts. Only the first logs the result. A model in parts is saved by `save_sharded`, and
    any number of processes can resume from it.
    """

    def __init__(
        self, installed: Installed, *, evaluator: Callable[[], dict[str, float]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(model=installed.model, **kwargs)
        self.installed = installed
        self._evaluator = evaluator
        self._seen: dict[str, list[Tensor | float]] = {}
        self._sharded = bool(fsdp_units(installed.model))
        self.is_distributed_loading_by_transformers |= self._sharded  # else accelerate wraps it a second time

    def get_tp_size(self) -> int:
        """Return the number of processes that read the same tokens."""
        _, _, tensor_parallel = ranks.sharded() or (1, 1, 1)
        return tensor_parallel

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's loader, which gives tensor-parallel processes the same rows.

        accelerate does so only for models on GPUs.
        """
        loader: DataLoader[Any] = super().get_train_dataloader()
        tensor_parallel = self.get_tp_size()
        if tensor_parallel > 1:
            rows: Any = loader.batch_sampler
            rows.num_processes //= tensor_parallel
            rows.process_index //= tensor_parallel
        return loader

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint's weights and state as a resumed `train` does, without training."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        for say in (self.callback_handler.on_train_begin, self.callback_handler.on_train_end):
            say(self.args, self.state, self.control)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log and save as the Trainer does.

        If one of several processes cannot write, all of them raise.
        """
        with ranks.agreed() if self.control.should_log or self.control.should_save else nullcontext():
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as the Trainer does.

        A model in parts is not saved here, but with its optimizer.
        """
        if not self._sharded:
            super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        ranks.on_rank_zero(lambda: Path(output_dir).mkdir(parents=True, exist_ok=True))
        notes = {"scheduler": self.lr_scheduler.state_dict()}
        save_sharded(Path(output_dir) / SHARDED, self.model, self.optimizer, notes=notes)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._is_sharded_checkpoint(resume_from_checkpoint):
            load_sharded(Path(resume_from_checkpoint) / SHARDED, self.model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn as the Trainer does, except about a tied table that was loaded under another name."""
        named, missing = dict(self.model.named_parameters(remove_duplicate=False)), set(load_result.missing_keys)
        loaded = {id(tensor) for name, tensor in named.items() if name not in missing}
        without = [name for name in load_result.missing_keys if id(named.get(name)) not in loaded]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=without))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._is_sharded_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        notes = load_sharded(Path(checkpoint) / SHARDED, self.model, self.optimizer)
        groups = len(self.optimizer.param_groups)  # one per mesh, all with the same rate
        state = {}
        for name, value in notes["scheduler"].items():
            state[name] = value[:1] * groups if isinstance(value, list) else value
        self.lr_scheduler.load_state_dict(state)

    def _is_sharded_checkpoint(self, checkpoint: str) -> bool:
        """Return whether a checkpoint has a model that several processes hold in parts.

        RunError: this model is in parts, and the checkpoint is not.
        """
        in_parts = (Path(checkpoint) / SHARDED).is_dir()
        if self._sharded and not in_parts:
            problem = f"{checkpoint} is of processes that held a whole model each"
            raise RunError(problem, "resume without --fsdp and --tp")
        return in_parts

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Defer as the Trainer does, for a model that transformers did not shard itself."""
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the state of each process's generators.

        All are saved before the first process writes the state that marks a checkpoint as complete.
        """
        with ranks.agreed():
            super()._save_rng_state(output_dir)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: nothing reads the count, and counting takes 1 % of a small model's step."""
        return 0

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Step as the Trainer does, then measure the gradient before it is clipped."""
        table_in, table_out = self.installed.tables()
        tied = table_in is table_out
        if (self.installed.record is not None) != tied:
            self.installed.track(tied)  # only a shared table adds the two gradients
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        frozen = tied and table_in.grad is None
        if self.accelerator.sync_gradients and not frozen:
            self._note_path_norms()
        return loss

    def _note_path_norms(self) -> None:
        """Note the norms of both gradient paths, divided by the scale of mixed precision.

        They stay tensors until the next log, so that no step waits for the device.
        """
        with torch.no_grad():
            norms = self.installed.path_sums()
        if self.installed.record is not None:
            self.installed.record.clear()
        scale = 1.0
        if self.accelerator.scaler is not None:
            scale = self.accelerator.scaler.get_scale()
        self.note(path_a=norms.a / scale, path_b=norms.b / scale, cosine=norms.cosine)

    def loss_of(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of one micro-batch as `compute_loss` does, without the penalty."""
        return super().compute_loss(model, inputs, *args, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss, and while training add the spec's penalty on its projection.

        The penalty is that of Press & Wolf 2017, §3.
        """
        loss = self.loss_of(model, inputs, *args, **kwargs)
        penalty = self.installed.penalty() if model.training else None
        if penalty is None:
            return loss
        self.note(penalty=penalty.detach())
        return loss + self.share_of_step(penalty, kwargs.get("num_items_in_batch"))

    def share_of_step(self, mean: Tensor, items: Any) -> Tensor:
        """Return the share of a step's loss that a micro-batch's mean contributes.

        `items` is the Trainer's `num_items_in_batch`.
        """
        # the Trainer divides by the number of micro-batches later, except for a model that takes the item count
        if not self.model_accepts_loss_kwargs or items is None:
            return mean
        micro_batches: int = self.current_gradient_accumulation_steps
        return mean / micro_batches

    def note(self, **measured: Tensor | float) -> None:
        """Note values whose means over the logging window are logged.

        A tensor with several numbers counts with each of them.
        """
        for name, value in measured.items():
            self._seen.setdefault(name, []).append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the noted means to the training log, and subtract the penalty from its loss."""
        if "loss" in logs:
            means = self._means_of_window()
            logs = {**logs, "loss": logs["loss"] - means.pop("penalty", 0.0), **means}
            if math.isnan(logs.get("cosine", 0.0)):
                del logs["cosine"]  # untied: the two gradients have no common table
            if self._evaluator is not None and (ranks.is_first() or self._sharded):
                logs |= {f"{EVALUATED}{name}": value for name, value in self._evaluator().items()}
                reshard(self.model)  # the next save and the optimizer need the parts
        super().log(logs, start_time)

    def _means_of_window(self) -> dict[str, float]:
        """Return the means of the values noted since the last log, over all processes.

        The noted values are then forgotten.
        """
        seen, self._seen = self._seen, {}
        means = {}
        for name, values in seen.items():
            numbers = torch.cat([torch.as_tensor(value).flatten() for value in values])
            means[name] = float(numbers.cpu().double().mean())
        if means and self.args.world_size > 1:  # each process saw other rows
            here = torch.tensor([*means.values()], dtype=torch.float64, device=self.args.device)
            everywhere = self.accelerator.reduce(here, "mean").tolist()
            means = dict(zip(means, everywhere, strict=True))
        return means


def training_arguments(job: Job, **changes: Any) -> ReportedArguments:
    """Return the Trainer's arguments for every run.

    The optimizer is AdamW with a cosine; `changes` of a kind replace it.
    """
    s = job.settings
    window, on_gpu = logging_window(s.steps), torch.cuda.is_available()
    recipe = {
        "per_device_train_batch_size": ranks.rows_per_rank(s.batch),
        "optim": "adamw_torch_fused",
        "adam_beta1": ADAM_BETAS[0],
        "adam_beta2": ADAM_BETAS[1],
        "lr_scheduler_type": "cosine",
        "warmup_steps": max(1, s.steps // 10),
        "max_grad_norm": 1.0,
    }
    chosen = ReportedArguments(
        output_dir=str(job.folder),
        max_steps=s.steps,
        gradient_accumulation_steps=s.accumulate,
        learning_rate=s.peak_rate,
        weight_decay=s.weight_decay,
        logging_steps=window,
        logging_nan_inf_filter=False,
        save_steps=4 * window,  # a multiple of the window, or a resumed window would average other steps
        save_total_limit=2,
        seed=job.seed,
        data_seed=1000 * job.seed,  # permutations of seeds 1, 2, 3 would overlap from one epoch to the next
        log_level_replica="error",  # else every process prints the libraries' messages
        disable_tqdm=True,
        dataloader_drop_last=True,  # or the last batch of every epoch would be smaller than the others
        dataloader_pin_memory=on_gpu,  # with the next line, rows are copied while the GPU computes
        accelerator_config={"non_blocking": on_gpu},
        remove_unused_columns=False,
        bf16=s.bf16,
        use_cpu=not torch.accelerator.is_available(),  # without it the Trainer refuses bf16 on a CPU
        activation_checkpointing=s.activation_checkpointing,
        **tracker_arguments(job.trackers, job.tracked_as, job.arm),
        **{**recipe, **changes},
    )
    chosen._n_gpu = min(chosen.n_gpu, 1)  # one device per process: replicas record no paths
    return without_events(chosen)


def logging_window(steps: int) -> int:
    """Return the steps between two points of a run's curve: 20 points, or a few more."""
    return max(1, steps // 20)


class CheckpointedCallback(TrainerCallback, ExportableState):  # type: ignore[misc, unused-ignore]  # no types
    """Callback whose attributes named in `checkpointed` are stored in checkpoints."""

    checkpointed: tuple[str, ...]

    def state(self) -> dict[str, Any]:
        """Return the attributes in the form that transformers stores."""
        return {"args": {}, "attributes": {name: getattr(self, name) for name in self.checkpointed}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Set the attributes to those of the checkpoint."""
        for name, value in state.stateful_callbacks.get(type(self).__name__, self.state())["attributes"].items():
            setattr(self, name, value)


class RunRecord(CheckpointedCallback):
    """Callback that writes a run's curve to `metrics.jsonl`, reports progress and times steps.

    Evaluation, saving, set-up and a process's first step, which warms up, do not count in `seconds`. The count
    continues in a resumed run.
    """

    checkpointed = ("seconds", "steps")

    def __init__(self, job: Job) -> None:
        self.job, self.path = job, job.folder / METRICS
        self.seconds, self.steps = 0.0, 0
        self._start, self._warm = 0.0, False
        self._nll: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Restore a checkpoint's time, and drop lines of the curve after its step.

        An incomplete line is dropped, too.
        """
        super().on_train_begin(args, state, control, **kw)
        ranks.on_rank_zero(lambda: keep_lines(self.path, state.global_step))
        self.job.report_progress(state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Start the clock."""
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Stop the clock.

        If the Trainer continues with something other than a step, the clock includes the work that the accelerator has
        not finished.
        """
        is_last = control.should_log or control.should_save or control.should_training_stop
        if torch.accelerator.is_available() and (is_last or not self._warm):
            torch.accelerator.synchronize()
        if self._warm:
            self.seconds += time.perf_counter() - self._start
            self.steps += 1
        self._warm = True
        self.job.report_progress(state.global_step, self._nll)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kw: Any) -> None:
        """Append the training loss of the window and the noted values."""
        if logs and "loss" in logs and ranks.is_first():
            line = {"step": state.global_step, "train_nll": logs["loss"], "learning_rate": logs.get("learning_rate")}
            noted = {name: value for name, value in logs.items() if name not in ("loss", "grad_norm", "epoch")}
            measured = {name.removeprefix(EVALUATED): value for name, value in noted.items()}
            add_line(self.path, line | measured)
            self._nll = logs["loss"]


class Events(TensorBoardCallback):  # type: ignore[misc, unused-ignore]  # no types
    """Writer of a run's TensorBoard events, by the first process.

    All processes wait for it at the end.
    """

    def __init__(self, job: Job) -> None:
        folder = events_folder(job.tracked_as, job.folder)
        super().__init__(tensorboard.SummaryWriter(log_dir=str(folder)) if ranks.is_first() else None)

    on_train_begin = ranks.agreed()(TensorBoardCallback.on_train_begin)
    on_train_end = ranks.agreed()(TensorBoardCallback.on_train_end)


class Interrupt(NotedCtrlC, TrainerCallback):  # type: ignore[misc, unused-ignore]  # no types
    """Handler of Ctrl-C that finishes the step, writes a checkpoint and stops.

    A second Ctrl-C stops at once. Use it as a context manager around `trainer.train()`. Afterwards `.pressed` is True
    if Ctrl-C came. Processes that train together all stop after the same step, whichever of them got the signal. A
    press that came earlier and was lost in a library (`tiewise.core.interrupts`) counts.
    """

    def __init__(self) -> None:
        super().__init__(was_ctrl_c_pressed())

    def __enter__(self) -> Interrupt:
        self._before = set_ctrl_c_handler(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        set_ctrl_c_handler(self._before)

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> Any:
        """Make the Trainer save and stop."""
        if ranks.any_of(self.pressed):
            self.pressed = control.should_save = control.should_training_stop = True
        return control
