/* For matmul.c and lm_head.c: a right factor, and panels of its columns, packed just before they are used. */

#include "bf16.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define HAS_PANELS
#include <omp.h>

enum { ROWS = 12, PANEL = PANEL_COLUMNS, VECTORS = PANEL / LANES, PANELS_AT_ONCE = 2 };
/* Of a tile of sums, 24 of 32 registers; columns of a panel; panels whose columns are read together where rows lie far
   apart, one line of each by itself: such lines share few places in the caches, and only so many are on their way at a
   time. */

/* A right factor [columns, depth], or transposed: [depth, columns]. A word of 32 bits has 2 or 4 numbers of one column:
   an instruction multiplies them by as many of a row of the left factor, and sums. */
typedef struct {
    const void *numbers;
    long depth, size; /* bytes of a number: 2, bf16, or 1, int8 */
    int transposed;
} Right;

/* Two or four numbers that are read as one; a row may begin at any of them. */
typedef int32_t __attribute__((aligned(1), may_alias)) Word;

static inline long parts(long n, long each) { return (n + each - 1) / each; }
static inline long larger(long a, long b) { return a > b ? a : b; }

/* A bit for each of the first n numbers of a register, and of a panel's row. */
static inline __mmask16 lane_mask(long n) { return n >= LANES ? 0xffff : n > 0 ? (__mmask16)((1u << n) - 1) : 0; }
static inline __mmask32 panel_mask(long n) { return (__mmask32)lane_mask(n - LANES) << LANES | lane_mask(n); }

/* Rows that are whole pages apart, or halves, would have but a few places in a cache between them: they are copied,
   this many bytes apart. */
static inline long padded_stride(long stride) { return stride % 1024 ? stride : stride + 64; }

/* Two rows of a panel's columns, `stride` numbers apart, as a word for each column. */
static inline void interleave_two(const bf16 *row, long stride, __mmask32 mask, __m512i words[VECTORS]) {
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    __m512i a = _mm512_maskz_loadu_epi16(mask, row), b = _mm512_maskz_loadu_epi16(mask, row + stride);
    words[0] = _mm512_permutex2var_epi16(a, order, b);
    words[1] = _mm512_permutex2var_epi16(a, _mm512_add_epi16(order, _mm512_set1_epi16(LANES)), b);
}

/* Four rows: numbers of two rows side by side, then pairs of those; halves of registers come apart in that, and are put
   together. */
static inline void interleave_four(const int8_t *row, long stride, __mmask32 mask, __m512i words[VECTORS]) {
    __m256i a = _mm256_maskz_loadu_epi8(mask, row), b = _mm256_maskz_loadu_epi8(mask, row + stride);
    __m256i c = _mm256_maskz_loadu_epi8(mask, row + 2 * stride), d = _mm256_maskz_loadu_epi8(mask, row + 3 * stride);
    __m256i ab = _mm256_unpacklo_epi8(a, b), cd = _mm256_unpacklo_epi8(c, d), ab_high = _mm256_unpackhi_epi8(a, b),
            cd_high = _mm256_unpackhi_epi8(c, d);
    __m256i w = _mm256_unpacklo_epi16(ab, cd), x = _mm256_unpackhi_epi16(ab, cd),
            y = _mm256_unpacklo_epi16(ab_high, cd_high), z = _mm256_unpackhi_epi16(ab_high, cd_high);
    words[0] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_permute2x128_si256(w, x, 0x20)),
                                  _mm256_permute2x128_si256(y, z, 0x20), 1);
    words[1] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_permute2x128_si256(w, x, 0x31)),
                                  _mm256_permute2x128_si256(y, z, 0x31), 1);
}

/* The columns from `column` on as `count` panels of words [words, PANEL], of the depth from word `start` on, zeros
   after the last column. int8 has its sign bit flipped, that is, 128 added: the processor multiplies numbers without a
   sign by numbers with one. */
