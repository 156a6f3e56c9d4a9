"""A machine that computes or sends more slowly than the others is found, and its neighbors are not."""

import time
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from drivetrain import strategies
from drivetrain.pipeline.apps.cli import doctor
from drivetrain.strategies.launching import health
from drivetrain.strategies.launching.group import AllReduce
from drivetrain.strategies.launching.health import Health, bandwidths, examine_health, rounds, slow


@pytest.mark.parametrize("places", range(1, 9))
def test_each_machine_meets_both_neighbors_and_one_at_a_time(places: int) -> None:
    found = rounds(places)
    assert len(found) <= 3
    for pairs in found:
        members = [*chain.from_iterable(pairs)]
        assert len(set(members)) == len(members)
    links = {frozenset(pair) for pair in chain.from_iterable(found)}
    assert links == {frozenset((one, (one + 1) % places)) for one in range(places) if places > 1}


def test_slow_is_less_than_half_of_the_median() -> None:
    assert slow({"a": 10.0, "b": 11.0, "c": 4.5, "d": 9.0}) == ["c"]
    assert slow({"a": 10.0, "b": 5.1, "c": 10.0}) == slow({}) == slow({"a": 1.0}) == []


def test_the_ranks_of_a_slow_machine_do_not_count_among_those_they_are_compared_with() -> None:
    ranks = [{"host": f"node{number // 8}", "device": "CPU"} for number in range(16)]
    for slower, bad in ((4.0, ["node1"]), (5.1, [])):
        speeds = [Health(slower if rank["host"] == "node1" else 10.0, 0.0, True) for rank in ranks]
        assert doctor._healths(ranks, speeds)[1] == bad
    alone = [Health(4.0 if number == 1 else 10.0, 0.0, True) for number in range(8)]
    assert doctor._healths(ranks[:8], alone)[1] == ["node0"]


def test_of_two_machines_either_could_be_the_slow_one() -> None:
    both = [Health(1.0, 1e9, True), Health(1.0, 1e9, True), Health(1.0, 0.0, True)]
    assert bandwidths(["a", "b", "b"], both) == {}
    assert bandwidths(["a", "b", "c"], [*both[:2], Health(1.0, 1e8, True)]) == {"a": 1e9, "b": 1e9, "c": 1e8}


def test_the_bandwidth_of_an_all_reduce_is_what_each_rank_of_a_ring_sends() -> None:
    """In the median time: 2 (n - 1) / n times the size."""
    assert AllReduce(1000, 4, (0.5, 1.0, 9.0)).bandwidth == 1500
    assert AllReduce(1000, 2, (0.5, 0.5)).bandwidth == 2000


def examined() -> list[Any]:
    """On each of four ranks, as if on four machines: what is found, while rank 2 sends six times as slowly.

    Those of the others take 50 ms, because what two cores that are busy elsewhere add to a transfer is milliseconds.
    """
    send = dist.send

    def late(values: torch.Tensor, peer: int) -> None:
        time.sleep(0.3 if dist.get_rank() == 2 else 0.05)
        send(values, peer)

    with mock.patch.object(health, "_SENT", 1 << 16), mock.patch.object(health, "_SIDE", 64):
        with mock.patch.object(dist, "send", late):
            apart = examine_health(["a", "b", "c", "d"], torch.device("cpu"))
        alone = examine_health(["a"] * 4, torch.device("cpu"))
    return [[(each.bandwidth, each.sound, each.operations) for each in one] for one in (apart, alone)]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(200)
def test_four_machines_of_which_one_sends_slowly() -> None:
    first, *others = strategies.launch(examined, devices=4, device="cpu", timeout=150)
    assert all(other == first for other in others), "every rank knows all"
    apart, alone = first
    assert slow({name: speed for name, (speed, *_) in zip("abcd", apart, strict=True)}) == ["c"]
    assert all(sound and operations > 0 for _, sound, operations in apart)
    assert [speed for speed, *_ in alone] == [0.0] * 4, "one machine sends to none"
