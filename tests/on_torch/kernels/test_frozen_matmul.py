"""Products of frozen weights in 8 bits: against float64 on the same codes, against whole products,
and in whole runs.
"""

import contextlib
import io
import itertools
import json

import pytest
import torch

from anyqlora.config.resolve import resolve
from anyqlora.core.errors import NotSupported, RunError, UsageError
from anyqlora.on_torch.adapters.fused_layers import fused_layers
from anyqlora.on_torch.assembly import int8_calibration
from anyqlora.on_torch.assembly.build import build
from anyqlora.on_torch.kernels import fused_lora
from anyqlora.on_torch.kernels.cpu import bindings
from anyqlora.on_torch.kernels.frozen_matmul import (
    FLOAT8,
    CpuFullMatmul,
    CpuInt8Matmul,
    Fp8Matmul,
    FullMatmul,
    Int8Matmul,
    SplitMatmul,
    quantize_rows,
    rotated,
)
from anyqlora.on_torch.memory import malloc
from anyqlora.on_torch.runtime import Runtime
from anyqlora.planning.backends import BackendManager
from anyqlora.recipes import sft
from tests.support import tiny_models

FOUND = BackendManager("cpu").report
needs_int8 = pytest.mark.skipif("int8" not in FOUND.products, reason="this processor's int8 products may saturate")
needs_native = pytest.mark.skipif("native" not in FOUND.kernels, reason="no C compiler, or no AVX512-BF16, is here")
LARGEST = {torch.int8: 127.0, FLOAT8: 448.0}
WAYS = [
    pytest.param(Int8Matmul(), torch.int8, id="int8", marks=needs_int8),
    pytest.param(CpuInt8Matmul(), torch.int8, id="int8 in C", marks=(needs_int8, needs_native)),
    pytest.param(Fp8Matmul(), FLOAT8, id="fp8"),
]


def drawn(*shape, seed=0, scale=1.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


@pytest.mark.parametrize("kind", LARGEST, ids=str)
def test_codes_are_the_nearest_and_the_largest_number_has_the_largest_code(kind):
    x, columns = drawn(7, 80), torch.linspace(0.5, 2, 80)
    codes, scales = quantize_rows(x, kind, columns)
    exact = x.double() * columns
    step = exact.abs().amax(1) / LARGEST[kind]
    torch.testing.assert_close(scales.double(), step, rtol=1e-6, atol=0)
    assert (codes.float().abs().amax(1) == LARGEST[kind]).all()
    width = (
        torch.ones_like(exact)
        if kind == torch.int8
        else 2.0 ** (torch.floor(torch.log2((exact / step[:, None]).abs())).clamp(min=-6) - 3)
    )  # between neighbours
    assert ((codes.double() - exact / step[:, None]).abs() <= 0.5001 * width).all()


@pytest.mark.parametrize("kind", LARGEST, ids=str)
def test_a_row_of_nothing_is_nothing_and_one_with_no_number_stays_none(kind):
    x = drawn(4, 16)
    x[0], x[1, 3], x[2, 5] = 0, torch.nan, torch.inf
    codes, scales = quantize_rows(x, kind)
    assert not codes[:3].float().any() and scales[0] == 0 and scales[1:3].isnan().all() and scales[3] > 0
    y = Int8Matmul() if kind == torch.int8 else Fp8Matmul()
    out = y.forward(y.prepare_input(x), y.prepare_weight(drawn(32, 16, seed=1)), None)
    assert not out[0].any() and out[1:3].isnan().all() and out[3].isfinite().all()


def test_numbers_are_spread_and_come_together_again():
    """Hadamard's matrix from its definition: -1 to the number of bits that a row's and a column's number share."""
    sylvester = torch.tensor(
        [[(-1.0) ** (row & column).bit_count() for column in range(32)] for row in range(32)], dtype=torch.float64
    )
    x = drawn(5, 77).double()
    torch.testing.assert_close(rotated(x)[:, 32:64], x[:, 32:64] @ sylvester / 32**0.5)
    assert torch.equal(rotated(x)[:, 64:], x[:, 64:])
    torch.testing.assert_close(rotated(rotated(x)), x)


@pytest.mark.parametrize(("products", "kind"), [way for way in WAYS if "fp8" not in way.id])
def test_a_number_that_stands_out_costs_the_others_little(products, kind):
    """As in what goes into down_proj: a few numbers of a token are ten times the others."""
    x, w, g = drawn(200, 256), drawn(96, 256, seed=1, scale=0.1), drawn(200, 96, seed=2)
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(3)) < 0.01] *= 10
    made = products.prepare_weight(w)
    for ours, whole in (
        (products.forward(products.prepare_input(x), made, None), x.double() @ w.double().T),
        (products.backward(g, made, None), g.double() @ w.double()),
    ):
        assert float((ours.double() - whole).norm() / whole.norm()) < 0.012
    (xc, xs), (wc, ws) = quantize_rows(x, kind), quantize_rows(w, kind)
    plain = (xc.double() * xs.double()[:, None]) @ (wc.double() * ws.double()[:, None]).T
    assert float((plain - x.double() @ w.double().T).norm() / (x.double() @ w.double().T).norm()) > 0.02


