/* Products with a frozen weight on a processor with AVX512-BF16 and AVX512-VNNI (on one with AMX oneDNN's are several times as fast, and taken): of bf16, or of
   int8 codes with a scale for each row. A panel of the weight's columns is packed just before it is used, so that the weight lies in memory once for
   both directions; what LoRA adds is summed in the same registers and rounded with the rest, once. And LoRA's own narrow products, whose learned factors
   and their gradients are float32. Called by native.py; every array is contiguous but LoRA's narrow one, whose rows may lie apart. Each number is summed
   by one thread, in one order. */

#include "panels.h"

#ifdef HAS_PANELS

enum { BLOCK = 1032, SOME = 96, CHUNK = 1024, TOGETHER = 4, SUMS = 24, MOST = 3, PAIRS = 128 };
/* Rows that share packed panels, at most and at least; words of the depth that are summed over at a time; panels that are packed together. Of a narrow product,
   registers of sums, and those of its columns at most; of a factor's gradient, pairs of rows that are looked at together and stay in a core's first cache. */

/* What `product` computes, and for how many words of the depth at a time; left's rows lie so many bytes apart. */
typedef struct {
    const char *left;
    Right right, narrow_right;
    const float *of_rows, *of_columns; /* int8: scales */
    const bf16 *bias, *narrow;
    bf16 *out;
    long columns, rank, left_stride, narrow_stride, words, chunk;
    int added, spreads;
} Product;

/* A thread's own memory. */
typedef struct {
    uint32_t *panels, *narrow_panels; /* [TOGETHER] of a chunk of the depth, and of the rank */
    char *copy;                       /* of a block's rows, where those lie badly; else NULL */
    float *sums;                      /* of a block's panels, [panels, rows, PANEL], over the depth so far; NULL where it is one chunk */
    int32_t minus[BLOCK];             /* int8: what a row's sums have too much */
} Room;

/* `count` rows from `row` on of a panel of the output at `column`. left: their chunk of the depth, so many words, `apart` bytes apart. Sums are added to those of the
   chunks before unless that is NULL, and go to `after` unless this is the last one; both [count, PANEL], int32 in int8. */
static inline __attribute__((always_inline)) void tile(const Product *of, long row, long column, int count, int is_int8, const char *left, long apart, const int32_t *minus,
                                                       const uint32_t *panel, long words, const uint32_t *narrow_panel, const float *before, float *after) {
    __m512 y[ROWS][VECTORS];
    if (is_int8) {
        __m512i sums[ROWS][VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                __m512i sum = before ? _mm512_load_si512(before + r * PANEL + v * LANES) : _mm512_setzero_si512();
                sums[r][v] = _mm512_add_epi32(sum, _mm512_set1_epi32(minus[r]));
            }
        add_codes(sums, count, left, apart, panel, words, 1);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                if (after)
                    _mm512_store_si512(after + r * PANEL + v * LANES, sums[r][v]);
                else
                    y[r][v] = _mm512_cvtepi32_ps(sums[r][v]) * of->of_rows[row + r];
            }
    } else {
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) y[r][v] = before ? _mm512_load_ps(before + r * PANEL + v * LANES) : _mm512_setzero_ps();
        add_products(y, count, left, apart, panel, words);
#pragma GCC unroll 12
        for (int r = 0; r < count && after; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) _mm512_store_ps(after + r * PANEL + v * LANES, y[r][v]);
    }
    if (after) return;
    if (is_int8 && of->of_columns) {
        __m512 scales[VECTORS];
        for (int v = 0; v < VECTORS; v++) scales[v] = _mm512_maskz_loadu_ps(of_lanes(of->columns - column - v * LANES), of->of_columns + column + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) y[r][0] *= scales[0], y[r][1] *= scales[1];
    }
    if (is_int8 && of->spreads && column + PANEL <= of->columns) {
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) spread(&y[r][0], &y[r][1]);
    }
    add_products(y, count, of->narrow + row * of->narrow_stride, of->narrow_stride * sizeof(bf16), narrow_panel, of->rank / 2);
    __mmask32 some = of_panel(of->columns - column);
    const bf16 *more = of->added ? of->out + row * of->columns + column : of->bias ? of->bias + column : NULL;
    long more_stride = of->added ? of->columns : 0;
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) {
        if (more) {
            __m512i x = _mm512_maskz_loadu_epi16(some, more + r * more_stride);
            y[r][0] += former(x), y[r][1] += latter(x);
        }
        _mm512_mask_storeu_epi16(of->out + (row + r) * of->columns + column, some, rounded(y[r][0], y[r][1]));
    }
}

