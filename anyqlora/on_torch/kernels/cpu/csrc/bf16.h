/* bf16 and e^x, for all files here: one number at a time and, where the processor has registers of 512 bits and rounds
   to bf16 by itself (AVX512-BF16), 16 or 32. */

#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static inline uint32_t bits(float x) {
    return ((union {
               float number;
               uint32_t bits;
           }){.number = x})
        .bits;
}
static inline float number(uint32_t x) {
    return ((union {
               uint32_t bits;
               float number;
           }){.bits = x})
        .number;
}

static inline long rounded_up(long n, long to) { return (n + to - 1) / to * to; }
static inline long smaller(long a, long b) { return a < b ? a : b; }

static inline float to_float(bf16 x) { return number((uint32_t)x << 16); }

static inline bf16 to_bf16(float x) { /* to the nearest, ties to even; not a number stays one */
    uint32_t rounded = (bits(x) + 0x7fff + ((bits(x) >> 16) & 1)) >> 16;
    return (bf16)(x != x ? 0x7fc0 : rounded);
}

static inline float round_to_bf16(float x) { return to_float(to_bf16(x)); }

static inline float
exponential(float x) { /* e^x to 3e-6, 0 and infinity to float32's smallest and largest powers of two */
    float y = x * 1.44269504f;
    y = y < -126.0f ? -126.0f : y;
    y = y > 127.0f ? 127.0f : y;
    float shifted = y + 12582912.0f; /* 1.5 * 2^23: its last bits are the nearest whole number */
    float part = y - (shifted - 12582912.0f);
    float series =
        1.0f + part * (0.69314718f +
                       part * (0.24022651f + part * (0.055504109f + part * (0.0096181291f + part * 0.0013333558f))));
    return number(bits(series) + (bits(shifted) << 23));
}

#ifdef __AVX512BF16__
#include <immintrin.h>

enum { LANES = 16 }; /* numbers of 32 bits in a register */

/* `exponential` of 16 numbers, but infinity beyond the largest power. */
static inline __m512 exponentials(__m512 x) {
    __m512 y = _mm512_max_ps(_mm512_set1_ps(-126.0f), x * 1.44269504f); /* what is not a number stays the second one */
    __m512 nearest = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), part = y - nearest;
    __m512 series =
        1.0f + part * (0.69314718f +
                       part * (0.24022651f + part * (0.055504109f + part * (0.0096181291f + part * 0.0013333558f))));
    return _mm512_scalef_ps(series, nearest);
}

/* 16 numbers and 16 more as bf16, one after another; and the first and the second 16 of 32. */
static inline __m512i round_32(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }
static inline __m512 widen(__m256i x) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
static inline __m512 first_half(__m512i x) { return widen(_mm512_castsi512_si256(x)); }
static inline __m512 second_half(__m512i x) { return widen(_mm512_extracti64x4_epi64(x, 1)); }

/* 16 numbers, each with its partner in `partners` added; of two, the `later` one is subtracted. */
static inline __m512 with_partners(__m512 x, __m512 partners, int later) {
    const __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_fmadd_ps(x, _mm512_mask_sub_ps(one, (__mmask16)later, _mm512_setzero_ps(), one), partners);
}

/* 32 numbers times Hadamard's matrix of that size over its root, which is its own inverse: partners 16, 8, 4, 2 and 1
   apart. In place. */
static inline void rotate_32(__m512 *first, __m512 *second) {
    __m512 both[2] = {0.17677670f * (*first + *second), 0.17677670f * (*first - *second)};
    for (int i = 0; i < 2; i++) {
        __m512 x = both[i];
        x = with_partners(x, _mm512_shuffle_f32x4(x, x, 0x4e), 0xff00);
        x = with_partners(x, _mm512_shuffle_f32x4(x, x, 0xb1), 0xf0f0);
        x = with_partners(x, _mm512_permute_ps(x, 0x4e), 0xcccc);
        both[i] = with_partners(x, _mm512_permute_ps(x, 0xb1), 0xaaaa);
    }
    *first = both[0], *second = both[1];
}

/* 16 registers of 16 words of 32 bits, transposed: pairs of neighbouring rows, then of pairs, then quarters of
   registers. */
static inline __attribute__((always_inline)) void transpose(__m512i x[LANES]) {
    __m512i y[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i even = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), odd = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        __m512i later_even = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88),
                later_odd = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
        x[i] = _mm512_shuffle_i32x4(even, later_even, 0x88);
        x[i + 4] = _mm512_shuffle_i32x4(odd, later_odd, 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(even, later_even, 0xdd);
        x[i + 12] = _mm512_shuffle_i32x4(odd, later_odd, 0xdd);
    }
}

#endif
