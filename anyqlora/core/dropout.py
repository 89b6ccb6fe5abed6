"""Dropout by tokens, as every framework computes it: what is dropped of a token in a layer is a function of the token's
key, that is of the run's seed, the step, the token's row and its place there (data.stream), and of the layer's key.

Each two neighbouring columns of a layer's input share 32 bits that are mixed from the number of their pair and from the
two keys' exclusive or: with its `low` and `high` 32 bits,

    h = pair * PER_PAIR + low
    h = ((h ^ h >> 16) * FIRST) ^ high
    h = (h ^ h >> 15) * SECOND
    bits = h ^ h >> 15

in numbers of 32 bits that wrap. The even column has the lower 16 bits, the odd one the upper; a value is dropped where
they are below the `threshold`. The multipliers are those of the hash "lowbias32" (Wellons, hash-prospector) and of
Knuth's multiplicative one.
"""

from __future__ import annotations

import hashlib

BUCKETS = 1 << 16  # random numbers of 16 bits decide what is dropped
PER_PAIR, FIRST, SECOND = 0x9E3779B9, 0x21F0AAAD, 0x735A2D97


def threshold(rate: float) -> int:
    """Random numbers of 16 bits below it drop what they decide on."""
    return round(rate * BUCKETS)


def representable(rate: float) -> float:
    """The probability nearest to `rate` that 16 random bits can have."""
    return threshold(rate) / BUCKETS


def layer_key(name: str) -> int:
    """64 bits, signed, of a layer: layers that read one input have one name, and drop the same."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)
