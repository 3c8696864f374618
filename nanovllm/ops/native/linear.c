/* Products with weights in floating point: y = x W^T + bias. Twin: ops/linear.py.
 *
 * A BLAS is made for many rows and for its maker's processors: MKL reads a matrix with one thread for one row where the
 * processor is not Intel's (11 of 49 GB/s on two cores), and takes AVX2 there even if the processor has AVX-512.
 *
 *     to 4 rows    the inputs are the lanes of a vector: four outputs at a time, each weight is read from memory once for
 *                  all rows, and all threads read
 *     more         the rows are the lanes: x is transposed, and a weight is multiplied with 16 (or 8, 4) rows by one
 *                  instruction. There is no sum over lanes, and the weights stay as they are
 *
 * On one core of an AMD EPYC (Zen 5) that computes 138 products a ns at most, products a ns, ours and MKL's, 3072 x 576:
 *
 *     rows     1     2     4     9    16    32    64   500
 *     ours    26    33    35    62   108   132   131   128
 *     MKL     21    22    30    37    49    54    58    60
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "half.h"
#include "share.h"

#define LANES_ARE_INPUTS 4 /* rows up to which they are */
#define FEW_ROWS 8 /* of weights in 16 bits; as in ops.py */
#define UNROLL _Pragma("GCC unroll 16")

typedef struct {
    const float *x, *w, *bias;
    float *y, *columns; /* columns: see many_rows_part */
    int64_t rows, size, outputs, stride, parts;
} Linear;

#define AHEAD 8192 /* bytes: what the processor asks for by itself ends with a page; 16.7 -> 20 GB/s on two cores */

/* The products of x with four rows of a matrix. `fetch`: the numbers to come are asked for from memory. */
INLINE void dots(const float *a, const float *b, const float *c, const float *d, const float *x, int64_t size, int fetch,
                 float *sums) {
    float s0 = 0.0f, s1 = 0.0f, s2 = 0.0f, s3 = 0.0f;
    for (int64_t start = 0; start < size; start += 64) {
        const int64_t end = size - start < 64 ? size : start + 64;
        for (int64_t i = start; fetch && i < start + 64; i += 16) {
            __builtin_prefetch((const char *)(a + i) + AHEAD);
            __builtin_prefetch((const char *)(b + i) + AHEAD);
            __builtin_prefetch((const char *)(c + i) + AHEAD);
            __builtin_prefetch((const char *)(d + i) + AHEAD);
        }
        for (int64_t i = start; i < end; i++) {
            s0 += a[i] * x[i];
            s1 += b[i] * x[i];
            s2 += c[i] * x[i];
            s3 += d[i] * x[i];
        }
    }
    sums[0] = s0, sums[1] = s1, sums[2] = s2, sums[3] = s3;
}

static void few_rows_part(const void *context, int64_t part) {
    const Linear *all = context;
    const int64_t rows = all->rows, size = all->size, outputs = all->outputs, fours = (outputs + 3) / 4;
    const float *w = all->w, *bias = all->bias;
    for (int64_t first = 4 * (fours * part / all->parts); first < 4 * (fours * (part + 1) / all->parts); first += 4) {
        const int64_t last = outputs - 1; /* beyond it the last output is computed again, and not stored */
        const float *a = w + first * size, *b = w + (first + 1 < last ? first + 1 : last) * size;
        const float *c = w + (first + 2 < last ? first + 2 : last) * size, *d = w + (first + 3 < last ? first + 3 : last) * size;
        for (int64_t r = 0; r < rows; r++) {
            float sums[4];
            if (r == 0) dots(a, b, c, d, all->x, size, 1, sums);
            else dots(a, b, c, d, all->x + r * size, size, 0, sums);
            for (int64_t o = first; o < outputs && o < first + 4; o++)
                all->y[r * all->stride + o] = bias ? sums[o - first] + bias[o] : sums[o - first];
        }
    }
}

/* ---- many rows ------------------------------------------------------------------------------------------------------ */

#if defined(__AVX512F__)
#define LANES 16
#define OUTPUTS 12 /* of a tile: 2 x 12 sums, 2 vectors of x, 1 weight, in 32 registers */
#elif defined(__AVX__)
#define LANES 8
#define OUTPUTS 6 /* the same in 16 registers */
#elif defined(__aarch64__)
#define LANES 4
#define OUTPUTS 12
#else
#define LANES 4
#define OUTPUTS 6
#endif
#define ROWS (2 * LANES) /* of a tile */
#define DEPTH 768        /* inputs at once: so many of some rows, and of a tile's outputs, stay in the cache */
#define NEAR 2           /* tiles of rows for which the weights of a tile are used before the next ones are read */
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* sums [OUTPUTS, ROWS]: `size` inputs of a tile. x [size, ROWS], w [OUTPUTS, stride]. */
INLINE void multiply(const float *x, const float *w, int64_t stride, int64_t size, const int vectors, float *sums) {
    Lanes sum[OUTPUTS][2] = {{{0}}};
    for (int64_t k = 0; k < size; k++, x += ROWS) {
        Lanes own[2];
        UNROLL
        for (int v = 0; v < vectors; v++) own[v] = *(const Lanes *)(x + v * LANES);
        UNROLL
        for (int o = 0; o < OUTPUTS; o++) {
            const float weight = w[o * stride + k];
            UNROLL
            for (int v = 0; v < vectors; v++) sum[o][v] += weight * own[v];
        }
    }
    UNROLL
    for (int o = 0; o < OUTPUTS; o++)
        UNROLL
        for (int v = 0; v < vectors; v++) *(Lanes *)(sums + o * ROWS + v * LANES) = sum[o][v];
}

