/* y[m, n] = sum over k of x[m, k] * w[n, k] for a few rows x, in one pass over w.
 *
 * A handful of rows should cost what one costs: reading the weights. So w is streamed once, four of
 * its rows at a time, and later ones are asked for while these are at work: a part of them in each
 * tile of rows of x, so that memory never waits. Every y[m, n] is summed in one order, whatever the
 * number of rows, so a token's result does not depend on how many are verified beside it.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float lanes __attribute__((vector_size(64)));
typedef float quarter __attribute__((vector_size(16)));
typedef uint32_t bits __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

enum { LANES = 16, WIDE = 4, TALL = 5, LINE = 64, AHEAD = 8192 };

/* How many rows of `size` bytes it is to what is asked for; 0 where w[n] ends before that. */
static inline long rows_ahead(long size, long b, long n) {
    long rows = WIDE * (1 + AHEAD / (WIDE * size));
    return b + rows + WIDE <= n ? rows : 0;
}

/* Tile t of m rows asks for row b of w if b & parts(m) == t. */
static inline int parts(long m) { return m <= TALL ? 0 : m <= 2 * TALL ? 1 : 3; }

static inline lanes load_float(const float *p) {
    lanes v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline lanes load_bfloat16(const uint16_t *p) {
    halves v;
    memcpy(&v, p, sizeof v);
#ifdef __AVX512F__ /* compilers make seven instructions of the conversion, and this is two */
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)v), 16);
#else
    return (lanes)(__builtin_convertvector(v, bits) << 16);