/* Of a block of `count` rows from `row` on the panels [first, end) of the output. */
static void panels_of_block(const Product *of, long row, long count, long first, long end, Room *room) {
    long size = of->right.size, stride = of->left_stride, apart = room->copy ? set_apart(4 * of->chunk) : stride, start = 0;
    do {
        long words = smaller(of->chunk, of->words - start), is_last = start + words == of->words;
        const char *lefts = of->left + row * stride + 4 * start;
        for (long r = 0; size == 1 && r < count; r++) {
            int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
            for (long k = 0; k < 4 * words; k++) sum += ((const int8_t *)lefts)[r * stride + k];
            room->minus[r] = -128 * sum;
        }
        for (long r = 0; room->copy && r < count; r++) memcpy(room->copy + r * apart, lefts + r * stride, 4 * words);
        if (room->copy) lefts = room->copy;
        for (long panel = first; panel < end; panel += TOGETHER) {
            long together = smaller(TOGETHER, end - panel), r = 0;
            packed(room->panels, together, &of->right, panel * PANEL, of->columns, start, words);
            if (is_last) packed(room->narrow_panels, together, &of->narrow_right, panel * PANEL, of->columns, 0, of->rank / 2);
#define TILES(COUNT, IS_INT8)                                                                                                                             \
    for (; r + COUNT <= count; r += COUNT)                                                                                                                \
        for (long p = 0; p < together; p++) {                                                                                                             \
            float *sums = room->sums ? room->sums + ((panel - first + p) * count + r) * PANEL : NULL;                                                     \
            tile(of, row + r, (panel + p) * PANEL, COUNT, IS_INT8, lefts + r * apart, apart, room->minus + r, room->panels + p * words * PANEL, words,    \
                 room->narrow_panels + p * (of->rank / 2) * PANEL, start ? sums : NULL, is_last ? NULL : sums);                                           \
        }
            if (size == 1) {
                TILES(ROWS, 1) TILES(4, 1) TILES(1, 1)
            } else {
                TILES(ROWS, 0) TILES(4, 0) TILES(1, 0)
            }
#undef TILES
        }
        start += words;
    } while (start < of->words);
}

/* out [rows, columns] = left [rows, depth] right + narrow [rows, rank] narrow_right + bias, or added: out + the products. int8: the product's rows
   times `of_rows`, its columns times `of_columns` where there are such, and spread where so said. narrow_right is turned where right is. left's
   rows lie left_stride numbers apart; depth is a multiple of 4 in int8, and of 2 in bf16, as rank is. */
void product(const void *left, const void *right, const float *of_rows, const float *of_columns, const bf16 *bias, const bf16 *narrow,
             const float *narrow_right, bf16 *out, long rows, long depth, long columns, long rank, long left_stride, long narrow_stride, int size, int turned, int added, int spreads) {
    if (!rows) return;
    bf16 *narrow_rounded = aligned_alloc(64, rounded_up(2 * rank * columns, 64) + 64);
    for (long i = 0; i < rank * columns; i += LANES) {
        __mmask16 some = of_lanes(rank * columns - i);
        _mm256_mask_storeu_epi16(narrow_rounded + i, some, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, narrow_right + i)));
    }
    long words = depth * size / 4, chunk = rounded_up(parts(words, larger(1, parts(words, CHUNK))), LANES); /* of one size, nearly */
    Product of = {left, {right, depth, size, turned}, {narrow_rounded, rank, 2, turned}, of_rows, of_columns, bias, narrow, out, columns, rank, left_stride * size, narrow_stride, words, chunk, added, spreads};
    long panels = parts(columns, PANEL), is_copied = of.left_stride != set_apart(of.left_stride);
    long blocks = larger(parts(rows, BLOCK), smaller(parts(4 * omp_get_max_threads(), panels), parts(rows, SOME)));
    long block = rounded_up(parts(rows, blocks), ROWS); /* of one size, so that each thread has as much to do */
    blocks = parts(rows, block);
