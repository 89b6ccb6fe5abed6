/* Causal attention within documents on a processor that multiplies pairs of bf16 numbers (AVX512-BF16): scores and
   probabilities of a block of queries and a block of keys never leave the caches. Softmax block by block and the
   backward pass follow FlashAttention-2 (Dao 2023). Arrays are [B, T, heads, D]. A thread takes all queries of one
   document that share their keys.

   Scores are computed with a key in each row and a query in each lane: what softmax sums, it sums over rows. */

#include "bf16.h"

#ifdef __AVX512BF16__

typedef uint32_t pair; /* two numbers, the first one in the lower half */

enum { QUERIES = 64, KEYS = 64, ROWS = 4, VECTORS = 4 }; /* of a block; of a tile of sums */

static const float LOWEST = -1e30f; /* below every score: minus infinity has no difference from itself */

static inline pair both(bf16 first, bf16 second) { return (pair)first | (pair)second << 16; }

static inline __attribute__((always_inline)) void tile(float *c, const pair *a, long row_step, long pair_step,
                                                       const pair *b, long width, long pairs, int begins, int vectors) {
    __m512 sums[ROWS][VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sums[r][v] = begins ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * width + v * LANES);
    for (long j = 0; j < pairs; j++) {
        __m512bh right[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) right[v] = (__m512bh)_mm512_loadu_si512(b + j * width + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            __m512bh left = (__m512bh)_mm512_set1_epi32(a[r * row_step + j * pair_step]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], left, right[v]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) _mm512_storeu_ps(c + r * width + v * LANES, sums[r][v]);
}

/* What a product does not need on the diagonal, where a query sees the keys up to its own: what is zero there, and what
   nobody looks at. */
enum { NOTHING, EARLIER_LANES, EARLIER_PAIRS, LATER_PAIRS };

/* c [rows, width] += a b, or = where it begins: a [rows, pairs] has element (i, j) at i * row_step + j * pair_step, b
   is [pairs, width]. Whole tiles of rows, whole lanes of width. `needless` is left out: lanes, or pairs of a row of a,
   before or after the row's own number. */
static void multiply(float *c, const pair *a, long row_step, long pair_step, const pair *b, long rows, long width,
                     long pairs, int begins, int needless) {
    for (long i = 0; i < rows; i += ROWS) {
        long first = needless == EARLIER_PAIRS ? i / 2 : 0, last = needless == LATER_PAIRS ? i / 2 + ROWS / 2 : pairs;
        for (long n = needless == EARLIER_LANES ? i / LANES * LANES : 0; n < width; n += VECTORS * LANES) {
            float *out = c + i * width + n;
            const pair *left = a + i * row_step + first * pair_step, *right = b + first * width + n;
            switch ((width - n) / LANES) {
            case 1: tile(out, left, row_step, pair_step, right, width, last - first, begins, 1); break;
            case 2: tile(out, left, row_step, pair_step, right, width, last - first, begins, 2); break;
            case 3: tile(out, left, row_step, pair_step, right, width, last - first, begins, 3); break;
            default: tile(out, left, row_step, pair_step, right, width, last - first, begins, 4);
            }
        }
    }
}

/* Rows of x, `stride` numbers apart, as they are: [padded, head_dim / 2]; zeros follow them. */
static void copy_rows(pair *out, const bf16 *x, long stride, long rows, long padded, long head_dim) {
    for (long i = 0; i < rows; i++) memcpy(out + i * (head_dim / 2), x + i * stride, head_dim * sizeof(bf16));
    memset(out + rows * (head_dim / 2), 0, (padded - rows) * head_dim * sizeof(bf16));
}

/* The same rows in pairs: [padded / 2, head_dim]. */
static void pair_rows(pair *pairs, const bf16 *x, long stride, long rows, long padded, long head_dim) {
    for (long i = 0; i < padded; i += 2) {
        const bf16 *first = x + i * stride, *second = first + stride;
        pair *out = pairs + i / 2 * head_dim;
        if (i + 1 < rows)
            for (long n = 0; n < head_dim; n++) out[n] = both(first[n], second[n]);
        else if (i < rows)
            for (long n = 0; n < head_dim; n++) out[n] = both(first[n], 0);
        else
            memset(out, 0, head_dim * sizeof(pair));
    }
}

/* A block of queries' rows with a query in each lane: [head_dim / 2, QUERIES]. */
static void put_in_lanes(pair *out, const bf16 *x, long stride, long rows, long head_dim) {
    for (long i = 0; i < QUERIES; i += LANES)
        for (long j = 0; j < head_dim / 2; j += LANES) {
            long columns = smaller(LANES, head_dim / 2 - j);
            __m512i block[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++)
                block[r] = i + r < rows ? _mm512_maskz_loadu_epi32((__mmask16)((1u << columns) - 1),
                                                                   x + (i + r) * stride + 2 * j)
                                        : _mm512_setzero_si512();
            transpose(block);
#pragma GCC unroll 16
            for (int c = 0; c < LANES; c++)
                if (c < columns) _mm512_storeu_si512(out + (j + c) * QUERIES + i, block[c]);
        }
}

/* How many keys of a block the v-th register of queries looks at: on the diagonal none after its last query. */
static inline long keys_of(long v, long first, long key) { return key == first ? (v + 1) * LANES : KEYS; }

/* Of the queries from `query` on, a lane each, those that see the key: it is not after them, and less than a window
   before. */
static inline __mmask16 sees(long query, long key, long window) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i behind = _mm512_add_epi32(_mm512_set1_epi32((int)(query - key)),
                                      lanes); /* of a later key negative, that is, without a sign, huge */
    return _mm512_cmplt_epu32_mask(behind, _mm512_set1_epi32((int)smaller(window, INT32_MAX)));
}

