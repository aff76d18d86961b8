/* Mamba's transition for the skeleton in scan.h.
 *
 *     delta = softplus(dt),   S = a S + w u k,   a = exp(delta A)
 *     w = delta                      Euler's step
 *     w = (a - 1) / A                the exact zero-order hold, with ZOH defined
 *
 * A state takes one exponential a token, forward or backward: a step leaves `a` to its adjoint.
 */
#include "vector.h"

#ifdef ZOH
enum { ENERGY = 0, ABREAST = 1 };
#else
enum { ENERGY = 0, ABREAST = 2 };
#endif

static const double LOG2_E = 1.4426950408889634074, LN2 = 0.69314718055994530942;

typedef struct {
  vec u, delta, slope; /* slope = d delta / d dt */
} Token;

/* softplus, and above 20 dt itself, as in torch */
INLINE Token token(vec u, vec dt, vec energy) {
  (void)energy;
  vec zero = {0}, size = pick(dt < zero, -dt, dt);
  vec shut = exponential(-size);
  shut = pick(size > splat(sizeof(REAL) == 8 ? 708 : 87), zero, shut);
  vec delta = pick(dt < zero, zero, dt) + log_one_plus(shut);
  vec slope = pick(dt < zero, shut, splat(1)) / (splat(1) + shut);
  mask straight = dt > splat(20);
  return (Token){u, pick(straight, dt, delta), pick(straight, splat(1), slope)};
}

INLINE Token spread(const Token *x, int64_t lane) {
  return (Token){splat(x->u[lane]), splat(x->delta[lane]), splat(x->slope[lane])};
}

#ifndef ZOH

typedef struct {
  vec rate; /* A / ln 2: exponentials are to the base 2 */
} Param;

typedef struct {
  vec decay;
} Memo;

typedef struct {
  vec written, decayed;
} Sums;

INLINE Param learned(vec A) { return (Param){A * splat((REAL)LOG2_E)}; }

INLINE vec step(vec S, vec key, const Param *param, const Token *x, Memo *memo) {
  Power p = power(x->delta * param->rate);
  memo->decay = scaled(splat(1) + p.rest, p.n);
  return memo->decay * S + x->delta * x->u * key;
}

INLINE vec adjoint(vec G, vec S, vec key, const Param *param, const Token *x, const Memo *memo,
                   Sums *sums, vec *grad_key, vec *grad_param) {
  vec carry = memo->decay * G, kept = carry * S;
  sums->written += key * G;
  sums->decayed += kept * param->rate;
  *grad_key += x->delta * x->u * G;
  *grad_param += kept * x->delta;
  return carry;
}

INLINE void finish(const Token *x, const Sums *sums, vec *grad_u, vec *grad_dt, vec *grad_energy) {
  *grad_u = x->delta * sums->written;
  *grad_dt = (x->u * sums->written + sums->decayed * splat((REAL)LN2)) * x->slope;
  *grad_energy = (vec){0};
}

#else

typedef struct {
  vec rate, inverse; /* A / ln 2, 1 / A */
} Param;

typedef struct {
  vec decay, weight;
} Memo;

typedef struct {
  vec written, decayed, pushed;
} Sums;

INLINE vec size_of(vec x) { return pick(x < (vec){0}, -x, x); }

INLINE Param learned(vec A) { return (Param){A * splat((REAL)LOG2_E), splat(1) / A}; }

INLINE vec step(vec S, vec key, const Param *param, const Token *x, Memo *memo) {
  vec exponent = x->delta * param->rate;
  Power p = power(exponent);
  vec scale = scaled(splat(1), p.n);
  memo->decay = scale * p.rest + scale;
  memo->weight = (scale * p.rest + (scale - splat(1))) * param->inverse;
  /* A -> 0: within rounding, delta; 1 / A may be infinite there */
  mask flat = size_of(exponent) < splat(sizeof(REAL) == 8 ? 0x1p-53 : 0x1p-24);
  memo->weight = pick(flat, x->delta, memo->weight);
  return memo->decay * S + memo->weight * x->u * key;
}

/* d weight / d A = (delta a - weight) / A, or delta^2 sum_k (k + 1) / (k + 2)! (delta A)^k where that
 * would cancel */
INLINE vec bend(const Param *param, const Token *x, const Memo *memo) {
  static const REAL terms[][4] = {
      FOUR(1.0 / 2), FOUR(2.0 / 6), FOUR(3.0 / 24), FOUR(4.0 / 120), FOUR(5.0 / 720),
      FOUR(6.0 / 5040), FOUR(7.0 / 40320), FOUR(8.0 / 362880), FOUR(9.0 / 3628800),
      FOUR(10.0 / 39916800), FOUR(11.0 / 479001600), FOUR(12.0 / 6227020800),
      FOUR(13.0 / 87178291200), FOUR(14.0 / 1307674368000), FOUR(15.0 / 20922789888000)};
  vec exponent = x->delta * param->rate, natural = exponent * splat((REAL)LN2);
  vec sum = polynomial(terms, sizeof(REAL) == 8 ? 14 : 7, natural);
  vec away = (x->delta * memo->decay - memo->weight) * param->inverse;
  return pick(size_of(exponent) < splat((REAL)0.5), x->delta * x->delta * sum, away);
}

INLINE vec adjoint(vec G, vec S, vec key, const Param *param, const Token *x, const Memo *memo,
                   Sums *sums, vec *grad_key, vec *grad_param) {
  vec carry = memo->decay * G, kept = carry * S, written = memo->weight * G;
  sums->written += key * written;
  sums->decayed += kept * param->rate;
  sums->pushed += key * carry;
  *grad_key += x->u * written;
  *grad_param += kept * x->delta + x->u * key * G * bend(param, x, memo);
  return carry;
}

INLINE void finish(const Token *x, const Sums *sums, vec *grad_u, vec *grad_dt, vec *grad_energy) {
  *grad_u = sums->written;
  *grad_dt = (x->u * sums->pushed + sums->decayed * splat((REAL)LN2)) * x->slope;
  *grad_energy = (vec){0};
}

#endif

#include "scan.h"