/* Inputs start .. start + depth of the tile of rows that begins with `row`, and of the outputs that begin with `first`. The
 * last tile of outputs begins early enough to be whole; what the one before it has computed is not added again. */
static void tile(const Linear *all, int64_t row, int64_t first, int64_t start, int64_t depth) {
    const int64_t from = first < all->outputs - OUTPUTS ? first : all->outputs - OUTPUTS;
    const int64_t count = all->rows - row < ROWS ? all->rows - row : ROWS;
    const float *x = all->columns + row * all->size + start * ROWS, *w = all->w + from * all->size + start;
    float sums[OUTPUTS * ROWS];
    if (count > LANES) multiply(x, w, all->size, depth, 2, sums);
    else multiply(x, w, all->size, depth, 1, sums);
    for (int64_t r = 0; r < count; r++) {
        float *y = all->y + (row + r) * all->stride + from;
        for (int64_t o = first - from; o < OUTPUTS; o++)
            y[o] = (start ? y[o] : all->bias ? all->bias[from + o] : 0.0f) + sums[o * ROWS + r];
    }
}

static void many_rows_part(const void *context, int64_t part) {
    const Linear *all = context;
    const int64_t tiles = (all->outputs + OUTPUTS - 1) / OUTPUTS;
    const int64_t from = OUTPUTS * (tiles * part / all->parts), to = OUTPUTS * (tiles * (part + 1) / all->parts);
    for (int64_t start = 0; start < all->size; start += DEPTH) {
        const int64_t depth = all->size - start < DEPTH ? all->size - start : DEPTH;
        for (int64_t near = 0; near < all->rows; near += NEAR * ROWS)
            for (int64_t first = from; first < to && first < all->outputs; first += OUTPUTS)
                for (int64_t row = near; row < all->rows && row < near + NEAR * ROWS; row += ROWS)
                    tile(all, row, first, start, depth);
    }
}

/* columns [tiles of rows, size, ROWS]: x transposed, tile by tile. */
static void transpose_part(const void *context, int64_t part) {
    const Linear *all = context;
    const int64_t from = all->size * part / all->parts, to = all->size * (part + 1) / all->parts;
    for (int64_t row = 0; row < all->rows; row += ROWS) {
        const int64_t count = all->rows - row < ROWS ? all->rows - row : ROWS;
        for (int64_t k = from; k < to; k++) {
            float *out = all->columns + row * all->size + k * ROWS;
            for (int64_t r = 0; r < count; r++) out[r] = all->x[(row + r) * all->size + k];
            for (int64_t r = count; r < ROWS; r++) out[r] = 0.0f;
        }
    }
}

/* y [rows, stride] gets its first `outputs` columns. `bias` may be NULL. Returns 1 if there is no memory for x transposed. */
int float_linear(const float *x, int64_t rows, int64_t size, const float *w, int64_t outputs, const float *bias, float *y,
                 int64_t stride) {
    Linear all = {x, w, bias, y, NULL, rows, size, outputs, stride, 1};
    const int is_large = outputs * size > 16384;
    if (rows <= LANES_ARE_INPUTS || outputs < OUTPUTS) {
        all.parts = is_large ? num_parts((outputs + 3) / 4) : 1;
        share(all.parts, few_rows_part, &all);
        return 0;
    }
    all.columns = malloc((rows + ROWS - 1) / ROWS * ROWS * size * sizeof(float));
    if (!all.columns) return 1;
    all.parts = rows * size > 32768 ? num_parts(size) : 1;
    share(all.parts, transpose_part, &all);
    all.parts = is_large ? num_parts((outputs + OUTPUTS - 1) / OUTPUTS) : 1;
    share(all.parts, many_rows_part, &all);
    free(all.columns);
    return 0;
}

/* ---- weights in 16 bits --------------------------------------------------------------------------------------------- */

/* out [count]: numbers in 16 bits, IEEE's half or bfloat16 (the upper half of a float), as floats. */
INLINE void widen(const uint16_t *in, int64_t count, const int is_half, float *restrict out) {
    if (is_half) {
        halves_to_floats(in, count, out);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)in[i] << 16;
        memcpy(out + i, &bits, sizeof bits);
    }
}

#define CHUNK 256 /* numbers that are widened at once, of four outputs: they stay in the cache for all rows */

INLINE void half_rows(const float *x, int64_t rows, int64_t size, const uint16_t *w, int64_t outputs, const int is_half,
                      float *y) {
#pragma omp parallel for schedule(static) if (outputs * size > 16384)
    for (int64_t first = 0; first < outputs; first += 4) {
        float wide[4][CHUNK], sums[FEW_ROWS][4] = {{0.0f}};
        const int64_t count = outputs - first < 4 ? outputs - first : 4;
        for (int64_t start = 0; start < size; start += CHUNK) {
            const int64_t length = size - start < CHUNK ? size - start : CHUNK;
            for (int64_t o = 0; o < 4; o++) widen(w + (first + (o < count ? o : 0)) * size + start, length, is_half, wide[o]);
            for (int64_t r = 0; r < rows; r++) {
                float s[4];
                dots(wide[0], wide[1], wide[2], wide[3], x + r * size + start, length, 0, s);
                for (int o = 0; o < 4; o++) sums[r][o] += s[o];
            }
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = 0; o < count; o++) y[r * outputs + first + o] = sums[r][o];
    }
}

/* Of weights in 16 bits, for up to FEW_ROWS rows. */
void half_rows_linear(const float *x, int64_t rows, int64_t size, const uint16_t *w, int64_t outputs, int64_t is_half,
                      float *y) {
    if (is_half) half_rows(x, rows, size, w, outputs, 1, y);
    else half_rows(x, rows, size, w, outputs, 0, y);
}
