/* Products with quantised weights on a CPU: y = x W^T, W in 4 to 8 bits, x in int8. Twin: ops/quant.py.
 *
 * The arithmetic. A row of W is cut into blocks of 32 inputs. A weight is d q + m with q a small integer; d and m are
 * shared by the block. A row of x is cut likewise: x = e p with p an int8, e shared by the block (`quantise`). So
 *
 *     sum over the block of w x  =  (d e) (sum of q p)  +  m (e sum of p)
 *
 * The sum of q p is exact in integers, whatever the order. What remains is one multiply-add in float for each block, in
 * the order of the blocks. Multiplications and additions are rounded one by one (-ffp-contract=off), so every processor,
 * every number of threads and rows, and the twin give the same bits.
 *
 * The layout. Eight outputs are one panel. In a panel 4 inputs of 8 outputs are one vector of 32 bytes, so that one
 * instruction (vpdpbusd, or sdot twice) multiplies them with 4 bytes of x and adds up each output's four products in a
 * lane of its own. Lanes are outputs: there is no sum across lanes, d and m are vectors too, and an unpacked block is
 * used for up to 4 rows of x. Input 4 g + i of output o is byte 4 o + i of vector g = 0..7:
 *
 *     4 bits   32 bytes p = 0..3: vector p in the low, vector p + 4 in the high nibbles
 *     5 bits   the same, then 32 bytes: bit g is the fifth bit of vector g
 *     6 bits   the same, then 64 bytes: byte j has bits 4 and 5 of vectors 0..3, byte 32 + j those of vectors 4..7
 *     8 bits   vectors 0..7, signed
 *
 * Scales stand before the bits that they belong to, 8 numbers (one an output) each:
 *
 *     SCALE      d f16                                   w = d (q - offset)          Q4_0, Q5_0, Q8_0
 *     MINIMUM    d f16, m f16                            w = d q + m                 Q4_1, Q5_1
 *     SUPER      d f16, n f16, then for 8 blocks s u8,   w = (d s) q - (n t)         Q4_K, Q5_K
 *                then for 8 blocks t u8
 *     HALVES     d f16, then for 16 half blocks s i8     w = d s (q - 32)            Q6_K
 *
 * Sizes were checked by the caller (native/ops.py). */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 8
#define BLOCK 32
#define TILE 4 /* rows of x for which an unpacked block is used */

enum { SCALE, MINIMUM, SUPER, HALVES };

typedef struct { /* rows of x, cut into blocks */
    const int8_t *q;
    const float *scale;   /* e, one a block */
    const float *product; /* e times the sum of the block */
    const int32_t *sums;  /* of half blocks */
} Rows;

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, bits = h & 1023;
    float out;
    if (exponent == 0) { /* zero or a number below the normal ones: bits times 2^-24 */
        out = (float)bits * 5.9604644775390625e-8f;
        uint32_t word;
        memcpy(&word, &out, 4);
        word |= sign;
        memcpy(&out, &word, 4);
        return out;
    }
    uint32_t word = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | bits << 13;
    memcpy(&out, &word, 4);
    return out;
}

