/* B'MOJO's innovation: the error of a weighted mean of the k outputs before, summed over channels.
 *
 * Rows lie flat, cut into segments by `offsets`; before a segment's first row lie the k rows of its
 * history. Every token is on its own, so results do not depend on the number of threads.
 */
#include "vector.h"

enum { SUMS = 4, SHARE = 64 }; /* partial sums of a row; tokens of a task */

typedef struct {
  const REAL *y, *history, *weights;
  const int64_t *offsets;
  int64_t segments, width, span, stride;
  int relative;
} Inputs;

static REAL score(const Inputs *in, const REAL *now, const REAL *const *before) {
  vec errors[SUMS] = {{0}}, sizes[SUMS] = {{0}};
  for (int64_t c = 0, j = 0; c < in->width; c += LANES, j = (j + 1) % SUMS) {
    int64_t left = in->width - c;
    vec y = load_some(now + c, left), error = y;
    for (int64_t i = 0; i < in->span; i++)
      error -= splat(in->weights[i]) * load_some(before[i] + c, left);
    errors[j] += error * error;
    sizes[j] += y * y;
  }
  if (in->relative) return joined(errors) / (joined(sizes) + (REAL)1e-6);
  return joined(errors) / (REAL)in->width;
}

/* Returns 0, or 1 if memory ran out. */
int innovation(const Inputs *in, REAL *scores, int threads) {
  int64_t tokens = in->offsets[in->segments];
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const REAL **before = scratch((int64_t)sizeof(REAL *) * in->span);
    if (!before) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(static)
    for (int64_t first = 0; first < tokens; first += SHARE) {
      int64_t segment = 0, end = first + SHARE < tokens ? first + SHARE : tokens;
      for (int64_t high = in->segments; high - segment > 1;) { /* the last that begins by then */
        int64_t middle = (segment + high) / 2;
        if (in->offsets[middle] <= first)
          segment = middle;
        else
          high = middle;
      }
      for (int64_t t = first; before && t < end; t++) {
        while (in->offsets[segment + 1] <= t) segment++;
        int64_t within = t - in->offsets[segment];
        for (int64_t i = 0; i < in->span; i++) {
          int64_t back = i + 1, row = (segment + 1) * in->span + within - back;
          before[i] = within >= back ? in->y + (t - back) * in->stride
                                     : in->history + row * in->width;
        }
        scores[t] = score(in, in->y + t * in->stride, before);
      }
    }
    free(before);
  }
  return failed;
}
