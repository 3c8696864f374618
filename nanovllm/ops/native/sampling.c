/* Drawing one token a row on a CPU. Twin: ops/sampling.py, which defines the draw; docs/sampling.md derives it.
 *
 * A row is cut into blocks of 64 columns, and the largest logit of each block is kept. Every filter leaves a prefix of
 * the tokens in the order (larger logit, then lower id), so what is left is described by one place in that order: the
 * tokens before it. A block whose largest logit lies behind the place is not read again.
 *
 *     all rows   one pass for the largest logits: greedy rows need no more
 *     no filter  one pass of exp for the sums of the tiles of 2,048, then noise for one tile
 *     top_k      the k-th largest of the blocks' largest logits is a bound, since k blocks have a logit as large; the
 *                exact k-th is then searched in the few blocks that reach it
 *     top_p      one pass of exp for the mass, a coarse search for a logit that is not above the last kept one, noise
 *                for the blocks that reach it. The best token is the answer if the tokens before it have less than
 *                the share; if not, what stands behind it is not kept either, and the best before it is taken
 *
 * Nothing is sorted. Loops run over whole blocks, so the compiler vectorises them without remainders. Random bits,
 * masses (whole numbers, ops/sampling.py:integer_weights) and the order are exact; exp and log are polynomials in
 * float32, products and sums are rounded one by one (-ffp-contract=off), so every processor draws the same tokens. They
 * are those of the twin except where two candidates lie within a few units in the last place. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "exp.h"

#define INLINE static inline __attribute__((always_inline))
#define BLOCK 64
#define TILE 2048
#define HUGE_LOGIT 1e30f    /* sampling/sampler.py */
#define LARGEST_NOISE 16.7f /* of 23 random bits: 24 log(2) = 16.64; the least is -2.82 */
#define LOG_TILE 7.7f       /* log(2048) = 7.62: a tile's logsumexp is at most so much above its largest logit */
#define LEAST (-25.0f)      /* so far below the peak a token has no mass (2^-35) and cannot win by noise */
enum { LEVEL_TILE, LEVEL_COLUMN };

/* TIMES multiplies the low halves of 64-bit lanes. gcc 12 does not find the instruction for it: from a loop over 32-bit
 * integers it makes shuffles before and after each product. */
typedef uint64_t Wide __attribute__((vector_size(32)));
typedef uint32_t Four __attribute__((vector_size(16)));
#ifdef __AVX2__
#include <immintrin.h>
#define TIMES(a, b) ((Wide)_mm256_mul_epu32((__m256i)(a), _mm256_set1_epi64x(b)))
#else
#define TIMES(a, b) (((a) & 0xFFFFFFFFu) * (b))
#endif

typedef struct {
    const float *logits;
    int64_t vocab, blocks;
    float tail[BLOCK]; /* the columns behind the last whole block, then -inf */
    float *largest;    /* of each block; -inf: no token of the block can be drawn */
    float *weights;    /* of each column, where they were computed */
    float peak, scale; /* the largest logit; 1 / temperature */
    float least;       /* tokens with less than this as (logit - peak) * scale are not drawn */
    uint32_t position;
    Wide keys[10][2]; /* of Philox's rounds */
} Row;

typedef struct { /* in the order of tokens. Before it: larger logits, and this one with a lower id */
    float logit;
    int32_t id;
} Place;

INLINE float larger(float a, float b) { return a > b ? a : b; }

