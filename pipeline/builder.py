"""`Pipeline`: the one builder. It is a value; each method returns a new one, and nothing runs until `fit`."""

from __future__ import annotations

import copy
import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from .. import strategies
from ..checks import is_whole
from ..errors import PlanError, require
from ..strategies import OptimizerFactory, Strategy
from ..transforms import Transform
from .cuda_settings import MatmulPrecision
from .frozen import FrozenDict
from .models import model_factory
from .optimizers import Optimization
from .plan import Plan, make_plan, sort_transforms
from .retention import Checkpoints
from .rules import check_epochs, check_hook
from .stages import ONE_DEVICE, Data, Distribution, source_name

if TYPE_CHECKING:
    from .build import Built
    from .ledger_result import Ledger
    from .lightning import HandOver
    from .loggers import Choice
    from .nonfinite import OnNonFinite
    from .result import FitResult

CHECKPOINTS, LOG_EVERY = Checkpoints(), 50
"""What `fit` does when it is not told."""


@dataclass(frozen=True, init=False, repr=False)
class Pipeline:
    """A training run, described stage by stage and started by `fit`.

    A value: it cannot change, and every method returns another one, of the same class. Pipelines of equal stages are
    equal, and have the same hash; models that are modules are equal if they are the same object. It can be pickled
    where its model can, and `dataclasses.replace` changes single fields.

    A subclass whose `__init__` takes other arguments must override `from_recipe`, which calls it as this one's.

    Args:
        model: a factory of the model, called with `model_options`; the name of one (`"resnet50"` or any
            other of torchvision, `"cifar_resnet"`, `"package.module:factory"`); or a module, which
            is copied and stays as it is.
        seed: of weights, order and augmentation. Default 0.
        model_options: arguments of the factory.

    Raises:
        PlanError, RecipeError: naming the value that cannot be used.

    Example::

        pipeline = (
            Pipeline(torchvision.models.resnet50, num_classes=10)
            .load("train.beton", "val.beton", batch_size=256, image_size=176)
            .transform(BlurPool(), ChannelsLast(), LabelSmoothing(0.1))
            .optimize("sgd", lr=2.0, momentum=0.9, weight_decay=5e-5, schedule="cosine", warmup=0.1)
            .distribute("ddp", devices=8, precision="bf16")
        )
        print(pipeline.plan())
        result = pipeline.fit(epochs=16)
    """

    model: Callable[..., nn.Module] | nn.Module
    model_options: Mapping[str, Any]
    optimization: Optimization
    data: Data | None = None
    transforms: tuple[Transform, ...] = ()
    distribution: Distribution = ONE_DEVICE
    optimized: bool = False
    seed: int = 0
    epochs: int | None = None
    recipe: str | None = None

    def __init__(
        self, model: str | Callable[..., nn.Module] | nn.Module, *, seed: int = 0, **model_options: Any
    ) -> None:
        if model_options.keys() >= _REPLACED:
            # dataclasses.replace gives every field by its name: no factory has all of them for options.
            self._take(model=model, seed=seed, **model_options)
            return
        if isinstance(model, str):
            model = model_factory(model)
        self._take(model=model, model_options=model_options, seed=seed, optimization=Optimization())

    def _take(self, **fields: Any) -> None:
        """Takes values for fields, checked. The others have their defaults from the class."""
        unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(Pipeline)})
        if unknown:
            raise PlanError(f"A pipeline has no field {unknown[0]!r}.")
        model, seed = fields["model"], fields["seed"]
        options = FrozenDict(fields["model_options"])
        if isinstance(model, nn.Module) and options:
            raise PlanError(
                f"The model is built already; it cannot take {sorted(options)}. Give its factory."
            )
        if not callable(model):
            raise PlanError(f"A model must be a module, a factory or a name, not {model!r:.80}.")
        if not is_whole(seed, 0, 2**63 - 1):
            raise PlanError(f"seed={seed!r} must be an integer from 0 to 2**63 - 1.")
        # Not by assignment, which a frozen dataclass refuses.
        vars(self).update(fields, model_options=options)

    def _with(self, **changes: Any) -> Self:
        """A copy with some fields changed, of this class, whatever arguments a subclass has for its constructor."""
        new = copy.copy(self)
        new._take(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(Pipeline)} | changes
        )
        return new

    @classmethod
    def from_recipe(cls, recipe: str | Path | Mapping[str, Any], **overrides: Any) -> Self:
        """The pipeline of a recipe, with some values replaced.

        Args:
            recipe: a name in `RECIPES`, a dict, or a file that ends in .yaml, .yml or .json.
            overrides: any value by its key (`epochs=36`, `batch_size=512`, `train="train.beton"`); a dotted key
                reaches into a dict (`**{"optimizer.lr": 0.5}`).

        Raises:
            RecipeError: for an unknown name or key, with the nearest one, or a value of the wrong kind; of a
                file, with the line.
        """
        from .recipes import build_pipeline

        return build_pipeline(recipe, overrides, cls)

    def to_recipe(self) -> dict[str, Any]:
        """This pipeline as a recipe: a dict of JSON values, from which `from_recipe` builds its equal.

        Raises:
            RecipeError: naming what no recipe can hold (a built module, a factory without a name), and the remedy.
        """
        from .recipe_export import to_recipe

        return to_recipe(self)

    @property
    def model_name(self) -> str:
        """The model's name for people."""
        if isinstance(self.model, nn.Module):
            return f"a copy of your {type(self.model).__name__}"
        return getattr(self.model, "__name__", type(self.model).__name__)

    def load(
        self,
        train: str | Path,
        val: str | Path | None = None,
        *,
        batch_size: int,
        image_size: int,
        eval_image_size: int | None = None,
        loader: str = "ffcv",
        workers: int | None = None,
        **settings: Any,
    ) -> Self:
        """The data: `.beton` files, or `"cifar10:train"` and `"cifar10:test"`.

        Args:
            train, val: files to train on, and to evaluate on after each epoch.
            batch_size: the *global* batch: the same samples make up step k on one device or on eight.
            image_size: side of the square images, in pixels.
            eval_image_size: their side in evaluation; None: image_size. A model that is trained on random
                crops is often at its best on somewhat larger images (Touvron et al. 2019, arXiv:1906.06423).
            loader: `"ffcv"`, or `"torch"` for the plain PyTorch baseline.
            workers: threads (`ffcv`) or processes (`torch`) per rank; None: one per core.
            settings: the loader's others: `crop`, `scale`, `padding`, `flip`, `mean`, `std`, …
        """
        names = source_name(train, "train"), None if val is None else source_name(val, "val")
        data = Data(*names, batch_size, image_size, loader, workers, settings, eval_image_size)
        before, optimization = self.data, self.optimization
        replaced = before is not None and self.optimized and before.batch_size != batch_size
        if before is not None and replaced and optimization.base_batch_size is None:
            # The learning rate was chosen for the batch size before.
            optimization = dataclasses.replace(optimization, base_batch_size=before.batch_size)
        return self._with(data=data, optimization=optimization)

    def transform(self, *transforms: Transform) -> Self:
        """Adds transforms, in any order; the plan sorts them.

        Raises:
            PlanError: if one is not a transform, is there twice, or does not define the method of its kind.
        """
        given: tuple[object, ...] = transforms
        for transform in given:
            if not isinstance(transform, Transform):
                hint = f" Did you mean {transform.__name__}()?" if isinstance(transform, type) else ""
                raise PlanError(f"transform() takes transforms such as BlurPool(), not {transform!r}.{hint}")
        for transform in transforms:
            check_hook(transform)
        sort_transforms((*self.transforms, *transforms))
        return self._with(transforms=(*self.transforms, *transforms))

    def optimize(
        self,
        optimizer: str | OptimizerFactory,
        *,
        schedule: str = "cosine",
        warmup: float = 0.0,
        base_batch_size: int | None = None,
        scale_lr: bool = False,
        **options: Any,
    ) -> Self:
        """The optimizer, by name (`"sgd"`, `"sgdw"`, `"adamw"`) with its options, or as a factory.

        Args:
            optimizer: a factory is a function `parameters -> Optimizer`, never an optimizer: it is
                called when surgery and wrapping have made the final parameters.
            schedule: of the learning rate, step by step: `"cosine"`, `"linear"` or `"constant"`.
            warmup: share of all steps in which the learning rate rises to its peak.
            base_batch_size: the global batch, in images, that `lr` was chosen for; None: the pipeline's own. The plan
                states how far the learning rate per image is from that, where `load` has another.
            scale_lr: whether `lr` is scaled from `base_batch_size` to the pipeline's batch size: in proportion for
                SGD (Goyal et al. 2017, arXiv:1706.02677), with the square root for AdamW (Malladi et al. 2022,
                arXiv:2205.10287). In a pipeline that comes from a recipe, the base is the recipe's own
                batch size unless it is given.
            options: the optimizer's own, e.g. `lr=2.0, momentum=0.9, weight_decay=5e-5`.

        Raises:
            PlanError: for an unknown name, with the nearest one, or a value that cannot be used.
        """
        if scale_lr is True and base_batch_size is None and self.recipe is not None and self.data is not None:
            base_batch_size = self.optimization.base_batch_size or self.data.batch_size
        optimization = Optimization(optimizer, options, schedule, warmup, base_batch_size, scale_lr)
        return self._with(optimization=optimization, optimized=True)

    def distribute(
        self,
        strategy: str | Strategy,
        *,
        devices: int = 1,
        precision: strategies.Precision = "fp32",
        accumulate: int = 1,
        clip_norm: float | None = None,
        activation_checkpointing: strategies.Policy = False,
        compile: bool | str = False,
        cudnn_benchmark: bool | None = None,
        matmul_precision: MatmulPrecision | None = None,
        **options: Any,
    ) -> Self:
        """The strategy that trains the model, by name or as an object.

        Args:
            strategy: see `drivetrain.strategies.available()`.
            devices: ranks. Outside torchrun, more than one start as fresh interpreters.
            precision: `"fp32"`, or `"bf16"` or `"fp16"`: autocast over fp32 weights.
            accumulate: microbatches into which each rank splits its share of a batch.
            clip_norm: largest norm of all gradients together; None: no clipping.
            activation_checkpointing: modules that forget their activations and compute them again in the
                backward: True for the model's blocks, class names, or a function of name and module.
            compile: have `torch.compile` compile the model in place; a string is its mode.
            cudnn_benchmark: on GPUs, have cuDNN measure its convolutions at the first batch of each size and take the
                fastest. None: where images keep their size, and torch is not set to deterministic algorithms, because
                the choice may be another in each run. Put back after the run.
            matmul_precision: on GPUs, the precision of float32 matrix products: `"highest"` (float32), `"high"`
                (TF32, several times as fast on GPUs that have it) or `"medium"`. None, the default, leaves it as it
                is, in torch `"highest"`: another would change the numbers. Put back after the run. Convolutions are
                not concerned: cuDNN computes those of float32 in TF32 by default, whatever this says.
            options: the strategy's own.

        Raises:
            StrategyError: for an unknown strategy, with the nearest name, or a value that means nothing.
            PlanError: for `devices` that are no number of ranks, and settings of the GPU that mean nothing.
        """
        return self._with(
            distribution=Distribution(
                strategy,
                devices,
                precision,
                accumulate,
                clip_norm,
                activation_checkpointing,
                compile,
                options,
                asked=True,
                cudnn_benchmark=cudnn_benchmark,
                matmul_precision=matmul_precision,
            )
        )

    def plan(self) -> Plan:
        """Every step in order with its reason. Conflicts are errors here, before any work.

        The data's files are opened as far as their headers; data sets by name are not fetched. Where the pipeline has
        a number of epochs, as that of a recipe, it is checked, too.

        Raises:
            PlanError, StrategyError: naming the parts that do not go together, and the remedy.
            DataError: for a file that is missing, cannot be read, or is not a finished `.beton` file.
        """
        from .checks import check_sources

        plan = make_plan(self)
        if self.epochs is not None:
            check_epochs(self, self.epochs)
        assert self.data is not None  # make_plan has checked
        check_sources(self.data, self.distribution.devices)
        return plan

    def build(self) -> Built:
        """Loaders, model and engine of this process, ready for a loop of your own."""
        from .build import build

        return build(self)

    def fit(
        self,
        *,
        epochs: int | None = None,
        out: str | Path | None = None,
        progress: bool = True,
        resume: str | Path | bool | None = None,
        checkpoints: Checkpoints | None = CHECKPOINTS,
        on_nonfinite: OnNonFinite = "raise",
        logger: Choice = None,
        log_every: int = LOG_EVERY,
    ) -> FitResult:
        """Trains.

        A run that is resumed goes on as if it had not been interrupted: bit for bit with the same strategy and
        number of ranks, with others to the rounding of sums. What is compared, and refused where it differs:
        model, optimizer, schedule, seed, data, batch size, transforms, precision, clipping, and the epochs
        unless the learning rate and the transforms (`Transform.depends_on_length`) do not depend on them. Functions
        among the settings are compared by module and qualified name, lambdas also by their code. Epochs that
        were finished keep their lines in the history. A run that was finished gives its result.

        Args:
            epochs: passes over the training data; None: the recipe's.
            out: a folder for `plan.txt` and `recipe.yaml`, for `history.json` and `model.safetensors`, written
                after each epoch, for `curves.png`, drawn at the end, and for `checkpoints/`. With several
                machines, one that all of them share.
            progress: show a bar and a line per epoch.
            resume: `"auto"`, or True: from the newest complete checkpoint in `out`, or from the start where there is
                none; a path: from this checkpoint, or the newest of this run's folder; None, or False: from the start.
                A path to a checkpoint in `out` that is not the newest one there is refused: the newer would be lost.
                An earlier run in `out` is then replaced, and a line says so: its results go when this one begins,
                its checkpoints once the first new one is complete.
            checkpoints: when they are made, and which are kept; None: none are. Without `out` there are none.
            on_nonfinite: `"raise"`: a loss that is not finite ends the training, naming step, rank and the last
                good checkpoint; `"skip"`: its step is not taken by any rank. The learning rate goes on, and
                the history counts it. On a GPU every step then waits for its loss.
            logger: `"csv"` (`out/metrics.csv`), `"tensorboard"` (`out/tensorboard/`), an object with
                `log(dict, step=)` or `log_metrics(dict, step=)`, such as `wandb.init(…)` or the module `mlflow`,
                or a list of them. It gets each epoch's figures, and those of every `log_every`-th step under
                names that begin with `step/`, the loss being that of rank 0's share of the batch. Only rank 0
                logs; where this call starts the ranks, an object is copied to it. A logger that fails is left
                out from then on, with a `LoggerWarning`. A run that is resumed goes on in the same files.
            log_every: optimizer steps between two entries. 50 by default, so that they cost nothing to speak of;
                the device is never waited for.

        Raises:
            PlanError, DataError, StrategyError: before training, if it cannot work.
            DrivetrainError: if another run is training in `out`.
            CheckpointError: if a checkpoint cannot be written, or is damaged, or is of another run.
            NonFiniteError: see `on_nonfinite`.
            TrainingInterrupted: on Ctrl-C; a KeyboardInterrupt that carries what was finished.
        """
        from .fit import fit

        return fit(
            self, epochs=epochs, out=out, progress=progress, resume=resume, checkpoints=checkpoints,
            on_nonfinite=on_nonfinite, logger=logger, log_every=log_every,
        )  # fmt: skip

    def to_lightning(self, *, epochs: int | None = None, **trainer: Any) -> HandOver:
        """This pipeline for Lightning: `module, data, trainer, reports`; `Trainer(**trainer).fit(module, data)`.

        Each strategy of Lightning's can train it, by its name there or as an object:
        `to_lightning(epochs=16, strategy="ddp_spawn", devices=2)`, or as is usual in Lightning,
        `Trainer(**{**trainer, "strategy": "ddp_spawn"})`. What `distribute` was told is translated otherwise.
        `fsdp` and its kin then are FSDP1, with the whole model as one unit (`FSDPStrategy(auto_wrap_policy=…)`
        divides it), and need GPUs, as do Lightning's `deepspeed…`; `ddp_fork` and `ddp_notebook` fork this process,
        in which torch should not have computed on several threads by then. This call does not.

        The losses are those of `fit` with the same seed. Statistics of BatchNorm are not averaged over the ranks
        before evaluation, as `fit` does. Of a sharded model, `Trainer.save_checkpoint` gathers the weights.

        Args:
            epochs: passes over the training data, which the schedule needs; None: the recipe's.
            trainer: arguments of Lightning's `Trainer` that replace the pipeline's, or come to them: `strategy`,
                `devices`, `accelerator`, `callbacks`, `logger`, …

        Raises:
            PlanError: naming what works in our own loop only (EMA, SWA, SAM, …), a strategy that Lightning does not
                have, or a value that is the pipeline's to say; by `Trainer.fit`, before training, if the Trainer was
                told other epochs or another accumulation, or the batch does not divide among its ranks.
            MissingExtra: without Lightning.
        """
        require("lightning.pytorch", "lightning", "hand a pipeline over to Lightning")
        from .lightning import hand_over

        return hand_over(self, epochs, trainer)

    def ledger(
        self,
        *,
        seconds: float = 120.0,
        within: float = 0.02,
        accuracy: bool = False,
        epochs: int | None = None,
        target: float | None = None,
        progress: bool = True,
    ) -> Ledger:
        """Measure what each stage brings: alone, added in turn, and last; and which part is the bottleneck.

        Plain PyTorch is 1.00. It reads the same samples, from the same file. What `fit` has beside the steps (bar,
        the CSV log every 50 steps, the guard against losses that are not finite) is off, and has a row of its own.

        `seconds` includes everything but the fetching of a named data set and the trainings of `accuracy`: building,
        warm-up, compiling, rounds and peak memory. Plain PyTorch and the full pipeline, one turn each, are the least
        that is a ledger. What fits besides is decided by how long these take: turns of fewer batches, fewer rounds,
        fewer variants. What is left out is in `facts["left_out"]`, with the reason. When the time is over, no further
        batch begins, and one that runs is interrupted; in another thread than the main one it is waited for. So a
        ledger takes longer by at most one batch, or the building of one model.

        A variant that fails (it diverges, lacks memory, loses a rank) is a row with the reason; see
        `facts["failed"]`. The others are measured without it.

        Args:
            seconds: the time to spend.
            within: ends earlier when every interval is as narrow as this to each side (0.02: ± 2 %).
            accuracy: then also trains each variant (the stages in turn, only one stage, all but one), with
                accuracy and time. These trainings are not part of `seconds`, and take as long as so many calls of
                `fit`; the bar shows which of them runs, and the time left.
            epochs: to train each of them; None: the recipe's. Only with `accuracy`.
            target: top-1 accuracy, 0 to 1, to give the time to; None: what plain PyTorch reaches. Likewise.
            progress: show a bar of the time that is used.

        Raises:
            PlanError, DataError, StrategyError: as `fit`.
            LedgerError: if plain PyTorch fails, or `seconds` is too short for the least (the message has how many
                would do). Its `ledger` has the rounds that were complete, or None.
            DrivetrainError: if two variants did not train on the same samples.
            LedgerInterrupted: on Ctrl-C, a KeyboardInterrupt. Its `ledger` has what was measured by then, or None.
        """
        from .ledger import measure

        return measure(
            self, seconds=seconds, within=within, accuracy=accuracy, epochs=epochs, target=target,
            progress=progress,
        )  # fmt: skip

    def __repr__(self) -> str:
        """The calls that make an equal pipeline, as far as text can; what has its default is left out."""
        head = {"seed": self.seed} if self.seed else {}
        name = type(self.model).__name__ if isinstance(self.model, nn.Module) else self.model_name
        lines = [f"{type(self).__name__}({_call((name,), {**head, **self.model_options})})"]
        if self.data:
            lines.append(f"  .load({_call(*self.data.arguments())})")
        if self.transforms:
            lines.append(f"  .transform({', '.join(map(repr, self.transforms))})")
        if self.optimized:
            lines.append(f"  .optimize({_call(*self.optimization.arguments())})")
        if self.distribution.asked:
            lines.append(f"  .distribute({_call(*self.distribution.arguments())})")
        about = [] if self.recipe is None else [f"recipe {self.recipe!r}"]
        about += [] if self.epochs is None else [f"epochs={self.epochs}"]
        return "\n".join([*lines, f"  # {', '.join(about)}"] if about else lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def _call(positional: Sequence[object], named: Mapping[str, object]) -> str:
    """Arguments as they are written in a call; the first may be the text of a name."""
    return ", ".join([*map(str, positional), *(f"{name}={value!r}" for name, value in named.items())])


_REPLACED = {field.name for field in dataclasses.fields(Pipeline)} - {"model", "seed"}
"""What `dataclasses.replace` gives to `Pipeline.__init__` besides its own arguments."""
