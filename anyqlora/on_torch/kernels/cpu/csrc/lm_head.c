/* The output head and its cross-entropy, as attention.c is attention: of some words at a time a few tokens' logits, their powers and what these add to
   the gradient of the head's input, which never leave a core's caches. A power is taken above a reference of its token, which follows the token's largest
   logit; sums above an older one are lowered. For processors that products.c is for, and called by native.py; every array is contiguous. */

#include "panels.h"

#include <float.h>

#ifdef HAS_PANELS

enum { WORDS = 128, WITHIN = 8, PARTS = 8, SOME = 48 };
/* Words that are looked at together, and whose weights are packed for both products; e^WITHIN is the largest power above a reference; parts of the words, and
   tokens that share packed weights, at least. */

/* Some tokens' sums over a part of the words. */
typedef struct {
    float highest, total, rounded, unused[LANES - 3]; /* the reference, and the sums of the powers above it and of these in bf16 */
    float sums[];                                     /* of the latter times the words' weights */
} Token;

static inline Token *token(char *tokens, long size, long r) { return (Token *)(tokens + r * size); }

/* The logits [count, WORDS] of so many tokens: panels [WORDS / PANEL] of the words' weights, and their biases. */
static inline __attribute__((always_inline)) void logits_tile(const char *hidden, long apart, int count, const uint32_t *panels, long pairs, const float *biases, float scale, float *logits) {
    for (long p = 0; p < WORDS / PANEL; p++) {
        __m512 y[ROWS][VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) y[r][0] = y[r][1] = _mm512_setzero_ps();
        add_products(y, count, hidden, apart, panels + p * pairs * PANEL, pairs);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                long word = p * PANEL + v * LANES;
                _mm512_store_ps(logits + r * WORDS + word, scale * (y[r][v] + _mm512_load_ps(biases + word)));
            }
    }
}

/* Puts a token's reference where so many words' logits have powers that are not too large. */
static void refer(Token *token, const float *logits, long words, long padded) {
    __m512 most = _mm512_set1_ps(-FLT_MAX);
    for (long i = 0; i < words; i += LANES) most = _mm512_mask_max_ps(most, of_lanes(words - i), most, _mm512_load_ps(logits + i));
    float highest = _mm512_reduce_max_ps(most);
    if (!(highest <= token->highest + WITHIN)) {
        float lowered = exponential(token->highest - highest);
        token->total *= lowered, token->rounded *= lowered;
        for (long i = 0; i < padded && token->highest > -FLT_MAX; i++) token->sums[i] *= lowered;
        token->highest = highest;
    }
}

/* A token's powers of its logits of so many words, bf16 [WORDS], zeros after the last one. */
static void powers_of(Token *token, const float *logits, long words, long padded, bf16 *powers) {
    __m512 sum = _mm512_setzero_ps(), of_rounded = sum;
    refer(token, logits, words, padded);
    for (long i = 0; i < WORDS; i += PANEL) {
        __m512 both[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            both[v] = _mm512_maskz_mov_ps(of_lanes(words - i - v * LANES), exponentials(_mm512_load_ps(logits + i + v * LANES) - token->highest));
        __m512i narrow = rounded(both[0], both[1]);
        sum += both[0] + both[1], of_rounded += former(narrow) + latter(narrow);
        _mm512_store_si512(powers + i, narrow);
    }
    token->total += _mm512_reduce_add_ps(sum), token->rounded += _mm512_reduce_add_ps(of_rounded);
}

/* The same times the words' scales, as codes without a sign, [WORDS]; returns what a code of 1 stands for. `products` has room for so many floats. */
static float codes_of(Token *token, const float *logits, long words, long padded, const float *scales, float *products, uint8_t *codes) {
    __m512 sum = _mm512_setzero_ps(), most = sum;
    refer(token, logits, words, padded);
    for (long i = 0; i < WORDS; i += PANEL) {
        __m512 both[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            both[v] = _mm512_maskz_mov_ps(of_lanes(words - i - v * LANES), exponentials(_mm512_load_ps(logits + i + v * LANES) - token->highest));
            __m512 product = both[v] * _mm512_load_ps(scales + i + v * LANES);
            most = _mm512_max_ps(most, product);
            _mm512_store_ps(products + i + v * LANES, product);
        }
        sum += both[0] + both[1];
    }
    float step = _mm512_reduce_max_ps(most) / 255.0f, per_step = 1.0f / step;
    if (!(per_step < INFINITY)) step = per_step = 0.0f; /* nothing, or what is not finite: the sum of the powers is not, either */
    for (long i = 0; i < WORDS; i += LANES)
        _mm_store_si128((__m128i *)(codes + i), _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(_mm512_load_ps(products + i) * per_step)));
    token->total += _mm512_reduce_add_ps(sum);
    return step;
}

