/* What surrounds the matrix products of a bf16 step on a CPU, a row in one pass: numbers are read and written as bf16,
   computed in float32, and rounded where the references round. Rows are shared among OpenMP's threads. */

#include "bf16.h"

/* losses [rows] of logits [rows, vocab] times `scale`; the logits are overwritten with the gradient of the losses'
   sum. */
void cross_entropy(bf16 *logits, const int64_t *targets, float *losses, long rows, long vocab, float scale) {
#pragma omp parallel
    {
        float *powers = malloc(vocab * sizeof(float));
#pragma omp for schedule(static, 1)
        for (long r = 0; r < rows; r++) {
            bf16 *row = logits + r * vocab;
            float highest = -INFINITY, sum = 0.0f, chosen = scale * to_float(row[targets[r]]);
#pragma omp simd reduction(max : highest)
            for (long i = 0; i < vocab; i++) {
                float z = scale * to_float(row[i]);
                highest = z > highest ? z : highest;
            }
#pragma omp simd reduction(+ : sum)
            for (long i = 0; i < vocab; i++) {
                powers[i] = exponential(scale * to_float(row[i]) - highest);
                sum += powers[i];
            }
            float factor = scale / sum;
#pragma omp simd
            for (long i = 0; i < vocab; i++) row[i] = to_bf16(factor * powers[i]);
            row[targets[r]] = to_bf16(factor * powers[targets[r]] - scale);
            losses[r] = logf(sum) + highest - chosen;
        }
        free(powers);
    }
}

/* y = x / sqrt(mean(x^2) + eps) * (offset + weight), and 1 / sqrt(...) of each row in `rstd`; late: one rounding
   instead of two. */
void rms_norm(const bf16 *x, const bf16 *weight, bf16 *y, float *rstd, long rows, long width, float eps, float offset,
              int late) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; r++) {
        const bf16 *in = x + r * width;
        bf16 *out = y + r * width;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < width; i++) sum += to_float(in[i]) * to_float(in[i]);
        float inverse = 1.0f / sqrtf(sum / width + eps);
        rstd[r] = inverse;
        if (late) {
#pragma omp simd
            for (long i = 0; i < width; i++)
                out[i] = to_bf16(to_float(in[i]) * inverse * (offset + to_float(weight[i])));
        } else {
#pragma omp simd
            for (long i = 0; i < width; i++)
                out[i] = to_bf16(round_to_bf16(to_float(in[i]) * inverse) * (offset + to_float(weight[i])));
        }
    }
}

void rms_norm_backward(const bf16 *grad_y, const bf16 *x, const bf16 *weight, const float *rstd, bf16 *grad_x,
                       long rows, long width, float offset, int late) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; r++) {
        const bf16 *in = x + r * width, *grad = grad_y + r * width;
        bf16 *out = grad_x + r * width;
        float inverse = rstd[r], sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < width; i++) {
            float inner = to_float(grad[i]) * (offset + to_float(weight[i]));
            inner = late ? inner : round_to_bf16(inner);
            sum += inner * to_float(in[i]);
        }
        float mean = sum * inverse * inverse / width;
#pragma omp simd
        for (long i = 0; i < width; i++) {
            float inner = to_float(grad[i]) * (offset + to_float(weight[i]));
            inner = late ? inner : round_to_bf16(inner);
            out[i] = to_bf16(inverse * (inner - mean * to_float(in[i])));
        }
    }
}

/* One head of `rotate`: by bf16 angles each product is rounded, by float32 ones the sum alone. */
static inline __attribute__((always_inline)) void rotate_head(const bf16 *x, const void *cos, const void *sin, bf16 *y,
                                                              long half, int backward, int float_angles) {
#define ANGLE(angles, i) (float_angles ? ((const float *)(angles))[i] : to_float(((const bf16 *)(angles))[i]))
#define PRODUCT(a, b) (float_angles ? (a) * (b) : round_to_bf16((a) * (b)))
#pragma omp simd
    for (long i = 0; i < half; i++) {
        float a = to_float(x[i]), b = to_float(x[half + i]);
        float into_first = backward ? PRODUCT(b, ANGLE(sin, half + i)) : PRODUCT(-b, ANGLE(sin, i));
        float into_second = backward ? PRODUCT(-a, ANGLE(sin, i)) : PRODUCT(a, ANGLE(sin, half + i));
        y[i] = to_bf16(PRODUCT(a, ANGLE(cos, i)) + into_first);
        y[half + i] = to_bf16(PRODUCT(b, ANGLE(cos, half + i)) + into_second);
    }
#undef ANGLE
#undef PRODUCT
}