INLINE float as_float(int32_t bits) {
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

INLINE int32_t as_bits(float value) {
    int32_t out;
    memcpy(&out, &value, sizeof out);
    return out;
}

/* x = 2^n m, m in [sqrt(1/2), sqrt(2)): log(x) = n log(2) + log(1 + f), f = m - 1 exact, so it is good near 1 too.
 * x is not denormal; 0 gives about -88. */
INLINE float log_(float x) {
    int32_t bits = as_bits(x), n = (bits - 0x3f3504f3) >> 23;
    float f = as_float(bits - n * (1 << 23)) - 1.0f, z = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    p = p * f * z + (float)n * -2.12194440e-4f;
    return (f + (p - 0.5f * z)) + (float)n * 0.693359375f;
}

/* The random bits of the 64 indices from 64 * block on: words[16 j + i] is that of index 4 i + j. 16 calls of
 * Philox4x32-10. The upper halves of the lanes are not part of the result, and TIMES does not read them. */
static void philox(const Row *row, int64_t block, uint32_t level, uint32_t *words) {
    for (int part = 0; part < 4; part++) {
        uint64_t group = 16 * block + 4 * part;
        Wide c[4] = {{group, group + 1, group + 2, group + 3}, (Wide){0} + row->position, (Wide){0} + level, {0}};
        for (int round = 0; round < 10; round++) {
            Wide low = TIMES(c[0], 0xD2511F53u), high = TIMES(c[2], 0xCD9E8D57u);
            c[0] = high >> 32 ^ c[1] ^ row->keys[round][0], c[1] = high;
            c[2] = low >> 32 ^ c[3] ^ row->keys[round][1], c[3] = low;
        }
        for (int j = 0; j < 4; j++) {
            Four words_of = __builtin_convertvector(c[j], Four);
            memcpy(words + 16 * j + 4 * part, &words_of, sizeof words_of);
        }
    }
}

/* The larger the bits, the larger the noise. u = (23 bits + 1/2) / 2^23 is exact. */
INLINE float gumbel(uint32_t bits) {
    return -log_(-log_(((float)(int32_t)(bits >> 9) + 0.5f) * 1.1920928955078125e-7f));
}

/* At most (n + 1) log(2), n the number of leading ones, because -log(u) >= 1 - u > 2^-(n + 1). */
INLINE float noise_bound(uint32_t bits) { return 0.69315f * (float)(__builtin_clz((~bits >> 9) << 1 | 1) - 7); }

static void noise(const uint32_t *words, float *out) {
    uint32_t ordered[BLOCK];
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++) ordered[4 * i + j] = words[16 * j + i];
    for (int i = 0; i < BLOCK; i++) out[i] = gumbel(ordered[i]);
}

INLINE const float *block_of(const Row *row, int64_t block) {
    return (block + 1) * BLOCK <= row->vocab ? row->logits + block * BLOCK : row->tail;
}

INLINE float largest_of(const float *values) {
    float best[16];
    for (int i = 0; i < 16; i++)
        best[i] = larger(larger(values[i], values[i + 16]), larger(values[i + 32], values[i + 48]));
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) best[i] = larger(best[i], best[i + width]);
    return best[0];
}

INLINE int is_before(float logit, int32_t id, Place place) {
    return (logit > place.logit) | ((logit == place.logit) & (id < place.id));
}

INLINE Place place_in(int64_t block, Place place) { return (Place){place.logit, place.id - (int32_t)block * BLOCK}; }

INLINE Place behind_all(const Row *row) { return (Place){-FLT_MAX, (int32_t)row->vocab}; }

/* The largest logit of each block. 0 if the row must be mended first: NaN, or a peak beyond 1e30. */
static int look(Row *row) {
    int32_t num_within = 0;
    row->peak = -INFINITY;
    for (int64_t b = 0; b < row->blocks; b++) {
        const float *x = block_of(row, b);
        for (int i = 0; i < BLOCK; i++) num_within += x[i] <= HUGE_LOGIT;
        row->largest[b] = largest_of(x);
        row->peak = larger(row->largest[b], row->peak);
    }
    return num_within == row->blocks * BLOCK && row->peak >= -HUGE_LOGIT;
}

/* The best logit * scale + noise of these blocks, among the tokens before the place. Of equal ones the lowest id. */
static int64_t best_token(const Row *row, int64_t first, int64_t end, Place place) {
    int64_t token = 0;
    float best = -INFINITY;
    for (int64_t b = first; b < end; b++) {
        if (row->largest[b] < place.logit || row->largest[b] * row->scale + LARGEST_NOISE <= best) continue;
        const float *x = block_of(row, b);
        float scores[BLOCK];
        uint32_t words[BLOCK], most = 0;
        philox(row, b, LEVEL_COLUMN, words);
        for (int i = 0; i < BLOCK; i++) most = words[i] > most ? words[i] : most;
        if (row->largest[b] * row->scale + noise_bound(most) <= best) continue;
        noise(words, scores);
        const Place here = place_in(b, place);
        for (int i = 0; i < BLOCK; i++) {
            int kept = is_before(x[i], i, here) & ((x[i] - row->peak) * row->scale >= row->least);
            float score = x[i] * row->scale + scores[i];
            scores[i] = kept ? score : -INFINITY;
        }
        float found = largest_of(scores);
        if (found > best) {
            best = found;
            int i = 0;
            while (scores[i] != found) i++;
            token = b * BLOCK + i;
        }
    }
    return token;
}

