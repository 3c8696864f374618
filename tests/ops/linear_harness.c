/* Compares linear.c with sums in double precision, for processors that cannot load a library into the Python of the tests.
 * Prints the first product that is wrong, and ends with 1. */
#include "../../nanovllm/ops/native/linear.c"
#include "../../nanovllm/ops/native/share.c"
#include <math.h>
#include <stdio.h>

static float number(uint32_t *state) { return (float)((*state = *state * 1664525u + 1013904223u) >> 8) / (1 << 23) - 1.0f; }

static int is_right(int64_t rows, int64_t outputs, int64_t size, int has_bias) {
    const int64_t stride = outputs + 3;
    float *x = malloc(4 * rows * size), *w = malloc(4 * outputs * size), *bias = malloc(4 * outputs), *y = malloc(4 * rows * stride);
    uint32_t state = (uint32_t)(rows * 31 + outputs * 17 + size);
    for (int64_t i = 0; i < rows * size; i++) x[i] = number(&state);
    for (int64_t i = 0; i < outputs * size; i++) w[i] = number(&state);
    for (int64_t i = 0; i < outputs; i++) bias[i] = number(&state);
    for (int64_t i = 0; i < rows * stride; i++) y[i] = 77.0f;
    int right = float_linear(x, rows, size, w, outputs, has_bias ? bias : NULL, y, stride) == 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t o = 0; o < stride; o++) {
            double sum = o >= outputs ? 77.0 : has_bias ? bias[o] : 0.0;
            for (int64_t k = 0; o < outputs && k < size; k++) sum += (double)x[r * size + k] * w[o * size + k];
            right &= fabs(sum - y[r * stride + o]) <= 1e-4;
        }
    free(x), free(w), free(bias), free(y);
    return right;
}

int main(void) {
    static const int64_t sizes[] = {1, 7, 64, 769, 1600}, outputs[] = {1, 5, 6, 12, 13, 40}, rows[] = {1, 3, 4, 5, 8, 9, 17, 33, 70};
    for (int s = 0; s < 5; s++)
        for (int o = 0; o < 6; o++)
            for (int r = 0; r < 9; r++)
                if (!is_right(rows[r], outputs[o], sizes[s], (s + o + r) % 2)) {
                    printf("%d rows, %d x %d\n", (int)rows[r], (int)outputs[o], (int)sizes[s]);
                    return 1;
                }
    return 0;
}
