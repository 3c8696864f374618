/* Reads one product from stdin, computes it with quant.c, writes everything to stdout: for processors that cannot load a
 * library into the Python of the tests (aarch64 under qemu).
 * stdin: format, outputs, size, rows, bytes of the matrix as int64; the matrix; x as float32. */
#include "../../nanovllm/ops/native/quant.c"
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    int64_t head[5];
    if (fread(head, 8, 5, stdin) != 5) return 1;
    int64_t outputs = head[1], size = head[2], rows = head[3], blocks = size / 32;
    uint8_t *w = malloc(head[4]);
    float *x = malloc(4 * rows * size), *scale = malloc(4 * rows * blocks), *product = malloc(4 * rows * blocks);
    float *y = malloc(4 * rows * outputs);
    int8_t *q = malloc(rows * size);
    int32_t *sums = malloc(8 * rows * blocks);
    if (fread(w, 1, head[4], stdin) != (size_t)head[4] || fread(x, 4, rows * size, stdin) != (size_t)(rows * size)) return 2;
    quantise(x, rows, size, q, scale, product, sums);
    quantised_linear(head[0], w, outputs, size, q, scale, product, sums, rows, 0, y, outputs);
    int64_t last = outputs - 1;
    float *row = malloc(4 * size);
    dequantise_rows(head[0], w, size, &last, 1, row);
    fwrite(row, 4, size, stdout);
    fwrite(q, 1, rows * size, stdout);
    fwrite(scale, 4, rows * blocks, stdout);
    fwrite(y, 4, rows * outputs, stdout);
    fprintf(stderr, "%s", quant_variant());
    return 0;
}