/* ---- what a processor must offer: V 32 bytes, I 8 integers, F 8 floats ------------------------------------------------ */

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
typedef __m256i V;
typedef __m256i I;
typedef __m256 F;
INLINE V load(const uint8_t *p) { return _mm256_loadu_si256((const V *)p); }
INLINE V low(V v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
INLINE V high(V v) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15)); }
/* bit(s) `from` of every byte, moved to bit 4; mask says which */
INLINE V plane(V v, int from, int mask) {
    V moved = from <= 4 ? _mm256_slli_epi16(v, 4 - from) : _mm256_srli_epi16(v, from - 4);
    return _mm256_and_si256(moved, _mm256_set1_epi8((char)mask));
}
INLINE V join(V a, V b) { return _mm256_or_si256(a, b); }
INLINE V four(const int8_t *x) { int32_t word; memcpy(&word, x, 4); return _mm256_set1_epi32(word); }
INLINE I iset(int32_t value) { return _mm256_set1_epi32(value); }
INLINE I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
INLINE I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
INLINE I imul(I a, I b) { return _mm256_mullo_epi32(a, b); }
INLINE I iload8(const int8_t *p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE F fset(float value) { return _mm256_set1_ps(value); }
INLINE F fadd(F a, F b) { return _mm256_add_ps(a, b); }
INLINE F fsub(F a, F b) { return _mm256_sub_ps(a, b); }
INLINE F fmul(F a, F b) { return _mm256_mul_ps(a, b); }
INLINE F fint(I a) { return _mm256_cvtepi32_ps(a); }
INLINE F fhalf(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE F fbyte(const uint8_t *p) { return fint(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE void fstore(float *p, F a) { _mm256_storeu_ps(p, a); }
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define DOT4 _mm256_dpbusd_epi32
#elif defined(__AVXVNNI__)
#define DOT4 _mm256_dpbusd_avx_epi32
#endif
#ifdef DOT4
INLINE I dot(int bits, const V *w, const int8_t *x, int count) {
    (void)bits;
    I sum = iset(0);
    for (int g = 0; g < count; g++) sum = DOT4(sum, w[g], four(x + 4 * g));
    return sum;
}
INLINE I dot8(const V *w, const int8_t *x, int32_t sum) { /* w signed: (w + 128) p - 128 p */
    I total = iset(-128 * sum);
    for (int g = 0; g < 8; g++) total = DOT4(total, _mm256_xor_si256(w[g], _mm256_set1_epi8(-128)), four(x + 4 * g));
    return total;
}
#else
/* maddubs adds pairs in 16 bits; so many of its results fit there: 15 * 127 * 2 * 8, 31 * 127 * 2 * 4, 63 * 127 * 2 * 2. */
INLINE I dot(int bits, const V *w, const int8_t *x, int count) {
    int most = bits == 4 ? 8 : bits == 5 ? 4 : 2;
    I sum = iset(0);
    for (int g = 0; g < count;) {
        I pairs = _mm256_maddubs_epi16(w[g], four(x + 4 * g));
        int end = g + most < count ? g + most : count;
        for (g++; g < end; g++) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[g], four(x + 4 * g)));
        sum = iadd(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return sum;
}
INLINE I dot8(const V *w, const int8_t *x, int32_t sum) { /* |w| times x with w's sign: 128 * 127 * 2 fits 16 bits */
    (void)sum;
    I total = iset(0);
    for (int g = 0; g < 8; g++) {
        I pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[g]), _mm256_sign_epi8(four(x + 4 * g), w[g]));
        total = iadd(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return total;
}
#endif

#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
typedef struct { int8x16_t a, b; } V;
typedef struct { int32x4_t a, b; } I;
typedef struct { float32x4_t a, b; } F;
INLINE V load(const uint8_t *p) { return (V){vld1q_s8((const int8_t *)p), vld1q_s8((const int8_t *)p + 16)}; }
INLINE int8x16_t and_(int8x16_t v, int mask) { return vandq_s8(v, vdupq_n_s8((int8_t)mask)); }
INLINE int8x16_t move(int8x16_t v, int left) { /* a negative count moves right */
    return vreinterpretq_s8_u8(vshlq_u8(vreinterpretq_u8_s8(v), vdupq_n_s8((int8_t)left)));
}
INLINE V low(V v) { return (V){and_(v.a, 15), and_(v.b, 15)}; }
INLINE V high(V v) { return (V){move(v.a, -4), move(v.b, -4)}; }
INLINE V plane(V v, int from, int mask) { return (V){and_(move(v.a, 4 - from), mask), and_(move(v.b, 4 - from), mask)}; }
INLINE V join(V a, V b) { return (V){vorrq_s8(a.a, b.a), vorrq_s8(a.b, b.b)}; }
INLINE I iset(int32_t value) { return (I){vdupq_n_s32(value), vdupq_n_s32(value)}; }
INLINE I iadd(I a, I b) { return (I){vaddq_s32(a.a, b.a), vaddq_s32(a.b, b.b)}; }
INLINE I isub(I a, I b) { return (I){vsubq_s32(a.a, b.a), vsubq_s32(a.b, b.b)}; }
INLINE I imul(I a, I b) { return (I){vmulq_s32(a.a, b.a), vmulq_s32(a.b, b.b)}; }
INLINE I iload8(const int8_t *p) {
    int16x8_t wide = vmovl_s8(vld1_s8(p));
    return (I){vmovl_s16(vget_low_s16(wide)), vmovl_s16(vget_high_s16(wide))};
}
INLINE F fset(float value) { return (F){vdupq_n_f32(value), vdupq_n_f32(value)}; }
INLINE F fadd(F a, F b) { return (F){vaddq_f32(a.a, b.a), vaddq_f32(a.b, b.b)}; }
INLINE F fsub(F a, F b) { return (F){vsubq_f32(a.a, b.a), vsubq_f32(a.b, b.b)}; }
INLINE F fmul(F a, F b) { return (F){vmulq_f32(a.a, b.a), vmulq_f32(a.b, b.b)}; }
INLINE F fint(I a) { return (F){vcvtq_f32_s32(a.a), vcvtq_f32_s32(a.b)}; }
INLINE F fhalf(const uint8_t *p) {
    uint16x8_t words = vreinterpretq_u16_u8(vld1q_u8(p));
    return (F){vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(words))),
               vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(words)))};
}
INLINE F fbyte(const uint8_t *p) {
    uint16x8_t wide = vmovl_u8(vld1_u8(p));
    return (F){vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)))};
}
INLINE void fstore(float *p, F a) { vst1q_f32(p, a.a); vst1q_f32(p + 4, a.b); }
INLINE I dot(int bits, const V *w, const int8_t *x, int count) {
    (void)bits;
    I sum = iset(0);
    for (int g = 0; g < count; g++) {
        int32_t word;
        memcpy(&word, x + 4 * g, 4);
        int8x16_t p = vreinterpretq_s8_s32(vdupq_n_s32(word));
        sum = (I){vdotq_s32(sum.a, w[g].a, p), vdotq_s32(sum.b, w[g].b, p)};
    }
    return sum;
}
INLINE I dot8(const V *w, const int8_t *x, int32_t sum) { (void)sum; return dot(8, w, x, 8); }