static inline void pack_panels(uint32_t *panels, long count, const Right *f, long column, long columns, long start,
                               long words) {
    long stride = f->depth * f->size / 4, size = words * PANEL;
    __m512i flip = _mm512_set1_epi32(f->size == 1 ? (int)0x80808080 : 0);
    for (long first = 0; first < count && f->transposed; first += PANELS_AT_ONCE)
        for (long j = 0; j < words; j++)
            for (long p = first; p < smaller(first + PANELS_AT_ONCE, count); p++) {
                long c = column + p * PANEL;
                __m512i pair[VECTORS];
                if (f->size == 1)
                    interleave_four((const int8_t *)f->numbers + 4 * (start + j) * columns + c, columns,
                                    panel_mask(columns - c), pair);
                else
                    interleave_two((const bf16 *)f->numbers + 2 * (start + j) * columns + c, columns,
                                   panel_mask(columns - c), pair);
                for (long v = 0; v < VECTORS; v++)
                    _mm512_store_si512(panels + p * size + j * PANEL + v * LANES, _mm512_xor_si512(flip, pair[v]));
            }
    for (long v = 0; v < count * VECTORS && !f->transposed; v++) {
        long first = column + v * LANES;
        uint32_t *out = panels + v / VECTORS * size + v % VECTORS * LANES;
        __mmask16 mask = lane_mask(columns - first);
        for (long j = 0; j < words; j += LANES) {
            __m512i block[LANES];
#pragma GCC unroll 16
            for (int c = 0; c < LANES; c++)
                block[c] = mask >> c & 1
                               ? _mm512_maskz_loadu_epi32(lane_mask(words - j), (const uint32_t *)f->numbers +
                                                                                    (first + c) * stride + start + j)
                               : _mm512_setzero_si512();
            transpose(block);
#pragma GCC unroll 16
            for (int c = 0; c < LANES; c++)
                if (j + c < words) _mm512_store_si512(out + (j + c) * PANEL, _mm512_xor_si512(flip, block[c]));
        }
    }
}

/* A cursor on one word of each of a few rows, `stride` bytes apart. A row is at most twice the stride from one of few
   bases, which a load adds up by itself; that these move is hidden from the compiler, which else has an offset for each
   row, loads most of them from the stack for each word, and takes up to 6 % longer. */
typedef struct {
    const char *bases[ROWS / 3];
    long stride;
} Left;

static inline __attribute__((always_inline)) Left left_of(const void *first, long stride) {
    Left left = {.stride = stride};
#pragma GCC unroll 4
    for (int i = 0; i < ROWS / 3; i++) left.bases[i] = (const char *)first + 3 * i * stride;
    return left;
}

static inline __attribute__((always_inline)) __m512i word_of(const Left *left, int row) {
    return _mm512_set1_epi32(*(const Word *)(left->bases[row / 3] + row % 3 * left->stride));
}

static inline __attribute__((always_inline)) void to_next_word(Left *left) {
#pragma GCC unroll 4
    for (int i = 0; i < ROWS / 3; i++) {
        left->bases[i] += 4;
        __asm__("" : "+r"(left->bases[i]));
    }
}

/* y [count, PANEL] and the bf16 products of so many rows, `stride` bytes apart, with a panel of words [pairs, PANEL]
   more. */
static inline __attribute__((always_inline)) void add_products(__m512 y[ROWS][VECTORS], int count, const void *rows,
                                                               long stride, const uint32_t *panel, long pairs) {
    Left left = left_of(rows, stride);
    for (long j = 0; j < pairs; j++, to_next_word(&left)) {
        __m512bh first = (__m512bh)_mm512_load_si512(panel + j * PANEL),
                 second = (__m512bh)_mm512_load_si512(panel + j * PANEL + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) {
            __m512bh one = (__m512bh)word_of(&left, r);
            y[r][0] = _mm512_dpbf16_ps(y[r][0], one, first);
            y[r][1] = _mm512_dpbf16_ps(y[r][1], one, second);
        }
    }
}

/* The same of int8 codes, summed in int32: either the rows or the panel have no sign. Not by the intrinsic: gcc 12 then
   keeps sums on the stack, and a product takes 1.7 times as long. */
static inline __attribute__((always_inline)) void add_codes(__m512i sums[ROWS][VECTORS], int count, const void *rows,
                                                            long stride, const uint32_t *panel, long words,
                                                            int rows_are_signed) {
    Left left = left_of(rows, stride);
    for (long j = 0; j < words; j++, to_next_word(&left)) {
        __m512i both[VECTORS] = {_mm512_load_si512(panel + j * PANEL), _mm512_load_si512(panel + j * PANEL + LANES)};
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) {
            __m512i four = word_of(&left, r);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                __asm__("vpdpbusd %2, %1, %0"
                        : "+v"(sums[r][v])
                        : "v"(rows_are_signed ? both[v] : four), "v"(rows_are_signed ? four : both[v]));
        }
    }
}

#endif
