/* Every function that the library exports, with the struct that one of them reads, and the tile sizes that the memory
   plan counts with: stated here and nowhere else. The C files include it, so a definition that differs does not
   compile; the binding (../header.py) and the plan (planning/native_kernels.py) read it as text. Therefore: one typedef
   struct, prototypes of scalars and pointers, `#define NAME NUMBER`, no more.

   Arrays are contiguous unless a stride says how many numbers (or bytes) their rows lie apart. Shapes stand in
   brackets. int parameters are flags, but `size` and `first`. What computes what is told at the definitions. */

#ifndef ANYQLORA_KERNELS_H
#define ANYQLORA_KERNELS_H

#include <stdint.h>

#define HEAD_VOCAB_BLOCK 128 /* tokens of the vocabulary whose logits are made together */
#define HEAD_VOCAB_PARTS 8   /* parts of the vocabulary that have sums of their own, at most */
#define PANEL_COLUMNS 32     /* columns of a packed panel of weights */

typedef uint16_t bf16;

/* --------------------------------------------------------------------------------------------------- elementwise.c */

void cross_entropy(bf16 *logits, const int64_t *targets, float *losses, long rows, long vocab, float scale);
void rms_norm(const bf16 *x, const bf16 *weight, bf16 *y, float *rstd, long rows, long width, float eps, float offset,
              int late);
void rms_norm_backward(const bf16 *grad_y, const bf16 *x, const bf16 *weight, const float *rstd, bf16 *grad_x,
                       long rows, long width, float offset, int late);
void rotate(const bf16 *x, const void *cos, const void *sin, bf16 *y, long tokens, long heads, long half,
            long positions, int backward, int float_angles);
void quantize_4bit(const void *weights, uint8_t *codes, float *scales, long blocks, const float *borders,
                   const int32_t *steps, int first, int is_bf16);
void token_mask(const int64_t *keys, uint8_t *mask, long rows, long width, long begin, long threshold);

/* The rest is for processors with AVX512-BF16. */
void swiglu(const bf16 *gate, const bf16 *up, bf16 *out, long n);
void swiglu_backward(const bf16 *grad_out, const bf16 *gate, const bf16 *up, bf16 *grad_gate, bf16 *grad_up, long n);
void quantize_int8_rows(const bf16 *x, const float *column_scales, int8_t *codes, float *row_scales, long codes_stride,
                        long rows, long width, int hadamard);
void dequantize_int8(const int32_t *sums, const float *row_scales, const float *column_scales, bf16 *out, long rows,
                     long width, int accumulate, int hadamard);

/* ----------------------------------------------------------------------------------------------------- attention.c */

void attention(const bf16 *q, const bf16 *k, const bf16 *v, bf16 *out, float *logsumexp, const int64_t *documents,
               long num_documents, long longest, long length, long heads, long kv_heads, long head_dim, long window,
               float scale);
void attention_backward(const bf16 *grad_out, const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *out,
                        const float *logsumexp, bf16 *grad_q, bf16 *grad_k, bf16 *grad_v, const int64_t *documents,
                        long num_documents, long longest, long length, long heads, long kv_heads, long head_dim,
                        long window, float scale);

/* ------------------------------------------------------------------- matmul.c and lm_head.c: with AVX512-VNNI, too */

void frozen_matmul(const void *left, const void *right, const float *row_scales, const float *column_scales,
                   const bf16 *bias, const bf16 *lora_hidden, const float *lora_factor, bf16 *out, long rows,
                   long depth, long columns, long rank, long left_stride, long hidden_stride, int size, int transposed,
                   int accumulate, int hadamard);
void lora_matmul(const bf16 *left, const float *factor, const float *scales, bf16 *out, long left_stride,
                 long out_stride, long rows, long depth, long rank, int transposed);
void lora_weight_grad(const bf16 *hidden, const bf16 *wide, float *out, long rows, long rank, long columns,
                      long hidden_stride, int transposed);

/* A layer of several that read one input: y = x weight^T + bias + scale (x a^T) b^T, weight [columns, depth], a [rank,
   depth] and b [columns, rank]. Backward y is its gradient, and grad_b that of b. int8: the weight's codes, rotated,
   and each column's scale; bf16 has none. */
typedef struct {
    const void *weight;
    const float *column_scales;
    const bf16 *bias;
    const float *a;
    const float *b;
    bf16 *y;
    float *grad_b;
    double scale;
    long columns;
    long rank;
    long first; /* of its columns among all layers' hidden ones */
} LoraLinear;

void lora_linears(const bf16 *x, const bf16 *dropped, const LoraLinear *layers, bf16 *hidden, long count, long rows,
                  long depth);
void lora_linears_backward(const bf16 *dropped, const LoraLinear *layers, const bf16 *hidden, float *grad_a,
                           bf16 *grad_x, bf16 *grad_dropped, long count, long rows, long depth, long hidden_stride);

void lm_head_cross_entropy(const bf16 *hidden, const bf16 *weight, const bf16 *bias, const int8_t *codes,
                           const float *code_scales, const float *mean, const int64_t *targets, float *losses,
                           bf16 *grad_hidden, char *workspace, long rows, long depth, long vocab, float scale);
long lm_head_workspace(long rows, long depth, long vocab, int has_grad);

#endif
