/* Causal attention within documents on a processor that multiplies pairs of bf16 numbers (AVX512-BF16): scores and probabilities of a block of
   queries and a block of keys never leave the caches. Softmax block by block and the backward pass follow FlashAttention-2 (Dao 2023).
   Called by native.py; arrays are [B, T, heads, D], contiguous. A thread takes all queries of one document that share their keys.

   Scores are computed with a key in each row and a query in each lane: what softmax sums, it sums over rows. */

#include "bf16.h"

#ifdef __AVX512BF16__

typedef uint32_t pair; /* two numbers, the first one in the lower half */

enum { QUERIES = 64, KEYS = 64, ROWS = 4, VECTORS = 4 }; /* of a block; of a tile of sums */

static const float LOWEST = -1e30f; /* below every score: minus infinity has no difference from itself */

static inline pair both(bf16 first, bf16 second) { return (pair)first | (pair)second << 16; }

static inline __attribute__((always_inline)) void tile(float *c, const pair *a, long across, long along, const pair *b, long width, long pairs,
                                                       int begins, int vectors) {
    __m512 sums[ROWS][VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[r][v] = begins ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * width + v * LANES);
    for (long j = 0; j < pairs; j++) {
        __m512bh right[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) right[v] = (__m512bh)_mm512_loadu_si512(b + j * width + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            __m512bh left = (__m512bh)_mm512_set1_epi32(a[r * across + j * along]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], left, right[v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) _mm512_storeu_ps(c + r * width + v * LANES, sums[r][v]);
}

/* What a product does not need on the diagonal, where a query sees the keys up to its own: what is zero there, and what nobody looks at. */
enum { NOTHING, EARLIER_LANES, EARLIER_PAIRS, LATER_PAIRS };

/* c [rows, width] += a b, or = where it begins: a [rows, pairs] has element (i, j) at i * across + j * along, b is [pairs, width]. Whole tiles of
   rows, whole lanes of width. `needless` is left out: lanes, or numbers of a row of a, before or after the row's own number. */
static void multiply(float *c, const pair *a, long across, long along, const pair *b, long rows, long width, long pairs, int begins, int needless) {
    for (long i = 0; i < rows; i += ROWS) {
        long first = needless == EARLIER_PAIRS ? i / 2 : 0, last = needless == LATER_PAIRS ? i / 2 + ROWS / 2 : pairs;
        for (long n = needless == EARLIER_LANES ? i / LANES * LANES : 0; n < width; n += VECTORS * LANES) {
            float *to = c + i * width + n;
            const pair *from = a + i * across + first * along, *right = b + first * width + n;
            switch ((width - n) / LANES) {
            case 1: tile(to, from, across, along, right, width, last - first, begins, 1); break;
            case 2: tile(to, from, across, along, right, width, last - first, begins, 2); break;
            case 3: tile(to, from, across, along, right, width, last - first, begins, 3); break;
            default: tile(to, from, across, along, right, width, last - first, begins, 4);
            }
        }
    }
}

/* Rows of x, `stride` numbers apart, as they are: [padded, width / 2]; zeros follow them. */
static void copied(pair *to, const bf16 *x, long stride, long rows, long padded, long width) {
    for (long i = 0; i < rows; i++) memcpy(to + i * (width / 2), x + i * stride, width * sizeof(bf16));
    memset(to + rows * (width / 2), 0, (padded - rows) * width * sizeof(bf16));
}

/* The same rows in pairs: [padded / 2, width]. */
static void paired(pair *to, const bf16 *x, long stride, long rows, long padded, long width) {
    for (long i = 0; i < padded; i += 2) {
        const bf16 *first = x + i * stride, *second = first + stride;
        pair *out = to + i / 2 * width;
        if (i + 1 < rows)
            for (long n = 0; n < width; n++) out[n] = both(first[n], second[n]);
        else if (i < rows)
            for (long n = 0; n < width; n++) out[n] = both(first[n], 0);
        else
            memset(out, 0, width * sizeof(pair));
    }
}

/* A block of queries' rows with a query in each lane: [width / 2, QUERIES]. */
static void across_lanes(pair *to, const bf16 *x, long stride, long rows, long width) {
    for (long i = 0; i < QUERIES; i += LANES)
        for (long j = 0; j < width / 2; j += LANES) {
            long columns = smaller(LANES, width / 2 - j);
            __m512i block[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++)
                block[r] = i + r < rows ? _mm512_maskz_loadu_epi32((__mmask16)((1u << columns) - 1), x + (i + r) * stride + 2 * j) : _mm512_setzero_si512();
            transpose(block);
#pragma GCC unroll 16
            for (int c = 0; c < LANES; c++)
                if (c < columns) _mm512_storeu_si512(to + (j + c) * QUERIES + i, block[c]);
        }
}

/* How many keys of a block a register of queries, the v-th one, looks at: on the diagonal none after its last query. */
static inline long keys_of(long v, long first, long key) { return key == first ? (v + 1) * LANES : KEYS; }

/* Of the queries from `query` on, a lane each, those that see the key: it is not after them, and less than a window before. */
static inline __mmask16 seeing(long query, long key, long window) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i behind = _mm512_add_epi32(_mm512_set1_epi32((int)(query - key)), lanes); /* of a later key negative, that is, without a sign, huge */
    return _mm512_cmplt_epu32_mask(behind, _mm512_set1_epi32((int)smaller(window, INT32_MAX)));
}

/* Whether all queries from `first` on see all keys from `key` on. */
static inline int all_see(long first, long key, long window) { return key + KEYS - 1 <= first && first + QUERIES - 1 - key < window; }

/* 16 numbers and 16 more, one after another, as pairs of one of each. */
static inline __m512i interleaved(__m512i halves) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, halves);
}

