/* Matrix products with a frozen weight, for AVX512-BF16 and AVX512-VNNI (with AMX oneDNN's are several times as fast,
   and taken): of bf16, or of int8 codes with a scale for each row. A panel of the weight's columns is packed just
   before it is used, so that the weight lies in memory once for both directions; what LoRA adds is summed in the same
   registers and rounded with the rest, once. And LoRA's own low-rank products, whose learned factors and their
   gradients are float32. Each number is summed by one thread, in one order. */

#include "panels.h"

#ifdef HAS_PANELS

enum { MAX_BLOCK = 1032, MIN_BLOCK = 96, CHUNK = 1024, PANELS_TOGETHER = 4, SUMS = 24, MAX_VECTORS = 3, PAIRS = 128 };
/* Rows that share packed panels, at most and at least; words of the depth that are summed over at a time; panels that
   are packed together. Of a low-rank product, registers of sums, and those of its columns at most; of a factor's
   gradient, pairs of rows that are read together and stay in a core's L1. */

/* What `frozen_matmul` computes, and over how many words of the depth at a time; left_stride in bytes. */
typedef struct {
    const char *left;
    Right right, lora_factor;
    const float *row_scales, *column_scales; /* int8: scales */
    const bf16 *bias, *hidden;
    bf16 *out;
    long columns, rank, left_stride, hidden_stride, words, chunk;
    int accumulate, hadamard;
} Matmul;

/* A thread's own memory. */
typedef struct {
    uint32_t *panels, *lora_panels; /* [PANELS_TOGETHER] of a chunk of the depth, and of the rank */
    char *copy;                     /* of a block's rows, where their stride is a bad one; else NULL */
    float *sums; /* of a block's panels, [panels, rows, PANEL], over the depth so far; NULL where it is one chunk */
    int32_t correction[MAX_BLOCK]; /* int8: correction of a row's sums for the flipped sign bits */
} Scratch;

/* `count` rows from `row` on of a panel of the output at `column`. left: their chunk of the depth, `words` of them,
   `stride` bytes apart. They are added to the sums `before`, unless NULL, and go to `after`, unless NULL (the last
   chunk): both [count, PANEL], int32 in int8. */
static inline __attribute__((always_inline)) void tile(const Matmul *op, long row, long column, int count, int is_int8,
                                                       const char *left, long stride, const int32_t *correction,
                                                       const uint32_t *panel, long words, const uint32_t *lora_panel,
                                                       const float *before, float *after) {
    __m512 y[ROWS][VECTORS];
    if (is_int8) {
        __m512i sums[ROWS][VECTORS];
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                __m512i sum = before ? _mm512_load_si512(before + r * PANEL + v * LANES) : _mm512_setzero_si512();
                sums[r][v] = _mm512_add_epi32(sum, _mm512_set1_epi32(correction[r]));
            }
        add_codes(sums, count, left, stride, panel, words, 1);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                if (after)
                    _mm512_store_si512(after + r * PANEL + v * LANES, sums[r][v]);
                else
                    y[r][v] = _mm512_cvtepi32_ps(sums[r][v]) * op->row_scales[row + r];
            }
    } else {
#pragma GCC unroll 12
        for (int r = 0; r < count; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++)
                y[r][v] = before ? _mm512_load_ps(before + r * PANEL + v * LANES) : _mm512_setzero_ps();
        add_products(y, count, left, stride, panel, words);
#pragma GCC unroll 12
        for (int r = 0; r < count && after; r++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) _mm512_store_ps(after + r * PANEL + v * LANES, y[r][v]);
    }
    if (after) return;
    if (is_int8 && op->column_scales) {
        __m512 scales[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            scales[v] = _mm512_maskz_loadu_ps(lane_mask(op->columns - column - v * LANES),
                                              op->column_scales + column + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) y[r][0] *= scales[0], y[r][1] *= scales[1];
    }
    if (is_int8 && op->hadamard && column + PANEL <= op->columns) {
#pragma GCC unroll 12
        for (int r = 0; r < count; r++) rotate_32(&y[r][0], &y[r][1]);
    }
    add_products(y, count, op->hidden + row * op->hidden_stride, op->hidden_stride * sizeof(bf16), lora_panel,
                 op->rank / 2);
    __mmask32 mask = panel_mask(op->columns - column);
    const bf16 *more = op->accumulate ? op->out + row * op->columns + column : op->bias ? op->bias + column : NULL;
    long more_stride = op->accumulate ? op->columns : 0;
#pragma GCC unroll 12
    for (int r = 0; r < count; r++) {
        if (more) {
            __m512i x = _mm512_maskz_loadu_epi16(mask, more + r * more_stride);
            y[r][0] += first_half(x), y[r][1] += second_half(x);
        }
        _mm512_mask_storeu_epi16(op->out + (row + r) * op->columns + column, mask, round_32(y[r][0], y[r][1]));
    }
}

