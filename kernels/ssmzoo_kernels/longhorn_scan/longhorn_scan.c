/* Longhorn's transition for the skeleton in scan.h.
 *
 *     rate = 1 / (1 + exp(-dt) + |k|^2),   S += rate k (u - k S)
 *
 * The residual form keeps full precision where the decay 1 - rate k^2 cancels.
 */
#include "vector.h"

enum { ENERGY = 1, ABREAST = 2 };

typedef struct {
  vec u, rate;
  vec slope; /* d log(rate) / d dt = rate exp(-dt) */
} Token;

typedef struct {
  vec u, rate; /* the gradient of rate times rate */
} Sums;

typedef struct {
} Param, Memo;

INLINE Token token(vec u, vec dt, vec energy) {
  vec shut = exponential(-dt);
  vec rate = splat(1) / (splat(1) + shut + energy);
  /* rate is 0 where exp(-dt) overflows, and so is everything that slope is multiplied with */
  return (Token){u, rate, at_most(shut, sizeof(REAL) == 8 ? 1e300 : 1e38f) * rate};
}

INLINE Token spread(const Token *x, int64_t lane) {
  return (Token){splat(x->u[lane]), splat(x->rate[lane]), splat(x->slope[lane])};
}

INLINE Param learned(vec param) {
  (void)param;
  return (Param){};
}

INLINE vec step(vec S, vec key, const Param *param, const Token *x, Memo *memo) {
  (void)param, (void)memo;
  return S + x->rate * key * (x->u - key * S);
}

INLINE vec adjoint(vec G, vec S, vec key, const Param *param, const Token *x, const Memo *memo,
                   Sums *sums, vec *grad_key, vec *grad_param) {
  (void)param, (void)memo, (void)grad_param;
  vec moved = x->rate * G, keyed = key * moved;
  vec recalled = key * S, error = x->u - recalled;
  sums->u += keyed;
  sums->rate += keyed * error;
  *grad_key += moved * (error - recalled);
  return G - key * keyed;
}

INLINE void finish(const Token *x, const Sums *sums, vec *grad_u, vec *grad_dt, vec *grad_energy) {
  *grad_u = sums->u;
  *grad_dt = sums->rate * x->slope;
  *grad_energy = -sums->rate * x->rate;
}

#include "scan.h"