#pragma omp parallel
    {
        long threads = omp_get_num_threads(), me = omp_get_thread_num(), task = blocks * panels * me / threads, end = blocks * panels * (me + 1) / threads;
        Room room = {aligned_alloc(64, TOGETHER * chunk * PANEL * 4), aligned_alloc(64, TOGETHER * (rank / 2) * PANEL * 4),
                     is_copied ? aligned_alloc(64, rounded_up(block * set_apart(4 * chunk), 64)) : NULL,
                     chunk < words ? aligned_alloc(64, smaller(panels, end - task) * block * PANEL * sizeof(float)) : NULL};
        while (task < end) { /* a panel of a block; all of them that are a thread's own in one go */
            long row = task / panels * block, first = task % panels, some = smaller(panels - first, end - task);
            panels_of_block(&of, row, smaller(block, rows - row), first, first + some, &room);
            task += some;
        }
        free(room.panels), free(room.narrow_panels), free(room.copy), free(room.sums);
    }
    free(narrow_rounded);
}

/* A factor [rank, depth], or turned: [depth, rank], as words [depth / 2, width] of two numbers each, zeros after the rank. */
static void paired(uint32_t *words, const float *factor, long rank, long depth, long width, int turned) {
    for (long c = 0; c < width; c += LANES) {
        __mmask16 some = of_lanes(rank - c);
        for (long j = 0; j < depth / 2 && turned; j++) {
            const float *row = factor + 2 * j * rank + c;
            __m256i one = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, row)), other = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, row + rank));
            _mm512_storeu_si512(words + j * width + c, _mm512_or_si512(_mm512_cvtepu16_epi32(one), _mm512_slli_epi32(_mm512_cvtepu16_epi32(other), 16)));
        }
        for (long j = 0; j < depth / 2 && !turned; j += LANES) {
            __m512i block[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const float *row = factor + (c + i) * depth + 2 * j;
                block[i] = some >> i & 1 ? rounded(_mm512_maskz_loadu_ps(of_lanes(depth - 2 * j), row), _mm512_maskz_loadu_ps(of_lanes(depth - 2 * j - LANES), row + LANES))
                                         : _mm512_setzero_si512();
            }
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                if (j + i < depth / 2) _mm512_storeu_si512(words + (j + i) * width + c, block[i]);
        }
    }
}

/* `count` rows of `vectors` registers of columns. */
static inline __attribute__((always_inline)) void narrow_tile(const char *left, long apart, int count, int vectors, const uint32_t *words, long pairs, long width,
                                                              const float *scales, bf16 *out, long out_stride, long columns) {
    __m512 y[SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < count * vectors; i++) y[i] = _mm512_setzero_ps();
    for (long j = 0; j < pairs; j++) {
        __m512bh right[MOST];
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) right[v] = (__m512bh)_mm512_loadu_si512(words + j * width + v * LANES);
#pragma GCC unroll 24
        for (int r = 0; r < count; r++) {
            __m512bh one = (__m512bh)_mm512_set1_epi32(((const int32_t *)(left + r * apart))[j]);
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) y[r * vectors + v] = _mm512_dpbf16_ps(y[r * vectors + v], one, right[v]);
        }
    }
