/* Numbers in 16 bits (IEEE's half) to floats and back. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* Of any half float; without branches, so that it vectorises. */
INLINE float half_to_float(uint16_t h) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    x *= 5.192296858534828e33f; /* 2^112: the bias of the exponent is 127, not 15; right below the normal numbers too */
    memcpy(&bits, &x, sizeof x);
    bits = (h & 0x7c00) == 0x7c00 ? 0x7f800000u | (uint32_t)(h & 1023) << 13 : bits; /* infinity and NaN */
    bits |= sign;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* To the nearest, of two the even one. What is too large becomes the largest: one infinity would make a row of scores NaN. */
INLINE uint16_t float_to_half(float x) {
    uint32_t bits, sign;
    memcpy(&bits, &x, sizeof x);
    sign = bits >> 16 & 0x8000;
    x = fabsf(x);
    if (x != x) return 0x7e00;
    x = x > 65504.0f ? 65504.0f : x;
    if (x < 6.103515625e-5f) return sign | (uint16_t)rintf(x * 16777216.0f); /* below 2^-14: a multiple of 2^-24 */
    memcpy(&bits, &x, sizeof x);
    return sign | (uint16_t)((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
}

INLINE void halves_to_floats(const uint16_t *h, int64_t count, float *restrict out) {
    int64_t i = 0;
#ifdef __F16C__ /* compilers do not vectorise this one */
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(h + i))));
#endif
    for (; i < count; i++) out[i] = half_to_float(h[i]);
}
