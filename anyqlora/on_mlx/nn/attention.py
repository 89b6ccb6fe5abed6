"""Attention of which backward keeps queries, keys and values only: the scores of pairs of tokens are made again there,
some heads at a time.

MLX's own kernel keeps no scores, but makes way for plain products wherever a gradient is asked
(ScaledDotProductAttention::use_fallback, mlx 0.32). Those keep the softmax [B, heads, T, T] of every layer, and
backward has four such arrays at a time: 17 GB for four rows of 4,096 tokens and 32 heads in 16 bits.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import mlx.core as mx

from anyqlora.on_mlx._compat import attention_replaced
from anyqlora.planning.memory import activations

own = mx.fast.scaled_dot_product_attention


@contextlib.contextmanager
def recomputed_attention() -> Iterator[None]:
    """While it lasts, models that call mx.fast.scaled_dot_product_attention, as mlx-lm's do, get `attention`
    instead.
    """

    def instead(queries, keys, values, *, scale, mask=None, sinks=None, **more):
        if sinks is not None or more:  # sinks may learn
            return own(queries, keys, values, scale=scale, mask=mask, sinks=sinks, **more)
        return attention(queries, keys, values, scale, mask)

    with attention_replaced(instead):
        yield


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    """MLX's own [B, heads, T, D] of [B, heads, T, D] and twice [B, kv heads, S, D]; a mask is None, "causal" or an
    array that broadcasts to [B, heads, T, S], of which no gradient is asked.
    """
    cuts = parts(queries.shape, keys.shape, queries.itemsize)

    def some(at):
        masked = mask
        if isinstance(mask, mx.array):
            leading = zip(at[4 - mask.ndim :], mask.shape, strict=False)  # rows and heads, as far as the mask has them
            masked = mask[tuple(part if length > 1 else slice(None) for part, length in leading)]
        return lambda q, k, v: own(q, k, v, scale=scale, mask=masked)

    @mx.custom_function
    def made(queries, keys, values):
        out = mx.zeros((*queries.shape[:-1], values.shape[-1]), mx.result_type(queries, keys, values))
        for at, of in cuts:
            taken = mx.depends(
                [queries[at], keys[of], values[of]], [out]
            )  # or the scores of all could be there at once
            out[at] = some(at)(*taken)
        return out

    @made.vjp
    def made_vjp(primals, cotangent, output):
        queries, keys, values = primals
        gradients = [mx.zeros_like(value) for value in primals]
        for at, of in cuts:
            *taken, back = mx.depends([queries[at], keys[of], values[of], cotangent[at]], gradients)
            _, chunk_gradients = mx.vjp(some(at), taken, [back])
            for whole, where, part in zip(gradients, (at, of, of), chunk_gradients, strict=True):
                whole[where] = whole[where] + part  # heads of one group share keys and values
        return tuple(gradients)

    return made(queries, keys, values)


def parts(queries: tuple, keys: tuple, width: int) -> list[tuple[tuple, tuple]]:
    """[(rows and heads of the queries, rows and heads of keys and values)] of these shapes: so many at a time that
    their scores, of `width` bytes each, have activations.SCORES_ON_MLX bytes, but one head at least.
    """
    rows, heads, length, _ = queries
    group = heads // keys[1]
    fitting = max(1, activations.SCORES_ON_MLX // (length * keys[2] * width))  # heads
    if fitting >= heads:
        whole = [(slice(row, row + fitting // heads), slice(None)) for row in range(0, rows, fitting // heads)]
        return list(zip(whole, whole, strict=True))
    together, cuts = max(fitting // group, 1) * group, []  # heads of whole groups
    for row, start in itertools.product(range(rows), range(0, heads, together)):
        end = min(start + together, heads)
        for first in range(start, end, fitting):  # more than one only where a group does not fit
            last = min(first + fitting, end)
            cuts.append(
                (
                    (slice(row, row + 1), slice(first, last)),
                    (slice(row, row + 1), slice(first // group, -(-last // group))),
                )
            )
    return cuts