/* Whether all queries from `first` on see all keys from `key` on. */
static inline int all_see(long first, long key, long window) {
    return key + KEYS - 1 <= first && first + QUERIES - 1 - key < window;
}

/* 16 numbers and 16 more, one after another, as pairs of one of each. */
static inline __m512i interleave(__m512i halves) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, halves);
}

static inline void store_halves(bf16 *first, bf16 *second, __m512i halves) {
    _mm256_storeu_si256((__m256i *)first, _mm512_castsi512_si256(halves));
    _mm256_storeu_si256((__m256i *)second, _mm512_extracti64x4_epi64(halves, 1));
}

static inline long first_key(long query, long window) {
    return query < window ? 0 : (query - window + 1) / KEYS * KEYS;
}

static void *allocated(long bytes) { return aligned_alloc(64, rounded_up(bytes, 64)); }

/* The probabilities' block in pairs of keys, before they are divided by their sum; `highest` and `sums` are updated,
   and `rescale` says by what to multiply what was summed before. */
static void softmax_block(const float *scores, pair *p, float *highest, float *sums, float *rescale, long first,
                          long key, long window, float scale) {
    int all_seen = all_see(first, key, window);
    for (long v = 0; v < QUERIES / LANES; v++) {
        const float *column = scores + v * LANES;
        long query = first + v * LANES, keys = keys_of(v, first, key);
        __m512 before = _mm512_loadu_ps(highest + v * LANES), top = before, sum = _mm512_setzero_ps();
        for (long k = 0; k < keys; k++) {
            __mmask16 seen = all_seen ? 0xffff : sees(query, key + k, window);
            top = _mm512_mask_max_ps(top, seen, top, _mm512_loadu_ps(column + k * QUERIES));
        }
        for (long k = 0; k < keys; k += 2) {
            __mmask16 seen = all_seen ? 0xffff : sees(query, key + k, window),
                      next_seen = all_seen ? 0xffff : sees(query, key + k + 1, window);
            __m512 x = _mm512_maskz_mov_ps(seen, exponentials(scale * (_mm512_loadu_ps(column + k * QUERIES) - top)));
            __m512 y = _mm512_maskz_mov_ps(next_seen,
                                           exponentials(scale * (_mm512_loadu_ps(column + (k + 1) * QUERIES) - top)));
            sum += x + y;
            _mm512_storeu_si512(p + k / 2 * QUERIES + v * LANES, interleave(round_32(x, y)));
        }
        __m512 factor = exponentials(scale * (before - top));
        _mm512_storeu_ps(rescale + v * LANES, factor);
        _mm512_storeu_ps(highest + v * LANES, top);
        _mm512_storeu_ps(sums + v * LANES, _mm512_loadu_ps(sums + v * LANES) * factor + sum);
    }
}