#pragma GCC unroll 24
    for (int r = 0; r < count; r++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            __mmask16 some = of_lanes(columns - v * LANES);
            __m512 scaled = y[r * vectors + v] * _mm512_maskz_loadu_ps(some, scales + v * LANES);
            _mm256_mask_storeu_epi16(out + r * out_stride + v * LANES, some, (__m256i)_mm512_cvtneps_pbh(scaled));
        }
}

/* out [rows, rank] = left [rows, depth] factor, its columns times `scales`; the factor [rank, depth] is turned around for that, or is turned already: [depth, rank].
   depth is even; left's rows lie left_stride numbers apart, and out's out_stride. */
void narrow_product(const bf16 *left, const float *factor, const float *scales, bf16 *out, long left_stride, long out_stride, long rows, long depth, long rank, int turned) {
    long width = rounded_up(rank, LANES), stride = 2 * left_stride, apart = set_apart(stride);
    uint32_t *words = aligned_alloc(64, rounded_up(depth / 2 * width * 4, 64));
    paired(words, factor, rank, depth, width, turned);
#pragma omp parallel
    {
        char *copy = apart == stride ? NULL : aligned_alloc(64, SUMS * apart);
#pragma omp for schedule(static)
        for (long first = 0; first < rows; first += SUMS) {
            const char *from = (const char *)left + first * stride;
            long count = smaller(SUMS, rows - first);
            for (long r = 0; copy && r < count; r++) memcpy(copy + r * apart, from + r * stride, 2 * depth);
            if (copy) from = copy;
            for (long c = 0; c < width; c += MOST * LANES) {
                long vectors = smaller(MOST, (width - c) / LANES), r = 0;
#define TILES(COUNT, VECTORS)                                                                                                                    \
    for (; r + COUNT <= count; r += COUNT)                                                                                                       \
        narrow_tile(from + r * apart, apart, COUNT, VECTORS, words + c, depth / 2, width, scales + c, out + (first + r) * out_stride + c, out_stride, rank - c);
                if (vectors == 1) {
                    TILES(24, 1) TILES(8, 1) TILES(1, 1)
                } else if (vectors == 2) {
                    TILES(12, 2) TILES(4, 2) TILES(1, 2)
                } else {
                    TILES(8, 3) TILES(4, 3) TILES(1, 3)
                }
#undef TILES
            }
        }
        free(copy);
    }
    free(words);
}

/* `count` rows of a panel of a factor's gradient: what is there, and what so many pairs of tokens add. */
static inline __attribute__((always_inline)) void outer_tile(const uint32_t *words, long rank, int count, const __m512i (*panel)[VECTORS], long pairs, float *sums) {
    __m512 y[ROWS][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) y[r][v] = _mm512_load_ps(sums + r * PANEL + v * LANES);
    for (long t = 0; t < pairs; t++) {
        __m512bh first = (__m512bh)panel[t][0], second = (__m512bh)panel[t][1];
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) {
            __m512bh one = (__m512bh)_mm512_set1_epi32((int)words[t * rank + r]);
            y[r][0] = _mm512_dpbf16_ps(y[r][0], one, first);
            y[r][1] = _mm512_dpbf16_ps(y[r][1], one, second);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) _mm512_store_ps(sums + r * PANEL + v * LANES, y[r][v]);
}

