/* Sharing out loops between threads, many times a step.
 *
 * OpenMP gives each thread its part and waits for all of them at the end of each loop. A decode step has 150 loops of 20
 * to 60 us. If another process holds a core for its time slice of some milliseconds, the loop waits that long for the one
 * thread that has not even begun: beside three busy processes on two cores a token took 70 ms, where it takes 32 now.
 *
 * Here the threads of one parallel region stay for the whole step (`with_team`), and each takes the next part that nobody
 * has taken. A thread that is away takes none, and the others do its work; only a part that it has begun is waited for.
 *
 * A ticket is one 64-bit counter: the number of the loop above, the next part below. So taking a part and seeing of which
 * loop it is are one step, and a thread that comes late with an old number in its mind gets a part of the new loop or none.
 * A record of a loop is written before its number is published and never again in the same step. */
#include "share.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_max_threads() 1
#define omp_get_thread_num() 0
#define omp_in_parallel() 0
#endif

#define SPINS 4000 /* some 50 us: then the core is left to others */
#define PARTS_A_THREAD 2
#define FETCHED 1024 /* bytes at once: some 100 ns, then a thread looks for work again */

typedef struct {
    Part run;
    const void *context;
    uint64_t parts;
    atomic_ullong ended;
} Loop;

typedef struct {
    atomic_ullong ticket;
    atomic_int over;
    atomic_uintptr_t ahead, ahead_end; /* what was announced and not fetched yet */
    uint64_t number, most; /* loops so far, and of how many there are records */
    Loop *loops;
} Team;

static _Thread_local Team *team; /* of the thread that walks */

/* 0: there is nothing to fetch. A thread that reads `ahead` of one announcement and `ahead_end` of the next asks for memory
 * that nobody needs, perhaps for memory that is not there: a processor ignores that. */
static int fetch(Team *of) {
    if (atomic_load(&of->ahead) >= atomic_load(&of->ahead_end)) return 0;
    const char *at = (const char *)atomic_fetch_add(&of->ahead, FETCHED);
    for (int i = 0; i < FETCHED; i += 64) __builtin_prefetch(at + i, 0, 2);
    return 1;
}

/* A moment without work. */
static void idle(Team *of, int *spins) {
    if (fetch(of)) return;
    if (++*spins > SPINS) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* 0: the newest loop has no part left. Its number comes back in any case. */
static int take_part(Team *of, uint64_t *number) {
    uint64_t ticket = atomic_fetch_add(&of->ticket, 1), part = ticket & 0xffffffff;
    Loop *loop = of->loops + (*number = ticket >> 32);
    if (part >= loop->parts) return 0;
    loop->run(loop->context, (int64_t)part);
    atomic_fetch_add(&loop->ended, 1);
    return 1;
}

static void help(Team *of) {
    uint64_t done = 0; /* number of the last loop that had no part left */
    int spins = 0;
    while (!atomic_load(&of->over)) {
        if (atomic_load(&of->ticket) >> 32 == done) idle(of, &spins);
        else if (take_part(of, &done)) done = 0, spins = 0;
    }
}

int64_t num_parts(int64_t units) {
    int64_t most = PARTS_A_THREAD * omp_get_max_threads();
    return units < most ? units : most;
}

void share(int64_t parts, Part run, const void *context) {
    if (parts <= 1 || (team && team->number + 1 >= team->most)) {
        for (int64_t part = 0; part < parts; part++) run(context, part);
        return;
    }
    if (!team) {
#pragma omp parallel for schedule(static)
        for (int64_t part = 0; part < parts; part++) run(context, part);
        return;
    }
    Loop *loop = team->loops + ++team->number;
    loop->run = run, loop->context = context, loop->parts = (uint64_t)parts;
    atomic_init(&loop->ended, 0);
    atomic_store(&team->ticket, team->number << 32);
    uint64_t number;
    int spins = 0;
    while (take_part(team, &number)) {}
    while (atomic_load(&loop->ended) < (uint64_t)parts) idle(team, &spins);
}

void announce(const void *memory, int64_t bytes) {
    if (!team) return;
    atomic_store(&team->ahead_end, (uintptr_t)memory + (uintptr_t)bytes);
    atomic_store(&team->ahead, (uintptr_t)memory);
}

void with_team(int64_t most_shares, Part walk, const void *context) {
    Loop *loops = omp_get_max_threads() > 1 && !omp_in_parallel() ? malloc((most_shares + 2) * sizeof(Loop)) : NULL;
    if (!loops) {
        walk(context, 0);
        return;
    }
    Team made = {.most = (uint64_t)most_shares + 1, .loops = loops};
    loops[0].parts = 0; /* the number that stands there before the first loop */
#pragma omp parallel
    if (omp_get_thread_num() == 0) {
        team = &made;
        walk(context, 0);
        team = NULL;
        atomic_store(&made.over, 1);
    } else help(&made);
    free(loops);
}
