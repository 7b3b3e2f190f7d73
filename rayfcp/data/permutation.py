"""A shuffled order without a table: position in, sample out, for data of any size and in any order of asking."""

import hashlib

import numpy as np
import numpy.typing as npt

_NUM_ROUNDS = 8


def permute(positions: npt.NDArray[np.int64], *, size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Where the permutation of `[0, size)` that (seed, epoch) names sends each position; a bijection.

    A balanced Feistel network of 8 rounds permutes `[0, 4^k)`, the least such range that holds `size`; a result
    beyond `size` is sent through again until it falls inside ("cycle walking", Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002, method 2). The round function is the 64-bit finaliser of SplitMix64 (Steele, Lea
    and Flood 2014) over half + key, its keys are BLAKE2b of (seed, epoch). All of it is integer arithmetic modulo
    2^64: the same on every platform and in every version of numpy.

    Raises:
        ValueError: A position outside of `[0, size)`.

    >>> permute(np.arange(6), size=6, seed=0, epoch=0).tolist()
    [2, 1, 3, 5, 0, 4]
    """
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < size:
        raise ValueError(f"positions reach from {positions.min()} to {positions.max()}, must lie in [0, {size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    values = positions.astype(np.uint64)
    outside = np.arange(values.size)
    while outside.size:
        values[outside] = _feistel(values[outside], keys=keys, half_bits=half_bits)
        outside = outside[values[outside] >= np.uint64(size)]
    return values.astype(np.int64)


def _keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(f"rayfcp order {seed} {epoch}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(values: npt.NDArray[np.uint64], *, keys: npt.NDArray[np.uint64], half_bits: int) -> npt.NDArray[np.uint64]:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for round_number in range(_NUM_ROUNDS):
        left, right = right, left ^ (_mix(right + keys[round_number : round_number + 1]) & mask)
    return (left << bits) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
