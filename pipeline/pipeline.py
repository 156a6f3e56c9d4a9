"""`Pipeline`: an immutable builder. Each method returns a new one, and nothing runs until `fit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ..common.checks import check_whole
from ..common.errors import PlanError, require
from ..common.options.signatures import built_from
from .describe.pipeline_spec import PipelineSpec
from .runs.config import FitConfig

if TYPE_CHECKING:
    from .describe.plan import Plan
    from .ledger.ledger import Ledger
    from .lightning.hand_over import HandOver
    from .measuring.race.race import Against
    from .measuring.race.result import RaceResult
    from .measuring.tuning.lr_range import LRRange
    from .measuring.tuning.result import Tuned
    from .recipes.presets import Completed
    from .runs.analysis.batch import ShownBatch
    from .runs.analysis.compare import RunArg, RunComparison
    from .runs.folds import CrossValidation
    from .runs.initial import WeightsArg
    from .runs.result import FitResult
    from .training.build import Built
    from .training.summary import ModelSummary


class Pipeline(PipelineSpec):
    """A training run, described stage by stage and started by `fit`.

    It is immutable: every method returns a new object of the same class. Pipelines with equal stages are equal and have
    the same hash; modules given as models are compared by identity. A pipeline can be pickled if its model can;
    `dataclasses.replace` changes single fields. A subclass with another `__init__` signature must override
    `from_recipe`, which calls `__init__` with the arguments below.

    Args:
        model: a model factory, called with `model_options`; the name of one (`"resnet50"` or any other of torchvision,
            `"cifar_resnet"`, `"timm:NAME"`, `"hf:NAME"`, `"package.module:factory"`); or a module, which is copied and
            not modified. With FSDP2 or DeepSpeed it may be on the meta device; see `strategies.FSDP`.
        seed: seed of weights, sample order and augmentation. Default 0.
        model_options: arguments of the factory. `num_classes="auto"` is the number of classes of the training data (of
            labels that are numbers or vectors, how many), decided when the plan is made; the run's recipe has it.

    Raises:
        PlanError, RecipeError: naming the invalid value.

    Example::

        >>> pipeline = (
        ...     Pipeline("resnet18", num_classes=2)
        ...     .load("train.beton", "val.beton", batch_size=16, image_size=32)
        ...     .transform(BlurPool(), ChannelsLast(), LabelSmoothing(0.1))
        ...     .optimize("sgd", lr=0.1, momentum=0.9, weight_decay=5e-5, schedule="cosine", warmup=0.1)
        ...     .distribute("single", precision="fp32")
        ... )
        >>> result = pipeline.fit(epochs=1, progress=False)
        >>> len(result.history.epochs)
        1
    """

    @classmethod
    def from_recipe(cls, recipe: str | Path | Mapping[str, Any] | Completed, **overrides: Any) -> Self:
        """Build the pipeline of a recipe, with some values replaced.

        Args:
            recipe: a name in `RECIPES`, a dict, a .yaml, .yml or .json file, or a `Completed` recipe.
            overrides: values by key (`epochs=36`, `batch_size=512`, `train="train.beton"`); a dotted key
                sets an entry of a dict (`**{"optimizer.lr": 0.5}`).

        Raises:
            RecipeError: for an unknown name or key, with the closest known one, or a value of the wrong type; for a
                file, with the line.

        Example::

            >>> pipeline = Pipeline.from_recipe("resnet50-mild", train="train.beton", val="val.beton", batch_size=64)
            >>> pipeline.epochs
            32
        """
        from .recipes.convert import build_pipeline

        return build_pipeline(recipe, overrides, cls)

    def to_recipe(self) -> dict[str, Any]:
        """Return this pipeline as a recipe: a dict of JSON values from which `from_recipe` builds an equal pipeline.

        Raises:
            RecipeError: naming what a recipe cannot contain (a module, a factory without a name), and the remedy.

        Example::

            >>> recipe = Pipeline("resnet18").load("train.beton", batch_size=16, image_size=32).to_recipe()
            >>> recipe["model"], recipe["batch_size"]
            ('resnet18', 16)
        """
        from .recipes.convert import to_recipe

        return to_recipe(self)

    def plan(self) -> Plan:
        """Return every step in order, with its reason. Conflicts raise here, before any work.

        Only the headers of data files are read; named data sets are not downloaded. The number of epochs is checked if
        the pipeline has one, e.g. from a recipe. For FSDP, the last row has the memory of a rank, computed from the
        model on the meta device.

        Raises:
            PlanError, StrategyError: naming the conflicting parts and the remedy.
            DataError: for a file that is missing, unreadable, or not a complete `.beton` file.

        Example::

            >>> for step in pipeline.transform(LabelSmoothing(0.1)).plan().steps:
            ...     print(step.what)
            load train.beton
            build cifar_resnet
            check the output
            wrap with single
            optimizer: sgd (lr=0.1), cosine schedule
            loss: cross entropy
            LabelSmoothing(smoothing=0.1)
        """
        from .describe.plan import Plan
        from .describe.resolve import resolve
        from .training.rank_memory import memory_steps

        resolved = resolve(self)
        return Plan((*resolved.steps, *memory_steps(resolved)))

    def summary(self) -> ModelSummary:
        """Return a summary of the model as it is trained, after the transforms: parameters, those that are trained,
        operations of a forward, and what it keeps for the backward. It prints as a table.

        The model is built, as by `fit`, but with random weights where files would be read; only shapes pass through it,
        so this takes about a second, and the memory of the weights. No data file needs to exist. The batch is that of a
        forward in the training: a rank's microbatch, at `load(image_size=…)`. Activation checkpointing, which keeps
        less, and the loss are not counted; a GPU's kernels may keep a little more or less. Where the model refuses such
        a forward, e.g. because it needs more than images, the summary names the reason and has the parameters only.

        Raises:
            PlanError, StrategyError: as `fit`, if the pipeline cannot work.

        Example::

            >>> summary = pipeline.summary()
            >>> summary.parameters, summary.trained
            (9830, 9830)
        """
        from .training.summary import summarize

        return summarize(self)

    def build(self) -> Built:
        """Build the loaders, model and engine of this process for a custom loop; docs/guide/how-to.md has one. The
        model has the weights that `fit` would begin with: of `init_from`, if the recipe has it. Under torchrun, this
        joins the other ranks, and each loads its share of every batch.

        Example::

            >>> with pipeline.build() as built:
            ...     images, labels = next(iter(built.train))
            >>> images.shape
            torch.Size([16, 3, 32, 32])
        """
        from .describe.resolve import resolve
        from .describe.rules import check_split_seed
        from .runs.initial import initial_weights
        from .training.build import build

        plan = resolve(self)
        check_split_seed(plan.data)
        built = build(plan, initial_weights(plan))
        built.in_own_loop = True
        return built

    @built_from(FitConfig, PipelineSpec.fit_defaults)
    def fit(self, config: FitConfig) -> FitResult:
        """Train.

        A resumed run continues as if it had not been interrupted: bit for bit with the same strategy and world size;
        across strategies or world sizes, results match up to floating-point summation order, except for what sees or
        draws for a rank's microbatch (BatchNorm, dropout, `MixUp`). Resuming requires the same model, optimizer,
        schedule, seed, data, batch size, transforms, precision and clipping, and the same epochs unless neither the
        learning rate nor any transform (`Transform.depends_on_length`) depends on them. Functions among the settings
        are compared by module and qualified name, lambdas also by their code. The history keeps the finished epochs.
        Resuming a finished run returns its result.

        Raises:
            PlanError, DataError, StrategyError: before training, if the pipeline cannot work.
            DrivetrainError: if another run is training in `out`.
            CheckpointError: if a checkpoint cannot be written, is damaged, or is from another run.
            NonFiniteError: see `on_nonfinite`.
            TrainingInterrupted: on Ctrl-C; a KeyboardInterrupt with the result of the finished epochs. With `out` and
                checkpoints, the run first finishes its step and saves a checkpoint; a second Ctrl-C stops at once.
            TrainingPreempted: on a signal of `stop_on`, after the step is finished and, with checkpoints, saved.

        Example::

            >>> result = pipeline.fit(epochs=2, eval_every=2, progress=False)
            >>> sorted(result.metrics)
            ['top1', 'val_loss']
        """
        from .runs.fit import fit

        return fit(self, config)

    def evaluate(self, weights: WeightsArg) -> dict[str, float]:
        """Return the metrics of weights of this pipeline's model on the validation data, by name.

        It computes what `fit` computes after an epoch. The training data is opened, too: it defines the classes.

        Args:
            weights: the folder of a run or of a checkpoint (the evaluated weights: averages with EMA or SWA), a file
                of weights (`.safetensors`, or of `torch.save`), or a state dict; under the names before or after the
                transforms.

        Raises:
            PlanError, DataError, StrategyError: if the pipeline cannot work, has no validation data, or the weights are
                not those of its model.
            CheckpointError: if a file or checkpoint is damaged.

        Example::

            >>> sorted(pipeline.evaluate("runs/photos"))
            ['top1', 'val_loss']
        """
        from .runs.result import evaluate_weights

        return evaluate_weights(self, weights)

    def cross_validate(self, folds: int = 5, **options: Any) -> CrossValidation:
        """Train once for each of `folds` parts of the training data, which is held out and evaluated; see
        `load(folds=…, fold=…)`.

        Validation data of the pipeline is not used: it stays for a test of the final model. With `out`, each fold has
        its folder, `out/fold-0`, …; with `resume="auto"`, finished folds are not trained again.

        Args:
            folds: the number of parts, at least 2. Default 5, the custom.
            options: those of `fit`.

        Raises:
            PlanError, DataError, StrategyError: as `fit`.

        Example::

            >>> found = pipeline.cross_validate(folds=3, epochs=1, progress=False)
            >>> sorted(found.mean), len(found.metrics)
            (['top1', 'val_loss'], 3)
        """
        from .runs.folds import cross_validate

        return cross_validate(self, folds, self.fit_defaults() | options)

    @staticmethod
    def compare(*runs: RunArg) -> RunComparison:
        """Compare runs: results, time, and only what differs between their recipes.

        Printed, it is a table, which a notebook displays; `show()` and `save("curves.png")` draw the curves of all. A
        run that is unfinished, damaged or missing has a row, too, and a sentence with what is wrong. From folders,
        no weights are read, and no code is run.

        Args:
            runs: any number of folders of runs (`fit(out=…)`), their addresses, such as `"s3://bucket/run"`, results of
                `fit`, or histories.

        Raises:
            DataError: without a run, or for what is not one; if none of the folders has a run.

        Example::

            >>> comparison = pipeline.compare("runs/photos", result)
            >>> [run.epochs for run in comparison.runs]
            [1, 1]
        """
        from .runs.analysis.compare import compare_runs

        return compare_runs(runs)

    def show_batch(self, epoch: int = 0, *, samples: int = 24, epochs: int | None = None) -> ShownBatch:
        """Return images of the first batch of an epoch as the step gets them: after crop, colors, policy, MixUp and
        CutMix, at the epoch's size, with class names and shares, masks and views.

        A notebook displays it; `save("batch.png")` writes it. The strategy's ranks are not started: their microbatches
        are computed here. Nothing is trained, so what depends on the trained weights shows those of the beginning.

        Args:
            epoch: counted from 0.
            samples: how many images of the batch, at most.
            epochs: of the training; None: the recipe's, else one more than `epoch`. Transforms may depend on it.

        Raises:
            PlanError, DataError, StrategyError: as `fit`; also for an `epoch` that there is not.
            MissingExtra: where it is drawn, without matplotlib.

        Example::

            >>> pipeline.show_batch(samples=8).texts[0]
            'cat'
        """
        for name, value, least in (("epoch", epoch, 0), ("samples", samples, 1)):
            check_whole(name, value, PlanError, least)
        if epochs is not None:
            check_whole("epochs", epochs, PlanError, 1)
        from .runs.analysis.batch import batch_of

        return batch_of(self, epoch, samples, epochs)

    def lr_range(self, *, lowest: float = 1e-6, highest: float = 10.0, steps: int = 100) -> LRRange:
        """Run Smith's learning-rate range test: train a copy for some steps while the learning rate grows from `lowest`
        to `highest` by equal factors, and return the losses.

        The strategy's ranks, transforms, and the optimizer's other options are those of the training; parameter groups
        keep their ratio to the first. The test ends early where the loss diverges: where it is not finite, or the
        smoothed one is four times its lowest. The pipeline and its model stay as they are. Printed, the result names
        the suggestion, `result.suggestion`; `show()` and `save("lr.png")` draw it.

        Args:
            lowest: learning rate of the first step. The default is below what any optimizer here trains with.
            highest: learning rate of the last step. The default is above it.
            steps: optimizer steps, 10 or more. With the default, 14 to each power of 10.

        Raises:
            PlanError, DataError, StrategyError: as `fit`; also if the loss diverges within the first steps.

        Example::

            >>> found = pipeline.lr_range(steps=12)
            >>> len(found.lrs) <= 12
            True
        """
        from .measuring.tuning.lr_range import lr_range

        return lr_range(self, lowest, highest, steps)

    def to_lightning(self, *, epochs: int | None = None, **trainer: Any) -> HandOver:
        """Return this pipeline for Lightning: `module, data, trainer, reports`; `Trainer(**trainer).fit(module, data)`.

        Any Lightning strategy can train it, by Lightning's name or as an object:
        `to_lightning(epochs=16, strategy="ddp_spawn", devices=2)`, or
        `Trainer(**{**trainer, "strategy": "ddp_spawn"})`. The other options of `distribute` are translated,
        and of a recipe's options of `fit` `init_from`, `callbacks` and `eval_every`.
        Lightning's `fsdp` strategies are FSDP1 with the full model as one unit (split it with
        `FSDPStrategy(auto_wrap_policy=…)`) and require GPUs, as do its `deepspeed…` strategies. `ddp_fork` and
        `ddp_notebook` fork this process, in which torch must not have computed on several threads before; this call
        does not.

        The losses are those of `fit` with the same seed. Unlike in `fit`, BatchNorm's statistics are not averaged over
        the ranks before evaluation; `sync_batchnorm=True` uses torch's SyncBatchNorm, on GPUs only.
        `Trainer.save_checkpoint` gathers the weights of a sharded model.

        Args:
            epochs: passes over the training data, which the schedule needs; None: the recipe's.
            trainer: arguments of Lightning's `Trainer` that replace or extend the pipeline's: `strategy`, `devices`,
                `accelerator`, `callbacks`, `logger`, …

        Raises:
            PlanError: naming a transform that only Drivetrain's loop supports (EMA, SWA, SAM, …), a strategy that
                Lightning does not have, or an argument that the pipeline determines; from `Trainer.fit`, before
                training, if the Trainer has other epochs or another accumulation, or if the batch size is not
                divisible by its ranks.
            MissingExtra: without Lightning.

        Example::

            >>> from lightning.pytorch import Trainer
            >>> module, data, trainer, reports = pipeline.to_lightning(epochs=16, logger=False)
            >>> Trainer(**trainer).max_epochs  # .fit(module, data) trains
            16
        """
        require("lightning.pytorch", "lightning", "hand a pipeline over to Lightning")
        from .lightning.hand_over import hand_over

        return hand_over(self, epochs, trainer)

    def ledger(
        self, *, seconds: float = 120.0, within: float = 0.02, accuracy: bool = False, epochs: int | None = None,
        target: float | None = None, other_loader: str | None = None, progress: bool = True,
    ) -> Ledger:  # fmt: skip
        """Measure what each stage contributes (alone, added in turn, and last), and which part is the bottleneck.

        Plain PyTorch is 1.00 and reads the same samples from the same file. The overhead of `fit` (progress bar, CSV
        log every 50 steps, guard against non-finite losses) is excluded, and has its own row.

        `seconds` includes building, warm-up, compiling, rounds and peak memory; not the download of a named data set or
        the training runs of `accuracy`. A ledger needs at least one trial each of plain PyTorch and the full pipeline.
        Their duration decides what else fits: fewer batches per trial, fewer rounds, fewer variants. `Ledger.left_out`
        lists what is left out, with the reason. When the time is over, no further batch starts and the running one is
        interrupted; outside the main thread, it finishes. So a ledger exceeds `seconds` by at most one batch, or the
        building of one model.

        A variant that fails (diverges, runs out of memory, loses a rank) becomes a row with the reason, also in
        `Ledger.failed`. The others are measured without it.

        Args:
            seconds: the time budget.
            within: stop early once every interval is this narrow to each side (0.02: ± 2 %).
            accuracy: also train each variant (the stages in turn, only one stage, all but one) and report accuracy
                and time. These training runs are not part of `seconds`; each takes as long as a call of `fit`. The
                progress bar shows the current one and the time left.
            epochs: epochs of each training run; None: the recipe's. Only with `accuracy`.
            target: the accuracy, 0 to 1, for the time to accuracy, of the metric that the task monitors; None: what
                plain PyTorch reaches. Only with `accuracy`.
            other_loader: also measure another loader, alone and in the full pipeline, interleaved with the rest:
                `"ffcv_stock"` shows FFCV's own loader next to `"ffcv"`.
            progress: show a progress bar of the time budget.

        Raises:
            PlanError, DataError, StrategyError: as `fit`.
            LedgerError: if plain PyTorch fails, or `seconds` is too short; the message states how many are enough. Its
                `ledger` has the complete rounds, or None.
            DrivetrainError: if two variants did not train on the same samples.
            LedgerInterrupted: on Ctrl-C, a KeyboardInterrupt. Its `ledger` has the results so far, or None.
        """
        from .measuring.ledger import measure

        return measure(
            self, seconds=seconds, within=within, accuracy=accuracy, epochs=epochs, target=target,
            other_loader=other_loader, progress=progress,
        )  # fmt: skip

    def tune(
        self, *, seconds: float = 600.0, allow: Sequence[str] = (), target: float | None = None,
        epochs: int | None = None, out: str | Path | None = None, again: bool = False, progress: bool = True,
    ) -> Tuned:  # fmt: skip
        """Find the fastest way to run this training on this machine, and prove it.

        Without `allow`, only changes that keep what the training computes are tried: loader workers and batches ahead,
        JPEGs stored as raw pixels where these are the same, memory format, compiling, cuDNN's search, strategies with
        the same numbers, the allocator's environment variables; and if the pipeline does not fit into memory, the
        fewest microbatches that do, then activation checkpointing. Each change is trained in turns with the best
        pipeline so far, on the same samples, those for the bottleneck first. It is accepted as soon as the confidence
        interval of the ratio excludes 1 (without an effect with a probability of at most 0.25 %), and dropped as soon
        as it excludes a gain of 1 %.

        A change of `allow` that is faster is trained from three to eight seeds, as is the pipeline as given. It is
        accepted only if the interval of the difference excludes a loss of accuracy of half a percentage point; else it
        is reported as a trade, and not taken.

        Data are converted to another format only with `out`, if the loader costs 5 % of the speed or more, and if a
        sample loads faster. The files are next to `out` if the change is accepted, and removed if not.

        The results are kept in the cache folder (`tuned` in `$DRIVETRAIN_DATA`, else in `$XDG_CACHE_HOME/drivetrain`,
        by default `~/.cache/drivetrain`), for the same pipeline with the same code of its model, transforms and task,
        the same data, machine, environment and versions, `allow`, `target` and `epochs`. A second call is answered from
        there at once, if every change was tried, or if its budget is not larger than the first's was. Otherwise it
        continues from the known trials, also after an interrupt.

        With `target`, the goal is the time to an accuracy: each change of the kinds `allow` (default: all) races the
        best pipeline so far, as `race` does, in full runs from up to eight seeds. It is accepted by the same test, on
        the ratios of the seconds of training to the target, and dropped as soon as one of its runs does not reach the
        target within 1.5 times the other's time.

        Args:
            seconds: the time budget, for everything. When it is over, the running batch is interrupted.
            allow: kinds of changes that change what the training computes: `"precision"`, `"resolution"`, `"surgery"`,
                `"batch_size"` (with the learning rate scaled to it if its rule is known), `"storage"` (JPEGs of fewer
                pixels, raw pixels where the loader decodes at a smaller size, and if the data exceed the memory
                quasi-random order); with `target` also `"methods"` (EfficientTrain, InfoBatch) and `"epochs"` (fewer),
                but not `"storage"`. Default: none; with `target`, all.
            target: the accuracy to which the time is tuned, 0 to 1: of the metric that the task monitors. Default None:
                speed is tuned. Changes of speed alone are not tried with it: tune those first.
            epochs: of each short training by which `allow` measures the accuracy. Default 1: more make it more
                similar to the full training, and take longer. With `target`: of each run; default: the recipe's.
            out: a `.json` file that keeps the trials, of one call at a time. A second one continues from it; it must be
                of the same pipeline, machine, environment and versions.
            again: whether to measure again what is kept on this machine, or in `out`. Default False.
            progress: whether to show a progress bar of the time budget.

        Returns:
            The tuned `pipeline`, `variables` of the environment to set before Python starts, and `accepted`, `trades`,
            `trials` and `bound`; it prints as a table, and saves as a recipe (`.yaml`), all figures (`.json`) and a
            picture (`.png`).

        Raises:
            PlanError, DataError, StrategyError: as `fit`; also if the pipeline fails, and for `allow` without
                validation data.
            LedgerError: if `out` is of something else.
            TuneInterrupted: on Ctrl-C, a KeyboardInterrupt. Its `tuned` has the results so far.
        """
        from .measuring.tuning.tune import tune

        return tune(
            self, seconds=seconds, allow=allow, epochs=epochs, target=target, out=out, again=again, progress=progress
        )

    def race(
        self, *, target: float, seeds: int = 3, against: Against | None = None, epochs: int | None = None,
        give_up: float | None = 5.0, seconds: float | None = None, out: str | Path | None = None, progress: bool = True,
    ) -> RaceResult:  # fmt: skip
        """Train this pipeline and others to an accuracy, from several seeds in turns, and compare the times.

        For each seed, all variants are trained one after the other, every second time in reverse order. Each run goes
        to its last epoch, as its schedule does. The time to the target is that of the first evaluation that reaches it,
        in seconds of training without evaluations. It contains what the first steps compile, but not building the
        model. Without `eval_every_steps` in the recipe, there is an evaluation per epoch.

        Args:
            target: the accuracy, 0 to 1: of the metric that the task monitors, a share such as `top1` or the mean
                intersection over union.
            seeds: how many seeds, from that of this pipeline on. With 3, the default, intervals are wide; a difference
                of a few percent needs 5 to 10.
            against: the other pipelines, as a dict by name or as a list. Default None: plain PyTorch, as in `ledger`,
                with the same model, data and optimizer.
            epochs: of each run; None: each pipeline's own, of its recipe.
            give_up: stop a run that has trained this many times as long as the fastest variant so far needed on the
                same seed, without reaching the target; `RaceResult.rule` has the rule in full. At least 1; None: stop
                no run. The default still measures speed-ups of up to 5.
            seconds: the time budget, for everything. No run begins that is expected to end after it, by the longest run
                of the same variant. A variant's first run begins in any case; the end of the budget interrupts it, and
                it does not count. With `out`, the next call continues it after its last epoch, so that the budget must
                be longer than an epoch. Default None: all runs.
            out: a `.json` file that keeps each run when it ends; a folder next to it keeps the unfinished one. A second
                call continues, also with more seeds; it must be of the same pipelines, target, machine, environment
                and versions.
            progress: whether to show a progress bar of the runs.

        Returns:
            The `runs`, and `rows` with what they show, one per variant. It prints as a table, and saves as `.json` and
            as a picture (`.png`, `.svg`, `.pdf`). A run that fails is reported with the reason, counts as not reached,
            and is repeated by the next call.

        Raises:
            PlanError, DataError, StrategyError: as `fit`; also for a pipeline without validation data.
            LedgerError: if `out` is of something else.
            RaceInterrupted: on Ctrl-C, a KeyboardInterrupt. Its `race` has the runs that had ended.

        Example::

            >>> smooth = pipeline.transform(LabelSmoothing(0.1))
            >>> race = pipeline.race(target=0.5, seeds=2, against={"smooth": smooth}, epochs=1, progress=False)
            >>> [(row.variant, row.runs) for row in race.rows]
            [('the pipeline', 2), ('smooth', 2)]
        """
        from .measuring.race.race import race

        return race(
            self, target=target, seeds=seeds, against=against, epochs=epochs, give_up=give_up, seconds=seconds, out=out,
            progress=progress,
        )  # fmt: skip
