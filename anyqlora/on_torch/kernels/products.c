/* Products with a frozen weight on a processor with AVX512-BF16 and AVX512-VNNI, but not AMX, on which oneDNN's are several times as fast: of bf16, or of
   int8 codes with a scale for each row. A panel of the weight's columns is packed just before it is used, so that the weight lies in memory once for
   both directions; what LoRA adds is summed in the same registers and rounded with the rest, once. Called by native.py; every array is contiguous but
   LoRA's narrow one, whose rows may lie apart. Each number is summed by one thread, in one order. */

#include "bf16.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && !defined(__AMX_TILE__)
#include <omp.h>

enum { ROWS = 12, VECTORS = 2, PANEL = VECTORS * LANES, BLOCK = 1008, SOME = 96, COPIED = 4 << 20 };
/* Of a tile of sums, 24 of 32 registers; columns of a panel; rows that share a packed panel, at most and at least; bytes. */

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
static void packed(uint32_t *panel, const Right *f, long column, long columns) {
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

/* Rows of the left factor and what becomes of them. */
typedef struct {
    const char *left;
    long stride;            /* bytes */
    const int32_t *minus;   /* int8: what a row's sums have too much */
    const float *of_rows;   /* int8: scales */
    const bf16 *narrow;     /* [rows, rank] */
    long narrow_stride;     /* numbers */
    bf16 *out;              /* [rows, columns] */
} Rows;

/* `count` rows of a panel of the output. */
static inline __attribute__((always_inline)) void tile(Rows rows, int count, const uint32_t *panel, long words, int is_int8, const uint32_t *narrow_panel,
                                                       long rank, const float *of_columns, const bf16 *bias, long columns, long column, int added, int spreads) {
    __m512 y[ROWS][VECTORS];
    if (is_int8) {
        __m512i sums[ROWS][VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) sums[r][0] = sums[r][1] = _mm512_set1_epi32(rows.minus[r]);
        for (long j = 0; j < words; j++) {
            __m512i first = _mm512_loadu_si512(panel + j * PANEL), second = _mm512_loadu_si512(panel + j * PANEL + LANES);
#pragma GCC unroll 12
            for (int r = 0; r < count; r++) {
                __m512i left = _mm512_set1_epi32(((const int32_t *)(rows.left + r * rows.stride))[j]);
                /* not by its intrinsic: gcc 12 then keeps sums on the stack, and a product takes 1.7 times as long */
                __asm__("vpdpbusd %2, %1, %0" : "+v"(sums[r][0]) : "v"(first), "v"(left));
                __asm__("vpdpbusd %2, %1, %0" : "+v"(sums[r][1]) : "v"(second), "v"(left));
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                y[r][v] = _mm512_cvtepi32_ps(sums[r][v]) * rows.of_rows[r];
                if (of_columns) y[r][v] *= _mm512_maskz_loadu_ps(of_lanes(columns - column - v * LANES), of_columns + column + v * LANES);
            }
        if (spreads && column + PANEL <= columns) {
#pragma GCC unroll 12
            for (int r = 0; r < count; r++) spread(&y[r][0], &y[r][1]);
        }
    } else {
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) y[r][0] = y[r][1] = _mm512_setzero_ps();
        for (long j = 0; j < words; j++) {
            __m512bh first = (__m512bh)_mm512_loadu_si512(panel + j * PANEL), second = (__m512bh)_mm512_loadu_si512(panel + j * PANEL + LANES);
#pragma GCC unroll 12
            for (int r = 0; r < count; r++) {
                __m512bh left = (__m512bh)_mm512_set1_epi32(((const int32_t *)(rows.left + r * rows.stride))[j]);
                y[r][0] = _mm512_dpbf16_ps(y[r][0], left, first);
                y[r][1] = _mm512_dpbf16_ps(y[r][1], left, second);
            }
        }
    }
    for (long j = 0; j < rank / 2; j++) {
        __m512bh first = (__m512bh)_mm512_loadu_si512(narrow_panel + j * PANEL), second = (__m512bh)_mm512_loadu_si512(narrow_panel + j * PANEL + LANES);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) {
            __m512bh left = (__m512bh)_mm512_set1_epi32(((const int32_t *)(rows.narrow + r * rows.narrow_stride))[j]);
            y[r][0] = _mm512_dpbf16_ps(y[r][0], left, first);
            y[r][1] = _mm512_dpbf16_ps(y[r][1], left, second);
        }
    }
    __mmask32 some = of_panel(columns - column);
    const bf16 *more = added ? rows.out + column : bias ? bias + column : NULL;
    long more_stride = added ? columns : 0;
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) {
        bf16 *to = rows.out + r * columns + column;
        if (more) {
            __m512i x = _mm512_maskz_loadu_epi16(some, more + r * more_stride);
            y[r][0] += former(x), y[r][1] += latter(x);
        }
        _mm512_mask_storeu_epi16(to, some, rounded(y[r][0], y[r][1]));
    }
}