/* Without filters: a tile by its logsumexp and noise, then a column of it. */
static int64_t draw_plain(const Row *row) {
    const int64_t per_tile = TILE / BLOCK, tiles = (row->vocab + TILE - 1) / TILE;
    int64_t chosen = 0;
    float best = -INFINITY, tile_noise[BLOCK];
    uint32_t words[BLOCK];
    for (int64_t t = 0; t < tiles; t++) {
        if (t % BLOCK == 0) philox(row, t / BLOCK, LEVEL_TILE, words), noise(words, tile_noise);
        int64_t first = t * per_tile, end = first + per_tile < row->blocks ? first + per_tile : row->blocks;
        float peak = -INFINITY, sums[BLOCK] = {0.0f};
        for (int64_t b = first; b < end; b++) peak = larger(row->largest[b], peak);
        peak *= row->scale;
        if (!(peak + LOG_TILE + tile_noise[t % BLOCK] > best)) continue; /* also if all of its columns are -inf */
        for (int64_t b = first; b < end; b++) {
            const float *x = block_of(row, b);
            for (int i = 0; i < BLOCK; i++) sums[i] += exp_(x[i] * row->scale - peak);
        }
        for (int width = BLOCK / 2; width; width /= 2)
            for (int i = 0; i < width; i++) sums[i] += sums[i + width];
        float mass = peak + log_(sums[0]) + tile_noise[t % BLOCK];
        if (mass > best) best = mass, chosen = t;
    }
    int64_t first = chosen * per_tile, end = first + per_tile < row->blocks ? first + per_tile : row->blocks;
    return best_token(row, first, end, behind_all(row));
}

INLINE void add_up(const float *values, double *sums) {
    for (int j = 0; j < BLOCK; j += 8)
        for (int i = 0; i < 8; i++) sums[i] += (double)values[j + i];
}

INLINE double sum_of(const double *sums) {
    double total = 0.0;
    for (int i = 0; i < 8; i++) total += sums[i];
    return total;
}

/* The weights of the blocks that reach a logit: whole numbers, 2^35 exp(x). Returns their sum, exact too. */
static double weigh(const Row *row, float logit) {
    const float peak = row->peak, scale = row->scale, least = row->least;
    double sums[8] = {0.0};
    for (int64_t b = 0; b < row->blocks; b++) {
        if (row->largest[b] < logit) continue;
        const float *x = block_of(row, b);
        float *restrict weights = row->weights + b * BLOCK;
        for (int i = 0; i < BLOCK; i++) {
            float difference = (x[i] - peak) * scale;
            float weight = floorf(exp_(difference) * 34359738368.0f);
            weights[i] = difference >= least ? weight : 0.0f;
        }
        add_up(weights, sums);
    }
    return sum_of(sums);
}

/* The sum of the weights before the place. */
static double mass(const Row *row, Place place) {
    double sums[8] = {0.0};
    for (int64_t b = 0; b < row->blocks; b++) {
        if (row->largest[b] < place.logit) continue;
        const float *x = block_of(row, b);
        const float *weights = row->weights + b * BLOCK;
        float counted[BLOCK];
        const Place here = place_in(b, place);
        for (int i = 0; i < BLOCK; i++) counted[i] = is_before(x[i], i, here) ? weights[i] : 0.0f;
        add_up(counted, sums);
    }
    return sum_of(sums);
}

/* The k-th largest of n values, -FLT_MAX if there are fewer above it. The bits of a float, those of a negative one
 * flipped, sort like an integer: so half of the integers are ruled out with each count. */
static float kth_largest(const float *values, int64_t n, int64_t k, float peak) {
    int32_t bits = as_bits(peak);
    int64_t low = as_bits(-FLT_MAX) ^ 0x7fffffff, high = bits ^ (bits >> 31 & 0x7fffffff);
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        float bound = as_float((int32_t)middle ^ ((int32_t)middle >> 31 & 0x7fffffff));
        int32_t count = 0;
        for (int64_t i = 0; i < n; i++) count += values[i] >= bound;
        if (count >= k) low = middle;
        else high = middle - 1;
    }
    return as_float((int32_t)low ^ ((int32_t)low >> 31 & 0x7fffffff));
}

/* The place behind the k-th token. */
static Place place_of_top(const Row *row, int64_t k) {
    float bound = kth_largest(row->largest, row->blocks, k, row->peak);
    float *list = row->weights; /* not yet in use */
    int64_t n = 0, above = 0;
    for (int64_t b = 0; b < row->blocks; b++)
        if (row->largest[b] >= bound) memcpy(list + n, block_of(row, b), BLOCK * sizeof(float)), n += BLOCK;
    float last = kth_largest(list, n, k, row->peak);
    for (int64_t i = 0; i < n; i++) above += list[i] > last;
    for (int64_t b = 0; b < row->blocks; b++)
        if (row->largest[b] >= last) {
            const float *x = block_of(row, b);
            for (int i = 0; i < BLOCK; i++)
                if (x[i] == last && ++above == k) return (Place){last, (int32_t)(b * BLOCK) + i + 1};
        }
    return behind_all(row);
}

