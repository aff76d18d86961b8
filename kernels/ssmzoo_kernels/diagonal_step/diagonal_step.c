/* z' = decay z + drive u, y = Re sum_n readout z' + D u. Complex numbers are pairs, N a head. */
#include "vector.h"

typedef struct {
  const REAL *u, *state, *decay, *drive, *readout, *direct;
  REAL *y, *next;
  int64_t batch, heads, modes;
} Step;

/* Plain loops, for the compiler to turn into shuffles. */
INLINE void advance(const REAL *restrict z, const REAL *restrict a, const REAL *restrict b, REAL u,
                    REAL *restrict next, int64_t modes) {
  if (b) {
    for (int64_t n = 0; n < 2 * modes; n += 2) {
      next[n] = a[n] * z[n] - a[n + 1] * z[n + 1] + b[n] * u;
      next[n + 1] = a[n] * z[n + 1] + a[n + 1] * z[n] + b[n + 1] * u;
    }
  } else {
    for (int64_t n = 0; n < 2 * modes; n += 2) {
      next[n] = a[n] * z[n] - a[n + 1] * z[n + 1] + u;
      next[n + 1] = a[n] * z[n + 1] + a[n + 1] * z[n];
    }
  }
}

/* Real parts of products add, imaginary ones subtract: their lanes stay apart until the end. */
INLINE REAL read_out(const REAL *readout, const REAL *z, int64_t modes) {
  vec sums = {0};
  for (int64_t n = 0; n < 2 * modes; n += LANES)
    sums += load_some(readout + n, 2 * modes - n) * load_some(z + n, 2 * modes - n);
  REAL parts[LANES], real = 0, imaginary = 0;
  store(parts, sums);
  UNROLL for (int i = 0; i < LANES; i += 2) real += parts[i], imaginary += parts[i + 1];
  return real - imaginary;
}

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
