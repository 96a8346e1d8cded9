/* y[m, n] = sum over k of x[m, k] * w[n, k] for a few rows x, in one pass over w.
 *
 * A handful of rows should cost what one costs: reading the weights. So w is streamed once, four of
 * its rows at a time, and the next four are asked for while these are at work. Every y[m, n] is
 * summed in one order, whatever the number of rows, so a token's result does not depend on how many
 * are verified beside it.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float lanes __attribute__((vector_size(64)));
typedef float quarter __attribute__((vector_size(16)));
typedef uint32_t bits __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

enum { LANES = 16, WIDE = 4, TALL = 5 };

static inline lanes load_float(const float *p) {
    lanes v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline lanes load_bfloat16(const uint16_t *p) {
    halves v;
    memcpy(&v, p, sizeof v);
    return (lanes)(__builtin_convertvector(v, bits) << 16);
}

static inline float one_float(const float *p) { return *p; }

static inline float one_bfloat16(const uint16_t *p) {
    uint32_t word = (uint32_t)*p << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

static inline float total(lanes v) {
    float part[LANES / 4] __attribute__((aligned(16)));
    quarter q[4];
    memcpy(q, &v, sizeof v);
    quarter sum = (q[0] + q[1]) + (q[2] + q[3]);
    memcpy(part, &sum, sizeof sum);
    return (part[0] + part[1]) + (part[2] + part[3]);
}

static inline void store_float(float *p, float value) { *p = value; }

static inline void store_bfloat16(uint16_t *p, float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    *p = value != value ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16; /* to nearest even */
}

/* `tall` rows of x against `wide` rows of w; both are constants wherever this is inlined. */
#define TILE(TYPE, NAME)                                                                           \
    static inline __attribute__((always_inline)) void tile_##NAME(                                 \
        const float *x, const TYPE *w, const TYPE *bias, TYPE *y, long k, long n, int tall,        \
        int wide, int ahead) {                                                                     \
        lanes sum[TALL][WIDE] = {{{0}}};                                                           \
        long i = 0;                                                                                \
        for (; i + LANES <= k; i += LANES) {                                                       \
            lanes row[WIDE];                                                                       \
            for (int b = 0; b < wide; b++) {                                                       \
                row[b] = load_##NAME(w + b * k + i);                                               \
                if (ahead && i * sizeof(TYPE) % 64 < LANES * sizeof(TYPE))                         \
                    __builtin_prefetch(w + (WIDE + b) * k + i);                                    \
            }                                                                                      \
            for (int a = 0; a < tall; a++) {                                                       \
                lanes value = load_float(x + a * k + i);                                           \
                for (int b = 0; b < wide; b++) sum[a][b] += value * row[b];                        \
            }                                                                                      \
        }                                                                                          \
        for (int a = 0; a < tall; a++)                                                             \
            for (int b = 0; b < wide; b++) {                                                       \
                float value = total(sum[a][b]);                                                    \
                for (long j = i; j < k; j++) value += x[a * k + j] * one_##NAME(w + b * k + j);    \
                if (bias) value += one_##NAME(bias + b);                                           \
                store_##NAME(y + a * n + b, value);                                                \
            }                                                                                      \
    }

#define LINEAR(TYPE, NAME)                                                                         \
    TILE(TYPE, NAME)                                                                               \
    static inline __attribute__((always_inline)) void rows_##NAME(                                 \
        const float *x, const TYPE *w, const TYPE *bias, TYPE *y, long m, long k, long n,          \
        int wide, int ahead) {                                                                     \
        for (; m >= TALL; m -= TALL, x += TALL * k, y += TALL * n, ahead = 0)                      \
            tile_##NAME(x, w, bias, y, k, n, TALL, wide, ahead);                                   \
        switch (m) {                                                                               \
            case 4: tile_##NAME(x, w, bias, y, k, n, 4, wide, ahead); break;                       \
            case 3: tile_##NAME(x, w, bias, y, k, n, 3, wide, ahead); break;                       \
            case 2: tile_##NAME(x, w, bias, y, k, n, 2, wide, ahead); break;                       \
            case 1: tile_##NAME(x, w, bias, y, k, n, 1, wide, ahead); break;                       \
        }                                                                                          \
    }                                                                                              \
    int linear_##NAME(const TYPE *x, const TYPE *w, const TYPE *bias, TYPE *y, long m, long k,     \
                      long n, int threads) {                                                       \
        float *wide_x = malloc(sizeof(float) * m * k);                                             \
        if (!wide_x) return 1;                                                                     \
        for (long i = 0; i < m * k; i++) wide_x[i] = one_##NAME(x + i);                            \
        _Pragma("omp parallel for schedule(static) num_threads(threads)")                          \
        for (long b = 0; b < n; b += WIDE) {                                                       \
            const TYPE *offset = bias ? bias + b : 0;                                              \
            if (b + WIDE <= n)                                                                     \
                rows_##NAME(wide_x, w + b * k, offset, y + b, m, k, n, WIDE, b + 2 * WIDE <= n);   \
            else                                                                                   \
                for (long c = b; c < n; c++)                                                       \
                    rows_##NAME(wide_x, w + c * k, bias ? bias + c : 0, y + c, m, k, n, 1, 0);     \
        }                                                                                          \
        free(wide_x);                                                                              \
        return 0;                                                                                  \
    }

LINEAR(float, float)
LINEAR(uint16_t, bfloat16)
