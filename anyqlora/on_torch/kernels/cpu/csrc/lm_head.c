/* The LM head and its cross-entropy in one, as attention.c is attention: for a block of the vocabulary a few tokens'
   logits, their powers (the softmax's numerators) and what these add to the gradient of the head's input, which never
   leave a core's caches. A power is taken above a reference of its token, which follows the token's largest logit; sums
   above an older one are lowered. For the processors of matmul.c. */

#include "panels.h"

#include <float.h>

#ifdef HAS_PANELS

enum { BLOCK = HEAD_VOCAB_BLOCK, WITHIN = 8, MIN_TOKENS = 48 };
/* Rows of the weight, a block of the vocabulary, that are packed for both products; e^WITHIN is the largest power above
   a reference; tokens that share packed weights, at least. */

/* A token's sums over a part of the vocabulary. */
typedef struct {
    float highest, total, rounded,
        unused[LANES - 3]; /* the reference, and the sums of the powers above it and of these in bf16 */
    float sums[];          /* of the latter times the weight's rows */
} Token;

static inline Token *token(char *tokens, long size, long r) { return (Token *)(tokens + r * size); }

/* The logits [count, BLOCK] of so many tokens: panels [BLOCK / PANEL] of the block's weights, and its biases. hidden's
   rows lie `stride` bytes apart. */
static inline __attribute__((always_inline)) void logits_tile(const char *hidden, long stride, int count,
                                                              const uint32_t *panels, long pairs, const float *biases,
                                                              float scale, float *logits) {
    for (long p = 0; p < BLOCK / PANEL; p++) {
        __m512 y[ROWS][VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) y[r][0] = y[r][1] = _mm512_setzero_ps();
        add_products(y, count, hidden, stride, panels + p * pairs * PANEL, pairs);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                long column = p * PANEL + v * LANES;
                _mm512_store_ps(logits + r * BLOCK + column, scale * (y[r][v] + _mm512_load_ps(biases + column)));
            }
    }
}

/* Moves a token's reference to where a block's logits have powers that are not too large. */
static void move_reference(Token *token, const float *logits, long count, long padded) {
    __m512 maxima = _mm512_set1_ps(-FLT_MAX);
    for (long i = 0; i < count; i += LANES)
        maxima = _mm512_mask_max_ps(maxima, lane_mask(count - i), maxima, _mm512_load_ps(logits + i));
    float highest = _mm512_reduce_max_ps(maxima);
    if (!(highest <= token->highest + WITHIN)) {
        float lowered = exponential(token->highest - highest);
        token->total *= lowered, token->rounded *= lowered;
        for (long i = 0; i < padded && token->highest > -FLT_MAX; i++) token->sums[i] *= lowered;
        token->highest = highest;
    }
}

/* A token's powers of its `count` logits of a block, bf16 [BLOCK], zeros after the last one. */
static void powers_of(Token *token, const float *logits, long count, long padded, bf16 *powers) {
    __m512 sum = _mm512_setzero_ps(), rounded_sum = sum;
    move_reference(token, logits, count, padded);
    for (long i = 0; i < BLOCK; i += PANEL) {
        __m512 powers_32[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            powers_32[v] = _mm512_maskz_mov_ps(lane_mask(count - i - v * LANES),
                                               exponentials(_mm512_load_ps(logits + i + v * LANES) - token->highest));
        __m512i rounded = round_32(powers_32[0], powers_32[1]);
        sum += powers_32[0] + powers_32[1], rounded_sum += first_half(rounded) + second_half(rounded);
        _mm512_store_si512(powers + i, rounded);
    }
    token->total += _mm512_reduce_add_ps(sum), token->rounded += _mm512_reduce_add_ps(rounded_sum);
}

/* The same times the rows' code scales, as codes without a sign, [BLOCK]; returns what a code of 1 stands for.
   `products` has room for BLOCK floats. */
static float codes_of(Token *token, const float *logits, long count, long padded, const float *scales, float *products,
                      uint8_t *codes) {
    __m512 sum = _mm512_setzero_ps(), maxima = sum;
    move_reference(token, logits, count, padded);
    for (long i = 0; i < BLOCK; i += PANEL) {
        __m512 powers[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            powers[v] = _mm512_maskz_mov_ps(lane_mask(count - i - v * LANES),
                                            exponentials(_mm512_load_ps(logits + i + v * LANES) - token->highest));
            __m512 product = powers[v] * _mm512_load_ps(scales + i + v * LANES);
            maxima = _mm512_max_ps(maxima, product);
            _mm512_store_ps(products + i + v * LANES, product);
        }
        sum += powers[0] + powers[1];
    }
    float step = _mm512_reduce_max_ps(maxima) / 255.0f, per_step = 1.0f / step;
    if (!(per_step < INFINITY))
        step = per_step = 0.0f; /* nothing, or what is not finite: the sum of the powers is not, either */
    for (long i = 0; i < BLOCK; i += LANES)
        _mm_store_si128((__m128i *)(codes + i),
                        _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(_mm512_load_ps(products + i) * per_step)));
    token->total += _mm512_reduce_add_ps(sum);
    return step;
}