/* out [rank, columns], or turned: [columns, rank], = narrow [rows, rank]^T wide [rows, columns]: a factor's gradient. */
void outer_product(const bf16 *narrow, const bf16 *wide, float *out, long rows, long rank, long columns, long narrow_stride, int turned) {
    long pairs = parts(rows, 2);
    uint32_t *words = aligned_alloc(64, rounded_up(pairs * rank * 4, 64)); /* [pairs, rank], of two tokens each, a zero after the last one */
#pragma omp parallel
    {
        __m512i panels[AT_ONCE][PAIRS][VECTORS];
        float *sums = aligned_alloc(64, AT_ONCE * rank * PANEL * sizeof(float));
#pragma omp for schedule(static)
        for (long t = 0; t < pairs; t++) {
            const bf16 *one = narrow + 2 * t * narrow_stride;
            for (long r = 0; r < rank; r++) words[t * rank + r] = one[r] | (2 * t + 1 < rows ? (uint32_t)one[narrow_stride + r] << 16 : 0);
        }
        long panel = parts(columns, PANEL) * omp_get_thread_num() / omp_get_num_threads(), end = parts(columns, PANEL) * (omp_get_thread_num() + 1) / omp_get_num_threads();
        for (; panel < end; panel += AT_ONCE) {
            long column = panel * PANEL, together = smaller(AT_ONCE, end - panel);
            memset(sums, 0, AT_ONCE * rank * PANEL * sizeof(float));
            for (long first = 0; first < pairs; first += PAIRS) {
                long some = smaller(PAIRS, pairs - first);
                for (long t = 0; t < some; t++) { /* after the last row comes what is finite: a row again */
                    long row = 2 * (first + t), apart = row + 1 < rows ? columns : 0;
                    for (long p = 0, c = column; p < together; p++, c += PANEL) of_two(wide + row * columns + c, apart, of_panel(columns - c), panels[p][t]);
                }
                for (long p = 0, r = 0; p < together; p++, r = 0) {
#define TILES(COUNT) \
    for (; r + COUNT <= rank; r += COUNT) outer_tile(words + first * rank + r, rank, COUNT, panels[p], some, sums + (p * rank + r) * PANEL);
                    if (rank % 12 == 0) TILES(12)
                    TILES(8) TILES(4) TILES(1)
#undef TILES
                }
            }
            for (long p = 0, from = column; p < together; p++, from += PANEL)
                for (long r = 0; r < rank; r++)
                    for (long c = 0; c < smaller(PANEL, columns - from); c++) out[turned ? (from + c) * rank + r : r * columns + from + c] = sums[(p * rank + r) * PANEL + c];
        }
        free(sums);
    }
    free(words);
}

/* A layer of several that read one input: y = x weight^T + bias + scale (x a^T) b^T, weight [columns, depth], a [rank, depth] and b [columns, rank]. Backward
   y is its gradient, and of_b that of b. int8: the weight's codes, spread, and each column's scale; bf16 has none. */
typedef struct {
    const void *weight;
    const float *of_columns;
    const bf16 *bias;
    const float *a, *b;
    bf16 *y;
    float *of_b;
    double scale;
    long columns, rank, middle; /* the first of its columns among all layers' middles */
} Layer;

/* All layers' a, one below the other, and each row's scale: [R, depth] and, after them, [R]. */
static float *stacked(const Layer *layers, long count, long depth, long ranks) {
    float *factor = malloc((ranks * depth + ranks) * sizeof(float)), *a = factor, *scale = factor + ranks * depth;
    for (const Layer *layer = layers; layer < layers + count; layer++) {
        memcpy(a, layer->a, layer->rank * depth * sizeof(float));
        a += layer->rank * depth;
        for (long r = 0; r < layer->rank; r++) *scale++ = (float)layer->scale;
    }
    return factor;
}

static long ranks_of(const Layer *layers, long count) {
    long sum = 0;
    for (long i = 0; i < count; i++) sum += layers[i].rank;
    return sum;
}

void int8_rows(const bf16 *x, const float *columns, int8_t *codes, float *scales, long codes_stride, long rows, long width, int spreads); /* native.c */

/* Room for rows of int8 codes that lie well, after a scale for each row; NULL where layers are bf16. */
static float *room_for_codes(const Layer *layers, long count, long rows, long depth) {
    long widest = depth;
    for (long i = 0; i < count; i++) widest = larger(widest, layers[i].columns);
    return layers->of_columns ? malloc(rows * (sizeof(float) + widest + 64)) : NULL;
}