@needs_native
@pytest.mark.parametrize("width", [1, 15, 64, 577])
def test_codes_in_c_are_those_of_the_definition(width):
    x = drawn(40, width, scale=3.0)
    x[0], x[1, 0], x[2, -1], x[3], x[4] = 0, torch.nan, -torch.inf, 1e-39, 3e38
    weights = (
        torch.rand(width, generator=torch.Generator().manual_seed(134)) + 0.5
    )  # of 1e-39 the scale is then the next float32 at 577
    for columns, hadamard in itertools.product((None, weights), (False, True)):
        (ours, mine), (theirs, others) = (
            bindings.quantize_int8_rows(x, columns, hadamard),
            quantize_rows(x, torch.int8, columns, hadamard),
        )
        # 32 numbers are summed in another order; floats below 2^-126 are 2^-149 apart
        torch.testing.assert_close(mine, others, rtol=1e-6 * hadamard, atol=2**-149 * hadamard, equal_nan=True)
        off = ours.int() - theirs.int()
        assert off.abs().max() <= 1 and (off != 0).sum() <= off.numel() / 500  # halves: one rounding there, two here


@needs_native
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_are_scaled_in_c_as_defined(accumulate):
    sums = torch.randint(-(10**7), 10**7, (9, 33), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    row_scales, column_scales, before = torch.rand(9) * 1e-4, torch.rand(33), drawn(9, 33)
    for columns, hadamard in itertools.product((None, column_scales), (False, True)):
        out = before.clone()
        bindings.dequantize_int8(sums, row_scales, columns, out, accumulate=accumulate, hadamard=hadamard)
        exact = sums.double() * row_scales.double()[:, None] * (1 if columns is None else columns.double())
        exact = (rotated(exact) if hadamard else exact) + (before.double() if accumulate else 0)
        assert (
            (out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * (exact.abs().max() if hadamard else 1)
        ).all()  # 32 terms of any size may cancel


@pytest.mark.parametrize(("products", "kind"), WAYS)
@pytest.mark.parametrize("shape", [(600, 96, 64), (3, 4096, 32)], ids=str)
def test_products_are_those_of_their_codes(products, kind, shape):
    """In float64 on the same codes; bf16 rounds the result once, and once more what is added to."""
    m, inputs, outputs = shape
    x, w, g, before = (
        drawn(m, inputs),
        drawn(outputs, inputs, seed=1, scale=0.1),
        drawn(m, outputs, seed=2),
        drawn(m, inputs, seed=3),
    )
    bias = drawn(outputs, seed=4)
    made = products.prepare_weight(w)
    hadamard = kind == torch.int8
    (xc, xs), (wc, ws) = quantize_rows(x, kind, None, hadamard), quantize_rows(w, kind, None, hadamard)
    gc, gs = quantize_rows(g, kind, ws)
    exact = (xc.double() * xs.double()[:, None]) @ (wc.double() * ws.double()[:, None]).T
    back = (gc.double() * gs.double()[:, None]) @ wc.double()
    back = rotated(back) if hadamard else back

    def near(ours, true, roundings=1):
        return float((ours.double() - true).norm() / true.norm()) < roundings * 2**-8

    assert near(products.forward(products.prepare_input(x), made, None), exact)
    assert near(products.forward(products.prepare_input(x.view(1, m, inputs)), made, bias)[0], exact + bias.double(), 2)
    assert near(products.backward(g, made, None), back)
    assert near(products.backward(g, made, before.clone()), back + before.double(), 2)
    for ours, true in ((exact, x.double() @ w.double().T), (back, g.double() @ w.double())):
        assert near(ours, true, 5 if kind == torch.int8 else 12)  # 0.02 and 0.05: what rounding the factors costs


needs_own = pytest.mark.skipif(
    not bindings.available("frozen_matmul"),
    reason="no C compiler, no AVX512-BF16 or no AVX512-VNNI is here",
)
takes_own = pytest.mark.skipif(
    not bindings.preferred("frozen_matmul"),
    reason="no C compiler, no AVX512-BF16 or no AVX512-VNNI is here, or AMX is and oneDNN's products are used",
)
CASES = [
    (37, 64, 50, 6),
    (1, 8, 1, 2),
    (600, 1024, 33, 16),
    (13, 36, 96, 0),
    (1100, 128, 70, 2),
    (37, 5000, 300, 6),
    (1100, 8192, 40, 2),
    (0, 8, 4, 2),
]  # rows, depth, columns, rank


def multiplied(case, kind, transposed, accumulate):
    """(out of C, the same in float64): of what C is given, codes and scales among it; LoRA's narrow factor is a part of
    a wider tensor.
    """
    rows, depth, columns, rank = case
    x, w, before = drawn(rows, depth), drawn(columns, depth, seed=1), drawn(rows, columns, seed=2)
    bias = None if accumulate else drawn(columns, seed=5)
    lora = (drawn(rows, rank + 4, seed=3)[:, 2 : 2 + rank], drawn(columns, rank, seed=4).float()) if rank else None
    row_scales = column_scales = None
    exact = lora[0].double() @ lora[1].double().T if rank else torch.zeros(rows, columns, dtype=torch.float64)
    if kind == torch.int8:
        (x, row_scales), (w, column_scales) = quantize_rows(x, kind), quantize_rows(w, kind)
        products = (x.double() @ w.double().T) * row_scales.double()[:, None] * column_scales.double()
        exact += rotated(products) if transposed else products
    else:
        exact += x.double() @ w.double().T
    if transposed:
        w, lora = w.T.contiguous(), lora and (lora[0], lora[1].T.contiguous())
    bindings.frozen_matmul(
        x,
        w,
        before if accumulate else (out := torch.full_like(before, torch.nan)),
        transposed=transposed,
        accumulate=accumulate,
        hadamard=transposed,
        row_scales=row_scales,
        column_scales=column_scales,
        bias=bias,
        lora=lora,
    )
    return (before, exact + drawn(rows, columns, seed=2).double()) if accumulate else (out, exact + bias.double())


@needs_own
@pytest.mark.parametrize("accumulate", [False, True], ids=["written", "added"])
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_in_c_are_float64s_rounded_once(case, kind, transposed, accumulate):
    out, exact = multiplied(case, kind, transposed, accumulate)
    scale = (
        exact.abs().mean() if len(exact) else 0.0
    )  # where a sum cancels, its float32 terms were rounded at their own size
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4 * scale).all()


NARROW = [
    (37, 64, 6),
    (1, 8, 1),
    (600, 1024, 16),
    (77, 36, 48),
    (515, 70, 100),
    (24, 2, 3),
    (0, 8, 4),
]  # rows, columns, rank


def narrowed(case, transposed):
    """[(out of C, float64's)]: LoRA's products into a factor's rank, and the gradient of a factor by a part of a wider
    tensor.
    """
    rows, columns, rank = case
    x, m, factor = (
        drawn(rows, columns),
        drawn(rows, rank + 4, seed=1)[:, 2 : 2 + rank],
        torch.randn(rank, columns, generator=torch.Generator().manual_seed(2)),
    )
    scales = torch.linspace(0.5, 2, rank)
    into = bindings.lora_matmul(x, factor.T.contiguous() if transposed else factor, scales, transposed)
    outer, exact = bindings.lora_weight_grad(m, x, transposed), m.double().T @ x.double()
    return [
        (into, x.double() @ factor.bfloat16().double().T * scales.double()),
        (outer, exact.T if transposed else exact),
    ]


@needs_own
@pytest.mark.parametrize("transposed", [False, True], ids=["as it lies", "transposed"])
@pytest.mark.parametrize("case", NARROW, ids=str)
def test_loras_products_in_c_are_float64s(case, transposed):
    """Into the rank: of the factor in bf16, rounded once. A factor's gradient: in float32."""
    for (made, exact), step, kind in zip(
        narrowed(case, transposed), (2**-8, 0), (torch.bfloat16, torch.float32), strict=True
    ):
        assert made.dtype == kind and made.shape == exact.shape
        scale = exact.abs().mean() if len(exact) else 0.0
        assert ((made.double() - exact).abs() <= step * exact.abs() + 1e-5 * scale).all()


@needs_own
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.int8], ids=str)
def test_products_in_c_have_the_same_bits_on_any_number_of_threads(kind):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            narrow = [made for case in NARROW for transposed in (False, True) for made, _ in narrowed(case, transposed)]
            found.append(
                narrow
                + [multiplied(case, kind, transposed, False)[0] for case in CASES for transposed in (False, True)]
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for others in found[1:] for one, other in zip(found[0], others, strict=True))


