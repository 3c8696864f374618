/* Reads one product from stdin, computes it with quant.c, writes everything to stdout: for processors that cannot load a
 * library into the Python of the tests (aarch64 under qemu).
 * stdin: format, outputs, size, rows, bytes of the matrix as int64; the matrix; x as float32. */
#include "../../nanovllm/ops/native/quant.c"
#include "../../nanovllm/ops/native/share.c"
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    int64_t head[5];
    if (fread(head, 8, 5, stdin) != 5) return 1;
    int64_t outputs = head[1], size = head[2], rows = head[3], blocks = size / 32, all = rows * blocks;
    uint8_t *w = malloc(head[4]);
    float *x = malloc(4 * rows * size), *y = malloc(4 * rows * outputs), *row = malloc(4 * size), *scale = malloc(4 * all);
    const Rows cut = {malloc(64 * all), malloc(4 * all), malloc(4 * all), malloc(8 * all)};
    int32_t *p = malloc(4 * rows * size);
    if (fread(w, 1, head[4], stdin) != (size_t)head[4] || fread(x, 4, rows * size, stdin) != (size_t)(rows * size)) return 2;
    quantise(x, rows, size, &cut);
    quantised_linear(head[0], w, outputs, size, &cut, rows, 0, y, outputs);
    int64_t last = outputs - 1;
    if (dequantise_rows(head[0], w, outputs, size, &last, 1, row)) return 3;
    if (!dequantise_rows(head[0], w, last, size, &last, 1, row)) return 4; /* there is no such row */
    for (int64_t first = 0, count; first < rows; first += count) { /* tiles back to rows */
        const Rows own = tile(&cut, first, blocks);
        count = tile_rows(rows - first);
        for (int64_t r = 0; r < count; r++)
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t n = b * count + r, to = (first + r) * blocks + b;
                scale[to] = own.scale[n];
                for (int i = 0; i < 32; i++) p[32 * to + i] = 128 * own.q[64 * n + i] + own.q[64 * n + 32 + i];
            }
    }
    fwrite(row, 4, size, stdout);
    fwrite(p, 4, rows * size, stdout);
    fwrite(scale, 4, all, stdout);
    fwrite(y, 4, rows * outputs, stdout);
    fprintf(stderr, "%s", quant_variant());
    return 0;
}
