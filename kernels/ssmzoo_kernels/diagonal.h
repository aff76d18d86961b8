/* Complex modes of a diagonal recurrence, as pairs of real and imaginary part. */
#ifndef SSMZOO_DIAGONAL_H
#define SSMZOO_DIAGONAL_H

#include "vector.h"

/* z' = a z + b u, or a z + u without b; z' may lie where z does. */
INLINE void advance(const REAL *z, const REAL *a, const REAL *b, REAL u, REAL *next,
                    int64_t modes) {
  mask other, real, imaginary, is_real;
  vec sign = {0};
  UNROLL for (int i = 0; i < LANES; i++) {
    other[i] = i ^ 1;
    real[i] = i & ~1;
    imaginary[i] = i | 1;
    is_real[i] = i & 1 ? 0 : -1;
    sign[i] = i & 1 ? 1 : -1;
  }
  vec input = pick(is_real, splat(u), (vec){0});
  for (int64_t n = 0; n < 2 * modes; n += LANES) {
    int64_t left = 2 * modes - n;
    vec old = load_some(z + n, left), factor = load_some(a + n, left);
    vec turned = shuffle(old, old, other) * shuffle(factor, factor, imaginary) * sign;
    vec new = old * shuffle(factor, factor, real) + turned;
    store_some(next + n, new + (b ? load_some(b + n, left) * splat(u) : input), left);
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

#endif