/* out [rows, columns] = left [rows, depth] right + narrow [rows, rank] narrow_right + bias, or added: out + the products. int8: the product's rows
   times `of_rows`, its columns times `of_columns` where there are such, and spread where so said. narrow_right is turned where right is. depth is a multiple of 4 in int8, and of 2
   in bf16, as rank is. */
void product(const void *left, const void *right, const float *of_rows, const float *of_columns, const bf16 *bias, const bf16 *narrow,
             const bf16 *narrow_right, bf16 *out, long rows, long depth, long columns, long rank, long narrow_stride, int size, int turned, int added, int spreads) {
    if (!rows) return;
    Right wide = {right, depth, size, turned}, thin = {narrow_right, rank, 2, turned};
    long panels = parts(columns, PANEL), words = depth * size / 4;
    /* Rows that are whole pages apart, or halves, would have but a few places in a cache between them: they are copied, so many at a time. */
    long stride = depth * size, apart = stride % 1024 ? stride : stride + 64, most = apart == stride ? BLOCK : smaller(BLOCK, larger(SOME, COPIED / apart));
    long blocks = larger(parts(rows, most), smaller(parts(4 * omp_get_max_threads(), panels), parts(rows, SOME)));
    long block = rounded_up(parts(rows, blocks), ROWS); /* of one size, so that each thread has as much to do */
    blocks = parts(rows, block);
#pragma omp parallel
    {
        uint32_t *panel = aligned_alloc(64, words * PANEL * 4), *thin_panel = aligned_alloc(64, rounded_up(rank, 2) * PANEL * 2 + 64);
        char *copy = apart == stride ? NULL : aligned_alloc(64, block * apart);
        int32_t minus[BLOCK];
        long here = -1;
#pragma omp for schedule(static)
        for (long task = 0; task < blocks * panels; task++) {
            long first = task / panels * block, column = task % panels * PANEL, count = smaller(block, rows - first);
            const char *from = (const char *)left + first * stride;
            if (here != first) {
                for (long r = 0; copy && r < count; r++) memcpy(copy + r * apart, from + r * stride, stride);
                for (long r = 0; size == 1 && r < count; r++) {
                    int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
                    for (long k = 0; k < depth; k++) sum += ((const int8_t *)from)[r * stride + k];
                    minus[r] = -128 * sum;
                }
                here = first;
            }
            packed(panel, &wide, column, columns);
            packed(thin_panel, &thin, column, columns);
            const char *lefts = copy ? copy : from;
            long r = 0;
#define TILES(COUNT, IS_INT8)                                                                                                                    \
    for (; r + COUNT <= count; r += COUNT) {                                                                                                     \
        long row = first + r;                                                                                                                    \
        Rows some = {lefts + r * apart, apart, minus + r, of_rows + row, narrow + row * narrow_stride, narrow_stride, out + row * columns};      \
        tile(some, COUNT, panel, words, IS_INT8, thin_panel, rank, of_columns, bias, columns, column, added, spreads);                           \
    }
            if (size == 1) {
                TILES(ROWS, 1) TILES(4, 1) TILES(1, 1)
            } else {
                TILES(ROWS, 0) TILES(4, 0) TILES(1, 0)
            }
        }
        free(panel), free(thin_panel), free(copy);
    }
}

#endif
