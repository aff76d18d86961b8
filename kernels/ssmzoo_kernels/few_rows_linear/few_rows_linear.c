/* y[m, o] = sum_i x[m, i] w[o, i] + bias[o] for a few rows m: as fast as w can be read. */
#include "vector.h"

INLINE void rows(int count, const REAL *x, const REAL *weights, const REAL *bias, REAL *y,
                 int64_t inputs, int64_t outputs, int threads) {
  int64_t whole = inputs / LANES * LANES;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t o = 0; o < outputs; o++) {
    const REAL *w = weights + o * inputs;
    vec sums[8] = {{0}};
    for (int64_t i = 0; i < whole; i += LANES) {
      vec weight = load(w + i);
      UNROLL for (int m = 0; m < count; m++) sums[m] += weight * load(x + m * inputs + i);
    }
    if (whole < inputs) {
      vec weight = load_some(w + whole, inputs - whole);
      UNROLL for (int m = 0; m < count; m++)
        sums[m] += weight * load_some(x + m * inputs + whole, inputs - whole);
    }
    UNROLL for (int m = 0; m < count; m++)
      y[m * outputs + o] = total(sums[m]) + (bias ? bias[o] : 0);
  }
}

void few_rows_linear(const REAL *x, const REAL *w, const REAL *bias, REAL *y, int64_t count,
                     int64_t inputs, int64_t outputs, int threads) {
#define CASE(n) \
  case n: rows(n, x, w, bias, y, inputs, outputs, threads); break;
  switch (count) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
  }
}
