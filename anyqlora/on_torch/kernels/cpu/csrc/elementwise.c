/* What surrounds the products of a bf16 step on a CPU, a row in one pass: numbers are read and written as bf16, computed in float32, and
   rounded where the definitions round. Called by native.py; every array is contiguous. Rows are shared among OpenMP's threads. */

#include "bf16.h"

/* losses [rows] of logits [rows, width] times `scale`; the logits become the gradient of the losses' sum by themselves. */
void cross_entropy(bf16 *logits, const int64_t *targets, float *losses, long rows, long width, float scale) {
#pragma omp parallel
    {
        float *powers = malloc(width * sizeof(float));
#pragma omp for schedule(static, 1)
        for (long r = 0; r < rows; r++) {
            bf16 *row = logits + r * width;
            float highest = -INFINITY, sum = 0.0f, chosen = scale * up(row[targets[r]]);
#pragma omp simd reduction(max : highest)
            for (long i = 0; i < width; i++) {
                float z = scale * up(row[i]);
                highest = z > highest ? z : highest;
            }
#pragma omp simd reduction(+ : sum)
            for (long i = 0; i < width; i++) {
                powers[i] = exponential(scale * up(row[i]) - highest);
                sum += powers[i];
            }
            float factor = scale / sum;
#pragma omp simd
            for (long i = 0; i < width; i++) row[i] = down(factor * powers[i]);
            row[targets[r]] = down(factor * powers[targets[r]] - scale);
            losses[r] = logf(sum) + highest - chosen;
        }
        free(powers);
    }
}

/* y = x / sqrt(mean(x^2) + eps) * (offset + weight), and 1 / sqrt(...) of each row in `scales`; late: one rounding instead of two. */
void rms_norm(const bf16 *x, const bf16 *weight, bf16 *y, float *scales, long rows, long width, float eps, float offset, int late) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; r++) {
        const bf16 *in = x + r * width;
        bf16 *out = y + r * width;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < width; i++) sum += up(in[i]) * up(in[i]);
        float scale = 1.0f / sqrtf(sum / width + eps);
        scales[r] = scale;
        if (late) {
#pragma omp simd
            for (long i = 0; i < width; i++) out[i] = down(up(in[i]) * scale * (offset + up(weight[i])));
        } else {
#pragma omp simd
            for (long i = 0; i < width; i++) out[i] = down(round_to_bf16(up(in[i]) * scale) * (offset + up(weight[i])));
        }
    }
}

void rms_norm_backward(const bf16 *of_y, const bf16 *x, const bf16 *weight, const float *scales, bf16 *of_x, long rows, long width, float offset,
                       int late) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; r++) {
        const bf16 *in = x + r * width, *outer = of_y + r * width;
        bf16 *out = of_x + r * width;
        float scale = scales[r], sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < width; i++) {
            float inner = up(outer[i]) * (offset + up(weight[i]));
            inner = late ? inner : round_to_bf16(inner);
            sum += inner * up(in[i]);
        }
        float mean = sum * scale * scale / width;
#pragma omp simd
        for (long i = 0; i < width; i++) {
            float inner = up(outer[i]) * (offset + up(weight[i]));
            inner = late ? inner : round_to_bf16(inner);
            out[i] = down(scale * (inner - mean * up(in[i])));
        }
    }
}

/* A head of `rotate`: by bf16 angles each product is rounded, by float32 ones the sum alone. */
static inline __attribute__((always_inline)) void turned(const bf16 *x, const void *cos, const void *sin, bf16 *y, long half, int back, int exact) {
#define ANGLE(angles, i) (exact ? ((const float *)(angles))[i] : up(((const bf16 *)(angles))[i]))
#define PRODUCT(a, b) (exact ? (a) * (b) : round_to_bf16((a) * (b)))
#pragma omp simd
    for (long i = 0; i < half; i++) {
        float a = up(x[i]), b = up(x[half + i]);
        float into_first = back ? PRODUCT(b, ANGLE(sin, half + i)) : PRODUCT(-b, ANGLE(sin, i));
        float into_second = back ? PRODUCT(-a, ANGLE(sin, i)) : PRODUCT(a, ANGLE(sin, half + i));
        y[i] = down(PRODUCT(a, ANGLE(cos, i)) + into_first);
        y[half + i] = down(PRODUCT(b, ANGLE(cos, half + i)) + into_second);
    }
#undef ANGLE
#undef PRODUCT
}