/* The panels [first, end) of the output, for a block of `count` rows from `row` on. */
static void panels_of_block(const Matmul *op, long row, long count, long first, long end, Scratch *scratch) {
    long size = op->right.size, stride = op->left_stride,
         left_stride = scratch->copy ? padded_stride(4 * op->chunk) : stride, start = 0;
    do {
        long words = smaller(op->chunk, op->words - start), is_last = start + words == op->words;
        const char *left = op->left + row * stride + 4 * start;
        for (long r = 0; size == 1 && r < count; r++) {
            int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
            for (long k = 0; k < 4 * words; k++) sum += ((const int8_t *)left)[r * stride + k];
            scratch->correction[r] = -128 * sum;
        }
        for (long r = 0; scratch->copy && r < count; r++)
            memcpy(scratch->copy + r * left_stride, left + r * stride, 4 * words);
        if (scratch->copy) left = scratch->copy;
        for (long panel = first; panel < end; panel += PANELS_TOGETHER) {
            long together = smaller(PANELS_TOGETHER, end - panel), r = 0;
            pack_panels(scratch->panels, together, &op->right, panel * PANEL, op->columns, start, words);
            if (is_last)
                pack_panels(scratch->lora_panels, together, &op->lora_factor, panel * PANEL, op->columns, 0,
                            op->rank / 2);
#define TILES(COUNT, IS_INT8)                                                                                    \
    for (; r + COUNT <= count; r += COUNT)                                                                       \
        for (long p = 0; p < together; p++) {                                                                    \
            float *sums = scratch->sums ? scratch->sums + ((panel - first + p) * count + r) * PANEL : NULL;      \
            tile(op, row + r, (panel + p) * PANEL, COUNT, IS_INT8, left + r * left_stride, left_stride,          \
                 scratch->correction + r, scratch->panels + p * words * PANEL, words,                            \
                 scratch->lora_panels + p * (op->rank / 2) * PANEL, start ? sums : NULL, is_last ? NULL : sums); \
        }
            if (size == 1) {
                TILES(ROWS, 1) TILES(4, 1) TILES(1, 1)
            } else {
                TILES(ROWS, 0) TILES(4, 0) TILES(1, 0)
            }
#undef TILES
        }
        start += words;
    } while (start < op->words);
}

/* out [rows, columns] = left [rows, depth] right + lora_hidden [rows, rank] lora_factor + bias; accumulate: out + both
   products. int8: the frozen product's rows times `row_scales`, its columns times `column_scales` unless NULL, and with
   hadamard rotated. right is [columns, depth], lora_factor [columns, rank]; transposed: both the other way round. depth
   is a multiple of 4 in int8, and of 2 in bf16, as rank is. */
