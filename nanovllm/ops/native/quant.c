/* Products with quantised weights on a CPU: y = x W^T, W in 4 to 8 bits, x in 15 bits. Twin: ops/quant.py.
 *
 * The arithmetic. A row of W is cut into blocks of 32 inputs. A weight is d q + m with q a small integer; d and m are
 * shared by the block. A row of x is cut likewise: x = e p with |p| <= 127 * 128, e shared by the block (`quantise`). So
 *
 *     sum over the block of w x  =  (d e) (sum of q p)  +  m (e sum of p)
 *
 * Instructions multiply bytes, so p = 128 a + b with a from -127 to 127 and b from -64 to 63 is stored as two of them,
 *
 *     sum of q p  =  128 (sum of q a)  +  (sum of q b)
 *
 * exact in integers, whatever the order; the largest sums fit 31 bits (Q6_K: 2 * 128 * 16 * 32 * 127 * 128). What remains
 * is one multiply-add in float for each block, in the order of the blocks. Multiplications and additions are rounded one
 * by one (-ffp-contract=off), so every processor, every number of threads and rows, and the twin give the same bits.
 * With one byte for an input, as llama.cpp has it, a third of the instructions would be gone, and 3 of 100 tokens another.
 *
 * The layout. Eight outputs are one panel. In a panel 4 inputs of 8 outputs are one vector of 32 bytes, so that one
 * instruction (vpdpbusd, or sdot twice) multiplies them with 4 bytes of x and adds up each output's four products in a
 * lane of its own. Lanes are outputs: there is no sum across lanes, d and m are vectors too, and an unpacked block is
 * used for up to TILE rows of x. Input 4 g + i of output o is byte 4 o + i of vector g = 0..7:
 *
 *     4 bits   32 bytes p = 0..3: vector p in the low, vector p + 4 in the high nibbles
 *     5 bits   the same, then 32 bytes: bit g is the fifth bit of vector g
 *     6 bits   the same, then 64 bytes: byte j has bits 4 and 5 of vectors 0..3, byte 32 + j those of vectors 4..7
 *     8 bits   vectors 0..7, signed
 *
 * With AVX-512 two panels are computed at once: their vectors are the halves of one of 64 bytes. `gap` is the distance
 * from a panel to the next one, or 0 where there is none.
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
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "share.h"

#define INLINE static inline __attribute__((always_inline))
#if defined(__AVX2__) || defined(__ARM_NEON)
#define UNROLL _Pragma("GCC unroll 16")
#else /* without vectors it gains nothing, and compiling took 44 s in place of 5 */
#define UNROLL
#endif
#define LANES 8
#define BLOCK 32
#define AHEAD 8192 /* bytes of the weight that are asked for before they are needed */

enum { SCALE, MINIMUM, SUPER, HALVES };

typedef struct { /* a tile of rows of x, cut into blocks: those of all rows with the first inputs, then with the next */
    int8_t *q;      /* of a block 32 a, then 32 b */
    float *scale;   /* e, one a block */
    float *product; /* e times the sum of the block */
    int32_t *sums;  /* of half blocks */
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

/* ---- what a processor must offer: V 32 bytes, I 8 integers, F 8 floats; twice that if AT_ONCE is 2 --------------------- */

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define AT_ONCE 2
typedef __m512i V;
typedef __m512i I;
typedef __m512 F;
INLINE V load(const uint8_t *p, int64_t gap) {
    V first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_inserti64x4(first, _mm256_loadu_si256((const __m256i *)(p + gap)), 1);
}
INLINE V low(V v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE V high(V v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
INLINE V plane(V v, int from, int mask) {
    V moved = from <= 4 ? _mm512_slli_epi16(v, 4 - from) : _mm512_srli_epi16(v, from - 4);
    return _mm512_and_si512(moved, _mm512_set1_epi8((char)mask));
}
INLINE V join(V a, V b) { return _mm512_or_si512(a, b); }
INLINE V four(const int8_t *x) { int32_t word; memcpy(&word, x, 4); return _mm512_set1_epi32(word); }
INLINE I iset(int32_t value) { return _mm512_set1_epi32(value); }
INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
INLINE I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
INLINE __m128i eights(const void *p, int64_t gap) {
    return _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)p), _mm_loadl_epi64((const __m128i *)((const char *)p + gap)));
}
INLINE I iload8(const int8_t *p, int64_t gap) { return _mm512_cvtepi8_epi32(eights(p, gap)); }
INLINE F fset(float value) { return _mm512_set1_ps(value); }
INLINE F v_add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F v_sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F v_mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F fint(I a) { return _mm512_cvtepi32_ps(a); }
INLINE F fhalf(const uint8_t *p, int64_t gap) {
    __m256i first = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(first, _mm_loadu_si128((const __m128i *)(p + gap)), 1));
}
INLINE F fbyte(const uint8_t *p, int64_t gap) { return fint(_mm512_cvtepu8_epi32(eights(p, gap))); }
INLINE void fstore(float *p, F a, int lanes) { _mm512_mask_storeu_ps(p, lanes == 16 ? 0xffff : 0xff, a); }
INLINE I ishift(I a) { return _mm512_slli_epi32(a, 7); }
INLINE V positive(V v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }
INLINE I add_dots(int bits, I sum, V w, const int8_t *x) { (void)bits; return _mm512_dpbusd_epi32(sum, w, four(x)); }