@takes_own
@pytest.mark.parametrize(
    "inputs, rank, expected",
    [(48, 4, (9, 6, 6)), (48, 3, (5, 6, 6)), (47, 4, (5, 4, 6))],
    ids=["all by C", "an odd rank", "odd rows"],
)
def test_whole_products_in_c_are_those_of_torch(inputs, rank, expected, monkeypatch):
    """Outputs and all gradients, with a bias and dropout and without; what C does not take goes torch's way. Of the
    products one is dropout's.
    """
    names, calls = ("frozen_matmul", "lora_matmul", "lora_weight_grad"), []
    for name in names:
        monkeypatch.setattr(
            bindings,
            name,
            lambda *given, name=name, plain=getattr(bindings, name), **more: (
                calls.append(name) or plain(*given, **more)
            ),
        )
    generator = torch.Generator().manual_seed(5)
    weights, bias = [drawn(size, inputs, seed=size, scale=0.2) for size in (32, 16)], drawn(16, seed=3)
    factors = [
        torch.randn(shape, generator=generator).requires_grad_()
        for size in (32, 16)
        for shape in ((rank, inputs), (size, rank))
    ]
    for dropout in (0.0, 0.25):
        found = []
        for way, kind in (
            (CpuFullMatmul(), torch.bfloat16),
            (FullMatmul(), torch.bfloat16),
            (FullMatmul(), torch.float64),
        ):
            torch.manual_seed(0)
            x = drawn(2, 20, inputs, seed=6).to(kind).requires_grad_()
            parts = [
                fused_lora.LoraLinear(lambda w=w.to(kind): w, given, a, b, 0.5)
                for w, given, a, b in zip(weights, (None, bias.to(kind)), factors[::2], factors[1::2], strict=True)
            ]
            ys = fused_lora.lora_linears(x, parts, fused_lora.Dropout(dropout), matmul=way)
            found.append(
                [
                    *(y.detach() for y in ys),
                    *torch.autograd.grad(
                        ys, [x, *factors], [drawn(2, 20, size, seed=size).to(kind) for size in (32, 16)]
                    ),
                ]
            )
        for ours, theirs, exact in zip(*found, strict=True):
            off, others = (float((y.double() - exact).norm() / exact.norm()) for y in (ours, theirs))
            assert off <= 1.05 * others + 1e-4 and others < 0.01
    assert tuple(map(calls.count, names)) == expected