/* What `count` tokens' powers add to their sums: panels of the block's weights, transposed. */
static inline __attribute__((always_inline)) void sums_tile(char *tokens, long size, int count, const bf16 *powers,
                                                            const uint32_t *panels, long pairs, long padded) {
    for (long column = 0; column < padded; column += PANEL) {
        __m512 y[ROWS][VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                y[r][v] = _mm512_load_ps(token(tokens, size, r)->sums + column + v * LANES);
        add_products(y, count, powers, BLOCK * sizeof(bf16), panels + column * pairs, pairs);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                _mm512_store_ps(token(tokens, size, r)->sums + column + v * LANES, y[r][v]);
    }
}

/* The same of codes: a word of a panel has the weights of four rows. */
static inline __attribute__((always_inline)) void codes_tile(char *tokens, long size, int count, const uint8_t *codes,
                                                             const float *steps, const uint32_t *panels, long padded) {
    for (long column = 0; column < padded; column += PANEL) {
        __m512i sums[ROWS][VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) sums[r][0] = sums[r][1] = _mm512_setzero_si512();
        add_codes(sums, count, codes, BLOCK, panels + column * (BLOCK / 4), BLOCK / 4, 0);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                float *total = token(tokens, size, r)->sums + column + v * LANES;
                _mm512_store_ps(total, _mm512_load_ps(total) + _mm512_cvtepi32_ps(sums[r][v]) * steps[r]);
            }
    }
}

/* Bytes of a token's sums, [depth] where its gradient is wanted. */
static inline long size_of(long depth, int has_grad) {
    return padded_stride(sizeof(Token) + has_grad * rounded_up(depth, PANEL) * sizeof(float));
}

/* Blocks in a part of the vocabulary. There are as many parts as keep the sums below what logits of bf16 would take,
   whatever the threads: a token's are added in one order. */
static inline long blocks_of(long depth, long vocab) {
    return parts(parts(vocab, BLOCK), smaller(HEAD_VOCAB_PARTS, larger(1, 2 * vocab / size_of(depth, 1))));
}

/* Bytes of workspace that `lm_head_cross_entropy` wants for so many rows. */
long lm_head_workspace(long rows, long depth, long vocab, int has_grad) {
    return rows * (parts(parts(vocab, BLOCK), blocks_of(depth, vocab)) * size_of(depth, has_grad) +
                   rounded_up(padded_stride(2 * depth), 64) + 64);
}

/* losses [rows] of scale * (hidden [rows, depth] weight^T + bias), weight [vocab, depth]; grad_hidden, unless NULL,
   becomes the gradient of their sum. bias may be NULL; depth is even. Unless `codes` is NULL, the gradient is made in 8
   bits: of codes of the weight without its `mean` [depth] over the vocabulary, rotated, with a scale for each row
   (quantize_int8_rows), packed as bindings.py does it, and of a token's powers, of which a block shares a step. */
