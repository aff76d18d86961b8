/* z' = decay z + drive u, y = Re sum_n readout z' + D u. Complex numbers are pairs, N a head. */
#include "diagonal.h"

typedef struct {
  const REAL *u, *state, *decay, *drive, *readout, *direct;
  REAL *y, *next;
  int64_t batch, heads, modes;
} Step;

void diagonal_step(const Step *s, int threads) {
  int64_t width = 2 * s->modes;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t h = 0; h < s->heads; h++)
    for (int64_t b = 0; b < s->batch; b++) {
      int64_t row = b * s->heads + h;
      REAL u = s->u[row], *next = s->next + row * width;
      const REAL *drive = s->drive ? s->drive + h * width : 0;
      advance(s->state + row * width, s->decay + h * width, drive, u, next, s->modes);
      s->y[row] = read_out(s->readout + h * width, next, s->modes) +
                  (s->direct ? s->direct[h] * u : 0);
    }
}