#elif defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
typedef __m256i V;
typedef __m256i I;
typedef __m256 F;
INLINE V load(const uint8_t *p, int64_t gap) { (void)gap; return _mm256_loadu_si256((const V *)p); }
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
INLINE I iload8(const int8_t *p, int64_t gap) { (void)gap; return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
INLINE F fset(float value) { return _mm256_set1_ps(value); }
INLINE F v_add(F a, F b) { return _mm256_add_ps(a, b); }
INLINE F v_sub(F a, F b) { return _mm256_sub_ps(a, b); }
INLINE F v_mul(F a, F b) { return _mm256_mul_ps(a, b); }
INLINE F fint(I a) { return _mm256_cvtepi32_ps(a); }
INLINE F fhalf(const uint8_t *p, int64_t gap) { (void)gap; return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE F fbyte(const uint8_t *p, int64_t gap) { (void)gap; return fint(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE void fstore(float *p, F a, int lanes) { (void)lanes; _mm256_storeu_ps(p, a); }
#if defined(__AVXVNNI__)
#define DOT4 _mm256_dpbusd_avx_epi32
#endif
INLINE I ishift(I a) { return _mm256_slli_epi32(a, 7); }
#ifdef DOT4
INLINE V positive(V v) { return _mm256_xor_si256(v, _mm256_set1_epi8(-128)); }
INLINE I add_dots(int bits, I sum, V w, const int8_t *x) { (void)bits; return DOT4(sum, w, four(x)); }
#else
#define SIGNED_DOT 1
/* maddubs adds pairs in 16 bits; so many of its results fit there: 15 * 127 * 2 * 8, 31 * 127 * 2 * 4, 63 * 127 * 2 * 2. */
#define OWN_DOTS 1
INLINE void dots(int bits, const V *w, const int8_t *x, int count, int lines, I *sums) {
    const int most = bits == 4 ? 8 : bits == 5 ? 4 : 2;
    for (int l = 0; l < lines; l++, x += BLOCK) {
        sums[l] = iset(0);
        for (int g = 0; g < count && bits == 8; g++) { /* |w| times x with w's sign: 128 * 127 * 2 fits 16 bits */
            I pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[g]), _mm256_sign_epi8(four(x + 4 * g), w[g]));
            sums[l] = iadd(sums[l], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
        for (int g = 0; g < count && bits < 8;) {
            I pairs = _mm256_maddubs_epi16(w[g], four(x + 4 * g));
            int end = g + most < count ? g + most : count;
            for (g++; g < end; g++) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[g], four(x + 4 * g)));
            sums[l] = iadd(sums[l], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    }
}
#endif

#elif defined(__aarch64__)
#include <arm_neon.h>
typedef struct { int8x16_t a, b; } V;
typedef struct { int32x4_t a, b; } I;
typedef struct { float32x4_t a, b; } F;
INLINE V load(const uint8_t *p, int64_t gap) { (void)gap; return (V){vld1q_s8((const int8_t *)p), vld1q_s8((const int8_t *)p + 16)}; }
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
INLINE I iload8(const int8_t *p, int64_t gap) {
    (void)gap;
    int16x8_t wide = vmovl_s8(vld1_s8(p));
    return (I){vmovl_s16(vget_low_s16(wide)), vmovl_s16(vget_high_s16(wide))};
}
INLINE F fset(float value) { return (F){vdupq_n_f32(value), vdupq_n_f32(value)}; }
INLINE F v_add(F a, F b) { return (F){vaddq_f32(a.a, b.a), vaddq_f32(a.b, b.b)}; }
INLINE F v_sub(F a, F b) { return (F){vsubq_f32(a.a, b.a), vsubq_f32(a.b, b.b)}; }
INLINE F v_mul(F a, F b) { return (F){vmulq_f32(a.a, b.a), vmulq_f32(a.b, b.b)}; }
INLINE F fint(I a) { return (F){vcvtq_f32_s32(a.a), vcvtq_f32_s32(a.b)}; }
INLINE F fhalf(const uint8_t *p, int64_t gap) {
    (void)gap;
    uint16x8_t words = vreinterpretq_u16_u8(vld1q_u8(p));
    return (F){vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(words))),
               vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(words)))};
}
INLINE F fbyte(const uint8_t *p, int64_t gap) {
    (void)gap;
    uint16x8_t wide = vmovl_u8(vld1_u8(p));
    return (F){vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)))};
}
INLINE void fstore(float *p, F a, int lanes) { (void)lanes; vst1q_f32(p, a.a); vst1q_f32(p + 4, a.b); }
INLINE I ishift(I a) { return (I){vshlq_n_s32(a.a, 7), vshlq_n_s32(a.b, 7)}; }
#define SIGNED_DOT 1
#if defined(__ARM_FEATURE_DOTPROD)
INLINE int32x4_t fours(int32x4_t sum, int8x16_t w, int8x16_t p) { return vdotq_s32(sum, w, p); }
#else /* pairs in 16 bits: 128 * 127 * 2 fits */
INLINE int32x4_t fours(int32x4_t sum, int8x16_t w, int8x16_t p) {
    int16x8_t first = vmull_s8(vget_low_s8(w), vget_low_s8(p)), second = vmull_high_s8(w, p);
    return vpadalq_s16(sum, vpaddq_s16(first, second));
}
#endif
INLINE I add_dots(int bits, I sum, V w, const int8_t *x) {
    (void)bits;
    int32_t word;
    memcpy(&word, x, 4);
    int8x16_t p = vreinterpretq_s8_s32(vdupq_n_s32(word));
    return (I){fours(sum.a, w.a, p), fours(sum.b, w.b, p)};
}