static inline void store_halves(bf16 *first, bf16 *second, __m512i halves) {
    _mm256_storeu_si256((__m256i *)first, _mm512_castsi512_si256(halves));
    _mm256_storeu_si256((__m256i *)second, _mm512_extracti64x4_epi64(halves, 1));
}

static inline long first_key(long query, long window) { return query < window ? 0 : (query - window + 1) / KEYS * KEYS; }

static void *room(long bytes) { return aligned_alloc(64, rounded_up(bytes, 64)); }

/* The probabilities' block in pairs of keys, before they are divided by their sum; `highest` and `sums` go on, and `shrunk` says by what to multiply
   that which was summed before. */
static void softmax_block(const float *scores, pair *p, float *highest, float *sums, float *shrunk, long first, long key, long window,
                          float scale) {
    int whole = all_see(first, key, window);
    for (long v = 0; v < QUERIES / LANES; v++) {
        const float *of_key = scores + v * LANES;
        long query = first + v * LANES, keys = keys_of(v, first, key);
        __m512 before = _mm512_loadu_ps(highest + v * LANES), top = before, sum = _mm512_setzero_ps();
        for (long k = 0; k < keys; k++) {
            __mmask16 seen = whole ? 0xffff : seeing(query, key + k, window);
            top = _mm512_mask_max_ps(top, seen, top, _mm512_loadu_ps(of_key + k * QUERIES));
        }
        for (long k = 0; k < keys; k += 2) {
            __mmask16 seen = whole ? 0xffff : seeing(query, key + k, window), next = whole ? 0xffff : seeing(query, key + k + 1, window);
            __m512 x = _mm512_maskz_mov_ps(seen, exponentials(scale * (_mm512_loadu_ps(of_key + k * QUERIES) - top)));
            __m512 y = _mm512_maskz_mov_ps(next, exponentials(scale * (_mm512_loadu_ps(of_key + (k + 1) * QUERIES) - top)));
            sum += x + y;
            _mm512_storeu_si512(p + k / 2 * QUERIES + v * LANES, interleaved(rounded(x, y)));
        }
        __m512 less = exponentials(scale * (before - top));
        _mm512_storeu_ps(shrunk + v * LANES, less);
        _mm512_storeu_ps(highest + v * LANES, top);
        _mm512_storeu_ps(sums + v * LANES, _mm512_loadu_ps(sums + v * LANES) * less + sum);
    }
}

/* out, and log_sums [B, T, heads], the logarithms of the softmax's denominators. documents [number, 3]: row, first token, end; q has `heads`, k and v
   have `shared` heads; a query sees `window` tokens, itself among them. */