SEVERAL = {
    "three layers": (96, (64, 32, 32), (4, 6, 16), False, 3),
    "a bias": (64, (96,), (16,), True, 1),
    "rows half a page apart": (1536, (48, 80), (2, 4), True, 2),
    "rows of codes a page apart": (4096, (1024, 32), (2, 4), False, 2),
    "one of which nothing is used": (48, (32, 16, 8), (2, 4, 2), False, 2),
    "an odd rank": (48, (32, 16), (4, 3), False, 2),
}


@takes_own
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("rows", [19, 0])
@pytest.mark.parametrize(
    "products",
    [CpuFullMatmul(), CpuInt8Matmul(), SplitMatmul(CpuFullMatmul(), CpuInt8Matmul())],
    ids=["bf16", "int8", "int8 back"],
)
@pytest.mark.parametrize("case", SEVERAL)
def test_layers_at_once_are_the_layers_one_by_one(case, products, rows, dropout):
    """The same bits: outputs, and all gradients of those that are used."""
    inputs, outputs, ranks, has_bias, used = SEVERAL[case]
    found, made = [], []
    for is_kept in (True, False):
        torch.manual_seed(5)
        factors = [
            torch.randn(shape).requires_grad_()
            for size, rank in zip(outputs, ranks, strict=True)
            for shape in ((rank, inputs), (size, rank))
        ]
        x = drawn(2, rows, inputs, seed=6).requires_grad_()
        parts = [
            fused_lora.LoraLinear(
                lambda w=products.prepare_weight(drawn(size, inputs, seed=size)): w,
                drawn(size, seed=size) if has_bias else None,
                a,
                b,
                0.5,
                is_kept,
            )
            for size, a, b in zip(outputs, factors[::2], factors[1::2], strict=True)
        ]
        ys = fused_lora.lora_linears(x, parts, fused_lora.Dropout(dropout), matmul=products)
        gradients = torch.autograd.grad(
            ys[:used], [x, *factors], [drawn(2, rows, size, seed=size) for size in outputs[:used]], allow_unused=True
        )
        found.append([*(y.detach() for y in ys), *(g for g in gradients if g is not None)])
        made.append(type(ys[0].grad_fn).__name__)
    assert made == [
        "_LoraLinearsBackward" if case == "an odd rank" else "_FusedLoraLinearsBackward",
        "_LoraLinearsBackward",
    ]
    assert len(found[0]) == len(found[1]) == len(outputs) + 1 + 2 * used
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@needs_int8
def test_sums_of_the_largest_codes_do_not_saturate():
    """127^2 * 4096 is beyond what 16-bit sums of two products hold, as processors without VNNI have them."""
    codes = torch.full((17, 4096), 127, dtype=torch.int8)
    for sign in (1, -1):
        assert (torch._int_mm(codes, (sign * codes[:16]).T) == sign * 127 * 127 * 4096).all()


