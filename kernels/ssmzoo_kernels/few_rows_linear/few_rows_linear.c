/* y[m, o] = scale[o] sum_i x[m, i] w[o, i] + bias[o] for a few rows m: as fast as w can be read. */
#include "linear.h"

void few_rows_linear(const REAL *x, const void *w, int64_t type, const void *scale,
                     int64_t scale_type, const REAL *bias, REAL *y, int64_t rows, int64_t inputs,
                     int64_t outputs, int threads) {
  const int64_t block = 64;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t first = 0; first < outputs; first += block) {
    Numbers weights = {w, type}, scales = {scale, scale_type}, added = {bias, AS_REAL};
    int64_t last = first + block < outputs ? first + block : outputs;
    product(weights, scales, added, rows, x, inputs, y, outputs, inputs, first, last);
  }
}

/* How many weights of four bits a block has, in which they are packed. */
int64_t block_inputs(void) { return BLOCK_INPUTS; }
