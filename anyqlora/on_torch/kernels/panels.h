/* Of products.c and head.c: a right factor, and panels of its columns, packed just before they are used. */

#include "bf16.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && !defined(__AMX_TILE__)
#define HAS_PANELS
#include <omp.h>

enum { ROWS = 12, VECTORS = 2, PANEL = VECTORS * LANES }; /* of a tile of sums, 24 of 32 registers; columns of a panel */

/* A right factor [columns, depth], or turned: [depth, columns]. A word of 32 bits has 2 or 4 numbers of one column: an instruction multiplies them by as many of
   a row of the left factor, and sums. */
typedef struct {
    const void *numbers;
    long depth, size; /* bytes of a number: 2, bf16, or 1, int8 */
    int turned;
} Right;

static inline long parts(long n, long each) { return (n + each - 1) / each; }
static inline long larger(long a, long b) { return a > b ? a : b; }

/* The first n numbers, of a register and of a panel's row. */
static inline __mmask16 of_lanes(long n) { return n >= LANES ? 0xffff : n > 0 ? (__mmask16)((1u << n) - 1) : 0; }
static inline __mmask32 of_panel(long n) { return (__mmask32)of_lanes(n - LANES) << LANES | of_lanes(n); }

/* Rows that are whole pages apart, or halves, would have but a few places in a cache between them: they are copied, so many bytes apart. */
static inline long set_apart(long stride) { return stride % 1024 ? stride : stride + 64; }

/* Two rows of a panel's columns, a word for each column. */
static inline void of_two(const bf16 *row, long apart, __mmask32 there, __m512i words[VECTORS]) {
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    __m512i a = _mm512_maskz_loadu_epi16(there, row), b = _mm512_maskz_loadu_epi16(there, row + apart);
    words[0] = _mm512_permutex2var_epi16(a, order, b);
    words[1] = _mm512_permutex2var_epi16(a, _mm512_add_epi16(order, _mm512_set1_epi16(LANES)), b);
}

/* Four rows of them: numbers of two rows side by side, then pairs of those; halves of registers come apart in that, and are put together. */
static inline void of_four(const int8_t *row, long apart, __mmask32 there, __m512i words[VECTORS]) {
    __m256i a = _mm256_maskz_loadu_epi8(there, row), b = _mm256_maskz_loadu_epi8(there, row + apart);
    __m256i c = _mm256_maskz_loadu_epi8(there, row + 2 * apart), d = _mm256_maskz_loadu_epi8(there, row + 3 * apart);
    __m256i ab = _mm256_unpacklo_epi8(a, b), cd = _mm256_unpacklo_epi8(c, d), ab_high = _mm256_unpackhi_epi8(a, b), cd_high = _mm256_unpackhi_epi8(c, d);
    __m256i w = _mm256_unpacklo_epi16(ab, cd), x = _mm256_unpackhi_epi16(ab, cd), y = _mm256_unpacklo_epi16(ab_high, cd_high), z = _mm256_unpackhi_epi16(ab_high, cd_high);
    words[0] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_permute2x128_si256(w, x, 0x20)), _mm256_permute2x128_si256(y, z, 0x20), 1);
    words[1] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_permute2x128_si256(w, x, 0x31)), _mm256_permute2x128_si256(y, z, 0x31), 1);
}

/* The columns from `column` on as a panel of words [depth * size / 4, PANEL], zeros after the last one. int8 has its sign bit turned over, that is,
   128 added: the processor multiplies numbers without a sign by numbers with one. */
static inline void packed(uint32_t *panel, const Right *f, long column, long columns) {
    long words = f->depth * f->size / 4;
    __m512i flip = _mm512_set1_epi32(f->size == 1 ? (int)0x80808080 : 0);
    __mmask32 there = of_panel(columns - column);
    for (long j = 0; j < words && f->turned; j++) {
        __m512i both[VECTORS];
        if (f->size == 1)
            of_four((const int8_t *)f->numbers + 4 * j * columns + column, columns, there, both);
        else
            of_two((const bf16 *)f->numbers + 2 * j * columns + column, columns, there, both);
        for (long v = 0; v < VECTORS; v++) _mm512_storeu_si512(panel + j * PANEL + v * LANES, _mm512_xor_si512(flip, both[v]));
    }
    for (long v = 0; v < VECTORS && !f->turned; v++) {
        long first = column + v * LANES;
        __mmask16 some = of_lanes(columns - first);
        for (long j = 0; j < words; j += LANES) {
            __m512i block[LANES];
#pragma GCC unroll 16
            for (int c = 0; c < LANES; c++)
                block[c] = some >> c & 1 ? _mm512_maskz_loadu_epi32(of_lanes(words - j), (const uint32_t *)f->numbers + (first + c) * words + j) : _mm512_setzero_si512();
            transpose(block);
#pragma GCC unroll 16
            for (int c = 0; c < LANES; c++)
                if (j + c < words) _mm512_storeu_si512(panel + (j + c) * PANEL + v * LANES, _mm512_xor_si512(flip, block[c]));
        }
    }
}

/* y [count, PANEL] and the bf16 products of so many rows, `stride` bytes apart, with a panel of words [pairs, PANEL] more. */
static inline __attribute__((always_inline)) void add_products(__m512 y[ROWS][VECTORS], int count, const char *left, long stride, const uint32_t *panel, long pairs) {
    for (long j = 0; j < pairs; j++) {
        __m512bh first = (__m512bh)_mm512_loadu_si512(panel + j * PANEL), second = (__m512bh)_mm512_loadu_si512(panel + j * PANEL + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) {
            __m512bh one = (__m512bh)_mm512_set1_epi32(((const int32_t *)(left + r * stride))[j]);
            y[r][0] = _mm512_dpbf16_ps(y[r][0], one, first);
            y[r][1] = _mm512_dpbf16_ps(y[r][1], one, second);
        }
    }
}

#endif