#else
#define PLAIN 1
typedef struct { uint8_t v[32]; } V;
typedef struct { int32_t v[LANES]; } I;
typedef struct { float v[LANES]; } F;
#define EACH(count, expression) for (int i = 0; i < (count); i++) out.v[i] = (expression); return out
INLINE V load(const uint8_t *p, int64_t gap) { (void)gap; V out; memcpy(out.v, p, 32); return out; }
INLINE V low(V v) { V out; EACH(32, v.v[i] & 15); }
INLINE V high(V v) { V out; EACH(32, v.v[i] >> 4); }
INLINE V plane(V v, int from, int mask) { V out; EACH(32, (uint8_t)((from <= 4 ? v.v[i] << (4 - from) : v.v[i] >> (from - 4)) & mask)); }
INLINE V join(V a, V b) { V out; EACH(32, a.v[i] | b.v[i]); }
INLINE I iset(int32_t value) { I out; EACH(LANES, value); }
INLINE I iadd(I a, I b) { I out; EACH(LANES, a.v[i] + b.v[i]); }
INLINE I isub(I a, I b) { I out; EACH(LANES, a.v[i] - b.v[i]); }
INLINE I imul(I a, I b) { I out; EACH(LANES, a.v[i] * b.v[i]); }
INLINE I iload8(const int8_t *p, int64_t gap) { (void)gap; I out; EACH(LANES, p[i]); }
INLINE F fset(float value) { F out; EACH(LANES, value); }
INLINE F v_add(F a, F b) { F out; EACH(LANES, a.v[i] + b.v[i]); }
INLINE F v_sub(F a, F b) { F out; EACH(LANES, a.v[i] - b.v[i]); }
INLINE F v_mul(F a, F b) { F out; EACH(LANES, a.v[i] * b.v[i]); }
INLINE F fint(I a) { F out; EACH(LANES, (float)a.v[i]); }
INLINE F fhalf(const uint8_t *p, int64_t gap) { (void)gap; F out; EACH(LANES, half_to_float((uint16_t)(p[2 * i] | p[2 * i + 1] << 8))); }
INLINE F fbyte(const uint8_t *p, int64_t gap) { (void)gap; F out; EACH(LANES, (float)p[i]); }
INLINE void fstore(float *p, F a, int lanes) { (void)lanes; memcpy(p, a.v, sizeof a.v); }
INLINE I ishift(I a) { I out; EACH(LANES, a.v[i] * 128); }
#define SIGNED_DOT 1
INLINE I add_dots(int bits, I sum, V w, const int8_t *x) {
    for (int o = 0; o < LANES; o++)
        for (int i = 0; i < 4; i++) sum.v[o] += (bits == 8 ? (int8_t)w.v[4 * o + i] : w.v[4 * o + i]) * x[i];
    return sum;
}
#endif

