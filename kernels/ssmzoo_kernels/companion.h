/* One token of a rational filter in companion form, vectors over channels.
 *
 *     y = d u + sum_i b_i x_i,    w = u - sum_i a_i x_i,    w takes the free place
 *
 * x_i of all channels are neighbours: a row [D] of the ring [n + 1, D], beside rows of the
 * coefficients [n, D]. x_1 is the row at `position` and older ones follow, around the end: two runs
 * of rows; the free place comes before x_1.
 */
#ifndef SSMZOO_COMPANION_H
#define SSMZOO_COMPANION_H

#include "vector.h"

enum { VECTORS = 4, BLOCK = VECTORS * LANES };

typedef struct {
  const REAL *u, *a, *b, *d;
  const int64_t *positions;
  REAL *rings, *y;
  int64_t batch, width, order, u_stride, y_stride;
} CompanionStep;

typedef struct {
  vec by_a[VECTORS], by_b[VECTORS];
} CompanionSums;

/* Rows of the ring beside as many of the coefficients; the last vector may be short. */
INLINE void add_run(CompanionSums *sums, const REAL *x, const REAL *a, const REAL *b, int64_t rows,
                    int64_t width, int vectors, int64_t last) {
  for (int64_t i = 0; i < rows; i++, x += width, a += width, b += width)
    UNROLL for (int v = 0; v < vectors; v++) {
      int64_t c = v * LANES, left = v + 1 < vectors ? LANES : last;
      vec state = load_some(x + c, left);
      sums->by_a[v] += state * load_some(a + c, left);
      sums->by_b[v] += state * load_some(b + c, left);
    }
}

INLINE void step_block(const CompanionStep *s, int64_t row, int64_t channel, int vectors,
                       int64_t last) {
  int64_t width = s->width, places = s->order + 1, first = s->positions[row] % places;
  if (first < 0) first += places;
  REAL *ring = s->rings + row * places * width + channel;
  const REAL *a = s->a + channel, *b = s->b + channel;
  int64_t until = first ? places - first : s->order, rest = s->order - until;
  CompanionSums sums = {{{0}}, {{0}}};
  add_run(&sums, ring + first * width, a, b, until, width, vectors, last);
  add_run(&sums, ring, a + until * width, b + until * width, rest, width, vectors, last);
  REAL *free_place = ring + (first ? first - 1 : s->order) * width;
  UNROLL for (int v = 0; v < vectors; v++) {
    int64_t c = v * LANES, left = v + 1 < vectors ? LANES : last;
    vec u = load_some(s->u + row * s->u_stride + channel + c, left);
    vec gain = load_some(s->d + channel + c, left);
    store_some(s->y + row * s->y_stride + channel + c, gain * u + sums.by_b[v], left);
    store_some(free_place + c, u - sums.by_a[v], left);
  }
}

/* The channels of one sequence from one on, as many as a block has at most. */
INLINE void step_some(const CompanionStep *s, int64_t row, int64_t channel, int64_t left) {
  if (left >= BLOCK)
    step_block(s, row, channel, VECTORS, LANES);
  else
    for (; left > 0; left -= LANES, channel += LANES)
      step_block(s, row, channel, 1, left < LANES ? left : LANES);
}

#endif