#else
#define PLAIN 1
typedef struct { uint8_t v[32]; } V;
typedef struct { int32_t v[LANES]; } I;
typedef struct { float v[LANES]; } F;
#define EACH(count, expression) for (int i = 0; i < (count); i++) out.v[i] = (expression); return out
INLINE V load(const uint8_t *p) { V out; memcpy(out.v, p, 32); return out; }
INLINE V low(V v) { V out; EACH(32, v.v[i] & 15); }
INLINE V high(V v) { V out; EACH(32, v.v[i] >> 4); }
INLINE V plane(V v, int from, int mask) { V out; EACH(32, (uint8_t)((from <= 4 ? v.v[i] << (4 - from) : v.v[i] >> (from - 4)) & mask)); }
INLINE V join(V a, V b) { V out; EACH(32, a.v[i] | b.v[i]); }
INLINE I iset(int32_t value) { I out; EACH(LANES, value); }
INLINE I iadd(I a, I b) { I out; EACH(LANES, a.v[i] + b.v[i]); }
INLINE I isub(I a, I b) { I out; EACH(LANES, a.v[i] - b.v[i]); }
INLINE I imul(I a, I b) { I out; EACH(LANES, a.v[i] * b.v[i]); }
INLINE I iload8(const int8_t *p) { I out; EACH(LANES, p[i]); }
INLINE F fset(float value) { F out; EACH(LANES, value); }
INLINE F fadd(F a, F b) { F out; EACH(LANES, a.v[i] + b.v[i]); }
INLINE F fsub(F a, F b) { F out; EACH(LANES, a.v[i] - b.v[i]); }
INLINE F fmul(F a, F b) { F out; EACH(LANES, a.v[i] * b.v[i]); }
INLINE F fint(I a) { F out; EACH(LANES, (float)a.v[i]); }
INLINE F fhalf(const uint8_t *p) { F out; EACH(LANES, half_to_float((uint16_t)(p[2 * i] | p[2 * i + 1] << 8))); }
INLINE F fbyte(const uint8_t *p) { F out; EACH(LANES, (float)p[i]); }
INLINE void fstore(float *p, F a) { memcpy(p, a.v, sizeof a.v); }
INLINE I dot(int bits, const V *w, const int8_t *x, int count) {
    I sum = iset(0);
    for (int g = 0; g < count; g++)
        for (int o = 0; o < LANES; o++)
            for (int i = 0; i < 4; i++)
                sum.v[o] += (bits == 8 ? (int8_t)w[g].v[4 * o + i] : w[g].v[4 * o + i]) * x[4 * g + i];
    return sum;
}
INLINE I dot8(const V *w, const int8_t *x, int32_t sum) { (void)sum; return dot(8, w, x, 8); }
#endif