/* What `count` tokens' powers add to their sums: panels of the words' weights, turned. */
static inline __attribute__((always_inline)) void sums_tile(char *tokens, long size, int count, const bf16 *powers, const uint32_t *panels, long pairs, long padded) {
    for (long column = 0; column < padded; column += PANEL) {
        __m512 y[ROWS][VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) y[r][v] = _mm512_load_ps(token(tokens, size, r)->sums + column + v * LANES);
        add_products(y, count, powers, WORDS * sizeof(bf16), panels + column * pairs, pairs);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) _mm512_store_ps(token(tokens, size, r)->sums + column + v * LANES, y[r][v]);
    }
}

/* The same of codes: a word of a panel has four words' weights. */
static inline __attribute__((always_inline)) void codes_tile(char *tokens, long size, int count, const uint8_t *codes, const float *steps, const uint32_t *panels, long padded) {
    for (long column = 0; column < padded; column += PANEL) {
        __m512i sums[ROWS][VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) sums[r][0] = sums[r][1] = _mm512_setzero_si512();
        add_codes(sums, count, codes, WORDS, panels + column * (WORDS / 4), WORDS / 4, 0);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                float *to = token(tokens, size, r)->sums + column + v * LANES;
                _mm512_store_ps(to, _mm512_load_ps(to) + _mm512_cvtepi32_ps(sums[r][v]) * steps[r]);
            }
    }
}

/* Bytes of a token's sums, [depth] where its gradient is wanted. */
static inline long size_of(long depth, int learns) { return set_apart(sizeof(Token) + learns * rounded_up(depth, PANEL) * sizeof(float)); }

/* Blocks of words in a part of them. There are as many parts as keep sums below what logits of bf16 would take, whatever the threads: a token's are added in one order. */
static inline long blocks_of(long depth, long words) { return parts(parts(words, WORDS), smaller(PARTS, larger(1, 2 * words / size_of(depth, 1)))); }

/* Bytes that `head` wants. */
long head_room(long rows, long depth, long words, int learns) {
    return rows * (parts(parts(words, WORDS), blocks_of(depth, words)) * size_of(depth, learns) + rounded_up(set_apart(2 * depth), 64) + 64);
}

/* losses [rows] of scale * (hidden [rows, depth] weight^T + bias), weight [words, depth], and unless it is NULL the gradient of their sum; bias may be NULL.
   depth is even. Unless `codes` is NULL, the gradient is of codes: of what is left of a word's weights without their `mean` [depth] over all words, spread,
   with a scale for each word (native.c: int8_rows), packed as native.py has them, and of a token's powers, 128 words of which share a step. */