@pytest.mark.parametrize("is_biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(
    "products",
    [
        pytest.param(FullMatmul(), id="whole"),
        pytest.param(CpuFullMatmul(), id="whole in C", marks=needs_native),
        *(pytest.param(way.values[0], id=way.id, marks=way.marks) for way in WAYS if "fp8" not in way.id),
    ],
)
def test_what_lora_adds_is_not_lost_where_it_is_less_than_a_step_of_the_frozen_part(products, is_biased):
    """In the mean of many outputs it is all there. Added to the frozen part's rounded outputs, four fifths of it would
    be lost, as in a run's first steps.
    """
    x, w, small = drawn(300, 512), drawn(384, 512, seed=1, scale=512**-0.5), 2.0**-11
    bias = drawn(384, seed=2) if is_biased else None
    narrow = torch.full((300, 16), small).bfloat16(), torch.full((384, 16), 1 / 16)
    made, read = products.prepare_weight(w), products.prepare_input(x)
    added = products.forward(read, made, bias, narrow).double() - products.forward(read, made, bias).double()
    assert abs(added.mean() / small - 1) < 0.1


@pytest.mark.parametrize(("products", "kind"), WAYS)
def test_fused_linears_round_the_frozen_part_alone(products, kind):
    """What the factors learn from is not rounded: given one gradient of the outputs, theirs are those of whole
    products.
    """
    generator = torch.Generator().manual_seed(5)
    weights = [drawn(size, 48, seed=size, scale=0.2) for size in (32, 16)]
    factors = [
        torch.randn(shape, generator=generator).requires_grad_() for size in (32, 16) for shape in ((4, 48), (size, 4))
    ]
    x = drawn(40, 48, seed=6).requires_grad_()
    found = []
    for way in (products, CpuFullMatmul() if isinstance(products, CpuFullMatmul) else FullMatmul()):
        parts = [
            fused_lora.LoraLinear(lambda made=way.prepare_weight(w): made, None, a, b, 0.5)
            for w, a, b in zip(weights, factors[::2], factors[1::2], strict=True)
        ]
        ys = fused_lora.lora_linears(x, parts, matmul=way)
        found.append(
            [
                *(y.detach() for y in ys),
                *torch.autograd.grad(ys, [x, *factors], [drawn(40, 32, seed=7), drawn(40, 16, seed=8)]),
            ]
        )
    for number, (ours, theirs) in enumerate(zip(*found, strict=True)):
        off = float((ours - theirs).float().norm() / theirs.float().norm())
        assert off == 0 if number > 2 else 0 < off < 0.06, (number, off)


