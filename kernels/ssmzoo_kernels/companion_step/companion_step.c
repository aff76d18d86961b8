/* One token of a rational filter in companion form, vectors along the state.
 *
 *     y = d u + sum_i b_i x_i,    w = u - sum_i a_i x_i,    w takes the place of x_n
 *
 * x_1, the newest value, lies at `position` of its ring and older ones follow, around the end: two
 * runs of neighbours, each beside a run of the coefficients. A task is one channel of one row.
 */
#include "vector.h"

typedef struct {
  vec by_a, by_b;
} Sums;

INLINE void add_run(Sums *sums, const REAL *x, const REAL *a, const REAL *b, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    vec state = load_some(x + i, count - i);
    sums->by_a += state * load_some(a + i, count - i);
    sums->by_b += state * load_some(b + i, count - i);
  }
}

void companion_step(const REAL *u, REAL *rings, const int64_t *positions, const REAL *a,
                    const REAL *b, const REAL *d, REAL *y, int64_t batch, int64_t width,
                    int64_t order, int64_t sharing, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t task = 0; task < batch * width; task++) {
    int64_t channel = task % width, first = order ? positions[task / width] % order : 0;
    if (first < 0) first += order;
    REAL *ring = rings + task * order;
    const REAL *as = a + channel / sharing * order, *bs = b + channel * order;
    Sums sums = {{0}, {0}};
    add_run(&sums, ring + first, as, bs, order - first);
    add_run(&sums, ring, as + order - first, bs + order - first, first);
    y[task] = d[channel] * u[task] + total(sums.by_b);
    if (order) ring[first ? first - 1 : order - 1] = u[task] - total(sums.by_a);
  }
}