void frozen_matmul(const void *left, const void *right, const float *row_scales, const float *column_scales,
                   const bf16 *bias, const bf16 *lora_hidden, const float *lora_factor, bf16 *out, long rows,
                   long depth, long columns, long rank, long left_stride, long hidden_stride, int size, int transposed,
                   int accumulate, int hadamard) {
    if (!rows) return;
    bf16 *factor_bf16 = aligned_alloc(64, rounded_up(2 * rank * columns, 64) + 64);
    for (long i = 0; i < rank * columns; i += LANES) {
        __mmask16 mask = lane_mask(rank * columns - i);
        _mm256_mask_storeu_epi16(factor_bf16 + i, mask,
                                 (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, lora_factor + i)));
    }
    long words = depth * size / 4,
         chunk = rounded_up(parts(words, larger(1, parts(words, CHUNK))), LANES); /* of one size, nearly */
    Matmul op = {left,
                 {right, depth, size, transposed},
                 {factor_bf16, rank, 2, transposed},
                 row_scales,
                 column_scales,
                 bias,
                 lora_hidden,
                 out,
                 columns,
                 rank,
                 left_stride * size,
                 hidden_stride,
                 words,
                 chunk,
                 accumulate,
                 hadamard};
    long panels = parts(columns, PANEL), is_copied = op.left_stride != padded_stride(op.left_stride);
    long blocks =
        larger(parts(rows, MAX_BLOCK), smaller(parts(4 * omp_get_max_threads(), panels), parts(rows, MIN_BLOCK)));
    long block = rounded_up(parts(rows, blocks), ROWS); /* of one size, so that each thread has as much to do */
    blocks = parts(rows, block);
#pragma omp parallel
    {
        long threads = omp_get_num_threads(), me = omp_get_thread_num(), task = blocks * panels * me / threads,
             end = blocks * panels * (me + 1) / threads;
        Scratch scratch = {
            aligned_alloc(64, PANELS_TOGETHER * chunk * PANEL * 4),
            aligned_alloc(64, PANELS_TOGETHER * (rank / 2) * PANEL * 4),
            is_copied ? aligned_alloc(64, rounded_up(block * padded_stride(4 * chunk), 64)) : NULL,
            chunk < words ? aligned_alloc(64, smaller(panels, end - task) * block * PANEL * sizeof(float)) : NULL};
        while (task < end) { /* a panel of a block; all of them that are a thread's own in one go */
            long row = task / panels * block, first = task % panels, own = smaller(panels - first, end - task);
            panels_of_block(&op, row, smaller(block, rows - row), first, first + own, &scratch);
            task += own;
        }
        free(scratch.panels), free(scratch.lora_panels), free(scratch.copy), free(scratch.sums);
    }
    free(factor_bf16);
}

/* A factor [rank, depth], or transposed: [depth, rank], as words [depth / 2, width] of two numbers each, zeros after
   the rank. */
static void paired(uint32_t *words, const float *factor, long rank, long depth, long width, int transposed) {
    for (long c = 0; c < width; c += LANES) {
        __mmask16 mask = lane_mask(rank - c);
        for (long j = 0; j < depth / 2 && transposed; j++) {
            const float *row = factor + 2 * j * rank + c;
            __m256i one = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, row)),
                    next = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, row + rank));
            _mm512_storeu_si512(
                words + j * width + c,
                _mm512_or_si512(_mm512_cvtepu16_epi32(one), _mm512_slli_epi32(_mm512_cvtepu16_epi32(next), 16)));
        }
        for (long j = 0; j < depth / 2 && !transposed; j += LANES) {
            __m512i block[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const float *row = factor + (c + i) * depth + 2 * j;
                block[i] = mask >> i & 1
                               ? round_32(_mm512_maskz_loadu_ps(lane_mask(depth - 2 * j), row),
                                          _mm512_maskz_loadu_ps(lane_mask(depth - 2 * j - LANES), row + LANES))
                               : _mm512_setzero_si512();
            }
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                if (j + i < depth / 2) _mm512_storeu_si512(words + (j + i) * width + c, block[i]);
        }
    }
}