/* Rotary positions of x [tokens, heads, 2 half] by cos and sin [positions, 2 half], bf16 or, exact, float32; back: the transpose. */
void rotate(const bf16 *x, const void *cos, const void *sin, bf16 *y, long tokens, long heads, long half, long positions, int back, int exact) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < tokens; t++) {
        long at = (t % positions) * 2 * half * (exact ? sizeof(float) : sizeof(bf16));
        const void *c = (const char *)cos + at, *s = (const char *)sin + at;
        for (long h = t * heads; h < (t + 1) * heads; h++) {
            if (exact)
                turned(x + h * 2 * half, c, s, y + h * 2 * half, half, back, 1);
            else
                turned(x + h * 2 * half, c, s, y + h * 2 * half, half, back, 0);
        }
    }
}

#ifdef __AVX512BF16__ /* what gcc makes of loops over single numbers takes almost three times as long here */

static inline __m512 sigmoids(__m512 x) { return 1.0f / (1.0f + exponentials(-x)); }

/* Which of 32 numbers from the i-th on there are. */
static inline __mmask32 present(long i, long n) { return n - i < 32 ? (1u << (n - i)) - 1 : ~0u; }

/* out = gate sigmoid(gate) * up_ */
void swiglu(const bf16 *gate, const bf16 *up_, bf16 *out, long n) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; i += 32) {
        __mmask32 some = present(i, n);
        __m512i g = _mm512_maskz_loadu_epi16(some, gate + i), u = _mm512_maskz_loadu_epi16(some, up_ + i);
        __m512i gated = rounded(former(g) * sigmoids(former(g)), latter(g) * sigmoids(latter(g)));
        _mm512_mask_storeu_epi16(out + i, some, rounded(former(gated) * former(u), latter(gated) * latter(u)));
    }
}

static inline __m512 of_gates(__m512 inner, __m512 gate, __m512 open) { return inner * open * (1.0f + gate * (1.0f - open)); }

void swiglu_backward(const bf16 *of_out, const bf16 *gate, const bf16 *up_, bf16 *of_gate, bf16 *of_up, long n) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; i += 32) {
        __mmask32 some = present(i, n);
        __m512i outer = _mm512_maskz_loadu_epi16(some, of_out + i), g = _mm512_maskz_loadu_epi16(some, gate + i), u = _mm512_maskz_loadu_epi16(some, up_ + i);
        __m512 open = sigmoids(former(g)), open_too = sigmoids(latter(g));
        __m512i gated = rounded(former(g) * open, latter(g) * open_too), inner = rounded(former(outer) * former(u), latter(outer) * latter(u));
        _mm512_mask_storeu_epi16(of_up + i, some, rounded(former(outer) * former(gated), latter(outer) * latter(gated)));
        _mm512_mask_storeu_epi16(of_gate + i, some, rounded(of_gates(former(inner), former(g), open), of_gates(latter(inner), latter(g), open_too)));
    }
}

/* Codes [rows, width] of x * columns (x alone where there are none), spread first where so said: 127 for the largest magnitude of each row, and what
   a code of 1 stands for there: not a number in a row that is not all finite, whose codes are 0. Rows of codes lie codes_stride bytes apart. */