/* ---- one panel ---------------------------------------------------------------------------------------------------- */

INLINE int block_bytes(int bits) { return LANES * BLOCK / 8 * bits; }
INLINE int header_bytes(int scales) { return LANES * (scales == SCALE ? 2 : scales == MINIMUM ? 4 : scales == SUPER ? 20 : 18); }

INLINE void unpack(int bits, const uint8_t *data, V *w) {
    if (bits == 8) {
        for (int g = 0; g < 8; g++) w[g] = load(data + 32 * g);
        return;
    }
    for (int p = 0; p < 4; p++) {
        V both = load(data + 32 * p);
        w[p] = low(both);
        w[p + 4] = high(both);
    }
    if (bits == 5) {
        V tops = load(data + 128);
        w[0] = join(w[0], plane(tops, 0, 16)), w[1] = join(w[1], plane(tops, 1, 16));
        w[2] = join(w[2], plane(tops, 2, 16)), w[3] = join(w[3], plane(tops, 3, 16));
        w[4] = join(w[4], plane(tops, 4, 16)), w[5] = join(w[5], plane(tops, 5, 16));
        w[6] = join(w[6], plane(tops, 6, 16)), w[7] = join(w[7], plane(tops, 7, 16));
    }
    if (bits == 6)
        for (int h = 0; h < 2; h++) {
            V tops = load(data + 128 + 32 * h);
            w[4 * h] = join(w[4 * h], plane(tops, 0, 48)), w[4 * h + 1] = join(w[4 * h + 1], plane(tops, 2, 48));
            w[4 * h + 2] = join(w[4 * h + 2], plane(tops, 4, 48)), w[4 * h + 3] = join(w[4 * h + 3], plane(tops, 6, 48));
        }
}

/* `count` rows of x with one panel. Constant arguments make a loop of its own for each format and number of rows. */
INLINE void panel(const int bits, const int scales, const int offset, const int count, const uint8_t *w, int64_t blocks,
                  const Rows *x, F *acc) {
    const int per_header = scales >= SUPER ? 8 : 1;
    for (int r = 0; r < count; r++) acc[r] = fset(0.0f);
    for (int64_t first = 0; first < blocks; first += per_header) {
        const uint8_t *header = w;
        F d = fhalf(header), m = scales == MINIMUM || scales == SUPER ? fhalf(header + 16) : fset(0.0f);
        w += header_bytes(scales);
        for (int i = 0; i < per_header; i++, w += block_bytes(bits)) {
            int64_t b = first + i;
            V v[8];
            unpack(bits, w, v);
            F scale = d, minimum = m;
            I left = iset(0), right = iset(0);
            if (scales == SUPER) {
                scale = fmul(d, fbyte(header + 32 + 8 * i));
                minimum = fmul(m, fbyte(header + 96 + 8 * i));
            }
            if (scales == HALVES) {
                left = iload8((const int8_t *)header + 16 + 16 * i);
                right = iload8((const int8_t *)header + 24 + 16 * i);
            }
            for (int r = 0; r < count; r++) {
                const int8_t *q = x[r].q + BLOCK * b;
                const int32_t *sums = x[r].sums + 2 * b;
                I total;
                if (scales == HALVES)
                    total = iadd(imul(left, isub(dot(bits, v, q, 4), iset(offset * sums[0]))),
                                 imul(right, isub(dot(bits, v + 4, q + 16, 4), iset(offset * sums[1]))));
                else if (bits == 8)
                    total = dot8(v, q, sums[0] + sums[1]);
                else if (offset)
                    total = isub(dot(bits, v, q, 8), iset(offset * (sums[0] + sums[1])));
                else
                    total = dot(bits, v, q, 8);
                acc[r] = fadd(acc[r], fmul(fmul(scale, fset(x[r].scale[b])), fint(total)));
                if (scales == MINIMUM) acc[r] = fadd(acc[r], fmul(minimum, fset(x[r].product[b])));
                if (scales == SUPER) acc[r] = fsub(acc[r], fmul(minimum, fset(x[r].product[b])));
            }
        }
    }
}

