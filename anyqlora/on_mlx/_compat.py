"""Every private part of another library that this folder touches, with its cause and how we know that it can go.

No other file names one: tests/test_private_names.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import mlx.core as mx


def model_classes(config: dict):
    """(model class, argument class) of a parsed config.json. Raises ValueError for an architecture that mlx-lm does not
    have.

    mlx-lm 0.32 has no public way to ask; `load_model` takes a function of this form as its argument
    `get_model_classes`. Can go when tests/on_mlx/test_architectures.py::test_mlx_lm_still_hides_its_classes fails.
    """
    from mlx_lm.utils import _get_classes

    return _get_classes(config)


def tied_weights(model) -> set[str]:
    """Names of the parameters of a transformers model that are another one's tensor, and so need not be in its files.

    transformers 5.17 to 5.23 have this list for models' authors alone.
    Can go when tests/on_torch/test_compat.py::test_transformers_still_hides_its_lists_of_modules fails.
    """
    return set(getattr(model, "_tied_weights_keys", None) or ())


@contextlib.contextmanager
def attention_replaced(attention: Callable) -> Iterator[None]:
    """Within, models that call mx.fast.scaled_dot_product_attention, as mlx-lm's do, get `attention`, of the same
    signature, instead.

    mlx 0.32: its own keeps the softmax [B, heads, T, T] of every layer wherever a gradient is asked (use_fallback of
    its primitive), and mlx-lm 0.32 has no place where a model's attention could be given to it. Can go when
    tests/on_mlx/test_attention.py::test_mlx_still_keeps_all_scores_for_a_gradient fails.
    """
    before = mx.fast.scaled_dot_product_attention
    mx.fast.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        mx.fast.scaled_dot_product_attention = before
