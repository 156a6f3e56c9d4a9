"""The ledger: what each stage brings, measured in one run, interleaved, and what binds the whole.

Each variant trains on the same samples with the same loop, and is refused if it did not. A round gives every
variant one turn, an epoch over the same part of the data; ratios are taken within a round, so that a machine
whose speed drifts favours none of them. Warm-up turns, and with them compiling, are not counted. Rounds end
when every ratio's confidence interval is narrow, or the time is spent; which of the two is told.

The stages in turn and the whole are always measured; each stage alone and the whole without each, as far as the
time allows; what is left out is told, with the reason.
"""

from __future__ import annotations

from contextlib import ExitStack
from time import perf_counter

import torch
from tqdm.auto import tqdm

from ..checks import is_number
from ..errors import DrivetrainError, PlanError
from ..strategies.group import under_torchrun
from .build import seeded
from .builder import Pipeline
from .fit import with_files
from .ledger_accuracy import check_accuracy, train_each
from .ledger_crew import MIN_BATCHES, Loaders, Taker, groups
from .ledger_findings import fallen, loses
from .ledger_memory import PEAK_RESERVE, PEAK_SECONDS, peak_bytes
from .ledger_result import Ledger
from .ledger_rounds import PLAIN, Turn, only, same_samples
from .ledger_variants import Variant, alone_and_without, in_turn, pair, possible, stages, variants
from .provenance import provenance

MIN_ROUNDS, MAX_ROUNDS = 3, 30
# Intervals of fewer rounds may be narrow by chance; each further variant must leave time for as many.
TIGHT_ROUNDS = 5
AIM_ROUNDS = 8  # that a turn's length is chosen for
WITHIN = 0.02
"""The ledger ends when every interval is as narrow as this to each side."""
FOR_PAIRS = 0.15  # share of the time that is kept to find out which stages stand in each other's way


def measure(
    pipeline: Pipeline,
    *,
    seconds: float = 120.0,
    within: float = WITHIN,
    accuracy: bool = False,
    epochs: int | None = None,
    target: float | None = None,
    progress: bool = True,
) -> Ledger:
    """Measures the ledger of a pipeline; see `Pipeline.ledger`.

    Raises:
        PlanError, DataError, StrategyError: as `Pipeline.fit`.
        DrivetrainError: if two variants did not train on the same samples.
    """
    check_asked(seconds, within)
    begin = perf_counter()
    plan = pipeline.plan()
    if accuracy:
        epochs = check_accuracy(pipeline, epochs, target)
    elif epochs is not None or target is not None:
        raise PlanError(
            "epochs and target are of the trainings that accuracy=True asks for. Give it, or neither."
        )
    pipeline = with_files(pipeline, progress)
    found = _measured(pipeline, begin, seconds, within, progress)
    assert pipeline.data is not None  # the plan has checked
    found.facts.update(
        recipe=pipeline.recipe,
        plan=plan.to_dict()["steps"],
        asked={
            "loader": pipeline.data.loader,
            "precision": pipeline.distribution.precision,
            "compile": bool(pipeline.distribution.compile),
        },
        batches_per_turn=found.rounds[0][PLAIN].images // pipeline.data.batch_size,
        seconds=round(perf_counter() - begin, 1),
        provenance=provenance(),
    )
    if accuracy and epochs is not None:
        found.facts["accuracy"] = train_each(
            [*in_turn(pipeline), *possible(alone_and_without(pipeline))], epochs, target, progress
        )
    return found


def check_asked(seconds: float, within: float = WITHIN) -> None:
    """Raises PlanError for what no ledger can be measured with, and under torchrun."""
    if not is_number(seconds, "(0, inf)"):
        said = f"{seconds:g}" if is_number(seconds) else repr(seconds)
        raise PlanError(f"seconds={said} (--seconds, --ledger-seconds) must be positive and finite.")
    if not is_number(within, "(0, 1)"):
        raise PlanError(f"within={within!r} must be between 0 and 1: 0.02 asks for intervals of ± 2 %.")
    if under_torchrun():
        raise PlanError("The ledger starts its ranks itself, between other turns. Start it without torchrun.")