typedef void (*Panel)(int, const uint8_t *, int64_t, const Rows *, F *);
#define FORMAT(name, bits, scales, offset)                                                                                \
    static void name(int count, const uint8_t *w, int64_t blocks, const Rows *x, F *acc) {                                \
        if (count == 4) panel(bits, scales, offset, 4, w, blocks, x, acc);                                                \
        else if (count == 3) panel(bits, scales, offset, 3, w, blocks, x, acc);                                           \
        else if (count == 2) panel(bits, scales, offset, 2, w, blocks, x, acc);                                           \
        else panel(bits, scales, offset, 1, w, blocks, x, acc);                                                           \
    }
FORMAT(q4_0, 4, SCALE, 8)
FORMAT(q4_1, 4, MINIMUM, 0)
FORMAT(q5_0, 5, SCALE, 16)
FORMAT(q5_1, 5, MINIMUM, 0)
FORMAT(q8_0, 8, SCALE, 0)
FORMAT(q4_k, 4, SUPER, 0)
FORMAT(q5_k, 5, SUPER, 0)
FORMAT(q6_k, 6, HALVES, 32)
static const struct { Panel panel; int bits, scales, offset; } FORMATS[] = { /* in the order of ops/quant.py:FORMATS */
    {q4_0, 4, SCALE, 8}, {q4_1, 4, MINIMUM, 0}, {q5_0, 5, SCALE, 16}, {q5_1, 5, MINIMUM, 0},
    {q8_0, 8, SCALE, 0}, {q4_k, 4, SUPER, 0},   {q5_k, 5, SUPER, 0},  {q6_k, 6, HALVES, 32},
};

/* ---- entry points --------------------------------------------------------------------------------------------------- */

/* A row at a time: block by block e = max |x| / 127, q = x / e rounded to even. A block with an infinity or a NaN gets
 * e = NaN, and so does every output that reads it, as in floating point. */
void quantise(const float *x, int64_t rows, int64_t size, int8_t *q, float *scale, float *product, int32_t *sums) {
    for (int64_t b = 0; b < rows * (size / BLOCK); b++, x += BLOCK, q += BLOCK, sums += 2) {
        float most = 0.0f, odd = 0.0f;
        for (int i = 0; i < BLOCK; i++) {
            float a = fabsf(x[i]);
            most = a > most ? a : most;
            odd += x[i] * 0.0f;
        }
        int finite = odd == 0.0f;
        float e = finite ? most / 127.0f : NAN, inverse = finite && e > 0.0f ? 1.0f / e : 0.0f;
        int32_t halves[2] = {0, 0};
        for (int h = 0; h < 2; h++)
            for (int i = 16 * h; i < 16 * h + 16; i++) {
                float rounded = finite ? rintf(x[i] * inverse) : 0.0f;
                rounded = rounded > 127.0f ? 127.0f : rounded < -127.0f ? -127.0f : rounded;
                q[i] = (int8_t)rounded;
                halves[h] += q[i];
            }
        scale[b] = e;
        product[b] = e * (float)(halves[0] + halves[1]);
        sums[0] = halves[0], sums[1] = halves[1];
    }
}