/* The rows of x for several products, copied once, so that they lie well; NULL where they do, and where there is one. */
static bf16 *copied(const bf16 *x, long rows, long depth, long products) {
    long stride = set_apart(2 * depth);
    char *copy = products > 1 && stride != 2 * depth ? malloc(rows * stride) : NULL;
#pragma omp parallel for schedule(static)
    for (long r = 0; r < (copy ? rows : 0); r++) memcpy(copy + r * stride, x + r * depth, 2 * depth);
    return (bf16 *)copy;
}

/* Each layer's y of x [rows, depth], and of `dropped`, which may be x, the middles scale x a^T, side by side: [rows, R]. Layers are all bf16 or all int8. */
void linears(const bf16 *x, const bf16 *dropped, const Layer *layers, bf16 *middles, long count, long rows, long depth) {
    long ranks = ranks_of(layers, count), stride = depth;
    float *below = stacked(layers, count, depth, ranks), *of_rows = room_for_codes(layers, 0, rows, depth);
    bf16 *copy = of_rows ? NULL : copied(x, rows, depth, count);
    const void *left = x;
    narrow_product(dropped, below, below + ranks * depth, middles, depth, ranks, rows, depth, ranks, 0);
    if (of_rows) {
        left = of_rows + rows, stride = set_apart(depth);
        int8_rows(x, NULL, (int8_t *)left, of_rows, stride, rows, depth, 1);
    } else if (copy)
        left = copy, stride = set_apart(2 * depth) / 2;
    for (const Layer *layer = layers; layer < layers + count; layer++)
        product(left, layer->weight, of_rows, layer->of_columns, layer->bias, middles + layer->middle, layer->b, layer->y, rows, depth, layer->columns, layer->rank,
                stride, ranks, of_rows ? 1 : 2, 0, 0, 0);
    free(below), free(of_rows), free(copy);
}

/* The gradients of each b, of all a [R, depth] and, unless they are NULL, of x and of `dropped`, else of both in x's, of those layers whose y was used; the
   middles are those of all, `stride` numbers a row. */
void linears_backward(const bf16 *dropped, const Layer *layers, const bf16 *middles, float *of_a, bf16 *of_x, bf16 *of_dropped, long count, long rows, long depth,
                      long stride) {
    long ranks = ranks_of(layers, count), column = 0;
    float *below = stacked(layers, count, depth, ranks);
    bf16 *of_middles = malloc(rows * ranks * sizeof(bf16));
    for (const Layer *layer = layers; layer < layers + count; column += layer++->rank) {
        narrow_product(layer->y, layer->b, below + ranks * depth + column, of_middles + column, layer->columns, ranks, rows, layer->columns, layer->rank, 1);
        outer_product(middles + layer->middle, layer->y, layer->of_b, rows, layer->rank, layer->columns, stride, 1);
    }
    outer_product(of_middles, dropped, of_a, rows, ranks, depth, ranks, 0);
    float *of_rows = of_x ? room_for_codes(layers, count, rows, 0) : NULL;
    int8_t *codes = (int8_t *)(of_rows + rows);
    for (const Layer *layer = layers; of_x && layer < layers + count; layer++) {
        long narrow = layer + 1 == layers + count && !of_dropped ? ranks : 0, apart = of_rows ? set_apart(layer->columns) : layer->columns;
        if (of_rows) int8_rows(layer->y, layer->of_columns, codes, of_rows, apart, rows, layer->columns, 0);
        product(of_rows ? (void *)codes : (void *)layer->y, layer->weight, of_rows, NULL, NULL, of_middles, below, of_x, rows, layer->columns, depth, narrow, apart,
                ranks, of_rows ? 1 : 2, 1, layer > layers, of_rows != NULL);
    }
    if (of_dropped) product(of_middles, below, NULL, NULL, NULL, of_middles, below, of_dropped, rows, 0, depth, ranks, 0, ranks, 2, 1, 0, 0);
    free(below), free(of_middles), free(of_rows);
}

#endif