/* Rotary positions of x [tokens, heads, 2 half] by cos and sin [positions, 2 half], bf16, or float32 with
   float_angles; backward: the transpose. */
void rotate(const bf16 *x, const void *cos, const void *sin, bf16 *y, long tokens, long heads, long half,
            long positions, int backward, int float_angles) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < tokens; t++) {
        long at = (t % positions) * 2 * half * (float_angles ? sizeof(float) : sizeof(bf16));
        const void *c = (const char *)cos + at, *s = (const char *)sin + at;
        for (long h = t * heads; h < (t + 1) * heads; h++) {
            if (float_angles)
                rotate_head(x + h * 2 * half, c, s, y + h * 2 * half, half, backward, 1);
            else
                rotate_head(x + h * 2 * half, c, s, y + h * 2 * half, half, backward, 0);
        }
    }
}

/* 32 bits that look random of a pair of columns and a token's key. */
static inline uint32_t mixed(uint32_t pair, uint32_t low, uint32_t high) {
    uint32_t h = pair * 0x9e3779b9u + low;
    h = (h ^ h >> 16) * 0x21f0aaadu ^ high;
    h = (h ^ h >> 15) * 0x735a2d97u;
    return h ^ h >> 15;
}

/* What stays of columns `begin` to `begin` + width of each row: core/dropout.py's definition. Neighbouring columns share 32
   bits, the first of them the lower half. */
void token_mask(const int64_t *keys, uint8_t *mask, long rows, long width, long begin, long threshold) {
    long first = begin / 2, pairs = (begin + width + 1) / 2 - first;
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; r++) {
        uint32_t low = (uint32_t)keys[r], high = (uint32_t)((uint64_t)keys[r] >> 32), kept = (uint32_t)threshold;
        uint8_t *out = mask + r * width;
        if (begin & 1 || width & 1) { /* a pair that is cut: one column at a time */
            for (long c = 0; c < width; c++) {
                uint32_t bits = mixed((uint32_t)((begin + c) / 2), low, high);
                mask[r * width + c] = ((begin + c) & 1 ? bits >> 16 : bits & 0xffff) >= kept;
            }
            continue;
        }
#pragma omp simd
        for (long p = 0; p < pairs; p++) {
            uint32_t bits = mixed((uint32_t)(first + p), low, high);
            out[2 * p] = (bits & 0xffff) >= kept;
            out[2 * p + 1] = bits >> 16 >= kept;
        }
    }
}

#ifdef __AVX512BF16__ /* what gcc makes of loops over single numbers takes almost three times as long */

static inline __m512 sigmoids(__m512 x) { return 1.0f / (1.0f + exponentials(-x)); }

/* A bit for each of the 32 numbers from the i-th on that exist. */
static inline __mmask32 present(long i, long n) { return n - i < 32 ? (1u << (n - i)) - 1 : ~0u; }

/* out = gate sigmoid(gate) * up */
void swiglu(const bf16 *gate, const bf16 *up, bf16 *out, long n) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; i += 32) {
        __mmask32 mask = present(i, n);
        __m512i g = _mm512_maskz_loadu_epi16(mask, gate + i), u = _mm512_maskz_loadu_epi16(mask, up + i);
        __m512i gated = round_32(first_half(g) * sigmoids(first_half(g)), second_half(g) * sigmoids(second_half(g)));
        _mm512_mask_storeu_epi16(out + i, mask,
                                 round_32(first_half(gated) * first_half(u), second_half(gated) * second_half(u)));
    }
}

static inline __m512 gate_grads(__m512 grad, __m512 gate, __m512 open) {
    return grad * open * (1.0f + gate * (1.0f - open));
}

void swiglu_backward(const bf16 *grad_out, const bf16 *gate, const bf16 *up, bf16 *grad_gate, bf16 *grad_up, long n) {
#pragma omp parallel for schedule(static)
    for (long i = 0; i < n; i += 32) {
        __mmask32 mask = present(i, n);
        __m512i grad = _mm512_maskz_loadu_epi16(mask, grad_out + i), g = _mm512_maskz_loadu_epi16(mask, gate + i),
                u = _mm512_maskz_loadu_epi16(mask, up + i);
        __m512 open_1 = sigmoids(first_half(g)), open_2 = sigmoids(second_half(g));
        __m512i gated = round_32(first_half(g) * open_1, second_half(g) * open_2),
                grad_gated = round_32(first_half(grad) * first_half(u), second_half(grad) * second_half(u));
        _mm512_mask_storeu_epi16(
            grad_up + i, mask, round_32(first_half(grad) * first_half(gated), second_half(grad) * second_half(gated)));
        _mm512_mask_storeu_epi16(grad_gate + i, mask,
                                 round_32(gate_grads(first_half(grad_gated), first_half(g), open_1),
                                          gate_grads(second_half(grad_gated), second_half(g), open_2)));
    }
}

