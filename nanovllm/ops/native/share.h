#include <stdint.h>

/* run(context, part) for part = 0 .. parts - 1, in any order, by several threads; all have ended when it returns. `run` itself may
 * share out nothing. */
typedef void (*Part)(const void *context, int64_t part);
void share(int64_t parts, Part run, const void *context);

/* Into how many parts work of `units` is cut: several for each thread, so that one that comes late gets fewer. */
int64_t num_parts(int64_t units);

/* Memory that will be read soon: a thread of a team that has nothing to do brings it into its cache, from the start on. */
void announce(const void *memory, int64_t bytes);

/* Calls walk(context) with all threads at its side: what it shares is taken up without waking them each time. */
void with_team(int64_t most_shares, Part walk, const void *context);