#ifndef AT_ONCE
#define AT_ONCE 1
#endif
/* Rows of x for which an unpacked block is used: its 8 vectors, and a sum for each row, should fit the registers. */
#if AT_ONCE == 2
#define TILE 8
#else
#define TILE 4
#endif
#ifndef TOGETHER
#define TOGETHER 4 /* rows whose sums are computed at the same time */
#endif
#define WIDTH (AT_ONCE * LANES) /* outputs of a vector */

/* ---- one panel ---------------------------------------------------------------------------------------------------- */

INLINE int block_bytes(int bits) { return LANES * BLOCK / 8 * bits; }
INLINE int header_bytes(int scales) { return LANES * (scales == SCALE ? 2 : scales == MINIMUM ? 4 : scales == SUPER ? 20 : 18); }

INLINE void unpack(int bits, const uint8_t *data, int64_t gap, V *w) {
    if (bits == 8) {
        for (int g = 0; g < 8; g++) w[g] = load(data + 32 * g, gap);
        return;
    }
    for (int p = 0; p < 4; p++) {
        V both = load(data + 32 * p, gap);
        w[p] = low(both);
        w[p + 4] = high(both);
    }
    if (bits == 5) {
        V tops = load(data + 128, gap);
        w[0] = join(w[0], plane(tops, 0, 16)), w[1] = join(w[1], plane(tops, 1, 16));
        w[2] = join(w[2], plane(tops, 2, 16)), w[3] = join(w[3], plane(tops, 3, 16));
        w[4] = join(w[4], plane(tops, 4, 16)), w[5] = join(w[5], plane(tops, 5, 16));
        w[6] = join(w[6], plane(tops, 6, 16)), w[7] = join(w[7], plane(tops, 7, 16));
    }
    if (bits == 6)
        for (int h = 0; h < 2; h++) {
            V tops = load(data + 128 + 32 * h, gap);
            w[4 * h] = join(w[4 * h], plane(tops, 0, 48)), w[4 * h + 1] = join(w[4 * h + 1], plane(tops, 2, 48));
            w[4 * h + 2] = join(w[4 * h + 2], plane(tops, 4, 48)), w[4 * h + 3] = join(w[4 * h + 3], plane(tops, 6, 48));
        }
}

#ifndef OWN_DOTS
/* Sums of q a and of q b of some rows, which lie at x one after another, 32 bytes each. Line by line they would wait for
 * each other: an instruction takes 4 cycles, and two can begin in each. */
INLINE void dots(int bits, const V *w, const int8_t *x, int count, int lines, I *sums) {
    UNROLL
    for (int l = 0; l < lines; l++) sums[l] = iset(0);
    UNROLL
    for (int g = 0; g < count; g++)
        UNROLL
        for (int l = 0; l < lines; l++) sums[l] = add_dots(bits, sums[l], w[g], x + BLOCK * l + 4 * g);
}
#endif

