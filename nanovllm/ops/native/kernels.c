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

/* exp for the softmax and the gate: exp(x) = 2^n * exp(r), |r| <= ln(2)/2, by a polynomial; 2 ulp, and it vectorises. */
static inline float exp_(float x) {
    x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float n = rintf(x * 1.44269504f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23; /* 2^n, by its exponent */
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

/* Inlined with a constant size wherever the callers below have one: short loops of unknown length are all remainder. */
#define INLINE static inline __attribute__((always_inline))

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

/* qkv [tokens, (heads + 2 * kv_heads) * dim]: q goes to q_out, k and v to their slot of the cache. */
void qk_norm_rope(const float *qkv, const float *q_weight, const float *k_weight, float eps, const float *table,
                  const int64_t *positions, const int64_t *slots, int64_t tokens, int64_t heads, int64_t kv_heads,
                  int64_t dim, int64_t half, float *q_out, float *k_cache, float *v_cache) {
    for (int64_t t = 0; t < tokens; t++) {
        const float *cos_sin = table + positions[t] * 2 * half;
        for (int64_t h = 0; h < heads; h++, qkv += dim, q_out += dim) turn(qkv, q_weight, eps, cos_sin, half, dim, q_out);
        float *k = k_cache + slots[t] * kv_heads * dim, *v = v_cache + slots[t] * kv_heads * dim;
        for (int64_t h = 0; h < kv_heads; h++, qkv += dim) turn(qkv, k_weight, eps, cos_sin, half, dim, k + h * dim);
        memcpy(v, qkv, kv_heads * dim * sizeof(float));
        qkv += kv_heads * dim;
    }
}

/* Some KV heads of one sequence: a pass over the keys for the scores of their q heads, softmax, a pass over the values. */
INLINE void attend(const float *q, const float *k_cache, const float *v_cache, const int32_t *table, int64_t first,
                   int64_t len, int64_t row, int64_t kv_heads, int64_t group, int64_t block_size, float scale,
                   int64_t longest, float *restrict scores, float *restrict out, const int64_t dim) {
    for (int64_t t = first; t < len; t++) {
        const float *k = k_cache + (table[t / block_size] * block_size + t % block_size) * row;
        for (int64_t h = 0; h < kv_heads; h++)
            for (int64_t g = h * group; g < (h + 1) * group; g++)
                scores[g * longest + t] = dot(q + g * dim, k + h * dim, dim) * scale;
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
        const float *v = v_cache + (table[t / block_size] * block_size + t % block_size) * row;
        for (int64_t h = 0; h < kv_heads; h++)
            for (int64_t g = h * group; g < (h + 1) * group; g++) {
                float weight = scores[g * longest + t];
                for (int64_t i = 0; i < dim; i++) out[g * dim + i] += weight * v[h * dim + i];
            }
    }
}

/* Attention of one query token a sequence over the paged cache, read in place. A thread takes a whole sequence, so that it
 * walks the cache in order (one KV head alone skips two thirds of every row: 740 us a layer instead of 400 for 16
 * sequences of SmolLM2); a single sequence is split by KV heads. Returns 1 if there is no memory for the scores. */
int decode_attention(const float *q, const float *k_cache, const float *v_cache, const int32_t *context_lens,
                     const int32_t *tables, int64_t table_stride, int64_t seqs, int64_t heads, int64_t kv_heads,
                     int64_t dim, int64_t block_size, int64_t window, float scale, int64_t longest, float *out) {
    int64_t group = heads / kv_heads, row = kv_heads * dim, share = seqs > 1 ? kv_heads : 1;
    float *all_scores = malloc(seqs * heads * longest * sizeof(float));
    if (!all_scores) return 1;
#pragma omp parallel for schedule(dynamic, 1) if (seqs * kv_heads * longest > 4096)
    for (int64_t job = 0; job < seqs * kv_heads / share; job++) {
        int64_t s = job * share / kv_heads, h = job * share % kv_heads, len = context_lens[s];
        int64_t first = window > 0 && len > window ? len - window : 0, place = s * heads + h * group;
        const float *k = k_cache + h * dim, *v = v_cache + h * dim;
        float *scores = all_scores + place * longest;
#define ATTEND(DIM)                                                                                                       \
    attend(q + place * dim, k, v, tables + s * table_stride, first, len, row, share, group, block_size, scale, longest,    \
           scores, out + place * dim, DIM)
        if (dim == 64) ATTEND(64);
        else if (dim == 128) ATTEND(128);
        else ATTEND(dim);
#undef ATTEND
    }
    free(all_scores);
    return 0;
}