void attention(const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out, float *log_sums, const int64_t *documents, long number, long longest,
               long length, long heads, long shared, long width, long window, float scale) {
    long most = rounded_up(longest, KEYS), group = heads / shared, stride = heads * width, shared_stride = shared * width;
#pragma omp parallel
    {
        pair *keys = room(most * width * sizeof(bf16)), *values = room(most * width * sizeof(bf16));
        pair *lanes = room(QUERIES * width * sizeof(bf16)), *p = room(KEYS * QUERIES * sizeof(bf16));
        float *scores = room(KEYS * QUERIES * sizeof(float)), *sum = room(QUERIES * width * sizeof(float));
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < number * shared; task++) {
            const int64_t *document = documents + task / shared * 3;
            long some = task % shared, begin = document[0] * length + document[1], tokens = document[2] - document[1];
            copied(keys, k + begin * shared_stride + some * width, shared_stride, tokens, rounded_up(tokens, KEYS), width);
            paired(values, v + begin * shared_stride + some * width, shared_stride, tokens, rounded_up(tokens, KEYS), width);
            for (long head = some * group; head < (some + 1) * group; head++)
                for (long first = 0; first < tokens; first += QUERIES) {
                    long rows = smaller(QUERIES, tokens - first), here = (begin + first) * stride + head * width;
                    float highest[QUERIES], sums[QUERIES] = {0}, shrunk[QUERIES];
                    for (long i = 0; i < QUERIES; i++) highest[i] = LOWEST;
                    across_lanes(lanes, q + here, stride, rows, width);
                    long start = first_key(first, window);
                    for (long key = start; key < smaller(first + QUERIES, tokens); key += KEYS) {
                        int diagonal = key == first;
                        multiply(scores, keys + key * (width / 2), width / 2, 1, lanes, KEYS, QUERIES, width / 2, 1, diagonal ? EARLIER_LANES : NOTHING);
                        softmax_block(scores, p, highest, sums, shrunk, first, key, window, scale);
                        if (key > start)
                            for (long i = 0; i < QUERIES; i++)
                                for (long n = 0; n < width; n++) sum[i * width + n] *= shrunk[i];
                        multiply(sum, p, 1, QUERIES, values + key / 2 * width, QUERIES, width, KEYS / 2, key == start, diagonal ? LATER_PAIRS : NOTHING);
                    }
                    for (long i = 0; i < rows; i++) {
                        float factor = 1.0f / sums[i];
                        for (long n = 0; n < width; n++) out[here + i * stride + n] = down(factor * sum[i * width + n]);
                        log_sums[(begin + first + i) * heads + head] = logf(sums[i]) + scale * highest[i];
                    }
                }
        }
        free(keys), free(values), free(lanes), free(p), free(scores), free(sum);
    }
}

/* A block's probabilities and gradients of its scores, a key in each row; the latter in pairs of keys, too. `of_p` is the gradient of the
   probabilities, `mean` its sum weighted by them. */
static void softmax_block_backward(const float *scores, const float *of_p, bf16 *p, bf16 *of_scores, pair *of_scores_paired, const float *log_sums,
                                   const float *mean, long first, long key, long window, float scale) {
    int whole = all_see(first, key, window);
    for (long v = 0; v < QUERIES / LANES; v++) {
        long query = first + v * LANES, keys = keys_of(v, first, key);
        __m512 log_sum = _mm512_loadu_ps(log_sums + v * LANES), middle = _mm512_loadu_ps(mean + v * LANES);
        for (long k = 0; k < keys; k += 2) {
            long one = k * QUERIES + v * LANES, other = one + QUERIES;
            __mmask16 seen = whole ? 0xffff : seeing(query, key + k, window), next = whole ? 0xffff : seeing(query, key + k + 1, window);
            __m512 x = _mm512_maskz_mov_ps(seen, exponentials(scale * _mm512_loadu_ps(scores + one) - log_sum));
            __m512 y = _mm512_maskz_mov_ps(next, exponentials(scale * _mm512_loadu_ps(scores + other) - log_sum));
            __m512i halves = rounded(scale * x * (_mm512_loadu_ps(of_p + one) - middle), scale * y * (_mm512_loadu_ps(of_p + other) - middle));
            store_halves(p + one, p + other, rounded(x, y));
            store_halves(of_scores + one, of_scores + other, halves);
            _mm512_storeu_si512(of_scores_paired + k / 2 * QUERIES + v * LANES, interleaved(halves));
        }
    }
}

