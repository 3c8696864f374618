/* What a decoder layer does between its matrix products, for fp32 on a CPU. Twins of the plain operators in ops/.
 *
 * With one token every PyTorch call costs 5 to 10 us on a busy core, whatever its size, and a layer makes some forty of
 * them between its four matrix products: a third of the time of a token. Each function here is one call. Loops are written
 * so that the compiler vectorises them; reductions may be reordered (-fassociative-math), so results equal the plain twins
 * to a few units in the last place.
 *
 * All tensors are contiguous; sizes were checked by the caller (native.py). */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "exp.h"
#include "half.h"
#include "share.h"

/* Inlined with a constant size wherever the callers below have one: short loops of unknown length are all remainder. */
INLINE float dot(const float *a, const float *b, int64_t n) {
    float total = 0.0f;
    for (int64_t i = 0; i < n; i++) total += a[i] * b[i];
    return total;
}

/* sum = x + residual (residual may be NULL: sum is not written), out = sum / rms(sum) * weight */
void add_rms_norm(const float *x, const float *residual, const float *weight, float eps, int64_t rows, int64_t size,
                  float *out, float *sum) {
    for (int64_t r = 0; r < rows; r++, x += size, out += size) {
        const float *s = x;
        if (residual) {
            for (int64_t i = 0; i < size; i++) sum[i] = x[i] + residual[i];
            s = sum;
            residual += size;
            sum += size;
        }
        float scale = 1.0f / sqrtf(dot(s, s, size) / size + eps);
        for (int64_t i = 0; i < size; i++) out[i] = s[i] * scale * weight[i];
    }
}

/* [rows, 2 * size] -> [rows, size]: silu(first half) * second half */
void silu_mul(const float *gate_up, int64_t rows, int64_t size, float *out) {
    for (int64_t r = 0; r < rows; r++, gate_up += 2 * size, out += size)
        for (int64_t i = 0; i < size; i++) out[i] = gate_up[i] / (1.0f + exp_(-gate_up[i])) * gate_up[size + i];
}

/* One head: norm it (weight may be NULL), then turn its first 2 * half elements; see ops/rotary.py. */
static void turn(const float *in, const float *weight, float eps, const float *cos_sin, int64_t half, int64_t dim, float *out) {
    float scale = weight ? 1.0f / sqrtf(dot(in, in, dim) / dim + eps) : 1.0f;
    for (int64_t i = 0; i < dim; i++) out[i] = weight ? in[i] * scale * weight[i] : in[i];
    for (int64_t i = 0; i < half; i++) {
        float a = out[i], b = out[half + i], c = cos_sin[i], s = cos_sin[half + i];
        out[i] = a * c - b * s;
        out[half + i] = b * c + a * s;
    }
}

/* ---- numbers in the KV cache: as they are, in 16 bits, or in 8 bits with a scale in 16 bits behind each head ---------- */

enum { FLOAT32, FLOAT16, INT8 }; /* in the order of ops.py:CACHE_FORMS */

INLINE int64_t head_bytes(const int form, int64_t dim) {
    return form == FLOAT32 ? 4 * dim : form == FLOAT16 ? 2 * dim : dim + 2;
}

/* The twin is ops/kv_cache.py:round_kv. */
static void store_head(int64_t form, const float *x, int64_t dim, uint8_t *out) {
    if (form == FLOAT32) {
        memcpy(out, x, dim * sizeof(float));
    } else if (form == FLOAT16) {
        for (int64_t i = 0; i < dim; i++) ((uint16_t *)out)[i] = float_to_half(x[i]);
    } else {
        float peak = 0.0f;
        int nans = 0;
        for (int64_t i = 0; i < dim; i++) peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
        for (int64_t i = 0; i < dim; i++) nans |= x[i] != x[i];
        uint16_t half = float_to_half(nans ? NAN : peak / 127.0f);
        float scale = half_to_float(half);
        for (int64_t i = 0; i < dim; i++) {
            float q = scale > 0.0f ? rintf(x[i] / scale) : 0.0f;
            ((int8_t *)out)[i] = (int8_t)(q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q);
        }
        memcpy(out + dim, &half, sizeof half);
    }
}

