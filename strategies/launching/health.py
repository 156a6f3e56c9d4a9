"""Which machine of a job is slower than the others: what each rank computes, and what machines send to each other."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from ..devices import wait_for

SLOW = 0.5  # of the median of other machines: below that it is broken or shared, not noise
_SIDE = 1024  # of the matrices
_SECONDS = 0.2  # that products take at least
_SENT = 16 << 20  # bytes, of which a slow start of TCP is a small part
_REPEATS = 3  # of which the fastest counts: others' traffic only makes a transfer slower
_PATTERN = 64 << 20  # bytes of memory that are written and read


@dataclass(frozen=True)
class Health:
    operations: float  # floating point operations a second, of fp32 matrix products
    bandwidth: float  # bytes a second to the faster of two other machines; 0 if not measured
    sound: bool  # whether memory returned what was written


def examine_health(hosts: Sequence[str], device: torch.device) -> list[Health]:
    """Return the health of each rank; all ranks of the default group must call it. `hosts` has the host of each."""
    with torch.no_grad():
        mine = [_operations(device), _bandwidth(hosts, device), float(_sound(device))]
    every = [torch.empty(3, dtype=torch.float64, device=device) for _ in hosts]
    dist.all_gather(every, torch.tensor(mine, dtype=torch.float64, device=device))
    return [Health(one, other, bool(sound)) for one, other, sound in (each.tolist() for each in every)]


def slow(speeds: Mapping[str, float], hosts: Mapping[str, str] | None = None) -> list[str]:
    """Return those below `SLOW` times the median of those on other hosts, because the ranks of a slow machine are slow
    together; on a single one, of all. Default for `hosts`: each its own."""
    of = hosts or {name: name for name in speeds}
    others = {host: [speed for name, speed in speeds.items() if of[name] != host] for host in of.values()}
    limits = {host: SLOW * median(each or speeds.values()) for host, each in others.items() if speeds}
    return [name for name, speed in speeds.items() if speed < limits[of[name]]]


def bandwidths(hosts: Sequence[str], health: Sequence[Health]) -> dict[str, float]:
    """Return the bandwidth of each machine; of two machines nothing, because either could be the slow one."""
    found = {host: each.bandwidth for host, each in zip(hosts, health, strict=True) if each.bandwidth}
    return found if len(found) > 2 else {}


def _operations(device: torch.device) -> float:
    left, right = (torch.ones(_SIDE, _SIDE, device=device) for _ in range(2))
    left @ right
    wait_for(device)
    start, times = time.perf_counter(), list[float]()
    while time.perf_counter() - start < _SECONDS or len(times) < _REPEATS:
        began = time.perf_counter()
        left @ right
        wait_for(device)
        times.append(time.perf_counter() - began)
    return float(2 * _SIDE**3 / min(times))


def _sound(device: torch.device) -> bool:
    written = torch.arange(_PATTERN // 4, dtype=torch.int32, device=device)
    return bool((written.bitwise_not().bitwise_not() == torch.arange(_PATTERN // 4, device=device)).all())


def _bandwidth(hosts: Sequence[str], device: torch.device) -> float:
    """Return bytes a second of the faster exchange with another machine. Machines stand in a circle, and the first
    ranks of neighbors exchange, so that one slow machine does not make its neighbors slow, which have another one."""
    places = [hosts.index(host) for host in dict.fromkeys(hosts)]
    best = 0.0
    for pairs in rounds(len(places)):
        dist.barrier()
        for one, other in pairs:
            if dist.get_rank() in (places[one], places[other]):
                best = max(best, _exchange(places[one], places[other], device))
    return best


def rounds(places: int) -> list[list[tuple[int, int]]]:
    """Return pairs of neighbors in a circle, in two or three rounds in which each place is in one pair at most."""
    links = [(place, (place + 1) % places) for place in range(places if places > 2 else places - 1)]
    odd = [links.pop()] if len(links) % 2 and len(links) > 1 else []
    return [pairs for pairs in (links[::2], links[1::2], odd) if pairs]


def _exchange(one: int, other: int, device: torch.device) -> float:
    values = torch.zeros(_SENT // 4, device=device)
    mine, peer = (one, other) if dist.get_rank() == one else (other, one)
    times = []
    for _ in range(1 + _REPEATS):  # the first connects
        start = time.perf_counter()
        for sender in (one, other):
            if sender == mine:
                dist.send(values, peer)
            else:
                dist.recv(values, peer)
        wait_for(device)
        times.append(time.perf_counter() - start)
    return 2 * _SENT / min(times[1:])
