/* A step's calls of the functions in kernels.c, linear.c and quant.c, made again one after another without Python between them.
 *
 * A call from Python takes 3 to 7 us with its checks, its tensors and their memory, and a decoder layer makes 12 of them:
 * in a decode step of one sequence a third of the time. Which functions are called, with which addresses, is the same in
 * every step of the same number of sequences; only what lies at the addresses changes. tape.py records the calls. */
#include <stdint.h>

#include "share.h"

void add_rms_norm(const float *, const float *, const float *, float, int64_t, int64_t, float *, float *);
void silu_mul(const float *, int64_t, int64_t, float *);
void qk_norm_rope(const float *, const float *, const float *, float, const float *, const int64_t *, const int64_t *,
                  int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float *, uint8_t *, uint8_t *);
int decode_attention(const float *, const uint8_t *, const uint8_t *, const int32_t *, const int32_t *, int64_t, int64_t,
                     int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float *);
int float_linear(const float *, int64_t, int64_t, const float *, int64_t, const float *, float *, int64_t);
int gather_rows(const float *, int64_t, int64_t, const int64_t *, int64_t, float *);
int linear_rows(int64_t, const uint8_t *, int64_t, int64_t, const float *, int64_t, const float *, float *, int64_t);
int64_t matrix_bytes(int64_t, int64_t, int64_t);
int dequantise_rows(int64_t, const uint8_t *, int64_t, int64_t, const int64_t *, int64_t, float *);

typedef union {
    void *p;
    int64_t i;
    double f;
} Argument;

typedef struct {
    int64_t function; /* its place in FUNCTIONS of tape.py */
    Argument a[16];
} Call;

typedef struct {
    const Call *calls;
    int64_t count;
    int *failed;
} Calls;

#define MOST_AHEAD (512 << 10) /* bytes: more would push out of the cache what the calls before it need */

static int is_product(const Call *call) { return call->function == 4 || call->function == 6; }

/* The norms, RoPE and the cutting of numbers into blocks are the work of one thread, a quarter of a layer's time. The others
 * spend it on bringing the first weights of the next product into their caches: a step is bound by reading weights. */
static void announce_product(const Call *call, const Call *end) {
    while (call < end && !is_product(call)) call++;
    if (call == end) return;
    const Argument *a = call->a;
    const int64_t bytes = call->function == 6 ? matrix_bytes(a[0].i, a[2].i, a[3].i) : a[4].i * a[2].i * (int64_t)sizeof(float);
    announce(call->function == 6 ? a[1].p : a[3].p, bytes < MOST_AHEAD ? bytes : MOST_AHEAD);
}

static void walk(const void *context, int64_t part) {
    const Calls *all = context;
    (void)part;
    for (const Call *call = all->calls; call < all->calls + all->count && !*all->failed; call++) {
        const Argument *a = call->a;
        int failed = 0;
        if (call == all->calls || is_product(call)) announce_product(call + is_product(call), all->calls + all->count);
        switch (call->function) {
        case 0: add_rms_norm(a[0].p, a[1].p, a[2].p, (float)a[3].f, a[4].i, a[5].i, a[6].p, a[7].p); break;
        case 1: silu_mul(a[0].p, a[1].i, a[2].i, a[3].p); break;
        case 2:
            qk_norm_rope(a[0].p, a[1].p, a[2].p, (float)a[3].f, a[4].p, a[5].p, a[6].p, a[7].i, a[8].i, a[9].i, a[10].i,
                         a[11].i, a[12].i, a[13].p, a[14].p, a[15].p);
            break;
        case 3:
            failed = decode_attention(a[0].p, a[1].p, a[2].p, a[3].p, a[4].p, a[5].i, a[6].i, a[7].i, a[8].i, a[9].i,
                                      a[10].i, a[11].i, a[12].i, (float)a[13].f, a[14].p);
            break;
        case 4: failed = float_linear(a[0].p, a[1].i, a[2].i, a[3].p, a[4].i, a[5].p, a[6].p, a[7].i); break;
        case 5: failed = gather_rows(a[0].p, a[1].i, a[2].i, a[3].p, a[4].i, a[5].p); break;
        case 6:
            failed = linear_rows(a[0].i, a[1].p, a[2].i, a[3].i, a[4].p, a[5].i, a[6].p, a[7].p, a[8].i);
            break;
        case 7: failed = dequantise_rows(a[0].i, a[1].p, a[2].i, a[3].i, a[4].p, a[5].i, a[6].p); break;
        default: failed = 1;
        }
        *all->failed = failed;
    }
}

/* Returns 1 if a call fails; those after it are not made. */
int replay(const Call *calls, int64_t count) {
    int failed = 0;
    const Calls all = {calls, count, &failed};
    with_team(2 * count, walk, &all);
    return failed;
}