@needs_int8
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "made"])
@pytest.mark.parametrize(
    ("whole", "int8"),
    [
        pytest.param(FullMatmul(), Int8Matmul(), id="portable"),
        pytest.param(CpuFullMatmul(), CpuInt8Matmul(), id="in C", marks=needs_native),
    ],
)
def test_each_way_multiplies_forward_as_one_does_and_back_as_the_other(whole, int8, is_kept, dropout):
    """The same bits: outputs and the factors' gradients of whole products, the gradient of x of int8's."""
    weights = [drawn(size, 48, seed=size, scale=0.2) for size in (32, 16)]
    factors = [drawn(*shape, seed=9).float().requires_grad_() for size in (32, 16) for shape in ((4, 48), (size, 4))]
    x = drawn(40, 48, seed=6).requires_grad_()
    found = []
    for way in (SplitMatmul(whole, int8), whole, int8):
        torch.manual_seed(5)
        parts = [
            fused_lora.LoraLinear(lambda made=way.prepare_weight(w): made, None, a, b, 0.5, is_kept)
            for w, a, b in zip(weights, factors[::2], factors[1::2], strict=True)
        ]
        ys = fused_lora.lora_linears(x, parts, fused_lora.Dropout(dropout), matmul=way)
        found.append(
            [
                *(y.detach() for y in ys),
                *torch.autograd.grad(ys, [x, *factors], [drawn(40, 32, seed=7), drawn(40, 16, seed=8)]),
            ]
        )
    for number, (ours, of_whole, of_int8) in enumerate(zip(*found, strict=True)):
        assert torch.equal(ours, of_int8 if number == 2 else of_whole) and (
            number > 2 or not torch.equal(of_whole, of_int8)
        )


# ----------------------------------------------------------------------------------------------------------- whole runs

TINY = {
    "model_name": "demo",
    "dataset": "demo",
    "backend": "cpu",
    "precision": "bf16",
    "log_to": "none",
    "save_steps": 0,
    "warmup_steps": 0,
    "lr": 3e-4,
}