/* A head of the cache as floats: where it lies, or expanded into `room`. Its twin is ops/kv_cache.py:expand_kv. */
INLINE const float *load_head(const int form, const uint8_t *in, const int64_t dim, float *room) {
    if (form == FLOAT32) return (const float *)in;
    if (form == FLOAT16) {
        halves_to_floats((const uint16_t *)in, dim, room);
    } else {
        uint16_t half;
        memcpy(&half, in + dim, sizeof half);
        const float scale = half_to_float(half);
        for (int64_t i = 0; i < dim; i++) room[i] = (float)((const int8_t *)in)[i] * scale;
    }
    return room;
}

/* qkv [tokens, (heads + 2 * kv_heads) * dim]: q goes to q_out, k and v to their slot of the cache. */
void qk_norm_rope(const float *qkv, const float *q_weight, const float *k_weight, float eps, const float *table,
                  const int64_t *positions, const int64_t *slots, int64_t tokens, int64_t heads, int64_t kv_heads,
                  int64_t dim, int64_t half, int64_t form, float *q_out, uint8_t *k_cache, uint8_t *v_cache) {
    const int64_t size = head_bytes(form, dim);
    float turned[dim];
    for (int64_t t = 0; t < tokens; t++) {
        const float *cos_sin = table + positions[t] * 2 * half;
        for (int64_t h = 0; h < heads; h++, qkv += dim, q_out += dim) turn(qkv, q_weight, eps, cos_sin, half, dim, q_out);
        uint8_t *k = k_cache + slots[t] * kv_heads * size, *v = v_cache + slots[t] * kv_heads * size;
        for (int64_t h = 0; h < kv_heads; h++, qkv += dim) {
            turn(qkv, k_weight, eps, cos_sin, half, dim, turned);
            store_head(form, turned, dim, k + h * size);
        }
        for (int64_t h = 0; h < kv_heads; h++, qkv += dim) store_head(form, qkv, dim, v + h * size);
    }
}

/* Some KV heads of one sequence: a pass over the keys for the scores of their q heads, softmax, a pass over the values. */
INLINE void attend(const float *q, const uint8_t *k_cache, const uint8_t *v_cache, const int32_t *table, int64_t first,
                   int64_t len, int64_t row, int64_t kv_heads, int64_t group, int64_t block_size, float scale,
                   int64_t longest, float *restrict scores, float *restrict out, const int form, const int64_t dim) {
    const int64_t size = head_bytes(form, dim);
    float room[dim];
    for (int64_t t = first; t < len; t++) {
        const uint8_t *row_k = k_cache + (table[t / block_size] * block_size + t % block_size) * row;
        for (int64_t h = 0; h < kv_heads; h++) {
            const float *k = load_head(form, row_k + h * size, dim, room);
            for (int64_t g = h * group; g < (h + 1) * group; g++) scores[g * longest + t] = dot(q + g * dim, k, dim) * scale;
        }
    }
    for (int64_t g = 0; g < kv_heads * group; g++) {
        float *p = scores + g * longest, peak = p[first], total = 0.0f;
        for (int64_t t = first; t < len; t++) peak = p[t] > peak ? p[t] : peak;
        for (int64_t t = first; t < len; t++) p[t] = exp_(p[t] - peak);
        for (int64_t t = first; t < len; t++) total += p[t];
        for (int64_t t = first; t < len; t++) p[t] /= total;
    }
    memset(out, 0, kv_heads * group * dim * sizeof(float));
    for (int64_t t = first; t < len; t++) {
        const uint8_t *row_v = v_cache + (table[t / block_size] * block_size + t % block_size) * row;
        for (int64_t h = 0; h < kv_heads; h++) {
            const float *v = load_head(form, row_v + h * size, dim, room);
            for (int64_t g = h * group; g < (h + 1) * group; g++) {
                float weight = scores[g * longest + t];
                for (int64_t i = 0; i < dim; i++) out[g * dim + i] += weight * v[i];
            }
        }
    }
}