/* The sums of q p of `rows` rows. */
INLINE void products(int bits, const V *w, const int8_t *x, int count, int rows, I *sums) {
    I parts[2 * TOGETHER];
    dots(bits, w, x, count, 2 * rows, parts);
    UNROLL
    for (int r = 0; r < rows; r++) sums[r] = iadd(ishift(parts[2 * r]), parts[2 * r + 1]);
}

/* `count` rows of x with one panel (or AT_ONCE). Constant arguments make a loop of its own for each format and number of
 * rows. Sums and addresses are local variables: what is stored through `sums` could be anything, also the addresses. */
INLINE void panel(const int bits, const int scales, const int offset, const int count, const uint8_t *w, int64_t gap,
                  int64_t blocks, const Rows *rows, F *sums) {
    const int per_header = scales >= SUPER ? 8 : 1;
    const Rows x = *rows;
    F acc[TILE];
    for (int r = 0; r < count; r++) acc[r] = fset(0.0f);
    for (int64_t first = 0; first < blocks; first += per_header) {
        const uint8_t *header = w;
        F d = fhalf(header, gap), m = scales == MINIMUM || scales == SUPER ? fhalf(header + 16, gap) : fset(0.0f);
        w += header_bytes(scales);
        for (int i = 0; i < per_header; i++, w += block_bytes(bits)) {
            int64_t b = first + i;
            V v[8];
            for (int ahead = 0; ahead < block_bytes(bits); ahead += 64) {
                __builtin_prefetch(w + AHEAD + ahead);
                if (AT_ONCE == 2) __builtin_prefetch(w + gap + AHEAD + ahead);
            }
            unpack(bits, w, gap, v);
#ifndef SIGNED_DOT /* its bytes have no sign: (w + 128) p - 128 p */
            for (int g = 0; g < 8 && bits == 8; g++) v[g] = positive(v[g]);
            const int shift = bits == 8 ? 128 : offset;
#else
            const int shift = offset;
#endif
            F scale = d, minimum = m;
            I left = iset(0), right = iset(0);
            if (scales == SUPER) {
                scale = v_mul(d, fbyte(header + 32 + 8 * i, gap));
                minimum = v_mul(m, fbyte(header + 96 + 8 * i, gap));
            }
            if (scales == HALVES) {
                left = iload8((const int8_t *)header + 16 + 16 * i, gap);
                right = iload8((const int8_t *)header + 24 + 16 * i, gap);
            }
            UNROLL
            for (int first = 0; first < count; first += TOGETHER) {
                const int now = count - first < TOGETHER ? count - first : TOGETHER;
                const int64_t n = b * count + first;
                const int8_t *q = x.q + 2 * BLOCK * n;
                I totals[TOGETHER], others[TOGETHER];
                products(bits, v, q, scales == HALVES ? 4 : 8, now, totals);
                if (scales == HALVES) products(bits, v + 4, q + 16, 4, now, others);
                UNROLL
                for (int r = 0; r < now; r++) {
                    const int32_t *of = x.sums + 2 * (n + r);
                    I total = totals[r];
                    if (scales == HALVES)
                        total = iadd(imul(left, isub(total, iset(offset * of[0]))),
                                     imul(right, isub(others[r], iset(offset * of[1]))));
                    else if (shift)
                        total = isub(total, iset(shift * (of[0] + of[1])));
                    F sum = v_add(acc[first + r], v_mul(v_mul(scale, fset(x.scale[n + r])), fint(total)));
                    if (scales == MINIMUM) sum = v_add(sum, v_mul(minimum, fset(x.product[n + r])));
                    if (scales == SUPER) sum = v_sub(sum, v_mul(minimum, fset(x.product[n + r])));
                    acc[first + r] = sum;
                }
            }
        }
    }
    for (int r = 0; r < count; r++) sums[r] = acc[r];
}

