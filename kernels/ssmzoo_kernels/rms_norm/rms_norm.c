/* Normalisation by the root mean square, a row at a time, each read from memory once. With `added`
 * rows are sums: x + added goes to `totals` and is normalised there, where it is in a cache.
 *
 *     y = (offset + w) x r,    r = 1 / sqrt(mean(x^2) + eps)
 *     g' = (offset + w) g,     dx = r (g' - x r mean(g' x r)),    dw = sum over rows of g x r
 *
 * Sums of a row run in SUMS vectors. The weight's gradient is summed over shares of neighbouring
 * rows, then over the shares in their order: the number of threads changes nothing.
 */
#include <math.h>

#include "vector.h"

enum { SUMS = 4 };

typedef struct {
  const REAL *x, *weight;
  int64_t count, width, stride;
  double eps, offset;
} Rows;

static REAL inverse_root(const Rows *in, const REAL *x) {
  vec sums[SUMS] = {{0}};
  int64_t c = 0;
  for (; c + SUMS * LANES <= in->width; c += SUMS * LANES) UNROLL for (int j = 0; j < SUMS; j++) {
      vec part = load(x + c + j * LANES);
      sums[j] += part * part;
    }
  for (; c < in->width; c += LANES) {
    vec part = load_some(x + c, in->width - c);
    sums[0] += part * part;
  }
  return 1 / (REAL)sqrt(joined(sums) / (REAL)in->width + (REAL)in->eps);
}

void rms_norm(const Rows *in, const REAL *added, int64_t added_stride, REAL *totals, REAL *ys,
              REAL *inverses, int threads) {
  const vec offset = splat((REAL)in->offset);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t row = 0; row < in->count; row++) {
    const REAL *x = in->x + row * in->stride;
    if (added) {
      const REAL *more = added + row * added_stride;
      REAL *total = totals + row * in->width;
      for (int64_t c = 0; c < in->width; c += LANES)
        store_some(total + c, load_some(x + c, in->width - c) + load_some(more + c, in->width - c),
                   in->width - c);
      x = total;
    }
    REAL *y = ys + row * in->width, inverse = inverses[row] = inverse_root(in, x);
    const vec scale = splat(inverse);
    int64_t c = 0;
    for (; c + LANES <= in->width; c += LANES)
      store(y + c, load(x + c) * scale * (load(in->weight + c) + offset));
    int64_t left = in->width - c;
    if (left > 0)
      store_some(y + c, load_some(x + c, left) * scale * (load_some(in->weight + c, left) + offset),
                 left);
  }
}

/* The gradient of one row, plus `more` if it has another one, and its share of the weight's. */
static void row_backward(const Rows *in, const REAL *x, const REAL *g, const REAL *more,
                         REAL inverse, REAL *grad_x, REAL *sum) {
  const vec offset = splat((REAL)in->offset), scale = splat(inverse);
  vec sums[SUMS] = {{0}};
  for (int64_t c = 0, j = 0; c < in->width; c += LANES, j = (j + 1) % SUMS) {
    int64_t left = in->width - c;
    vec unit = load_some(x + c, left) * scale;
    sums[j] += load_some(g + c, left) * (load_some(in->weight + c, left) + offset) * unit;
  }
  const vec along = splat(joined(sums) / (REAL)in->width);
  for (int64_t c = 0; c < in->width; c += LANES) {
    int64_t left = in->width - c;
    vec unit = load_some(x + c, left) * scale, grad = load_some(g + c, left);
    vec scaled = grad * (load_some(in->weight + c, left) + offset);
    vec grad_row = (scaled - unit * along) * scale;
    if (more) grad_row += load_some(more + c, left);
    store_some(grad_x + c, grad_row, left);
    store_some(sum + c, load_some(sum + c, left) + grad * unit, left);
  }
}

void rms_norm_backward(const Rows *in, const REAL *g, int64_t g_stride, const REAL *more,
                       int64_t more_stride, const REAL *inverses, REAL *grad_x, REAL *sums,
                       REAL *grad_weight, int64_t share, int64_t shares, int threads) {
  const int64_t width = in->width;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t s = 0; s < shares; s++) {
    int64_t end = (s + 1) * share < in->count ? (s + 1) * share : in->count;
    REAL *sum = sums + s * width;
    memset(sum, 0, (size_t)width * sizeof(REAL));
    for (int64_t row = s * share; row < end; row++)
      row_backward(in, in->x + row * in->stride, g + row * g_stride,
                   more ? more + row * more_stride : NULL, inverses[row], grad_x + row * width,
                   sum);
  }
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t c = 0; c < width; c += LANES) {
    int64_t left = width - c;
    vec sum = {0};
    for (int64_t s = 0; s < shares; s++) sum += load_some(sums + s * width + c, left);
    store_some(grad_weight + c, sum, left);
  }
}