/* y [rows, stride] gets its first `outputs` columns: x in blocks (see quantise) times W^T, plus bias (or NULL). */
void quantised_linear(int64_t format, const uint8_t *w, int64_t outputs, int64_t size, const int8_t *q, const float *scale,
                      const float *product, const int32_t *sums, int64_t rows, const float *bias, float *y, int64_t stride) {
    const int64_t blocks = size / BLOCK, panels = (outputs + LANES - 1) / LANES;
    const int scales = FORMATS[format].scales;
    const int64_t bytes = blocks * block_bytes(FORMATS[format].bits) + blocks / (scales >= SUPER ? 8 : 1) * header_bytes(scales);
    const Panel run = FORMATS[format].panel;
#pragma omp parallel for schedule(static) if (rows * panels * blocks > 2048)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t r = 0; r < rows; r += TILE) {
            int count = rows - r < TILE ? (int)(rows - r) : TILE;
            Rows x[TILE];
            F acc[TILE];
            for (int i = 0; i < count; i++)
                x[i] = (Rows){q + (r + i) * size, scale + (r + i) * blocks, product + (r + i) * blocks,
                              sums + (r + i) * 2 * blocks};
            run(count, w + p * bytes, blocks, x, acc);
            for (int i = 0; i < count; i++) {
                float out[LANES];
                fstore(out, acc[i]);
                float *to = y + (r + i) * stride + p * LANES;
                int64_t last = outputs - p * LANES;
                for (int o = 0; o < LANES && o < last; o++) to[o] = bias ? out[o] + bias[p * LANES + o] : out[o];
            }
        }
}

/* out [count, size]: rows `ids` of W as floats. A weight is computed as GGUF defines it: (q - offset) d, then + m. */
void dequantise_rows(int64_t format, const uint8_t *w, int64_t size, const int64_t *ids, int64_t count, float *out) {
    const int bits = FORMATS[format].bits, scales = FORMATS[format].scales, per_header = scales >= SUPER ? 8 : 1;
    const int offset = FORMATS[format].offset;
    const int64_t record = header_bytes(scales) + per_header * block_bytes(bits);
    const int64_t bytes = size / BLOCK / per_header * record;
    for (int64_t n = 0; n < count; n++, out += size) {
        const int lane = (int)(ids[n] % LANES);
        for (int64_t b = 0; b < size / BLOCK; b++) {
            const uint8_t *header = w + ids[n] / LANES * bytes + b / per_header * record;
            const uint8_t *data = header + header_bytes(scales) + b % per_header * block_bytes(bits);
            const uint8_t *own = header + 2 * lane;
            float d = half_to_float((uint16_t)(own[0] | own[1] << 8)), m = 0.0f, s[2] = {d, d};
            if (scales == MINIMUM || scales == SUPER) m = half_to_float((uint16_t)(own[16] | own[17] << 8));
            if (scales == SUPER) {
                s[0] = s[1] = d * (float)header[32 + 8 * (b % 8) + lane];
                m = -(m * (float)header[96 + 8 * (b % 8) + lane]);
            }
            if (scales == HALVES)
                for (int h = 0; h < 2; h++) s[h] = (float)(int8_t)header[16 + 16 * (b % 8) + 8 * h + lane] * d;
            for (int i = 0; i < BLOCK; i++) {
                const int g = i / 4, at = 4 * lane + i % 4;
                int q = bits == 8 ? (int8_t)data[32 * g + at] : data[32 * (g % 4) + at] >> (g < 4 ? 0 : 4) & 15;
                if (bits == 5) q |= (data[128 + at] >> g & 1) << 4;
                if (bits == 6) q |= (data[128 + 32 * (g / 4) + at] >> 2 * (g % 4) & 3) << 4;
                float value = (float)(q - offset) * s[i / 16];
                out[b * BLOCK + i] = scales == MINIMUM || scales == SUPER ? value + m : value; /* -0 + 0 would be 0 */
            }
        }
    }
}

/* Which of the variants above was compiled. */
const char *quant_variant(void) {
#if defined(PLAIN)
    return "plain C";
#elif defined(__ARM_FEATURE_DOTPROD)
    return "NEON with dot product";
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return "AVX-512 VNNI";
#elif defined(__AVXVNNI__)
    return "AVX-VNNI";
#else
    return "AVX2";
#endif
}