typedef void (*Panel)(int, const uint8_t *, int64_t, int64_t, const Rows *, F *);
#define FORMAT(name, bits, scales, offset)                                                                                \
    static void name(int count, const uint8_t *w, int64_t gap, int64_t blocks, const Rows *x, F *acc) {                   \
        if (count == TILE) panel(bits, scales, offset, TILE, w, gap, blocks, x, acc);                                      \
        else if (count == 4) panel(bits, scales, offset, 4, w, gap, blocks, x, acc);                                           \
        else if (count == 3) panel(bits, scales, offset, 3, w, gap, blocks, x, acc);                                      \
        else if (count == 2) panel(bits, scales, offset, 2, w, gap, blocks, x, acc);                                      \
        else panel(bits, scales, offset, 1, w, gap, blocks, x, acc);                                                      \
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

/* One block: e = max |x| / (127 * 128), p = x / e rounded to even. If it has an infinity or a NaN, e is NaN, and so is
 * every output that reads it, as in floating point; numbers too small for e count as 0. The bits of |x| sort like integers,
 * infinity and NaN above all others, and a compiler may take the maximum of integers in any order, eight at a time. */
INLINE void quantise_block(const float *x, int8_t *q, float *scale, float *product, int32_t *sums) {
    int32_t bits[BLOCK], top = 0;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < BLOCK; i++) top = (bits[i] & 0x7fffffff) > top ? bits[i] & 0x7fffffff : top;
    const int finite = top < 0x7f800000;
    float most;
    memcpy(&most, &top, sizeof most);
    float e = most / 16256.0f;
    e = e >= FLT_MIN ? e : 0.0f;
    float inverse = finite && e > 0.0f ? 1.0f / e : 0.0f;
    int32_t rounded[BLOCK], left = 0, right = 0;
    for (int i = 0; i < BLOCK; i++) {
        float r = finite ? rintf(x[i] * inverse) : 0.0f;
        rounded[i] = (int32_t)(r > 16256.0f ? 16256.0f : r < -16256.0f ? -16256.0f : r);
    }
    for (int i = 0; i < BLOCK; i++) q[i] = (int8_t)((rounded[i] + 64) >> 7); /* a, rounded down after adding half */
    for (int i = 0; i < BLOCK; i++) q[BLOCK + i] = (int8_t)(rounded[i] - 128 * q[i]);
    for (int i = 0; i < 16; i++) left += rounded[i], right += rounded[16 + i];
    sums[0] = left, sums[1] = right;
    *scale = finite ? e : NAN;
    *product = *scale * (float)(left + right);
}

/* Of `left` rows, how many are the next tile: as many as one loop is compiled for. */
INLINE int tile_rows(int64_t left) { return left >= TILE ? TILE : left > 4 ? 4 : (int)left; }

/* The tile that begins with row `first`. */
INLINE Rows tile(const Rows *all, int64_t first, int64_t blocks) {
    const int64_t n = first * blocks;
    return (Rows){all->q + 2 * BLOCK * n, all->scale + n, all->product + n, all->sums + 2 * n};
}

typedef struct {
    const float *x;
    int64_t rows, blocks, parts; /* blocks of a row */
    const Rows *out;
} Inputs;

static void quantise_part(const void *context, int64_t part) {
    const Inputs *a = context;
    const int64_t from = a->blocks * part / a->parts, to = a->blocks * (part + 1) / a->parts;
    for (int64_t first = 0, count; first < a->rows; first += count) {
        const Rows own = tile(a->out, first, a->blocks);
        count = tile_rows(a->rows - first);
        for (int64_t b = from; b < to; b++)
            for (int64_t r = 0; r < count; r++) {
                const int64_t n = b * count + r;
                quantise_block(a->x + ((first + r) * a->blocks + b) * BLOCK, own.q + 2 * BLOCK * n, own.scale + n,
                               own.product + n, own.sums + 2 * n);
            }
    }
}

/* Rows of x in blocks, tile by tile: q [rows * blocks, 64], scale and product [rows * blocks], sums [rows * blocks, 2]. */
void quantise(const float *x, int64_t rows, int64_t size, const Rows *out) {
    const int64_t blocks = size / BLOCK, parts = rows * size > 32768 ? num_parts(blocks) : 1;
    const Inputs all = {x, rows, blocks, parts, out};
    share(parts, quantise_part, &all);
}

typedef struct {
    Panel run;
    const uint8_t *w;
    int64_t bytes, panels, blocks, outputs, rows, stride, parts;
    const Rows *x;
    const float *bias;
    float *y;
} Product;

