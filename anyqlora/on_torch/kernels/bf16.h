/* Numbers of 16 bits and e^x, for native.c and attention.c. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

static inline uint32_t bits(float x) { return ((union { float number; uint32_t bits; }){.number = x}).bits; }
static inline float number(uint32_t x) { return ((union { uint32_t bits; float number; }){.bits = x}).number; }

static inline float up(bf16 x) { return number((uint32_t)x << 16); }

static inline bf16 down(float x) { /* to the nearest, ties to even; not a number stays one */
    uint32_t rounded = (bits(x) + 0x7fff + ((bits(x) >> 16) & 1)) >> 16;
    return (bf16)(x != x ? 0x7fc0 : rounded);
}

static inline float round_to_bf16(float x) { return up(down(x)); }

static inline int32_t to_whole(float x) { return (int32_t)(bits(x + 12582912.0f) - bits(12582912.0f)); } /* the nearest, for |x| below 2^22 */

static inline float exponential(float x) { /* e^x to 3e-6, 0 and infinity to float32's smallest and largest powers of two */
    float y = x * 1.44269504f;
    y = y < -126.0f ? -126.0f : y;
    y = y > 127.0f ? 127.0f : y;
    float shifted = y + 12582912.0f; /* 1.5 * 2^23: its last bits are the nearest whole number */
    float part = y - (shifted - 12582912.0f);
    float series = 1.0f + part * (0.69314718f + part * (0.24022651f + part * (0.055504109f + part * (0.0096181291f + part * 0.0013333558f))));
    return number(bits(series) + (bits(shifted) << 23));
}