typedef struct {
    const float *q;
    const uint8_t *k_cache, *v_cache;
    const int32_t *context_lens, *tables;
    int64_t table_stride, heads, kv_heads, dim, block_size, form, window, together, longest; /* KV heads at once */
    float scale, *scores, *out;
} Attention;

static void attention_job(const void *context, int64_t job) {
    const Attention *a = context;
    int64_t group = a->heads / a->kv_heads, size = head_bytes(a->form, a->dim), row = a->kv_heads * size;
    int64_t s = job * a->together / a->kv_heads, h = job * a->together % a->kv_heads, len = a->context_lens[s];
    int64_t first = a->window > 0 && len > a->window ? len - a->window : 0, place = s * a->heads + h * group;
    const uint8_t *k = a->k_cache + h * size, *v = a->v_cache + h * size;
#define ATTEND(FORM, DIM)                                                                                                 \
    attend(a->q + place * a->dim, k, v, a->tables + s * a->table_stride, first, len, row, a->together, group,             \
           a->block_size, a->scale, a->longest, a->scores + place * a->longest, a->out + place * a->dim, FORM, DIM)
#define ATTEND_ANY(FORM)                                                                                                  \
    if (a->dim == 64) ATTEND(FORM, 64);                                                                                   \
    else if (a->dim == 128) ATTEND(FORM, 128);                                                                            \
    else ATTEND(FORM, a->dim)
    if (a->form == FLOAT32) { ATTEND_ANY(FLOAT32); }
    else if (a->form == FLOAT16) { ATTEND_ANY(FLOAT16); }
    else { ATTEND_ANY(INT8); }
#undef ATTEND_ANY
#undef ATTEND
}

/* Attention of one query token a sequence over the paged cache, read in place. A thread takes a whole sequence, so that it
 * walks the cache in order (one KV head alone skips two thirds of every row: 740 us a layer instead of 400 for 16
 * sequences of SmolLM2); a single sequence is split by KV heads. Returns 1 if there is no memory for the scores. */
int decode_attention(const float *q, const uint8_t *k_cache, const uint8_t *v_cache, const int32_t *context_lens,
                     const int32_t *tables, int64_t table_stride, int64_t seqs, int64_t heads, int64_t kv_heads,
                     int64_t dim, int64_t block_size, int64_t form, int64_t window, float scale, float *out) {
    int64_t longest = 0;
    for (int64_t s = 0; s < seqs; s++) longest = context_lens[s] > longest ? context_lens[s] : longest;
    const int64_t large = seqs * kv_heads * longest > 256, together = seqs > 1 || !large ? kv_heads : 1;
    float *scores = malloc(seqs * heads * longest * sizeof(float));
    if (!scores) return 1;
    const Attention all = {q, k_cache, v_cache, context_lens, tables, table_stride, heads, kv_heads, dim, block_size, form,
                           window, together, longest, scale, scores, out};
    const int64_t jobs = seqs * kv_heads / together;
    if (large) share(jobs, attention_job, &all);
    else for (int64_t job = 0; job < jobs; job++) attention_job(&all, job);
    free(scores);
    return 0;
}

/* out [count, size]: rows `ids` of the table. Returns 1, and writes nothing, if it has no such row. */
int gather_rows(const float *table, int64_t rows, int64_t size, const int64_t *ids, int64_t count, float *out) {
    for (int64_t n = 0; n < count; n++)
        if (ids[n] < 0 || ids[n] >= rows) return 1;
    for (int64_t n = 0; n < count; n++) memcpy(out + n * size, table + ids[n] * size, size * sizeof(float));
    return 0;
}