void int8_rows(const bf16 *x, const float *columns, int8_t *codes, float *scales, long codes_stride, long rows, long width, int spreads) {
#pragma omp parallel
    {
        float *row = aligned_alloc(64, rounded_up(width, 32) * sizeof(float));
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            __m512i most = _mm512_setzero_si512(), magnitude = _mm512_set1_epi32(0x7fffffff); /* they compare as their bits do, and beyond them infinity and what is not a number */
            for (long i = 0; i < width; i += 32) {
                __m512i both = _mm512_maskz_loadu_epi16(present(i, width), x + r * width + i);
                __m512 first = former(both), second = latter(both);
                if (columns) {
                    first *= _mm512_maskz_loadu_ps((__mmask16)present(i, width), columns + i);
                    second *= _mm512_maskz_loadu_ps((__mmask16)(present(i, width) >> 16), columns + i + 16);
                }
                if (spreads && i + 32 <= width) spread(&first, &second);
                _mm512_store_ps(row + i, first), _mm512_store_ps(row + i + 16, second);
                most = _mm512_max_epu32(most, _mm512_max_epu32(_mm512_and_si512((__m512i)first, magnitude), _mm512_and_si512((__m512i)second, magnitude)));
            }
            uint32_t largest = _mm512_reduce_max_epu32(most);
            int finite = largest < 0x7f800000;
            float step = number(largest) / 127.0f, per_step = finite && step > 0.0f ? 1.0f / step : 0.0f;
            scales[r] = finite ? step : NAN;
            int some = finite && per_step < INFINITY;
            for (long i = 0; i < width; i += 16) {
                __m512i whole = some ? _mm512_cvtps_epi32(_mm512_load_ps(row + i) * per_step) : _mm512_setzero_si512();
                _mm512_mask_cvtepi32_storeu_epi8(codes + r * codes_stride + i, (__mmask16)present(i, width), whole);
            }
        }
        free(row);
    }
}

/* out (plus what it has, where so said) = sums * rows' scales * columns' scales (1 where there are none), spread where so said. */
void int8_out(const int32_t *sums, const float *of_rows, const float *of_columns, bf16 *out, long rows, long width, int added, int spreads) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < width; i += 32) {
            __mmask32 some = present(i, width);
            __m512 y[2];
            for (int v = 0; v < 2; v++) {
                __mmask16 half = (__mmask16)(some >> 16 * v);
                y[v] = _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(half, sums + r * width + i + 16 * v)) * of_rows[r];
                if (of_columns) y[v] *= _mm512_maskz_loadu_ps(half, of_columns + i + 16 * v);
            }
            if (spreads && i + 32 <= width) spread(&y[0], &y[1]);
            if (added) {
                __m512i more = _mm512_maskz_loadu_epi16(some, out + r * width + i);
                y[0] += former(more), y[1] += latter(more);
            }
            _mm512_mask_storeu_epi16(out + r * width + i, some, rounded(y[0], y[1]));
        }
}

#endif

/* Codes [blocks, 32] of weights [blocks, 64], the first of two in a byte's upper half, and each block's largest magnitude: infinity or not
   a number where one of its weights is, and then its codes mean nothing. A weight's code is `first` and the steps at all borders below
   weight / magnitude, where 1 / magnitude is rounded first. narrow: the weights are bf16, else float32. */
void quantize_4bit(const void *weights, uint8_t *codes, float *scales, long blocks, const float *borders, const int32_t *steps, int first,
                   int narrow) {
#pragma omp parallel for schedule(static)
    for (long b = 0; b < blocks; b++) {
        float x[64];
        uint32_t most = 0; /* magnitudes compare as their bits do */
        if (narrow) {
#pragma omp simd
            for (long i = 0; i < 64; i++) x[i] = up(((const bf16 *)weights)[64 * b + i]);
        } else {
            memcpy(x, (const float *)weights + 64 * b, sizeof x);
        }
#pragma omp simd reduction(max : most)
        for (long i = 0; i < 64; i++) {
            uint32_t magnitude = bits(x[i]) & 0x7fffffff;
            most = magnitude > most ? magnitude : most;
        }
        scales[b] = number(most);
        float per_scale = 1.0f / (number(most) < 1e-38f ? 1e-38f : number(most));
        for (long i = 0; i < 64; i++) x[i] *= per_scale;
        int32_t code[64];
        for (long i = 0; i < 64; i++) code[i] = first;
        for (long j = 0; j < 15; j++) {
            float border = borders[j];
            int32_t step = steps[j];
#pragma omp simd
            for (long i = 0; i < 64; i++) code[i] += x[i] > border ? step : 0;
        }
#pragma omp simd
        for (long i = 0; i < 32; i++) codes[32 * b + i] = (uint8_t)(code[2 * i] << 4 | code[2 * i + 1]);
    }
}
