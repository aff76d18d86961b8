/* The leaky sum h[t] = decay h[t-1] + x[t], forward and backward.
 *
 * One file, plain C: the zoo defines REAL, float or double, and adds OpenMP where the compiler has
 * it. A task is a column of all sequences, so every sum is taken in one order, whatever the number
 * of threads. Sequences lie one behind the other; sequence s has the tokens offsets[s] to
 * offsets[s + 1]. Absent tensors are null.
 */
#include <stdint.h>

typedef struct {
  const int64_t *offsets;
  int64_t sequences, width;
} Sizes;

void forward(const Sizes *n, const REAL *x, const REAL *decay, const REAL *initial, REAL *h,
             REAL *final, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t d = 0; d < n->width; d++)
    for (int64_t s = 0; s < n->sequences; s++) {
      REAL state = initial ? initial[s * n->width + d] : 0;
      for (int64_t t = n->offsets[s]; t < n->offsets[s + 1]; t++)
        h[t * n->width + d] = state = decay[d] * state + x[t * n->width + d];
      final[s * n->width + d] = state;
    }
}

void backward(const Sizes *n, const REAL *grad_h, const REAL *grad_final, const REAL *x,
              const REAL *decay, const REAL *initial, REAL *grad_x, REAL *grad_decay,
              REAL *grad_initial, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t d = 0; d < n->width; d++) {
    REAL total = 0;
    for (int64_t s = 0; s < n->sequences; s++) {
      REAL state = initial ? initial[s * n->width + d] : 0;
      for (int64_t t = n->offsets[s]; t < n->offsets[s + 1]; t++) {
        grad_x[t * n->width + d] = state; /* for the second pass */
        state = decay[d] * state + x[t * n->width + d];
      }
      REAL carry = grad_final ? grad_final[s * n->width + d] : 0;
      for (int64_t t = n->offsets[s + 1] - 1; t >= n->offsets[s]; t--) {
        REAL *place = grad_x + t * n->width + d;
        if (grad_h) carry += grad_h[t * n->width + d];
        total += carry * *place;
        *place = carry;
        carry *= decay[d];
      }
      if (grad_initial) grad_initial[s * n->width + d] = carry;
    }
    grad_decay[d] = total;
  }
}