/* out, and logsumexp [B, T, heads], the logarithms of the softmax's denominators. documents [num_documents, 3]: row,
   first token, end; `longest` tokens in one of them. q has `heads`, k and v have `kv_heads` heads; a query sees
   `window` tokens, itself among them. */
void attention(const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out, float *logsumexp, const int64_t *documents,
               long num_documents, long longest, long length, long heads, long kv_heads, long head_dim, long window,
               float scale) {
    long max_tokens = rounded_up(longest, KEYS), group = heads / kv_heads, stride = heads * head_dim,
         kv_stride = kv_heads * head_dim;
#pragma omp parallel
    {
        pair *keys = allocated(max_tokens * head_dim * sizeof(bf16)),
             *values = allocated(max_tokens * head_dim * sizeof(bf16));
        pair *lanes = allocated(QUERIES * head_dim * sizeof(bf16)), *p = allocated(KEYS * QUERIES * sizeof(bf16));
        float *scores = allocated(KEYS * QUERIES * sizeof(float)), *sum = allocated(QUERIES * head_dim * sizeof(float));
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < num_documents * kv_heads; task++) {
            const int64_t *document = documents + task / kv_heads * 3;
            long kv_head = task % kv_heads, begin = document[0] * length + document[1],
                 tokens = document[2] - document[1];
            copy_rows(keys, k + begin * kv_stride + kv_head * head_dim, kv_stride, tokens, rounded_up(tokens, KEYS),
                      head_dim);
            pair_rows(values, v + begin * kv_stride + kv_head * head_dim, kv_stride, tokens, rounded_up(tokens, KEYS),
                      head_dim);
            for (long head = kv_head * group; head < (kv_head + 1) * group; head++)
                for (long first = 0; first < tokens; first += QUERIES) {
                    long rows = smaller(QUERIES, tokens - first), here = (begin + first) * stride + head * head_dim;
                    float highest[QUERIES], sums[QUERIES] = {0}, rescale[QUERIES];
                    for (long i = 0; i < QUERIES; i++) highest[i] = LOWEST;
                    put_in_lanes(lanes, q + here, stride, rows, head_dim);
                    long start = first_key(first, window);
                    for (long key = start; key < smaller(first + QUERIES, tokens); key += KEYS) {
                        int diagonal = key == first;
                        multiply(scores, keys + key * (head_dim / 2), head_dim / 2, 1, lanes, KEYS, QUERIES,
                                 head_dim / 2, 1, diagonal ? EARLIER_LANES : NOTHING);
                        softmax_block(scores, p, highest, sums, rescale, first, key, window, scale);
                        if (key > start)
                            for (long i = 0; i < QUERIES; i++)
                                for (long n = 0; n < head_dim; n++) sum[i * head_dim + n] *= rescale[i];
                        multiply(sum, p, 1, QUERIES, values + key / 2 * head_dim, QUERIES, head_dim, KEYS / 2,
                                 key == start, diagonal ? LATER_PAIRS : NOTHING);
                    }
                    for (long i = 0; i < rows; i++) {
                        float factor = 1.0f / sums[i];
                        for (long n = 0; n < head_dim; n++)
                            out[here + i * stride + n] = to_bf16(factor * sum[i * head_dim + n]);
                        logsumexp[(begin + first + i) * heads + head] = logf(sums[i]) + scale * highest[i];
                    }
                }
        }
        free(keys), free(values), free(lanes), free(p), free(scores), free(sum);
    }
}