def _measured(pipeline: Pipeline, begin: float, seconds: float, within: float, progress: bool) -> Ledger:
    """The ledger's figures.

    Raises:
        KeyboardInterrupt: on Ctrl-C, without the frames that hold every variant's model: a notebook keeps them.
    """
    try:
        # Turns draw random numbers, as training does; the caller's stay as they are.
        with seeded(pipeline.seed):
            return _Measurement(pipeline, begin, seconds, within, progress).run()
    except KeyboardInterrupt:
        pass
    raise KeyboardInterrupt("the ledger was interrupted; one of fewer seconds ends earlier")


class _Measurement:
    """One measurement of a ledger, from warming up to the last round."""

    def __init__(
        self, pipeline: Pipeline, begin: float, seconds: float, within: float, progress: bool
    ) -> None:
        self._pipeline, self._within, self._seconds = pipeline, within, seconds
        self._left_out: dict[str, str] = {}
        self._in_processes = self._weighs_processes()
        self._deadline = begin + seconds - (PEAK_RESERVE if self._in_processes else 0)
        self._longest = 0.0  # seconds of a round
        self._bar = tqdm(desc="ledger: warming up", unit=" turns", disable=not progress, leave=False)

    def run(self) -> Ledger:
        """Measures."""
        with ExitStack() as stack:
            stack.callback(self._bar.close)
            self._stack, self._loaders = stack, Loaders(stack)
            always = groups(variants(self._pipeline, copies=_has_copies(self._pipeline)))
            takers = [self._taker(group) for group in always]
            turns = self.round(takers, 0, MIN_BATCHES)
            turns |= self._add_further(takers)
            batches = self._batches(takers, turns)
            ledger = Ledger([], {})
            kept = FOR_PAIRS * self._seconds if self._may_have_pairs(takers) else 0.0
            stopped = self._rounds(ledger, takers, batches, self._deadline - kept)
            pairs = self._pairs(ledger, takers, batches)
            if kept and not pairs:  # the time that was kept for them is for further rounds
                stopped = self._rounds(ledger, takers, batches, self._deadline)
            costs = {taker.names[0]: dict(taker.costs) for taker in takers}
        for first, *_ in (always[0], always[-1]) if self._in_processes else ():
            costs[first.name]["peak_bytes"] = peak_bytes(first.pipeline)
        ledger.facts.update(stopped=stopped, left_out=self._left_out, pairs=pairs, costs=costs)
        return ledger

    def _taker(self, group: list[Variant]) -> Taker:
        self._bar.set_description(f"ledger: warming up {group[0].name}")
        return Taker(group, self._loaders, self._stack)

    def _weighs_processes(self) -> bool:
        """Whether plain PyTorch and the whole show their peak memory in processes of their own, in the end.

        On a GPU that of each variant is counted while it warms up.
        """
        if _has_copies(self._pipeline):
            return False
        if self._seconds < PEAK_SECONDS:
            reason = f"it takes two processes, and less than {PEAK_SECONDS} s were given"
            self._left_out["peak memory"] = reason
        return self._seconds >= PEAK_SECONDS

    def round(self, takers: list[Taker], number: int, batches: int) -> dict[str, Turn]:
        """One turn of every variant, by name, in the order of the rows."""
        backwards = number % 2 == 0  # every second round, so that none always follows the same neighbour
        found: dict[str, Turn] = {}
        for taker in takers[:: -1 if backwards else 1]:
            found |= taker.take(number, batches, backwards)
            self._bar.update(len(taker.names))
        found = {name: found[name] for taker in takers for name in taker.names}
        same_samples(found)
        return found

    def _add_further(self, takers: list[Taker]) -> dict[str, Turn]:
        """Adds only one stage, and the whole without one, as far as the time allows; and their first turns."""
        turns: dict[str, Turn] = {}
        for variant in alone_and_without(self._pipeline):
            ranks = variant.pipeline.distribution.devices > 1
            alike = [t.seconds / len(t.names) for t in takers if t.on_ranks == ranks] or [0.0]
            expected = sum(alike) / len(alike)
            spent = sum(taker.seconds for taker in takers) + expected
            if perf_counter() + 2 * expected + TIGHT_ROUNDS * spent > self._deadline:
                self._left_out[variant.name] = "the time does not allow it; give more seconds"
                continue
            try:
                variant.pipeline.plan()
                taker = self._taker([variant])
            except (DrivetrainError, torch.OutOfMemoryError) as error:
                self._left_out[variant.name] = f"it cannot be measured: {error}"
                continue
            turns |= self.round([taker], 0, MIN_BATCHES)
            takers.append(taker)
        return turns

    def _batches(self, takers: list[Taker], turns: dict[str, Turn]) -> int:
        """How many batches a turn has, so that the rounds fit the time."""
        starting = 0.0  # of ranks, in a round
        for taker in takers:
            if taker.on_ranks:
                starting += taker.seconds - sum(turns[name].seconds for name in taker.names)
        training = sum(taker.seconds for taker in takers) - starting
        per_round = (self._deadline - perf_counter()) / AIM_ROUNDS - starting
        return max(int(MIN_BATCHES * per_round / training), MIN_BATCHES)

    def _rounds(self, ledger: Ledger, takers: list[Taker], batches: int, deadline: float) -> str:
        """Adds rounds until the intervals are narrow or the time is spent; says which of the two it was."""
        while True:
            start, number = perf_counter(), len(ledger.rounds) + 1
            if number > TIGHT_ROUNDS and ledger.spread <= self._within:
                return f"every interval is within ± {self._within:.1%}"
            if number > MIN_ROUNDS and start + self._longest > deadline:
                return f"the time of {self._seconds:g} s was spent"
            if number > MAX_ROUNDS:
                return f"{MAX_ROUNDS} rounds are the most"
            self._bar.set_description(f"ledger: round {number}")
            ledger.rounds.append(self.round(takers, number, batches))
            self._longest = max(self._longest, perf_counter() - start)

    def _may_have_pairs(self, takers: list[Taker]) -> bool:
        """Whether there are pairs to choose from, and the gains alone to compare them with."""
        names = stages(self._pipeline)
        measured = {name for taker in takers for name in taker.names}
        return len(names) > 2 and all(only(stage.name) in measured for stage in names[1:])

    def _pairs(self, ledger: Ledger, takers: list[Taker], batches: int) -> dict[str, list[float]]:
        """Where the speedups do not compound: of the stage that falls furthest, with each stage before it,
        the gain of the pair over the product of the two alone, round by round; empty if time is lacking."""
        if not self._may_have_pairs(takers) or not loses(ledger):
            return {}
        second = fallen(ledger).stage
        names = [gain.stage for gain in ledger.stages]
        firsts = names[: names.index(second)]
        if len(firsts) == 1:
            return {}  # it is known which two they are
        alone = {name: ledger.turns_of_only(name) for name in (*firsts, second)}
        by_name = {name: taker for taker in takers for name in taker.names}
        chosen = [by_name[name] for name in (PLAIN, *map(str, alone.values()))]
        spent = sum(taker.seconds for taker in chosen) * 2  # the pairs take about as long
        # Turns that are shorter than the other rounds', if need be: a pair's gain is taken within its round.
        fits = (self._deadline - perf_counter()) / ((MIN_ROUNDS + 1) * spent)
        batches, spent = int(batches * min(fits, 1.0)), spent * min(fits, 1.0)
        if batches < MIN_BATCHES:
            return {}
        chosen += [
            self._taker([Variant(f"{first} and {second}", pair(self._pipeline, first, second))])
            for first in firsts
        ]
        found: dict[str, list[float]] = {f"{first} and {second}": [] for first in firsts}
        number = 0
        while number < MIN_ROUNDS or (number < TIGHT_ROUNDS and perf_counter() + spent < self._deadline):
            number += 1
            turns = self.round(chosen, number, batches)
            for first in firsts:
                name = f"{first} and {second}"
                both = turns[str(alone[first])].speed * turns[str(alone[second])].speed
                found[name].append(turns[name].speed * turns[PLAIN].speed / both)
        return found


def _has_copies(pipeline: Pipeline) -> bool:
    """Whether batches are copied to a GPU; on a CPU they are where they are computed on."""
    device = pipeline.distribution.device
    return torch.cuda.is_available() if device is None else torch.device(device).type != "cpu"