def trained(tmp_path, name, **settings):
    """(losses, the adapter's bytes, what was printed) of a run of the embedded job."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        sft.train(
            resolve({**TINY, "output_dir": str(tmp_path), "run_name": name, **settings}, environ={}, origin="test")
        )
    lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    return (
        [line["loss"] for line in lines if "loss" in line and "event" not in line],
        (tmp_path / name / "adapter/adapter_model.safetensors").read_bytes(),
        said.getvalue(),
    )


@needs_int8
@pytest.mark.parametrize(
    ("kind", "called"),
    [pytest.param("int8", "int8", marks=pytest.mark.slow), ("int8_backward", "int8 in backward")],
)
def test_a_run_in_int8_learns_what_a_whole_one_does(kind, called, tmp_path):
    settings = {"max_steps": 30, "lr": 1e-3, "lora_dropout": 0}
    whole, _, _ = trained(tmp_path, "whole", **settings)
    ours, _, said = trained(tmp_path, kind, **settings, frozen_matmul=kind, log_to="stdout")
    assert ours != whole and (ours[0] == whole[0]) is (kind == "int8_backward") and ours[-1] < 0.75 * ours[0]
    differences = [x / y - 1 for x, y in zip(ours, whole, strict=True)]
    assert max(map(abs, differences)) < 0.02 and abs(sum(ours) / sum(whole) - 1) < int8_calibration.LOSS
    assert "rounded products are at most" in said and f"multiplied in {called}\n" in said


@takes_own
@pytest.mark.parametrize(
    "products",
    [
        "full",
        pytest.param("int8", marks=needs_int8),
        pytest.param("int8_backward", marks=(needs_int8, pytest.mark.slow)),
    ],
)
def test_weights_that_are_kept_multiply_at_once_and_to_the_same_bytes(products, tmp_path, monkeypatch):
    """Where they are made for each product they are so one at a time, for which the plan has room."""
    calls, plain = [], bindings.lora_linears
    monkeypatch.setattr(bindings, "lora_linears", lambda *given: calls.append(given[2]) or plain(*given))
    settings = {"quantizer": "nf4", "kernels": "native", "frozen_matmul": products, "max_steps": 2, "batch_size": 2}
    kept = trained(tmp_path, "kept", **settings)
    number = len(calls)
    made = trained(tmp_path, "made", **settings, dequantized_layers=0)
    assert number > 0 and len(calls) == number and kept[:2] == made[:2]


@needs_int8
@pytest.mark.parametrize(
    "settings",
    [
        {"quantizer": "none", "lora_dropout": 0.1},
        pytest.param({"quantizer": "nf4", "dequantized_layers": 0}, marks=pytest.mark.slow),
        pytest.param({"use_gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"frozen_matmul": "int8_backward", "quantizer": "nf4"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_in_int8_that_goes_on_writes_the_bytes_of_one_that_did_not_stop(tmp_path, settings):
    common = {"frozen_matmul": "int8", "save_steps": 3, **settings}
    _, whole, _ = trained(tmp_path, "whole", max_steps=6, **common)
    _, again, _ = trained(tmp_path, "again", max_steps=6, **common)
    assert again == whole
    directory = tmp_path / "cut"
    trained(tmp_path, "cut", max_steps=6, **common)
    for path in (directory / "result.json", directory / "adapter"):
        path.unlink() if path.is_file() else [file.unlink() for file in path.iterdir()]
    assert (directory / "adapter").rmdir() is None
    for checkpoint in sorted((directory / "checkpoints").iterdir())[1:]:
        [file.unlink() for file in checkpoint.iterdir()]
        checkpoint.rmdir()
    losses, cut, _ = trained(tmp_path, "cut", max_steps=6, **common)
    assert cut == whole


def started(tmp_path, change=lambda model: None, intermediate_size=128, **settings):
    """What is there when products are to prove themselves: a model, and the losses of a few rows."""
    base = tiny_models.make(tmp_path / "base", "llama", intermediate_size=intermediate_size)
    config = resolve(
        {
            **TINY,
            "model_name": str(base),
            "dataset": tiny_models.few_rows(tmp_path / "rows"),
            "output_dir": str(tmp_path / "run"),
            "quantizer": "none",
            "batch_size": 1,
            **settings,
        },
        environ={},
        origin="test",
    )
    run = tiny_models.opened(config)
    runtime = Runtime(run.plan)
    built = build(run.plan.config, runtime)
    change(built.model)
    sample = run.data.sample(1)
    return built.model, lambda: (built.loss(built.model, batch, runtime.device) for batch in sample)


def groups_of(model):
    return list({id(layer.group): layer.group for layer in fused_layers(model)}.values())


@needs_int8
def test_what_rounded_products_are_compared_with_is_the_model(tmp_path):
    """With an adapter that has learned: a run that goes on compares, too."""

    def learned(model):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(len(name)))

    model, losses = started(tmp_path, learned, precision="fp32", lora_dropout=0.0)
    learning, found = [p for p in model.parameters() if p.requires_grad], []
    for total in (
        lambda: int8_calibration._total(losses, is_back=True),
        lambda: int8_calibration._compared(groups_of(model), Int8Matmul(), losses),
    ):
        model.zero_grad()
        found.append((total(), torch.cat([p.grad.flatten() for p in learning])))
    (plain, of_plain), (compared, of_compared) = found
    assert compared == pytest.approx(plain, rel=1e-5)
    torch.testing.assert_close(of_compared, of_plain, rtol=1e-3, atol=1e-5 * float(of_plain.abs().max()))


@needs_int8
def test_layers_where_a_number_stands_out_keep_whole_products(tmp_path):
    """One input of a layer is so large in every token that int8's steps swallow the others."""

    def stand_out(model):
        layer = model.get_base_model().model.layers[1]
        with torch.no_grad():
            layer.input_layernorm.weight[3] = 1000.0
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).base_layer.weight[:, 3] /= (
                    1000.0  # as models have it that were trained so
                )

    model, losses = started(tmp_path, stand_out)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    said = int8_calibration.calibrate(model, Int8Matmul(), losses)
    whole = [group.names[0] for group in groups_of(model) if group.products is group.whole]
    assert len(whole) == 1 and "layers.1.self_attn.q_proj" in whole[0]
    assert "1 of 8 groups" in said[0] and "layers.1.self_attn.q_proj" in said[0]
    assert all(torch.equal(before[name], p) and p.grad is None for name, p in model.named_parameters())