/* A block's probabilities and gradients of its scores, a key in each row; the latter in pairs of keys, too. `grad_p` is
   the gradient of the probabilities, `deltas` its sum weighted by them. */
static void softmax_block_backward(const float *scores, const float *grad_p, bf16 *p, bf16 *grad_scores,
                                   pair *grad_scores_paired, const float *logsumexp, const float *deltas, long first,
                                   long key, long window, float scale) {
    int all_seen = all_see(first, key, window);
    for (long v = 0; v < QUERIES / LANES; v++) {
        long query = first + v * LANES, keys = keys_of(v, first, key);
        __m512 lse = _mm512_loadu_ps(logsumexp + v * LANES), delta = _mm512_loadu_ps(deltas + v * LANES);
        for (long k = 0; k < keys; k += 2) {
            long first_row = k * QUERIES + v * LANES, second_row = first_row + QUERIES;
            __mmask16 seen = all_seen ? 0xffff : sees(query, key + k, window),
                      next_seen = all_seen ? 0xffff : sees(query, key + k + 1, window);
            __m512 x = _mm512_maskz_mov_ps(seen, exponentials(scale * _mm512_loadu_ps(scores + first_row) - lse));
            __m512 y = _mm512_maskz_mov_ps(next_seen, exponentials(scale * _mm512_loadu_ps(scores + second_row) - lse));
            __m512i halves = round_32(scale * x * (_mm512_loadu_ps(grad_p + first_row) - delta),
                                      scale * y * (_mm512_loadu_ps(grad_p + second_row) - delta));
            store_halves(p + first_row, p + second_row, round_32(x, y));
            store_halves(grad_scores + first_row, grad_scores + second_row, halves);
            _mm512_storeu_si512(grad_scores_paired + k / 2 * QUERIES + v * LANES, interleave(halves));
        }
    }
}

