"""Seeded permutations of 0 to n - 1 without an array: each position is computed by itself, so that a rank pays for its
own. A Feistel network over the numbers of the bits of n - 1, applied again where its result is n or more ("cycle
walking"; Black and Rogaway 2002, "Ciphers with arbitrary finite domains"): less than twice on average."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Keys = NDArray[np.uint64] | np.uint64

# Rounds of the network, and those for few bits: there a round changes little, and with 8 some orders are measurably
# more frequent than others (`test_permutation.py`).
_ROUNDS, _BITS = 8, 96
_GOLDEN, _FIRST, _SECOND = (np.uint64(value) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


_PURPOSES = 0x6F72646572  # "order": no other spawn key begins with it


def key_of(*entropy: int, purpose: int = 0) -> np.uint64:
    """Return the key of a permutation for these integers, 0 or more; `purpose` separates uses of the same ones."""
    sequence = np.random.SeedSequence(entropy, spawn_key=(_PURPOSES, purpose))
    return np.uint64(sequence.generate_state(1, np.uint64)[0])


def subkeys(key: Keys, numbers: Numbers | NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a key of its own for each of the numbers `(n,)`; `key`: one, or of each."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64
        found: NDArray[np.uint64] = _stirred(key ^ _stirred(numbers.astype(np.uint64)))
    return found


def permuted(positions: Numbers, n: int, key: Keys) -> Numbers:
    """Return where a permutation of 0 to n - 1 takes the positions `(k,)`; `key`: one, or of each position `(k,)`.

    Every position of one key has a result of its own.
    """
    return _walked(positions, n, max((n - 1).bit_length(), 2), key)


def permuted_each(positions: Numbers, sizes: Numbers, keys: NDArray[np.uint64]) -> Numbers:
    """Return the same for a size and a key of each position; all arrays are `(k,)`."""
    found = np.empty_like(positions)
    all_bits = np.maximum(np.frexp(sizes - 1)[1], 2)  # exact below 2^53
    for bits in np.unique(all_bits).tolist():
        here = np.flatnonzero(all_bits == bits)
        found[here] = _walked(positions[here], sizes[here], bits, keys[here])
    return found


def _walked(positions: Numbers, n: int | Numbers, bits: int, key: Keys) -> Numbers:
    found: Numbers = _network(positions.astype(np.uint64), bits, key).view(np.int64)
    while len(outside := np.flatnonzero(found >= n)):
        keys = key[outside] if isinstance(key, np.ndarray) else key
        found[outside] = _network(found[outside].view(np.uint64), bits, keys).view(np.int64)
    return found


def _network(numbers: NDArray[np.uint64], bits: int, key: Keys) -> NDArray[np.uint64]:
    """Return a permutation of the numbers of so many bits: each round adds to one half a function of the other."""
    low = bits - bits // 2
    halves = [numbers & np.uint64((1 << low) - 1), numbers >> np.uint64(low)]
    widths = [low, bits // 2]
    with np.errstate(over="ignore"):
        for turn in range(max(_ROUNDS, _BITS // bits)):
            to = turn % 2
            value = halves[1 - to] ^ _stirred(key + np.uint64(turn + 1) * _GOLDEN)
            value *= _FIRST
            value ^= value >> np.uint64(32)
            value *= _SECOND
            value >>= np.uint64(64 - widths[to])
            halves[to] ^= value
    found: NDArray[np.uint64] = (halves[1] << np.uint64(low)) | halves[0]
    return found


def splitmix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a pseudo-random number for each, `(n,)`: SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom
    number generators")."""
    found: NDArray[np.uint64] = _stirred(values + _GOLDEN)
    return found


def _stirred(values: Any) -> Any:
    """Return the 64 bits mixed: SplitMix64's last step."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))
