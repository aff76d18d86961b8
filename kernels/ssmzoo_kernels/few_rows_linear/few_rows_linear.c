/* y[m, o] = sum_i x[m, i] w[o, i] + bias[o] for a few rows m: as fast as w can be read. */
#include "linear.h"

void few_rows_linear(const REAL *x, const REAL *w, const REAL *bias, REAL *y, int64_t count,
                     int64_t inputs, int64_t outputs, int threads) {
  int64_t block = 64, blocks = (outputs + block - 1) / block;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t b = 0; b < blocks; b++) {
    Numbers weights = {w, AS_REAL}, added = {bias, AS_REAL};
    int64_t last = (b + 1) * block < outputs ? (b + 1) * block : outputs;
    product(weights, 0, added, count, x, inputs, y, outputs, inputs, b * block, last);
  }
}