#endif
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
        int wide, long ahead, int mask, int part) {                                                \
        lanes sum[TALL][WIDE] = {{{0}}};                                                           \
        long i = 0;                                                                                \
        for (; i + LANES <= k; i += LANES) {                                                       \
            lanes row[WIDE];                                                                       \
            for (int b = 0; b < wide; b++) {                                                       \
                row[b] = load_##NAME(w + b * k + i);                                               \
                if (ahead && (b & mask) == part && i * sizeof(TYPE) % LINE == 0)                   \
                    __builtin_prefetch(w + (ahead + b) * k + i);                                   \
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
        int wide, long ahead) {                                                                    \
        int mask = parts(m), part = 0;                                                             \
        for (; m >= TALL; m -= TALL, x += TALL * k, y += TALL * n, part++)                         \
            tile_##NAME(x, w, bias, y, k, n, TALL, wide, ahead, mask, part);                       \
        switch (m) {                                                                               \
            case 4: tile_##NAME(x, w, bias, y, k, n, 4, wide, ahead, mask, part); break;           \
            case 3: tile_##NAME(x, w, bias, y, k, n, 3, wide, ahead, mask, part); break;           \
            case 2: tile_##NAME(x, w, bias, y, k, n, 2, wide, ahead, mask, part); break;           \
            case 1: tile_##NAME(x, w, bias, y, k, n, 1, wide, ahead, mask, part); break;           \
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
                rows_##NAME(wide_x, w + b * k, offset, y + b, m, k, n, WIDE,                       \
                            rows_ahead(k * sizeof(TYPE), b, n));                                   \
            else                                                                                   \
                for (long c = b; c < n; c++)                                                       \
                    rows_##NAME(wide_x, w + c * k, bias ? bias + c : 0, y + c, m, k, n, 1, 0);     \
        }                                                                                          \
        free(wide_x);                                                                              \
        return 0;                                                                                  \
    }

LINEAR(float, float)
LINEAR(uint16_t, bfloat16)

#ifdef __AVX512VNNI__
static inline __mmask16 floats_left(long n) { return n < LANES ? (1u << n) - 1 : 0xffff; }

static inline __mmask64 bytes_left(long n) { return n < LINE ? (1ull << n) - 1 : ~0ull; }

/* Multiplies each `block` of x[k], a power of two that divides k, by Hadamard's matrix of ones. */
static void rotate(float *x, long k, long block) {
    long h = 1;
    if (block >= LANES)
        for (; h < LANES; h *= 2) { /* partners are in one vector */
            __m512i place = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
            __m512i partner = _mm512_xor_si512(place, _mm512_set1_epi32(h));
            __mmask16 second = _mm512_test_epi32_mask(place, _mm512_set1_epi32(h));
            for (long i = 0; i < k; i += LANES) {
                __m512 v = _mm512_loadu_ps(x + i), other = _mm512_permutexvar_ps(partner, v);
                __m512 sum = _mm512_add_ps(other, v);
                _mm512_storeu_ps(x + i, _mm512_mask_sub_ps(sum, second, other, v));
            }
        }
    for (; h < block; h *= 2)
        for (long i = 0; i < k; i += 2 * h)
            for (long j = i; j < i + h; j++) {
                float a = x[j], b = x[j + h];
                x[j] = a + b;
                x[j + h] = a - b;
            }
}

/* Rounds x[k] to codes, and returns their scale, NaN where x is not finite; `sum` is theirs. */
static float encode(const float *x, int8_t *codes, long k, int *sum) {
    __m512 most = _mm512_setzero_ps(), unsound = most;
    for (long i = 0; i < k; i += LANES) {
        __m512 v = _mm512_maskz_loadu_ps(floats_left(k - i), x + i);
        most = _mm512_max_ps(most, _mm512_abs_ps(v));
        unsound = _mm512_add_ps(unsound, _mm512_sub_ps(v, v));
    }
    float largest = _mm512_reduce_max_ps(most);
    float scale = (largest > 1e-12f ? largest : 1e-12f) / 127;
    __m512i total = _mm512_setzero_si512();
    for (long i = 0; i < k; i += LANES) {
        __mmask16 left = floats_left(k - i);
        __m512 v = _mm512_div_ps(_mm512_maskz_loadu_ps(left, x + i), _mm512_set1_ps(scale));
        __m512i code = _mm512_cvtps_epi32(v);
        total = _mm512_add_epi32(total, code);
        _mm512_mask_cvtsepi32_storeu_epi8(codes + i, left, code);
    }
    *sum = _mm512_reduce_add_epi32(total);
    return scale + _mm512_reduce_add_ps(unsound);
}

/* Returns the totals of four vectors. */
static inline __m128i totals(const __m512i v[WIDE]) {
    __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
    __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
    a = _mm512_add_epi32(a, b), c = _mm512_add_epi32(c, d);
    a = _mm512_add_epi32(_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* `tall` rows of codes against four rows of weights, which are read as if 128 were added to them:
 * the instruction multiplies unsigned bytes by signed ones. */
static inline __attribute__((always_inline)) void tile_int8(const int8_t *x, const int8_t *const *w,
                                                            __m128i *dot, long k, int tall,
                                                            long ahead, int mask, int part) {
    __m512i sum[TALL][WIDE] = {{{0}}};
    for (long i = 0; i < k; i += LINE) {
        __mmask64 left = bytes_left(k - i);
        __m512i row[WIDE];
        for (int b = 0; b < WIDE; b++) {
            row[b] = _mm512_maskz_loadu_epi8(left, w[b] + i);
            row[b] = _mm512_xor_si512(row[b], _mm512_set1_epi8(-128));
            if (ahead && (b & mask) == part) __builtin_prefetch(w[b] + ahead * k + i);
        }
        for (int a = 0; a < tall; a++) {
            __m512i value = _mm512_maskz_loadu_epi8(left, x + a * k + i);
            for (int b = 0; b < WIDE; b++)
                sum[a][b] = _mm512_dpbusd_epi32(sum[a][b], row[b], value);
        }
    }
    for (int a = 0; a < tall; a++) dot[a] = totals(sum[a]);
}

/* x is rotated and rounded to codes first, each row with a scale of its own. */
#define INT8(TYPE, NAME)                                                                           \
    int int8_##NAME(const TYPE *x, const int8_t *w, const float *scale, const TYPE *bias, TYPE *y, \
                    long m, long k, long n, long block, int threads) {                             \
        float *wide_x = malloc(m * (k * (sizeof(float) + 1) + sizeof(float) + sizeof(int)));       \
        if (!wide_x) return 1;                                                                     \
        float *step = wide_x + m * k;                                                              \
        int *sum = (int *)(step + m);                                                              \
        int8_t *codes = (int8_t *)(sum + m);                                                       \
        _Pragma("omp parallel num_threads(threads)") {                                             \
            _Pragma("omp for schedule(static)") for (long a = 0; a < m; a++) {                     \
                float *row = wide_x + a * k;                                                       \
                for (long i = 0; i < k; i++) row[i] = one_##NAME(x + a * k + i);                   \
                rotate(row, k, block);                                                             \
                step[a] = encode(row, codes + a * k, k, sum + a) / sqrtf(block);                   \
            }                                                                                      \
            _Pragma("omp for schedule(static)") for (long b = 0; b < n; b += WIDE) {               \
                int wide = n - b < WIDE ? n - b : WIDE, mask = parts(m);                           \
                const int8_t *row[WIDE];                                                           \
                for (int c = 0; c < WIDE; c++) row[c] = w + (b + (c < wide ? c : 0)) * k;          \
                long ahead = rows_ahead(k, b, n);                                                  \
                for (long t = 0; t * TALL < m; t++) {                                              \
                    __m128i dot[TALL];                                                             \
                    const int8_t *from = codes + t * TALL * k;                                     \
                    switch (m - t * TALL) {                                                        \
                        case 1: tile_int8(from, row, dot, k, 1, ahead, mask, t); break;            \
                        case 2: tile_int8(from, row, dot, k, 2, ahead, mask, t); break;            \
                        case 3: tile_int8(from, row, dot, k, 3, ahead, mask, t); break;            \
                        case 4: tile_int8(from, row, dot, k, 4, ahead, mask, t); break;            \
                        default: tile_int8(from, row, dot, k, TALL, ahead, mask, t);               \
                    }                                                                              \
                    for (long a = t * TALL; a < m && a < (t + 1) * TALL; a++) {                    \
                        int total[WIDE];                                                           \
                        memcpy(total, dot + a - t * TALL, sizeof total);                           \
                        for (int c = 0; c < wide; c++) {                                           \
                            float value = (total[c] - 128 * sum[a]) * step[a] * scale[b + c];      \
                            if (bias) value += one_##NAME(bias + b + c);                           \
                            store_##NAME(y + a * n + b + c, value);                                \
                        }                                                                          \
                    }                                                                              \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        free(wide_x);                                                                              \
        return 0;                                                                                  \
    }

INT8(float, float)
INT8(uint16_t, bfloat16)
#endif
