#include <math.h>
#include <stdint.h>
#include <string.h>

/* exp(x) = 2^n * exp(r), |r| <= ln(2)/2, by a polynomial; 2 ulp, and it vectorises. */
static inline float exp_(float x) {
    x = -87.0f > x ? -87.0f : x; /* NaN stays */
    x = 88.0f < x ? 88.0f : x;
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