static int64_t num_reaching(const Row *row, float logit) {
    int32_t count = 0;
    for (int64_t b = 0; b < row->blocks; b++) count += row->largest[b] >= logit;
    return count;
}

/* A place before which the share stands, so that what is kept stands before it too: found by four halvings of the 12
 * temperatures below the peak, to less than one of them. Of 176 rows of SmolLM2's logits at temperature 1, top_p=0.9
 * keeps 84 tokens in the median, in 42 of the 768 blocks. */
static Place place_of_share(const Row *row, float temperature, double share) {
    Place place = behind_all(row);
    float low = 0.0f, high = 12.0f;
    for (int step = 0; step < 4; step++) {
        float middle = 0.5f * (low + high);
        Place higher = {row->peak - middle * temperature, (int32_t)row->vocab};
        int64_t left = num_reaching(row, higher.logit), saved = num_reaching(row, place.logit) - left;
        if (5 * saved < left) break; /* noise for a block takes five times as long as its mass */
        if (mass(row, higher) >= share) high = middle, place = higher;
        else low = middle;
    }
    return place;
}

static int64_t draw_filtered(Row *row, float temperature, int64_t top_k, double top_p, float min_p) {
    row->least = larger(log_(min_p), LEAST);
    for (int64_t b = 0; b < row->blocks; b++)
        if (!((row->largest[b] - row->peak) * row->scale >= row->least)) row->largest[b] = -INFINITY;
    const int limited = top_k > 0 && top_k < row->vocab;
    Place place = limited ? place_of_top(row, top_k) : behind_all(row);
    if (top_p >= 1.0) return best_token(row, 0, row->blocks, place);
    const double total = weigh(row, place.logit), share = top_p * (limited ? mass(row, place) : total);
    if (!limited) place = place_of_share(row, temperature, share);
    while (1) {
        int64_t token = best_token(row, 0, row->blocks, place);
        place = (Place){row->logits[token], (int32_t)token};
        double before = mass(row, place);
        if (before < share || before == 0.0) return token; /* 0: the most likely one stays, however small the share */
    }
}

typedef struct {
    double temperature, top_p, min_p; /* temperature 0: greedy */
    int64_t top_k, seed, position;    /* top_k 0: off */
} Wanted;

static int64_t draw_row(Row *row, const Wanted *wanted) {
    const float temperature = (float)wanted->temperature, min_p = (float)wanted->min_p;
    const double top_p = wanted->top_p;
    const int64_t top_k = wanted->top_k, whole = row->vocab / BLOCK * BLOCK;
    const uint64_t seed = (uint64_t)wanted->seed;
    for (int64_t i = 0; i < BLOCK; i++) row->tail[i] = whole + i < row->vocab ? row->logits[whole + i] : -INFINITY;
    if (!look(row)) return -1;
    if (temperature == 0.0f) {
        int64_t b = 0, i = 0;
        while (row->largest[b] != row->peak) b++;
        while (row->logits[b * BLOCK + i] != row->peak) i++;
        return b * BLOCK + i;
    }
    row->scale = 1.0f / temperature;
    row->position = (uint32_t)wanted->position;
    for (uint32_t round = 0; round < 10; round++) {
        row->keys[round][0] = (Wide){0} + ((uint32_t)seed + round * 0x9E3779B9u);
        row->keys[round][1] = (Wide){0} + ((uint32_t)(seed >> 32) + round * 0xBB67AE85u);
    }
    if (top_k > 0 || top_p < 1.0 || min_p > 0.0f) return draw_filtered(row, temperature, top_k, top_p, min_p);
    return draw_plain(row);
}

/* tokens [rows] of contiguous logits [rows, vocab], wanted [rows]. A token is -1 if its row must be mended first. 1: there
 * is no memory. */
int draw_rows(const float *logits, int64_t rows, int64_t vocab, const Wanted *wanted, int64_t *tokens) {
    const int64_t blocks = (vocab + BLOCK - 1) / BLOCK;
    int failed = 0;
#pragma omp parallel if (rows > 1) reduction(| : failed)
    {
        float *memory = malloc(blocks * (1 + BLOCK) * sizeof(float)); /* stays in the cache from row to row */
        failed = memory == NULL;
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < rows; r++) {
            if (!memory) continue;
            Row row = {.logits = logits + r * vocab, .vocab = vocab, .blocks = blocks, .largest = memory};
            row.weights = memory + blocks;
            row.least = -INFINITY;
            tokens[r] = draw_row(&row, wanted + r);
        }
        free(memory);
    }
    return failed;
}
