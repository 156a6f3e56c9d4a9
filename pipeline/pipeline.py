"""`Pipeline`: the one builder. It is a value; each method returns a new one, and nothing runs until `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..errors import require
from .recipes.build import build_pipeline
from .recipes.export import to_recipe
from .runs.config import FitConfig
from .spec.options import built_from
from .spec.pipeline_spec import PipelineSpec
from .spec.plan import Plan
from .spec.resolve import resolve

if TYPE_CHECKING:
    from .ledger.ledger import Ledger
    from .lightning.hand_over import HandOver
    from .runs.result import FitResult
    from .training.build import Built


class Pipeline(PipelineSpec):
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
        return build_pipeline(recipe, overrides, cls)

    def to_recipe(self) -> dict[str, Any]:
        """This pipeline as a recipe: a dict of JSON values, from which `from_recipe` builds its equal.

        Raises:
            RecipeError: naming what no recipe can hold (a built module, a factory without a name), and the remedy.
        """
        return to_recipe(self)

    def plan(self) -> Plan:
        """Every step in order with its reason. Conflicts are errors here, before any work.

        The data's files are opened as far as their headers; data sets by name are not fetched. Where the pipeline has
        a number of epochs, as that of a recipe, it is checked, too.

        Raises:
            PlanError, StrategyError: naming the parts that do not go together, and the remedy.
            DataError: for a file that is missing, cannot be read, or is not a finished `.beton` file.
        """
        return Plan(resolve(self).steps)

    def build(self) -> Built:
        """Loaders, model and engine of this process, ready for a loop of your own."""
        from .training.build import build

        return build(resolve(self))

    @built_from(FitConfig)
    def fit(self, config: FitConfig) -> FitResult:
        """Train.

        A run that resumes continues as if it had not been interrupted: bit for bit with the same strategy and
        number of ranks; across strategies or world sizes, results match up to floating-point summation order. What is
        compared, and refused where it differs: model, optimizer, schedule, seed, data, batch size, transforms,
        precision, clipping, and the epochs unless the learning rate and the transforms
        (`Transform.depends_on_length`) do not depend on them. Functions among the settings are compared by module and
        qualified name, lambdas also by their code. Epochs that were finished keep their lines in the history. A run
        that was finished gives its result.

        Raises:
            PlanError, DataError, StrategyError: before training, if it cannot work.
            DrivetrainError: if another run is training in `out`.
            CheckpointError: if a checkpoint cannot be written, or is damaged, or is of another run.
            NonFiniteError: see `on_nonfinite`.
            TrainingInterrupted: on Ctrl-C; a KeyboardInterrupt that carries what was finished.
        """
        from .runs.fit import fit

        return fit(self, config)

    def to_lightning(self, *, epochs: int | None = None, **trainer: Any) -> HandOver:
        """This pipeline for Lightning: `module, data, trainer, reports`; `Trainer(**trainer).fit(module, data)`.

        Each strategy of Lightning's can train it, by its name there or as an object:
        `to_lightning(epochs=16, strategy="ddp_spawn", devices=2)`, or as is usual in Lightning,
        `Trainer(**{**trainer, "strategy": "ddp_spawn"})`. The other options of `distribute` are translated.
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
        from .lightning.hand_over import hand_over

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
        warm-up, compiling, rounds and peak memory. Plain PyTorch and the full pipeline, one trial each, are the least
        that is a ledger. What fits besides is decided by how long these take: trials of fewer batches, fewer rounds,
        fewer variants. `Ledger.left_out` has what is left out, with the reason. When the time is over, no further
        batch begins, and one that runs is interrupted; in another thread than the main one it is waited for. So a
        ledger takes longer by at most one batch, or the building of one model.

        A variant that fails (it diverges, lacks memory, loses a rank) is a row with the reason,
        and in `Ledger.failed`. The others are measured without it.

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
        from .ledger.measure import measure

        return measure(
            self, seconds=seconds, within=within, accuracy=accuracy, epochs=epochs, target=target,
            progress=progress,
        )  # fmt: skip