/* The gradients of q, k and v from that of out. */
void attention_backward(const bf16 *grad_out, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *out,
                        const float *logsumexp, bf16 *grad_q, bf16 *grad_k, bf16 *grad_v, const int64_t *documents,
                        long num_documents, long longest, long length, long heads, long kv_heads, long head_dim,
                        long window, float scale) {
    long max_tokens = rounded_up(longest, KEYS), group = heads / kv_heads, stride = heads * head_dim,
         kv_stride = kv_heads * head_dim;
#pragma omp parallel
    {
        long all = max_tokens * head_dim, block = QUERIES * head_dim;
        pair *keys = allocated(all * sizeof(bf16)), *values = allocated(all * sizeof(bf16)),
             *keys_paired = allocated(all * sizeof(bf16));
        float *sum_k = allocated(all * sizeof(float)), *sum_v = allocated(all * sizeof(float)),
              *sum_q = allocated(block * sizeof(float));
        pair *lanes = allocated(block * sizeof(bf16)), *grad_lanes = allocated(block * sizeof(bf16));
        pair *queries = allocated(block * sizeof(bf16)), *grads = allocated(block * sizeof(bf16));
        float *scores = allocated(KEYS * QUERIES * sizeof(float)), *grad_p = allocated(KEYS * QUERIES * sizeof(float));
        pair *p = allocated(KEYS * QUERIES * sizeof(bf16)), *grad_scores = allocated(KEYS * QUERIES * sizeof(bf16));
        pair *grad_scores_paired = allocated(KEYS * QUERIES * sizeof(bf16));
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < num_documents * kv_heads; task++) {
            const int64_t *document = documents + task / kv_heads * 3;
            long kv_head = task % kv_heads, begin = document[0] * length + document[1],
                 tokens = document[2] - document[1];
            long padded = rounded_up(tokens, KEYS), there = begin * kv_stride + kv_head * head_dim;
            copy_rows(keys, k + there, kv_stride, tokens, padded, head_dim);
            copy_rows(values, v + there, kv_stride, tokens, padded, head_dim);
            pair_rows(keys_paired, k + there, kv_stride, tokens, padded, head_dim);
            memset(sum_k, 0, padded * head_dim * sizeof(float));
            memset(sum_v, 0, padded * head_dim * sizeof(float));
            for (long head = kv_head * group; head < (kv_head + 1) * group; head++)
                for (long first = 0; first < tokens; first += QUERIES) {
                    long rows = smaller(QUERIES, tokens - first), here = (begin + first) * stride + head * head_dim;
                    float row_logsumexp[QUERIES] = {0}, deltas[QUERIES] = {0};
                    for (long i = 0; i < rows; i++) {
                        const bf16 *a = out + here + i * stride, *b = grad_out + here + i * stride;
                        float delta = 0.0f;
#pragma omp simd reduction(+ : delta)
                        for (long n = 0; n < head_dim; n++) delta += to_float(a[n]) * to_float(b[n]);
                        deltas[i] = delta;
                        row_logsumexp[i] = logsumexp[(begin + first + i) * heads + head];
                    }
                    put_in_lanes(lanes, q + here, stride, rows, head_dim);
                    put_in_lanes(grad_lanes, grad_out + here, stride, rows, head_dim);
                    pair_rows(queries, q + here, stride, rows, QUERIES, head_dim);
                    pair_rows(grads, grad_out + here, stride, rows, QUERIES, head_dim);
                    long start = first_key(first, window);
                    for (long key = start; key < smaller(first + QUERIES, tokens); key += KEYS) {
                        int diagonal = key == first, lanes_needless = diagonal ? EARLIER_LANES : NOTHING,
                            pairs_needless = diagonal ? EARLIER_PAIRS : NOTHING;
                        multiply(scores, keys + key * (head_dim / 2), head_dim / 2, 1, lanes, KEYS, QUERIES,
                                 head_dim / 2, 1, lanes_needless);
                        multiply(grad_p, values + key * (head_dim / 2), head_dim / 2, 1, grad_lanes, KEYS, QUERIES,
                                 head_dim / 2, 1, lanes_needless);
                        softmax_block_backward(scores, grad_p, (bf16 *)p, (bf16 *)grad_scores, grad_scores_paired,
                                               row_logsumexp, deltas, first, key, window, scale);
                        multiply(sum_v + key * head_dim, p, QUERIES / 2, 1, grads, KEYS, head_dim, QUERIES / 2, 0,
                                 pairs_needless);
                        multiply(sum_k + key * head_dim, grad_scores, QUERIES / 2, 1, queries, KEYS, head_dim,
                                 QUERIES / 2, 0, pairs_needless);
                        multiply(sum_q, grad_scores_paired, 1, QUERIES, keys_paired + key / 2 * head_dim, QUERIES,
                                 head_dim, KEYS / 2, key == start, diagonal ? LATER_PAIRS : NOTHING);
                    }
                    for (long i = 0; i < rows; i++)
                        for (long n = 0; n < head_dim; n++)
                            grad_q[here + i * stride + n] = to_bf16(sum_q[i * head_dim + n]);
                }
            for (long i = 0; i < tokens; i++)
                for (long n = 0; n < head_dim; n++) {
                    grad_k[there + i * kv_stride + n] = to_bf16(sum_k[i * head_dim + n]);
                    grad_v[there + i * kv_stride + n] = to_bf16(sum_v[i * head_dim + n]);
                }
        }
        free(keys), free(values), free(keys_paired), free(sum_k), free(sum_v), free(sum_q), free(lanes),
            free(grad_lanes), free(queries), free(grads);
        free(scores), free(grad_p), free(p), free(grad_scores), free(grad_scores_paired);
    }
}

#endif