/* The gradients of q, k and v from that of out. */
void attention_backward(const bf16 *of_out, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *out, const float *log_sums, bf16 *of_q,
                        bf16 *of_k, bf16 *of_v, const int64_t *documents, long number, long longest, long length, long heads, long shared, long width,
                        long window, float scale) {
    long most = rounded_up(longest, KEYS), group = heads / shared, stride = heads * width, shared_stride = shared * width;
#pragma omp parallel
    {
        long all = most * width, block = QUERIES * width;
        pair *keys = room(all * sizeof(bf16)), *values = room(all * sizeof(bf16)), *keys_paired = room(all * sizeof(bf16));
        float *sum_k = room(all * sizeof(float)), *sum_v = room(all * sizeof(float)), *sum_q = room(block * sizeof(float));
        pair *lanes = room(block * sizeof(bf16)), *outer_lanes = room(block * sizeof(bf16));
        pair *queries = room(block * sizeof(bf16)), *outer = room(block * sizeof(bf16));
        float *scores = room(KEYS * QUERIES * sizeof(float)), *of_p = room(KEYS * QUERIES * sizeof(float));
        pair *p = room(KEYS * QUERIES * sizeof(bf16)), *of_scores = room(KEYS * QUERIES * sizeof(bf16));
        pair *of_scores_paired = room(KEYS * QUERIES * sizeof(bf16));
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < number * shared; task++) {
            const int64_t *document = documents + task / shared * 3;
            long some = task % shared, begin = document[0] * length + document[1], tokens = document[2] - document[1];
            long padded = rounded_up(tokens, KEYS), there = begin * shared_stride + some * width;
            copied(keys, k + there, shared_stride, tokens, padded, width);
            copied(values, v + there, shared_stride, tokens, padded, width);
            paired(keys_paired, k + there, shared_stride, tokens, padded, width);
            memset(sum_k, 0, padded * width * sizeof(float));
            memset(sum_v, 0, padded * width * sizeof(float));
            for (long head = some * group; head < (some + 1) * group; head++)
                for (long first = 0; first < tokens; first += QUERIES) {
                    long rows = smaller(QUERIES, tokens - first), here = (begin + first) * stride + head * width;
                    float of_rows[QUERIES] = {0}, means[QUERIES] = {0};
                    for (long i = 0; i < rows; i++) {
                        const bf16 *a = out + here + i * stride, *b = of_out + here + i * stride;
                        float mean = 0.0f;
#pragma omp simd reduction(+ : mean)
                        for (long n = 0; n < width; n++) mean += up(a[n]) * up(b[n]);
                        means[i] = mean;
                        of_rows[i] = log_sums[(begin + first + i) * heads + head];
                    }
                    across_lanes(lanes, q + here, stride, rows, width);
                    across_lanes(outer_lanes, of_out + here, stride, rows, width);
                    paired(queries, q + here, stride, rows, QUERIES, width);
                    paired(outer, of_out + here, stride, rows, QUERIES, width);
                    long start = first_key(first, window);
                    for (long key = start; key < smaller(first + QUERIES, tokens); key += KEYS) {
                        int diagonal = key == first, lanes_needless = diagonal ? EARLIER_LANES : NOTHING, pairs_needless = diagonal ? EARLIER_PAIRS : NOTHING;
                        multiply(scores, keys + key * (width / 2), width / 2, 1, lanes, KEYS, QUERIES, width / 2, 1, lanes_needless);
                        multiply(of_p, values + key * (width / 2), width / 2, 1, outer_lanes, KEYS, QUERIES, width / 2, 1, lanes_needless);
                        softmax_block_backward(scores, of_p, (bf16 *)p, (bf16 *)of_scores, of_scores_paired, of_rows, means, first, key, window, scale);
                        multiply(sum_v + key * width, p, QUERIES / 2, 1, outer, KEYS, width, QUERIES / 2, 0, pairs_needless);
                        multiply(sum_k + key * width, of_scores, QUERIES / 2, 1, queries, KEYS, width, QUERIES / 2, 0, pairs_needless);
                        multiply(sum_q, of_scores_paired, 1, QUERIES, keys_paired + key / 2 * width, QUERIES, width, KEYS / 2, key == start, diagonal ? LATER_PAIRS : NOTHING);
                    }
                    for (long i = 0; i < rows; i++)
                        for (long n = 0; n < width; n++) of_q[here + i * stride + n] = down(sum_q[i * width + n]);
                }
            for (long i = 0; i < tokens; i++)
                for (long n = 0; n < width; n++) {
                    of_k[there + i * shared_stride + n] = down(sum_k[i * width + n]);
                    of_v[there + i * shared_stride + n] = down(sum_v[i * width + n]);
                }
        }
        free(keys), free(values), free(keys_paired), free(sum_k), free(sum_v), free(sum_q), free(lanes), free(outer_lanes), free(queries), free(outer);
        free(scores), free(of_p), free(p), free(of_scores), free(of_scores_paired);
    }
}

#endif