void lm_head_cross_entropy(const bf16 *hidden, const bf16 *weight, const bf16 *bias, const int8_t *codes,
                           const float *code_scales, const float *mean, const int64_t *targets, float *losses,
                           bf16 *grad_hidden, char *workspace, long rows, long depth, long vocab, float scale) {
    int has_grad = grad_hidden != NULL, in_8_bits = has_grad && codes;
    long padded = has_grad * rounded_up(depth, PANEL), size = size_of(depth, has_grad),
         copy_stride = padded_stride(2 * depth), pairs = depth / 2;
    long blocks = parts(vocab, BLOCK), blocks_per_part = blocks_of(depth, vocab),
         num_parts = parts(blocks, blocks_per_part);
    long groups = 1, max_groups = larger(1, rows / MIN_TOKENS), threads = omp_get_max_threads();
    while (num_parts * groups % threads && groups < max_groups)
        groups++; /* of tokens, so that all threads have as much to do, where that is possible */
    char *all = workspace, *copy = all + num_parts * rows * size;
    float *chosen = (float *)(copy + rounded_up(rows * copy_stride, 64)); /* the targets' logits */
#pragma omp parallel
    {
        uint32_t *panels = aligned_alloc(64, BLOCK * pairs * 4),
                 *transposed_panels = aligned_alloc(64, BLOCK * rounded_up(depth, PANEL) * 2);
        _Alignas(64) float logits[ROWS * BLOCK], biases[BLOCK];
        _Alignas(64) bf16 powers[ROWS * BLOCK];
        _Alignas(64) float block_scales[BLOCK], products[BLOCK], steps[ROWS];
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) memcpy(copy + r * copy_stride, hidden + r * depth, 2 * depth);
#pragma omp for schedule(static)
        for (long task = 0; task < num_parts * groups; task++) {
            long part = task / groups, group = task % groups, start = rows * group / groups,
                 end = rows * (group + 1) / groups;
            char *tokens = all + part * rows * size;
            for (long r = start; r < end; r++) {
                memset(token(tokens, size, r), 0, size);
                token(tokens, size, r)->highest = -FLT_MAX; /* finite, whatever else is not */
            }
            for (long block = part * blocks_per_part; block < smaller((part + 1) * blocks_per_part, blocks); block++) {
                long first = block * BLOCK, count = smaller(BLOCK, vocab - first), lines = parts(count, 2), r = start;
                const bf16 *block_weight = weight + first * depth;
                Right logits_factor = {block_weight, depth, 2, 0};
                for (long i = 0; i < BLOCK; i++) biases[i] = bias && i < count ? to_float(bias[first + i]) : 0.0f;
                pack_panels(panels, BLOCK / PANEL, &logits_factor, 0, count, 0, pairs);
                for (long i = 0; i < BLOCK && in_8_bits; i++)
                    block_scales[i] = i < count ? code_scales[first + i] : 0.0f;
                for (long column = 0; column < padded && !in_8_bits; column += PANEL)
                    for (long j = 0; j < lines; j++) /* after the last row comes something finite: the row again */
                        interleave_two(block_weight + 2 * j * depth + column, 2 * j + 1 < count ? depth : 0,
                                       panel_mask(depth - column),
                                       (__m512i *)(transposed_panels + column * lines + j * PANEL));
#define TILES(COUNT)                                                                                    \
    for (; r + COUNT <= end; r += COUNT) {                                                              \
        logits_tile(copy + r * copy_stride, copy_stride, COUNT, panels, pairs, biases, scale, logits);  \
        for (long i = 0; i < COUNT; i++) {                                                              \
            long target = targets[r + i] - first;                                                       \
            if (target >= 0 && target < count) {                                                        \
                chosen[r + i] = logits[i * BLOCK + target];                                             \
                logits[i * BLOCK + target] = -FLT_MAX;                                                  \
            }                                                                                           \
            Token *current = token(tokens, size, r + i);                                                \
            if (in_8_bits)                                                                              \
                steps[i] = codes_of(current, logits + i * BLOCK, count, padded, block_scales, products, \
                                    (uint8_t *)powers + i * BLOCK);                                     \
            else                                                                                        \
                powers_of(current, logits + i * BLOCK, count, padded, powers + i * BLOCK);              \
        }                                                                                               \
        if (in_8_bits)                                                                                  \
            codes_tile(tokens + r * size, size, COUNT, (const uint8_t *)powers, steps,                  \
                       (const uint32_t *)(codes + first * padded), padded);                             \
        else                                                                                            \
            sums_tile(tokens + r * size, size, COUNT, powers, transposed_panels, lines, padded);        \
    }
                TILES(12) TILES(4) TILES(1)
#undef TILES
            }
        }
        free(panels), free(transposed_panels);
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            float highest = chosen[r], others = 0.0f, rounded = 0.0f, *sums = token(all, size, r)->sums;
            for (long part = 0; part < num_parts; part++)
                highest = fmaxf(highest, token(all, size, part * rows + r)->highest);
            for (long part = 0; part < num_parts; part++) {
                Token *other = token(all, size, part * rows + r);
                float lowered = expf(other->highest - highest);
                others += lowered * other->total, rounded += lowered * other->rounded;
                for (long i = 0; i < padded; i++) sums[i] = lowered * other->sums[i] + (part ? sums[i] : 0.0f);
            }
            float total = others + expf(chosen[r] - highest);
            losses[r] = logf(total) + highest - chosen[r];
            const bf16 *chosen_weight = weight + targets[r] * depth;
            for (long i = 0; i + PANEL <= depth && in_8_bits; i += PANEL) {
                __m512 first_16 = _mm512_load_ps(sums + i), second_16 = _mm512_load_ps(sums + i + LANES);
                rotate_32(&first_16, &second_16);
                _mm512_store_ps(sums + i, first_16), _mm512_store_ps(sums + i + LANES, second_16);
            }
            for (long i = 0; i < depth && in_8_bits; i++)
                grad_hidden[r * depth + i] =
                    to_bf16(scale / total * (sums[i] + others * (mean[i] - to_float(chosen_weight[i]))));
            for (long i = 0; i < depth && has_grad && !in_8_bits; i++)
                grad_hidden[r * depth + i] = to_bf16(scale / total * (sums[i] - rounded * to_float(chosen_weight[i])));
        }
    }
}

#endif