static void product_part(const void *context, int64_t part) {
    const Product *a = context;
    const int64_t pairs = (a->panels + AT_ONCE - 1) / AT_ONCE;
    for (int64_t p = AT_ONCE * (pairs * part / a->parts); p < AT_ONCE * (pairs * (part + 1) / a->parts); p += AT_ONCE)
        for (int64_t r = 0, count; r < a->rows; r += count) {
            const Rows x = tile(a->x, r, a->blocks);
            F acc[TILE];
            count = tile_rows(a->rows - r);
            a->run((int)count, a->w + p * a->bytes, p + 1 < a->panels ? a->bytes : 0, a->blocks, &x, acc);
            for (int i = 0; i < count; i++) {
                float out[WIDTH];
                fstore(out, acc[i], WIDTH);
                float *to = a->y + (r + i) * a->stride + p * LANES;
                int64_t last = a->outputs - p * LANES;
                for (int o = 0; o < WIDTH && o < last; o++) to[o] = a->bias ? out[o] + a->bias[p * LANES + o] : out[o];
            }
        }
}

/* Of a packed matrix. */
static int64_t panel_bytes(int64_t format, int64_t size) {
    const int64_t blocks = size / BLOCK;
    const int scales = FORMATS[format].scales;
    return blocks * block_bytes(FORMATS[format].bits) + blocks / (scales >= SUPER ? 8 : 1) * header_bytes(scales);
}

int64_t matrix_bytes(int64_t format, int64_t outputs, int64_t size) {
    return (outputs + LANES - 1) / LANES * panel_bytes(format, size);
}

/* y [rows, stride] gets its first `outputs` columns: x in blocks (see quantise) times W^T, plus bias (or NULL). */
void quantised_linear(int64_t format, const uint8_t *w, int64_t outputs, int64_t size, const Rows *x, int64_t rows,
                      const float *bias, float *y, int64_t stride) {
    const int64_t blocks = size / BLOCK, panels = (outputs + LANES - 1) / LANES;
    const int64_t parts = rows * panels * blocks > 2048 ? num_parts((panels + AT_ONCE - 1) / AT_ONCE) : 1;
    const Product all = {FORMATS[format].panel, w, panel_bytes(format, size), panels, blocks, outputs, rows, stride, parts,
                         x, bias, y};
    share(parts, product_part, &all);
}

/* Both in one call: x [rows, size] in floats. Returns 1 if there is no memory for its blocks. */
int linear_rows(int64_t format, const uint8_t *w, int64_t outputs, int64_t size, const float *x, int64_t rows,
                const float *bias, float *y, int64_t stride) {
    const int64_t blocks = rows * (size / BLOCK);
    float *scale = malloc(blocks * (2 * BLOCK + 16) + 1); /* + 1: of nothing, NULL is allowed */
    if (!scale) return 1;
    const Rows cut = {(int8_t *)(scale + 4 * blocks), scale, scale + blocks, (int32_t *)(scale + 2 * blocks)};
    quantise(x, rows, size, &cut);
    quantised_linear(format, w, outputs, size, &cut, rows, bias, y, stride);
    free(scale);
    return 0;
}

/* out [count, size]: rows `ids` of W as floats. A weight is computed as GGUF defines it: (q - offset) d, then + m.
 * Returns 1, and writes nothing, if W has no such row. */
int dequantise_rows(int64_t format, const uint8_t *w, int64_t outputs, int64_t size, const int64_t *ids, int64_t count,
                    float *out) {
    for (int64_t n = 0; n < count; n++)
        if (ids[n] < 0 || ids[n] >= outputs) return 1;
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
    return 0;
}

/* Which of the variants above was compiled. */
const char *quant_variant(void) {
#if defined(PLAIN)
    return "plain C";
#elif defined(__ARM_FEATURE_DOTPROD)
    return "NEON with dot product";
#elif defined(__aarch64__)
    return "NEON";
#elif AT_ONCE == 2
    return "AVX-512 VNNI";
#elif defined(__AVXVNNI__)
    return "AVX-VNNI";
#else
    return "AVX2";
#endif
}