void head(const bf16 *hidden, const bf16 *weight, const bf16 *bias, const int8_t *codes, const float *scales, const float *mean, const int64_t *targets, float *losses, bf16 *of_hidden, char *room, long rows, long depth, long words, float scale) {
    int learns = of_hidden != NULL, rounds = learns && codes;
    long padded = learns * rounded_up(depth, PANEL), size = size_of(depth, learns), apart = set_apart(2 * depth), pairs = depth / 2;
    long blocks = parts(words, WORDS), each = blocks_of(depth, words), ways = parts(blocks, each);
    long groups = 1, most = larger(1, rows / SOME), threads = omp_get_max_threads();
    while (ways * groups % threads && groups < most) groups++; /* of tokens, so that threads have as much to do, if it can be */
    char *all = room, *copy = all + ways * rows * size;
    float *chosen = (float *)(copy + rounded_up(rows * apart, 64)); /* the targets' logits */
#pragma omp parallel
    {
        uint32_t *panels = aligned_alloc(64, WORDS * pairs * 4), *turned = aligned_alloc(64, WORDS * rounded_up(depth, PANEL) * 2);
        _Alignas(64) float logits[ROWS * WORDS], biases[WORDS];
        _Alignas(64) bf16 powers[ROWS * WORDS];
        _Alignas(64) float of_words[WORDS], products[WORDS], steps[ROWS];
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) memcpy(copy + r * apart, hidden + r * depth, 2 * depth);
#pragma omp for schedule(static)
        for (long task = 0; task < ways * groups; task++) {
            long way = task / groups, group = task % groups, start = rows * group / groups, end = rows * (group + 1) / groups;
            char *mine = all + way * rows * size;
            for (long r = start; r < end; r++) {
                memset(token(mine, size, r), 0, size);
                token(mine, size, r)->highest = -FLT_MAX; /* finite, whatever is not */
            }
            for (long block = way * each; block < smaller((way + 1) * each, blocks); block++) {
                long first = block * WORDS, some = smaller(WORDS, words - first), lines = parts(some, 2), r = start;
                const bf16 *from = weight + first * depth;
                Right forward = {from, depth, 2, 0};
                for (long i = 0; i < WORDS; i++) biases[i] = bias && i < some ? up(bias[first + i]) : 0.0f;
                packed(panels, WORDS / PANEL, &forward, 0, some, 0, pairs);
                for (long i = 0; i < WORDS && rounds; i++) of_words[i] = i < some ? scales[first + i] : 0.0f;
                for (long column = 0; column < padded && !rounds; column += PANEL)
                    for (long j = 0; j < lines; j++) /* after the last word comes what is finite: the word again */
                        of_two(from + 2 * j * depth + column, 2 * j + 1 < some ? depth : 0, of_panel(depth - column), (__m512i *)(turned + column * lines + j * PANEL));
#define TILES(COUNT)                                                                                       \
    for (; r + COUNT <= end; r += COUNT) {                                                                 \
        logits_tile(copy + r * apart, apart, COUNT, panels, pairs, biases, scale, logits);                 \
        for (long i = 0; i < COUNT; i++) {                                                                 \
            long target = targets[r + i] - first;                                                          \
            if (target >= 0 && target < some) {                                                            \
                chosen[r + i] = logits[i * WORDS + target];                                                \
                logits[i * WORDS + target] = -FLT_MAX;                                                     \
            }                                                                                              \
            Token *one = token(mine, size, r + i);                                                         \
            if (rounds)                                                                                    \
                steps[i] = codes_of(one, logits + i * WORDS, some, padded, of_words, products, (uint8_t *)powers + i * WORDS); \
            else                                                                                           \
                powers_of(one, logits + i * WORDS, some, padded, powers + i * WORDS);                      \
        }                                                                                                  \
        if (rounds)                                                                                        \
            codes_tile(mine + r * size, size, COUNT, (const uint8_t *)powers, steps, (const uint32_t *)(codes + first * padded), padded); \
        else                                                                                               \
            sums_tile(mine + r * size, size, COUNT, powers, turned, lines, padded);                        \
    }
                TILES(12) TILES(4) TILES(1)
#undef TILES
            }
        }
        free(panels), free(turned);
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            float highest = chosen[r], others = 0.0f, rounded = 0.0f, *sums = token(all, size, r)->sums;
            for (long way = 0; way < ways; way++) highest = fmaxf(highest, token(all, size, way * rows + r)->highest);
            for (long way = 0; way < ways; way++) {
                Token *other = token(all, size, way * rows + r);
                float lowered = expf(other->highest - highest);
                others += lowered * other->total, rounded += lowered * other->rounded;
                for (long i = 0; i < padded; i++) sums[i] = lowered * other->sums[i] + (way ? sums[i] : 0.0f);
            }
            float total = others + expf(chosen[r] - highest);
            losses[r] = logf(total) + highest - chosen[r];
            const bf16 *chosen_weight = weight + targets[r] * depth;
            for (long i = 0; i + PANEL <= depth && rounds; i += PANEL) {
                __m512 former = _mm512_load_ps(sums + i), latter = _mm512_load_ps(sums + i + LANES);
                spread(&former, &latter);
                _mm512_store_ps(sums + i, former), _mm512_store_ps(sums + i + LANES, latter);
            }
            for (long i = 0; i < depth && rounds; i++) of_hidden[r * depth + i] = down(scale / total * (sums[i] + others * (mean[i] - up(chosen_weight[i]))));
            for (long i = 0; i < depth && learns && !rounds; i++) of_hidden[r * depth + i] = down(scale / total * (sums[i] - rounded * up(chosen_weight[i])));
        }
    }
}

#endif