/* Codes [rows, width] of x * column_scales (x alone where that is NULL), with hadamard rotated first: 127 for the
   largest magnitude of each row. row_scales: what a code of 1 stands for there, NaN in a row that is not all finite,
   whose codes are 0. Rows of codes lie codes_stride bytes apart. */
void quantize_int8_rows(const bf16 *x, const float *column_scales, int8_t *codes, float *row_scales, long codes_stride,
                        long rows, long width, int hadamard) {
#pragma omp parallel
    {
        float *row = aligned_alloc(64, rounded_up(width, 32) * sizeof(float));
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            __m512i most = _mm512_setzero_si512(),
                    magnitude = _mm512_set1_epi32(
                        0x7fffffff); /* magnitudes compare as their bits do, infinity and NaN above all */
            for (long i = 0; i < width; i += 32) {
                __m512i both = _mm512_maskz_loadu_epi16(present(i, width), x + r * width + i);
                __m512 first = first_half(both), second = second_half(both);
                if (column_scales) {
                    first *= _mm512_maskz_loadu_ps((__mmask16)present(i, width), column_scales + i);
                    second *= _mm512_maskz_loadu_ps((__mmask16)(present(i, width) >> 16), column_scales + i + 16);
                }
                if (hadamard && i + 32 <= width) rotate_32(&first, &second);
                _mm512_store_ps(row + i, first), _mm512_store_ps(row + i + 16, second);
                most = _mm512_max_epu32(most, _mm512_max_epu32(_mm512_and_si512((__m512i)first, magnitude),
                                                               _mm512_and_si512((__m512i)second, magnitude)));
            }
            uint32_t largest = _mm512_reduce_max_epu32(most);
            int finite = largest < 0x7f800000;
            float step = number(largest) / 127.0f, per_step = finite && step > 0.0f ? 1.0f / step : 0.0f;
            row_scales[r] = finite ? step : NAN;
            int is_usable = finite && per_step < INFINITY;
            for (long i = 0; i < width; i += 16) {
                __m512i codes_32 =
                    is_usable ? _mm512_cvtps_epi32(_mm512_load_ps(row + i) * per_step) : _mm512_setzero_si512();
                _mm512_mask_cvtepi32_storeu_epi8(codes + r * codes_stride + i, (__mmask16)present(i, width), codes_32);
            }
        }
        free(row);
    }
}

/* out = sums * row_scales * column_scales (1 where that is NULL), with hadamard rotated; accumulate: that much is added
   to out. */
void dequantize_int8(const int32_t *sums, const float *row_scales, const float *column_scales, bf16 *out, long rows,
                     long width, int accumulate, int hadamard) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; r++)
        for (long i = 0; i < width; i += 32) {
            __mmask32 mask = present(i, width);
            __m512 y[2];
            for (int v = 0; v < 2; v++) {
                __mmask16 half = (__mmask16)(mask >> 16 * v);
                y[v] =
                    _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(half, sums + r * width + i + 16 * v)) * row_scales[r];
                if (column_scales) y[v] *= _mm512_maskz_loadu_ps(half, column_scales + i + 16 * v);
            }
            if (hadamard && i + 32 <= width) rotate_32(&y[0], &y[1]);
            if (accumulate) {
                __m512i more = _mm512_maskz_loadu_epi16(mask, out + r * width + i);
                y[0] += first_half(more), y[1] += second_half(more);
            }
            _mm512_mask_storeu_epi16(out + r * width + i, mask, round_32(y[0], y[1]));
        }
}

#endif

/* Codes [blocks, 32] of weights [blocks, 64], the first of two in a byte's upper half, and each block's largest
   magnitude: infinity or NaN where one of its weights is, and then its codes mean nothing. A weight's code is `first`
   and the steps at all borders below weight / magnitude, where 1 / magnitude is rounded first. is_bf16: the weights are
   bf16, else float32. */
void quantize_4bit(const void *weights, uint8_t *codes, float *scales, long blocks, const float *borders,
                   const int32_t *steps, int first, int is_bf16) {
#pragma omp parallel for schedule(static)
    for (long b = 0; b < blocks; b++) {
        float x[64];
        uint32_t most = 0; /* magnitudes compare as their bits do */
        if (is_bf16) {
#pragma omp simd
            for (long i = 0; i < 64; i++) x[i] = to_float(((const bf16 *)weights)[64 * b + i]);
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
