/* Draws with sampling.c: reads rows, vocab as int64, then logits and what is wanted of each row; writes the tokens. */
#include "../../nanovllm/ops/native/sampling.c"
#include <stdio.h>

int main(void) {
    int64_t head[2];
    if (fread(head, 8, 2, stdin) != 2) return 1;
    size_t rows = head[0], vocab = head[1];
    float *logits = malloc(4 * rows * vocab);
    Wanted *wanted = malloc(sizeof(Wanted) * rows);
    int64_t *tokens = malloc(8 * rows);
    if (fread(logits, 4, rows * vocab, stdin) != rows * vocab || fread(wanted, sizeof(Wanted), rows, stdin) != rows) return 2;
    if (draw_rows(logits, rows, vocab, wanted, tokens)) return 3;
    fwrite(tokens, 8, rows, stdout);
    return 0;
}
