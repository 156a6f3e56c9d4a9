"""Training methods in a pipeline: each is called at its place, and has the same effect as in a custom loop."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from drivetrain import DataError, Pipeline, PlanError
from drivetrain import transforms as t
from drivetrain.loaders import FFCVLoader
from drivetrain.pipeline.training.hooks import TrainingHooks
from drivetrain.pipeline.training.loop import train_epoch
from pipeline_data import BATCH, CLASSES, SIDE, TRAIN, AllBut, Toy, batch_norm_model, evaluated, numbers, plain_model
from torch import nn

METHODS = [
    t.MixUp(), t.CutMix(), t.CutOut(length=0.25), t.ColOut(), t.SelectiveBackprop(0.0, 1.0), t.ProgressiveResizing(),
    t.EMA(half_life=2), t.SWA(0.5, 0.9), t.Lookahead(2), t.SAM(), t.GradientClipping("value", 0.01),
    t.GradientClipping("adaptive", 0.1), t.GradientClipping("norm", 0.5), t.NoWeightDecay(), t.TestTimeFlip(),
    t.LayerFreezing(0.0, 1.0),
]  # fmt: skip


def fit(pipeline: Pipeline, epochs: int = 2) -> Any:
    return pipeline.fit(epochs=epochs, progress=False)


def decaying(toy: Toy) -> Pipeline:
    return toy.pipeline(batch_norm_model).optimize("sgd", lr=0.05, momentum=0.9, weight_decay=0.01)


@pytest.fixture(scope="module")
def plain(toy: Toy) -> Any:
    return numbers(fit(decaying(toy), 4))


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_each_trains_and_differs_from_plain_training(toy: Toy, method: t.Transform, plain: Any) -> None:
    with_it = fit(decaying(toy).transform(method), 4)
    losses = [epoch.loss for epoch in with_it.history.epochs]
    assert losses[-1] < losses[0]
    assert with_it.history.epochs[-1].val_loss < 1.2
    assert numbers(with_it) != plain
    assert numbers(with_it) == numbers(fit(decaying(toy).transform(method), 4))  # and is the same when run again


def test_mixing_comes_before_smoothing_and_keeps_each_rows_sum(toy: Toy) -> None:
    seen: list[torch.Tensor] = []

    def spy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(targets)
        return logits.sum() * 0

    pipeline = toy.pipeline().transform(t.LabelSmoothing(0.1), t.CutMix(), t.MixUp())
    with pipeline.build() as built:
        built.hooks.begin(built.engine, 10)
        images, labels = next(iter(built.train))
        ((mixed, targets),) = built.hooks.microbatches(built.engine, images, labels, spy)
        loss = built.loss(torch.zeros(BATCH, CLASSES), targets)
    assert mixed.shape == images.shape
    assert targets.shape == (BATCH, CLASSES)
    torch.testing.assert_close(targets.sum(1), torch.ones(BATCH))
    assert (targets.max(1).values < 1).any()
    assert loss.item() == pytest.approx(torch.tensor(CLASSES).log().item())


@pytest.mark.parametrize(("half_life", "warned"), [(1000, True), (1, False)])
def test_an_average_that_keeps_its_start_is_named(
    toy: Toy, capsys: pytest.CaptureFixture[str], half_life: float, warned: bool
) -> None:
    toy.pipeline().transform(t.EMA(half_life=half_life)).fit(epochs=1)
    printed = capsys.readouterr().out
    assert (f"after all {TRAIN // BATCH} steps its average" in printed) is warned
    assert ("% initial weights" in printed) is warned


@pytest.mark.parametrize(("interval", "warned"), [(5, True), (4, False)])
def test_slow_weights_that_are_never_updated_are_named(
    toy: Toy, capsys: pytest.CaptureFixture[str], interval: int, warned: bool
) -> None:
    toy.pipeline().transform(t.Lookahead(interval)).fit(epochs=1)
    assert (f"in a run of {TRAIN // BATCH} steps it never updates" in capsys.readouterr().out) is warned


def test_the_average_is_evaluated_and_returned(toy: Toy) -> None:
    """The returned weights have the accuracy of the history; training continues from the unaveraged weights."""
    result = fit(toy.pipeline().transform(t.EMA(half_life=3)), 3)
    last = result.history.epochs[-1]
    assert evaluated(result.model, toy.val) == pytest.approx((last.val_loss, last.accuracy), abs=1e-5)
    plain = fit(toy.pipeline(), 3)
    assert [e.loss for e in result.history.epochs] == [e.loss for e in plain.history.epochs]
    assert not torch.equal(result.model[0].weight, plain.model[0].weight)


def test_images_grow_in_the_decoder(toy: Toy) -> None:
    resizing = t.ProgressiveResizing(initial_scale=0.5, delay=0.25, finetune=0.25, size_increment=2)
    sizes = []
    with toy.pipeline().transform(resizing).build() as built:
        methods, loader = built.hooks, built.train
        methods.begin(built.engine, 8 * len(loader))
        for _ in range(8):
            methods.begin_epoch(loader, SIDE)
            shapes = {tuple(images.shape[2:]) for images, _ in loader}
            methods.state.step += len(loader)
            sizes.append(shapes)
    assert [next(iter(shapes))[0] for shapes in sizes] == [8, 8, 8, 12, 12, 16, 16, 16]
    assert all(len(shapes) == 1 for shapes in sizes)


def test_in_the_end_the_model_has_the_average(toy: Toy) -> None:
    with toy.pipeline().transform(t.EMA(half_life=3)).build() as built:
        engine, methods = built.engine, built.hooks
        methods.begin(engine, len(built.train))
        train_epoch(engine, built.train, built.loss, hooks=methods)
        trained = engine.export_state()
        with methods.evaluating():
            average = engine.export_state()
        assert not torch.equal(trained["0.weight"], average["0.weight"])
        torch.testing.assert_close(engine.export_state(), trained, rtol=0, atol=0)
        methods.finish()
        torch.testing.assert_close(engine.export_state(), average, rtol=0, atol=0)


def test_evaluation_stays_at_full_size(toy: Toy) -> None:
    half = fit(toy.pipeline().transform(t.ProgressiveResizing(0.5, 1.0, 0.0, 1)), 1)
    assert evaluated(half.model, toy.val)[0] == pytest.approx(half.history.epochs[0].val_loss, abs=1e-5)


def test_flipped_images_count_in_evaluation(toy: Toy) -> None:
    result = fit(toy.pipeline().transform(t.TestTimeFlip()), 1)
    with FFCVLoader(toy.val, batch_size=50, image_size=SIDE, train=False, workers=1) as loader:
        images, labels = next(iter(loader))
    with torch.no_grad():
        logits = (result.model(images) + result.model(images.flip(3))) / 2
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert result.history.epochs[0].val_loss == pytest.approx(loss, abs=1e-5)


def test_sam_takes_its_gradient_nearby_and_counts_batches_once(toy: Toy) -> None:
    with toy.pipeline(batch_norm_model).transform(t.SAM(rho=0.5)).build() as built:
        engine, methods = built.engine, built.hooks
        methods.begin(engine, 1)
        parts = methods.microbatches(engine, *next(iter(built.train)), built.loss)
        weight = engine.plain_model[0].weight

        def gradients() -> None:
            for images, targets in parts:
                engine.backward(built.loss(engine.model(images), targets))

        gradients()
        first, before = weight.grad.clone(), weight.detach().clone()
        methods.before_step(gradients)
        assert torch.equal(weight, before)
        assert not torch.allclose(weight.grad, first, rtol=1e-3)
        assert engine.plain_model[1].num_batches_tracked.item() == 1
        engine.step()


@dataclass(frozen=True)
class Watches(t.Transform):
    """Keeps what the loop has of a microbatch at a moment, whichever others a session follows."""

    moment: str
    seen: list[Any]
    kind = "loop"
    source = "here"
    depends_on_length = False

    def session(self, model: nn.Module) -> t.Session:  # noqa: ARG002
        def look(_: t.Session, loop: t.Loop) -> None:
            self.seen.append((loop.batch, loop.outputs, loop.loss_function))

        made: t.Session = type("Look", (t.Session,), {self.moment: look})()
        return made


@pytest.mark.parametrize("moment", ["after_forward", "before_backward", "after_backward"])
def test_sessions_see_the_microbatch_at_any_of_its_moments(moment: str, toy: Toy) -> None:
    seen: list[Any] = []
    pipeline = toy.pipeline(plain_model).transform(Watches(moment, seen)).distribute("single", accumulate=2)
    with pipeline.build() as built:
        train_epoch(built.engine, built.train, built.loss, built.hooks, built.begin(1))
        assert built.hooks.state.batch is None, "which would keep its memory"
    assert len(seen) == 2 * TRAIN // BATCH
    for (images, targets), outputs, loss in seen:
        assert (len(images), len(targets)) == (BATCH // 2, BATCH // 2)
        assert loss is built.loss
        assert torch.isfinite(loss(outputs, targets))


def test_frozen_layers_stop(toy: Toy) -> None:
    """At the start of the second of two epochs, half of the layers freeze."""
    pipeline = toy.pipeline(batch_norm_model).transform(t.LayerFreezing(0.0, 1.0))
    with pipeline.build() as built:
        model = built.engine.plain_model
        built.hooks.begin(built.engine, 2)
        built.hooks.begin_epoch(built.train, SIDE)
        assert all(parameter.requires_grad for parameter in model.parameters())
        built.hooks.state.step = 1
        built.hooks.begin_epoch(built.train, SIDE)
        assert [parameter.requires_grad for parameter in model.parameters()] == [False, *[True] * 4]


def test_a_loop_of_ones_own_is_long_enough_for_its_methods(toy: Toy) -> None:
    """As `fit` is; a batch is shown without a number of epochs."""
    pipeline = toy.pipeline(plain_model).transform(t.ProgressiveResizing())
    with pipeline.build() as built:
        with pytest.raises(PlanError, match="with epochs=1 none would have full size"):
            built.begin(1)
        built.begin(8)
    pipeline.show_batch(samples=1)


def test_no_weight_decay_reaches_the_optimizer(toy: Toy) -> None:
    pipeline = toy.pipeline().optimize("adamw", lr=0.01, weight_decay=0.3).transform(t.NoWeightDecay())
    with pipeline.build() as built:
        groups = built.engine.optimizer.param_groups
        decays = {p.dim(): group["weight_decay"] for group in groups for p in group["params"]}
    assert decays == {4: 0.3, 2: 0.3, 1: 0.0}


def test_selection_keeps_half_of_every_other_batch(toy: Toy) -> None:
    with toy.pipeline().transform(t.SelectiveBackprop(0.0, 1.0)).build() as built:
        built.hooks.begin(built.engine, 100)
        sizes = []
        for images, labels in built.train:
            ((kept, targets),) = built.hooks.microbatches(built.engine, images, labels, built.loss)
            assert len(kept) == len(targets)
            sizes.append(len(kept))
            built.hooks.after_step()
    assert sizes == [BATCH // 2, BATCH] * (TRAIN // BATCH // 2)


@pytest.mark.parametrize("pack", [lambda outputs: {"out": outputs}, lambda outputs: (outputs, None)])
def test_selection_takes_the_models_main_output(pack: Any, toy: Toy) -> None:
    class Packed(nn.Sequential):
        def forward(self, images: torch.Tensor) -> Any:
            return pack(super().forward(images))

    pipelines = (toy.pipeline(model).transform(t.SelectiveBackprop(0.0, 1.0)) for model in (
        batch_norm_model, lambda: Packed(*batch_norm_model())
    ))  # fmt: skip
    plain, packed = (numbers(fit(pipeline)) for pipeline in pipelines)
    assert packed == plain


def test_random_numbers_are_those_of_seed_step_and_part(toy: Toy) -> None:
    """Two ranks with one part each draw what one process draws for two parts."""
    images, labels = torch.rand(8, 3, 4, 4), torch.arange(8) % CLASSES
    with toy.pipeline().transform(t.MixUp()).build() as built:

        def mixed(rank: int, accumulate: int, batch: slice, seed: int = 0, step: int = 3) -> list[Any]:
            methods = TrainingHooks([t.MixUp()], seed, CLASSES)
            methods.state.step = step
            built.engine.rank, built.engine.accumulate = rank, accumulate
            parts = methods.microbatches(built.engine, images[batch], labels[batch], built.loss)
            return [one for one, _ in parts]

        alone = mixed(0, 2, slice(0, 8))
        ranks = mixed(0, 1, slice(0, 4)) + mixed(1, 1, slice(4, 8))
        assert all(torch.equal(one, other) for one, other in zip(alone, ranks, strict=True))
        assert not torch.equal(alone[0], mixed(0, 2, slice(0, 8), seed=1)[0])
        assert not torch.equal(alone[0], mixed(0, 2, slice(0, 8), step=4)[0])
        # The seed itself, on which resumed runs depend.
        state = np.random.SeedSequence([7, 3, 1]).generate_state(1, np.uint64)
        context = t.BatchContext(torch.Generator().manual_seed(int(state[0])), classes=CLASSES)
        second, _ = t.MixUp().batch(images[4:], labels[4:], context)
        assert torch.equal(mixed(0, 2, slice(0, 8), seed=7)[1], second)


@pytest.mark.parametrize(
    ("methods", "distribute", "words"),
    [
        ([t.GradientClipping("norm", 1.0)], {"clip_norm": 0.5}, r"clip_norm=0.5\) both clip the gradients"),
        ([t.EMA(), t.SWA()], {}, "EMA and SWA both set the weights"),
        ([t.SWA(), t.Lookahead()], {}, "SWA and Lookahead both set the weights"),
        ([t.SeqLengthWarmup()], {}, "SeqLengthWarmup truncates sequences .* loads images"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_does_not_go_together(
    toy: Toy, methods: list[t.Transform], distribute: dict[str, Any], words: str
) -> None:
    pipeline = toy.pipeline().transform(*methods).distribute(**{"strategy": "single", **distribute})
    with pytest.raises(PlanError, match=words):
        pipeline.plan()


@pytest.mark.parametrize("model", [plain_model, batch_norm_model])
def test_what_evaluation_rejects_is_known_before_training(toy: Toy, model: Any) -> None:
    """Of images in evaluation, which may have another size; trying it leaves the model as it was."""
    at = toy.pipeline(model, eval_image_size=2 * SIDE)
    with pytest.raises(DataError, match=rf"shift={2 * SIDE}.*\(2, 3, 32, 32\).*sides larger than shift"):
        at.transform(t.TestTimeFlip(shift=2 * SIDE)).build()
    with at.build() as plain, at.transform(t.TestTimeFlip(shift=SIDE)).build() as tried:
        assert tried.engine.plain_model.training
        torch.testing.assert_close(
            tried.engine.plain_model.state_dict(), plain.engine.plain_model.state_dict(), rtol=0, atol=0
        )


def test_padded_crops_do_not_grow(toy: Toy) -> None:
    pipeline = toy.pipeline(crop="padded").transform(t.ProgressiveResizing())
    with pytest.raises(PlanError, match=r"ProgressiveResizing changes the size .* crop='padded'"):
        pipeline.plan()


def test_squares_of_pixels_do_not_grow(toy: Toy) -> None:
    several = [{"cutout": 2}, {"image_size": 4}]
    for options in ({"cutout": 4}, {"views": several}):
        pipeline = toy.pipeline(**options).transform(t.ProgressiveResizing())
        with pytest.raises(PlanError, match=r"ProgressiveResizing changes the size .* cutout= .* CutOut\(length=…\)"):
            pipeline.plan()
    assert toy.pipeline().transform(t.ProgressiveResizing(), t.CutOut()).plan().steps


@pytest.mark.parametrize("crop", ["random", "resized"])
def test_the_plan_tells_of_smaller_pieces(toy: Toy, crop: str) -> None:
    steps = toy.pipeline(crop=crop).transform(t.ProgressiveResizing()).plan().steps
    (step,) = (step for step in steps if step.what.startswith("ProgressiveResizing"))
    assert ("cuts smaller pieces" in step.why) == (crop == "random")


def test_the_plan_tells_each_methods_place(toy: Toy) -> None:
    methods = (t.TestTimeFlip(), t.EMA(), t.LabelSmoothing(), t.MixUp(), t.NoWeightDecay(), t.LayerFreezing())
    steps = toy.pipeline().transform(*methods).plan().steps
    heads = [step.what.split("(")[0].split(":")[0] for step in steps]
    assert heads[heads.index("optimizer") :] == [
        "optimizer", "NoWeightDecay", "LayerFreezing", "MixUp", "loss", "LabelSmoothing", "EMA", "TestTimeFlip"
    ]  # fmt: skip
    assert all(step.why for step in steps)
    (why,) = [step.why for step in steps if step.what.startswith("MixUp")]
    assert "become" not in why, "ProgressiveResizing and CutOut share it, and leave labels as they are"
    assert {step.asked_by for step in steps} >= {".transform()"}


def test_the_result_exports_plain_names(toy: Toy) -> None:
    """The factorised weights are multiplied out: a plain model computes the same with them."""
    few = {"min_channels": 1, "min_features": 1, "latent_channels": 2, "latent_features": 2}
    result = fit(toy.pipeline().transform(t.Factorize(**few)), 1)
    assert set(result.model.state_dict()) != set(plain_model().state_dict())
    plain = plain_model()
    plain.load_state_dict(result.plain_state())
    images = torch.rand(3, 3, SIDE, SIDE)
    with torch.no_grad():
        torch.testing.assert_close(plain(images), result.model(images), rtol=1e-4, atol=1e-5)


def test_a_plain_pipeline_does_nothing_more(toy: Toy) -> None:
    with toy.pipeline(plain_model).build() as built:
        images, labels = next(iter(built.train))
        ((same, targets),) = built.hooks.microbatches(built.engine, images, labels, built.loss)
    assert torch.equal(same, images)
    assert torch.equal(targets, labels)


@pytest.mark.parametrize(
    ("method", "side"),
    [
        (t.ProgressiveResizing(delay=0.25, finetune=0.25, size_increment=2), 14),  # 8, 10, 14 and 16 pixels
        (t.SelectiveBackprop(scale_factor=0.75), 12), (t.ColOut(0.25, 0.25), 12),
    ],
    ids=str,
)  # fmt: skip
def test_a_size_that_the_model_does_not_accept_is_named_before_training(
    toy: Toy, method: t.Transform, side: int
) -> None:
    name = type(method).__name__
    with pytest.raises(PlanError, match=rf"images of {side} × {side} pixels.* {name} trains on images of this size"):
        fit(toy.pipeline(lambda: AllBut(side)).transform(method), 4)
    fit(toy.pipeline(lambda: AllBut(side)), 1)


@pytest.mark.parametrize("first", [t.ProgressiveResizing(finetune=0.5), t.EfficientTrain(size_increment=8)], ids=str)
def test_sizes_of_two_transforms_together_are_tried_too(toy: Toy, first: t.Transform) -> None:
    """8 pixels, of which a fourth is dropped; but none is scored at half of them, since that begins later."""
    words = rf"images of 6 × 6 pixels.* {type(first).__name__} with ColOut trains on images of this size"
    with pytest.raises(PlanError, match=words):
        fit(toy.pipeline(lambda: AllBut(6)).transform(t.ColOut(0.25, 0.25), first), 2)
    later = t.SelectiveBackprop(start=0.9, end=1.0, scale_factor=0.5)
    fit(toy.pipeline(lambda: AllBut(4)).transform(later, first), 2)