/* `count` rows of `vectors` registers of columns of a low-rank product; left's rows lie `stride` bytes apart. */
static inline __attribute__((always_inline)) void lora_tile(const char *left, long stride, int count, int vectors,
                                                            const uint32_t *words, long pairs, long width,
                                                            const float *scales, bf16 *out, long out_stride,
                                                            long columns) {
    __m512 y[SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < count * vectors; i++) y[i] = _mm512_setzero_ps();
    for (long j = 0; j < pairs; j++) {
        __m512bh right[MAX_VECTORS];
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) right[v] = (__m512bh)_mm512_loadu_si512(words + j * width + v * LANES);
#pragma GCC unroll 24
        for (int r = 0; r < count; r++) {
            __m512bh one = (__m512bh)_mm512_set1_epi32(((const Word *)(left + r * stride))[j]);
#pragma GCC unroll 3
            for (int v = 0; v < vectors; v++) y[r * vectors + v] = _mm512_dpbf16_ps(y[r * vectors + v], one, right[v]);
        }
    }
#pragma GCC unroll 24
    for (int r = 0; r < count; r++)
#pragma GCC unroll 3
        for (int v = 0; v < vectors; v++) {
            __mmask16 mask = lane_mask(columns - v * LANES);
            __m512 scaled = y[r * vectors + v] * _mm512_maskz_loadu_ps(mask, scales + v * LANES);
            _mm256_mask_storeu_epi16(out + r * out_stride + v * LANES, mask, (__m256i)_mm512_cvtneps_pbh(scaled));
        }
}

/* out [rows, rank] = left [rows, depth] factor^T, its columns times `scales`: factor [rank, depth] or, transposed,
   [depth, rank]. depth is even. */
