"""What is to be trained, as a value: model, data, transforms, optimizer and strategy."""

from __future__ import annotations

import copy
import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import nn

from ... import strategies
from ...checks import is_whole
from ...errors import PlanError
from ...strategies import OptimizerFactory, Strategy
from ...transforms import Transform
from ..models.factories import model_factory
from .config import ONE_DEVICE, Data, Distribution, MatmulPrecision, source_name
from .frozen import FrozenDict
from .kinds import check_hook, sort_transforms
from .optimizers import Optimization


@dataclass(frozen=True, init=False, repr=False)
class PipelineSpec:
    """A description of a training run: the fields of a `Pipeline`, and the methods that build it.

    A value: it cannot change, and every method returns another one, of the same class. Specs of equal stages are
    equal, and have the same hash; models that are modules are equal if they are the same object. It can be pickled
    where its model can, and `dataclasses.replace` changes single fields.

    Args:
        model: a factory of the model, called with `model_options`; the name of one (`"resnet50"` or any
            other of torchvision, `"cifar_resnet"`, `"package.module:factory"`); or a module, which
            is copied and stays as it is.
        seed: of weights, order and augmentation. Default 0.
        model_options: arguments of the factory.

    Raises:
        PlanError, RecipeError: naming the value that cannot be used.
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
        unknown = sorted(fields.keys() - {field.name for field in dataclasses.fields(PipelineSpec)})
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

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, of this class, whatever arguments its constructor takes.

        Raises:
            PlanError: for a field that there is not, or a value that cannot be used.
        """
        new = copy.copy(self)
        new._take(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(PipelineSpec)} | changes
        )
        return new

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
        return self.replace(data=data, optimization=optimization)

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
        return self.replace(transforms=(*self.transforms, *transforms))

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
        return self.replace(optimization=optimization, optimized=True)

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
        return self.replace(
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


_REPLACED = {field.name for field in dataclasses.fields(PipelineSpec)} - {"model", "seed"}
"""What `dataclasses.replace` gives to `PipelineSpec.__init__` besides its own arguments."""
