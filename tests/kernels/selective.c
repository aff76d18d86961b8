/* A second family for the skeleton in scan.h: Mamba's selective scan, with a learned param A.
 *
 *     step = softplus(dt),   S = exp(step A) S + step u k
 */
#include "vector.h"

#define PARAM

typedef struct {
  vec u, step, slope;
} Token;

typedef struct {
  vec u, step;
} Sums;

INLINE Token token(vec u, vec dt, vec energy) {
  (void)energy;
  vec step;
  for (int i = 0; i < LANES; i++)
    step[i] = dt[i] > 20 ? dt[i] : (REAL)__builtin_log1p(__builtin_exp((double)dt[i]));
  return (Token){u, step, sigmoid(dt)};
}

INLINE Token spread(const Token *x, int64_t lane) {
  return (Token){splat(x->u[lane]), splat(x->step[lane]), splat(x->slope[lane])};
}

INLINE vec step(vec S, vec key, vec param, const Token *x) {
  return exponential(x->step * param) * S + x->step * x->u * key;
}

INLINE vec adjoint(vec G, vec S, vec key, vec param, const Token *x, Sums *sums, vec *grad_key,
                   vec *grad_param) {
  vec carry = exponential(x->step * param) * G;
  sums->u += x->step * key * G;
  sums->step += carry * param * S + x->u * key * G;
  *grad_key += x->step * x->u * G;
  *grad_param += carry * x->step * S;
  return carry;
}

INLINE void finish(const Token *x, const Sums *sums, vec *grad_u, vec *grad_dt, vec *grad_energy) {
  *grad_u = sums->u;
  *grad_dt = sums->step * x->slope;
  *grad_energy = (vec){0};
}

#include "scan.h"