void lora_matmul(const bf16 *left, const float *factor, const float *scales, bf16 *out, long left_stride,
                 long out_stride, long rows, long depth, long rank, int transposed) {
    long width = rounded_up(rank, LANES), stride = 2 * left_stride, copy_stride = padded_stride(stride);
    uint32_t *words = aligned_alloc(64, rounded_up(depth / 2 * width * 4, 64));
    paired(words, factor, rank, depth, width, transposed);
#pragma omp parallel
    {
        char *copy = copy_stride == stride ? NULL : aligned_alloc(64, SUMS * copy_stride);
#pragma omp for schedule(static)
        for (long first = 0; first < rows; first += SUMS) {
            const char *from = (const char *)left + first * stride;
            long count = smaller(SUMS, rows - first);
            for (long r = 0; copy && r < count; r++) memcpy(copy + r * copy_stride, from + r * stride, 2 * depth);
            if (copy) from = copy;
            for (long c = 0; c < width; c += MAX_VECTORS * LANES) {
                long vectors = smaller(MAX_VECTORS, (width - c) / LANES), r = 0;
#define TILES(COUNT, VECTORS)                                                                                   \
    for (; r + COUNT <= count; r += COUNT)                                                                      \
        lora_tile(from + r * copy_stride, copy_stride, COUNT, VECTORS, words + c, depth / 2, width, scales + c, \
                  out + (first + r) * out_stride + c, out_stride, rank - c);
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

/* `count` rows of a panel of a factor's gradient: sums += what so many pairs of tokens add. */
static inline __attribute__((always_inline)) void weight_grad_tile(const uint32_t *words, long rank, int count,
                                                                   const __m512i (*panel)[VECTORS], long pairs,
                                                                   float *sums) {
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

/* out [rank, columns], or transposed [columns, rank], = hidden [rows, rank]^T wide [rows, columns]: a factor's
   gradient. */
void lora_weight_grad(const bf16 *hidden, const bf16 *wide, float *out, long rows, long rank, long columns,
                      long hidden_stride, int transposed) {
    long pairs = parts(rows, 2);
    uint32_t *words = aligned_alloc(
        64, rounded_up(pairs * rank * 4, 64)); /* [pairs, rank], of two tokens each, a zero after the last one */
#pragma omp parallel
    {
        __m512i panels[PANELS_AT_ONCE][PAIRS][VECTORS];
        float *sums = aligned_alloc(64, PANELS_AT_ONCE * rank * PANEL * sizeof(float));
#pragma omp for schedule(static)
        for (long t = 0; t < pairs; t++) {
            const bf16 *one = hidden + 2 * t * hidden_stride;
            for (long r = 0; r < rank; r++)
                words[t * rank + r] = one[r] | (2 * t + 1 < rows ? (uint32_t)one[hidden_stride + r] << 16 : 0);
        }
        long panel = parts(columns, PANEL) * omp_get_thread_num() / omp_get_num_threads(),
             end = parts(columns, PANEL) * (omp_get_thread_num() + 1) / omp_get_num_threads();
        for (; panel < end; panel += PANELS_AT_ONCE) {
            long column = panel * PANEL, together = smaller(PANELS_AT_ONCE, end - panel);
            memset(sums, 0, PANELS_AT_ONCE * rank * PANEL * sizeof(float));
            for (long first = 0; first < pairs; first += PAIRS) {
                long count = smaller(PAIRS, pairs - first);
                for (long t = 0; t < count; t++) { /* after the last row comes something finite: the row again */
                    long row = 2 * (first + t), stride = row + 1 < rows ? columns : 0;
                    for (long p = 0, c = column; p < together; p++, c += PANEL)
                        interleave_two(wide + row * columns + c, stride, panel_mask(columns - c), panels[p][t]);
                }
                for (long p = 0, r = 0; p < together; p++, r = 0) {
#define TILES(COUNT)                      \
    for (; r + COUNT <= rank; r += COUNT) \
        weight_grad_tile(words + first * rank + r, rank, COUNT, panels[p], count, sums + (p * rank + r) * PANEL);
                    if (rank % 12 == 0) TILES(12)
                    TILES(8) TILES(4) TILES(1)
#undef TILES
                }
            }
            for (long p = 0, from = column; p < together; p++, from += PANEL)
                for (long r = 0; r < rank; r++)
                    for (long c = 0; c < smaller(PANEL, columns - from); c++)
                        out[transposed ? (from + c) * rank + r : r * columns + from + c] =
                            sums[(p * rank + r) * PANEL + c];
        }
        free(sums);
    }
    free(words);
}

/* All layers' a, one below the other, and each row's scale: [R, depth] and, after them, [R]. */
static float *stacked(const LoraLinear *layers, long count, long depth, long ranks) {
    float *factor = malloc((ranks * depth + ranks) * sizeof(float)), *a = factor, *scale = factor + ranks * depth;
    for (const LoraLinear *layer = layers; layer < layers + count; layer++) {
        memcpy(a, layer->a, layer->rank * depth * sizeof(float));
        a += layer->rank * depth;
        for (long r = 0; r < layer->rank; r++) *scale++ = (float)layer->scale;
    }
    return factor;
}

static long ranks_of(const LoraLinear *layers, long count) {
    long sum = 0;
    for (long i = 0; i < count; i++) sum += layers[i].rank;
    return sum;
}

/* Memory for a scale for each row and, after them, rows of int8 codes of a good stride; NULL where layers are bf16. */
static float *allocated_codes(const LoraLinear *layers, long count, long rows, long depth) {
    long widest = depth;
    for (long i = 0; i < count; i++) widest = larger(widest, layers[i].columns);
    return layers->column_scales ? malloc(rows * (sizeof(float) + widest + 64)) : NULL;
}

/* The rows of x for several products, copied once to a good stride; NULL where it is one, and where there is one
   product. */
static bf16 *copied(const bf16 *x, long rows, long depth, long products) {
    long stride = padded_stride(2 * depth);
    char *copy = products > 1 && stride != 2 * depth ? malloc(rows * stride) : NULL;
#pragma omp parallel for schedule(static)
    for (long r = 0; r < (copy ? rows : 0); r++) memcpy(copy + r * stride, x + r * depth, 2 * depth);
    return (bf16 *)copy;
}

/* Each layer's y of x [rows, depth], and of `dropped`, which may be x, their hidden scale x a^T side by side: [rows,
   R]. Layers are all bf16 or all int8. */
void lora_linears(const bf16 *x, const bf16 *dropped, const LoraLinear *layers, bf16 *hidden, long count, long rows,
                  long depth) {
    long ranks = ranks_of(layers, count), stride = depth;
    float *stacked_a = stacked(layers, count, depth, ranks), *row_scales = allocated_codes(layers, 0, rows, depth);
    bf16 *copy = row_scales ? NULL : copied(x, rows, depth, count);
    const void *left = x;
    lora_matmul(dropped, stacked_a, stacked_a + ranks * depth, hidden, depth, ranks, rows, depth, ranks, 0);
    if (row_scales) {
        left = row_scales + rows, stride = padded_stride(depth);
        quantize_int8_rows(x, NULL, (int8_t *)left, row_scales, stride, rows, depth, 1);
    } else if (copy)
        left = copy, stride = padded_stride(2 * depth) / 2;
    for (const LoraLinear *layer = layers; layer < layers + count; layer++)
        frozen_matmul(left, layer->weight, row_scales, layer->column_scales, layer->bias, hidden + layer->first,
                      layer->b, layer->y, rows, depth, layer->columns, layer->rank, stride, ranks, row_scales ? 1 : 2,
                      0, 0, 0);
    free(stacked_a), free(row_scales), free(copy);
}

/* The gradients of each b, of all a [R, depth], of x and of `dropped` (either may be NULL; where only the latter is,
   both are in grad_x), of those layers whose y was used. hidden has the columns of all layers. */
void lora_linears_backward(const bf16 *dropped, const LoraLinear *layers, const bf16 *hidden, float *grad_a,
                           bf16 *grad_x, bf16 *grad_dropped, long count, long rows, long depth, long hidden_stride) {
    long ranks = ranks_of(layers, count), column = 0;
    float *stacked_a = stacked(layers, count, depth, ranks);
    bf16 *grad_hidden = malloc(rows * ranks * sizeof(bf16));
    for (const LoraLinear *layer = layers; layer < layers + count; column += layer++->rank) {
        lora_matmul(layer->y, layer->b, stacked_a + ranks * depth + column, grad_hidden + column, layer->columns, ranks,
                    rows, layer->columns, layer->rank, 1);
        lora_weight_grad(hidden + layer->first, layer->y, layer->grad_b, rows, layer->rank, layer->columns,
                         hidden_stride, 1);
    }
    lora_weight_grad(grad_hidden, dropped, grad_a, rows, ranks, depth, ranks, 0);
    float *row_scales = grad_x ? allocated_codes(layers, count, rows, 0) : NULL;
    int8_t *codes = row_scales ? (int8_t *)(row_scales + rows) : NULL;
    for (const LoraLinear *layer = layers; grad_x && layer < layers + count; layer++) {
        long rank = layer + 1 == layers + count && !grad_dropped ? ranks : 0,
             stride = row_scales ? padded_stride(layer->columns) : layer->columns;
        if (row_scales)
            quantize_int8_rows(layer->y, layer->column_scales, codes, row_scales, stride, rows, layer->columns, 0);
        frozen_matmul(row_scales ? (void *)codes : (void *)layer->y, layer->weight, row_scales, NULL, NULL, grad_hidden,
                      stacked_a, grad_x, rows, layer->columns, depth, rank, stride, ranks, row_scales ? 1 : 2, 1,
                      layer > layers, row_scales != NULL);
    }
    if (grad_dropped)
        frozen_matmul(grad_hidden, stacked_a, NULL, NULL, NULL, grad_hidden, stacked_a, grad_dropped, rows, 0, depth,
                      ranks, 0, ranks, 2, 1, 0, 0);
    free(stacked_a), free(grad_hidden), free(row_scales);
}

#endif