@needs_int8
def test_codes_that_are_kept_are_made_once_and_not_among_what_is_passing(tmp_path, monkeypatch):
    """One layer's after another, while freed memory leaves the process: made in a step they lie in a heap full of
    holes.
    """
    model, losses = started(tmp_path, dequantized_layers=1)
    coded, products = [], Int8Matmul()
    before, weight = malloc._now, products.prepare_weight
    monkeypatch.setattr(
        products, "prepare_weight", lambda w: coded.append((malloc._now, w)) or weight(w), raising=False
    )
    int8_calibration.calibrate(model, products, losses)
    kept = [group for group in groups_of(model) if group.is_kept]
    made = [w for settings, w in coded if settings is malloc.LOADING]
    assert len(made) == sum(len(group.layers) for group in kept) == 7 and malloc._now is before
    coded.clear()
    for loss in losses():
        loss.backward()
    assert len(coded) == 2 * 7 * len(list(losses())), "only the other layer's, forward and back"


@needs_int8
def test_rounding_that_moves_the_loss_is_refused(tmp_path, monkeypatch):
    model, losses = started(tmp_path)
    monkeypatch.setattr(int8_calibration, "LOSS", 1e-9)
    with pytest.raises(RunError, match="the rows' loss moves by 0"):
        int8_calibration.calibrate(model, Int8Matmul(), losses)
    monkeypatch.setattr(int8_calibration, "NEAR", 1e-4)
    with pytest.raises(RunError, match=r"no layer's products are within 0% of whole ones, .*proj's are [1-3]% off"):
        int8_calibration.calibrate(model, Int8Matmul(), losses)


def test_a_model_without_fused_layers_is_refused(tmp_path):
    model, losses = started(tmp_path, fused_lora=False)
    with pytest.raises(RunError, match="none of this model's LoRA layers is fused"):
        int8_calibration.calibrate(model, Int8Matmul(), losses)


@pytest.mark.parametrize("width", [pytest.param(128, marks=pytest.mark.slow), 120])
def test_float8_is_for_weights_whose_sides_are_multiples_of_16(width, tmp_path):
    model, losses = started(tmp_path, intermediate_size=width)
    int8_calibration.calibrate(model, Fp8Matmul(), losses)
    rounded = {
        group.names[0].rpartition("model.")[2] for group in groups_of(model) if isinstance(group.products, Fp8Matmul)
    }
    assert len(rounded) >= (7 if width == 128 else 3)
    assert any("mlp" in name for name in rounded) == (width == 128)


@needs_int8
def test_a_finished_run_is_used_with_whole_products(tmp_path):
    from anyqlora.runs import finished

    trained(tmp_path, "run", max_steps=2, frozen_matmul="int8")
    plan = finished.plan_here(finished.read_run(tmp_path / "run"), {})
    assert plan.config.frozen_matmul == "full"


@pytest.mark.parametrize(
    ("settings", "error", "why"),
    [
        ({"precision": "fp32"}, UsageError, "for precision bf16"),
        ({"fused_lora": False}, UsageError, "contradicts fused"),
        ({"adapter": "dora"}, UsageError, "contradicts adapter"),
        ({"quantizer": "affine4"}, UsageError, "contradicts quantizer"),
        ({"strategy": "fsdp", "world_size": 2}, NotSupported, "not built for strategy fsdp"),
        ({"frozen_matmul": "fp8"}, UsageError, "backend cpu has no fp8 products"),
        ({"frozen_matmul": "int4"}, UsageError, "unknown value"),
    ],
    ids=str,
)
@needs_int8
def test_what_is_not_multiplied_so_is_refused(settings, error, why):
    with pytest.raises(error, match=why):
        BackendManager("cpu").plan(resolve({**TINY, "frozen_matmul": "int8", **settings}, environ={}, origin="test"))
