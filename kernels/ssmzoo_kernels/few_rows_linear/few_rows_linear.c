/* y[m, o] = scale[o] sum_i x[m, i] w[o, i] + bias[o] for a few rows m: as fast as w can be read. */
#include "linear.h"

void few_rows_linear(const REAL *x, const void *w, int64_t type, const void *scale,
                     int64_t scale_type, const REAL *bias, REAL *y, int64_t rows, int64_t inputs,
                     int64_t outputs, int threads) {
  /* one block a thread: each block of few bits rounds x anew */
  const int64_t each = (outputs + threads - 1) / threads;
  const int64_t block = (each + INT4_OUTPUTS - 1) / INT4_OUTPUTS * INT4_OUTPUTS;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t first = 0; first < outputs; first += block) {
    Numbers weights = {w, type}, scales = {scale, scale_type}, added = {bias, AS_REAL};
    int64_t last = first + block < outputs ? first + block : outputs;
    product(weights, scales, added, rows, x, inputs, y, outputs, inputs, first, last);
  }
}
