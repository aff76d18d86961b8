/* One token of a rational filter in companion form: companion.h. A task is a block of channels of one
 * sequence; sequences follow each other, so that a block's coefficients stay in the cache. */
#include "companion.h"

void companion_step(const CompanionStep *s, int threads) {
  int64_t blocks = (s->width + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t task = 0; task < blocks * s->batch; task++) {
    int64_t channel = task / s->batch * BLOCK;
    step_some(s, task % s->batch, channel, s->width - channel);
  }
}
