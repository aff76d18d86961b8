/* Vectors of REAL, for C kernels that run over channels.
 *
 * Only what GCC and clang share: vector_size types, lane-wise operators, comparisons that give
 * integer masks. No flag may let the compiler assume finite numbers or reorder sums: NaN and Inf
 * keep their meaning, and the same inputs give the same bits for any number of threads.
 */
#ifndef SSMZOO_VECTOR_H
#define SSMZOO_VECTOR_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef REAL
#define REAL float
#endif

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#endif
#if defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#define NEON
#endif
#ifdef __AVX512F__
#define VEC_BYTES 64
#elif defined(__AVX__)
#define VEC_BYTES 32
#else
#define VEC_BYTES 16
#endif
#if defined(__AVX512F__) || defined(NEON)
#define MANY_REGISTERS /* 32 of them, else 16 */
#endif

/* Let a number be loaded after the one before it. GCC loads all that a block of sums is multiplied with
 * first, in more registers than NEON has. */
#ifdef NEON
#define IN_TURN(x) __asm__ volatile("" : "+w"(x))
#else
#define IN_TURN(x) (void)(x)
#endif

/* GCC would load x anew for each product of it: two thirds of the speed (Zen 3). */
#ifdef __x86_64__
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define IN_REGISTER(x) IN_TURN(x)
#endif

/* Let what lies at `from` be loaded after x is computed: of many steps that do not wait for one
 * another, compilers would begin so many that NEON's registers do not hold them. */
#ifdef NEON
#define LOAD_AFTER(x, from) __asm__("" : "+r"(from) : "w"(x))
#define COEFFICIENT(row) load(row)
#else
#define LOAD_AFTER(x, from) (void)(from)
#define COEFFICIENT(row) splat((row)[0])
#endif

typedef REAL vec __attribute__((vector_size(VEC_BYTES)));
typedef __typeof__((vec){0} < (vec){0}) mask; /* signed integers of REAL's size */

enum { LANES = VEC_BYTES / sizeof(REAL) };

/* Arrays of vectors are registers once the loops over them are gone. Clang 14 takes a number as a wish,
 * and would tell of loops that some callers alone let it unroll. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#pragma clang diagnostic ignored "-Wpass-failed"
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE vec splat(REAL x) { return x - (vec){0}; }

INLINE vec load(const REAL *from) {
  vec x;
  memcpy(&x, from, sizeof x);
  return x;
}

INLINE void store(REAL *to, vec x) { memcpy(to, &x, sizeof x); }

/* Load fewer lanes of x than it has. Short vectors are copied lane by lane: around a call, loops would
 * keep on the stack what they hold in registers. */
#define LOAD_LANES(x, from, count)                             \
  do {                                                         \
    if (VEC_BYTES == 16)                                       \
      UNROLL for (int lane = 0; lane < LANES - 1; lane++) {    \
        if (lane < (count)) (x)[lane] = (from)[lane];          \
      }                                                        \
    else                                                       \
      memcpy(&(x), from, (size_t)(count) * sizeof *(from));    \
  } while (0)

/* The last vector of a row may have fewer channels than lanes; missing ones read as 0. */
INLINE vec load_some(const REAL *from, int64_t count) {
  if (count >= LANES) return load(from);
  vec x = {0};
  LOAD_LANES(x, from, count);
  return x;
}

INLINE void store_some(REAL *to, vec x, int64_t count) {
  if (count >= LANES)
    store(to, x);
  else if (VEC_BYTES == 16)
    UNROLL for (int i = 0; i < LANES - 1; i++) {
      if (i < count) to[i] = x[i];
    }
  else
    memcpy(to, &x, (size_t)count * sizeof(REAL));
}

INLINE vec pick(mask where, vec yes, vec no) {
  return (vec)((where & (mask)yes) | (~where & (mask)no));
}

/* Lanes of two vectors: those of the second count on from LANES. */
INLINE vec shuffle(vec a, vec b, mask from) {
#ifdef __clang__
  vec out;
  UNROLL for (int i = 0; i < LANES; i++) out[i] = from[i] < LANES ? a[from[i]] : b[from[i] - LANES];
  return out;
#else
  return __builtin_shuffle(a, b, from);
#endif
}

/* Turn a square, a vector a row. */
INLINE void transpose(vec *rows) {
  UNROLL for (int half = LANES / 2; half; half /= 2) {
    mask low, high;
    UNROLL for (int i = 0; i < LANES; i++) {
      low[i] = i & half ? LANES + (i ^ half) : i;
      high[i] = i & half ? LANES + i : i ^ half;
    }
    UNROLL for (int i = 0; i < LANES; i++) if (!(i & half)) {
      vec a = rows[i], b = rows[i + half];
      rows[i] = shuffle(a, b, low);
      rows[i + half] = shuffle(a, b, high);
    }
  }
}

/* a b + c, rounded once with AVX-512, FMA or NEON; elsewhere the compiler may choose. GCC 13 leaves it to the loop around an expression whether
 * it rounds once or twice (Zen 4), and then a sum's bits depend on what is summed beside it. */
INLINE vec multiply_add(vec a, vec b, vec c) {
#ifdef __AVX512F__
  if (sizeof(REAL) == 4) return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  return (vec)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  if (sizeof(REAL) == 4) return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  return (vec)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(NEON)
  if (sizeof(REAL) == 4)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
  return (vec)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return a * b + c;
#endif
}

/* NaN stays NaN. */
INLINE vec at_most(vec x, REAL bound) {
#ifdef NEON
  if (sizeof(REAL) == 4) return (vec)vminq_f32((float32x4_t)x, (float32x4_t)splat(bound));
  return (vec)vminq_f64((float64x2_t)x, (float64x2_t)splat(bound));
#else
  return pick(x > splat(bound), splat(bound), x);
#endif
}

INLINE vec at_least(vec x, REAL bound) {
#ifdef NEON
  if (sizeof(REAL) == 4) return (vec)vmaxq_f32((float32x4_t)x, (float32x4_t)splat(bound));
  return (vec)vmaxq_f64((float64x2_t)x, (float64x2_t)splat(bound));
#else
  return pick(x < splat(bound), splat(bound), x);
#endif
}

/* The sum of the lanes: upper halves are added to lower ones, vector by vector; where scalars are
 * added so, GCC 13 takes wrong lanes (float64, AVX-512, two sums side by side). */
INLINE REAL total(vec x) {
  enum { LEAST = 16 / sizeof(REAL) };
  typedef REAL least __attribute__((vector_size(16)));
#ifdef __AVX512F__
  typedef REAL pair __attribute__((vector_size(32)));
  pair wide = (pair)_mm512_castpd512_pd256((__m512d)x);
  wide += (pair)_mm512_extractf64x4_pd((__m512d)x, 1);
#else
  vec wide = x;
#endif
  least sums[sizeof wide / 16];
  memcpy(sums, &wide, sizeof wide);
  if (sizeof wide == 32) sums[0] += sums[sizeof wide / 16 - 1];
  if (LEAST == 2) return sums[0][0] + sums[0][1];
  return (sums[0][0] + sums[0][2 % LEAST]) + (sums[0][1] + sums[0][3 % LEAST]);
}

/* The sum of four vectors, as loops keep that add to each in turn. */
INLINE REAL joined(const vec *sums) { return total((sums[0] + sums[1]) + (sums[2] + sums[3])); }

/* A coefficient of a polynomial, in each lane of a short vector of floats. */
#define FOUR(x) {x, x, x, x}

/* The sum of fit[i] x^i. NEON adds to a copy of each coefficient. From memory it costs no more than
 * from a register, and they would fill half of those: so they are loaded, a few at a time. */
INLINE vec polynomial(const REAL (*fit)[4], const int last, vec x) {
  LOAD_AFTER(x, fit);
  vec sum = COEFFICIENT(fit[last]);
  UNROLL for (int i = last - 1; i >= 0; i--) {
    if (i % 4 == 3) LOAD_AFTER(sum, fit);
    sum = sum * x + COEFFICIENT(fit[i]);
  }
  return sum;
}

/* exp(x) = 2^n exp(r), |r| <= ln(2)/2, exp(r) by its series. Beyond the range the result is the
 * smallest normal number or infinity; NaN stays NaN. */
INLINE vec exponential(vec x) {
  const int wide = sizeof(REAL) == 8;
  const REAL high = wide ? 709.4 : 88.3, low = wide ? -708.3 : -87.3;
  const REAL shift = wide ? 0x1.8p52 : 0x1.8p23;
  const REAL ln2_high = wide ? 0x1.62e42feep-1 : 0x1.62ep-1;
  const REAL ln2_low = wide ? 0x1.a39ef35793c76p-33 : 0x1.0bfbe8p-15;
  static const REAL series[][4] = {
      FOUR(1.0), FOUR(1.0), FOUR(1.0 / 2), FOUR(1.0 / 6), FOUR(1.0 / 24), FOUR(1.0 / 120),
      FOUR(1.0 / 720), FOUR(1.0 / 5040), FOUR(1.0 / 40320), FOUR(1.0 / 362880), FOUR(1.0 / 3628800),
      FOUR(1.0 / 39916800), FOUR(1.0 / 479001600), FOUR(1.0 / 6227020800)};
  mask over = x > splat(high);
  x = at_least(at_most(x, high), low);
  vec shifted = x * splat((REAL)1.4426950408889634) + splat(shift); /* n in the low bits */
  vec n = shifted - splat(shift);
  vec r = x - n * splat(ln2_high) - n * splat(ln2_low);
  vec sum = polynomial(series, wide ? 13 : 7, r);
  mask power = ((mask)shifted << (wide ? 52 : 23)) + (mask)splat(1);
  return pick(over, splat((REAL)__builtin_inf()), sum * (vec)power);
}

/* 2^x = 2^n (1 + rest), n a whole number, |rest| <= 0.42; NaN stays NaN. */
typedef struct {
  vec n, rest;
} Power;

/* `rest` is r Q(r) with r = x - n, Q the polynomial of least relative error, 2.1e-8, in float and the
 * series in double: what errs where 2^x is close to 1 is x by that factor, not 2^x by that much. */
INLINE Power power(vec x) {
  static const REAL least[][4] = {
      FOUR(0x1.62e430p-1f), FOUR(0x1.ebfbdep-3f), FOUR(0x1.c6af6ep-5f), FOUR(0x1.3b2ba0p-7f),
      FOUR(0x1.5f07b4p-10f), FOUR(0x1.4308fap-13f)};
  static const REAL series[][4] = {
      FOUR(0.69314718055994530942), FOUR(0.24022650695910071233), FOUR(0.055504108664821579953),
      FOUR(0.0096181291076284771620), FOUR(0.0013333558146428443423),
      FOUR(0.00015403530393381609954), FOUR(1.5252733804059840280e-5),
      FOUR(1.3215486790144309488e-6), FOUR(1.0178086009239699727e-7),
      FOUR(7.0549116208011233299e-9), FOUR(4.4455382718708114976e-10),
      FOUR(2.5678435993488205142e-11), FOUR(1.3691488853904128881e-12)};
  const int wide = sizeof(REAL) == 8, last = wide ? 12 : 5;
#ifdef __AVX512F__
  vec n; /* of a NaN and a bound, max returns its second operand */
  if (wide) {
    x = (vec)_mm512_max_pd((__m512d)splat(-1100), (__m512d)x);
    n = (vec)_mm512_roundscale_pd((__m512d)x, 0);
  } else {
    x = (vec)_mm512_max_ps((__m512)splat(-160), (__m512)x);
    n = (vec)_mm512_roundscale_ps((__m512)x, 0);
  }
#else
  const REAL high = wide ? 1024 : 128, low = wide ? -1023 : -127;
  const REAL shift = wide ? 0x1.8p52 : 0x1.8p23;
  x = at_least(at_most(x, high), low);
  vec n = (x + splat(shift)) - splat(shift);
#endif
  vec r = x - n;
  return (Power){n, polynomial(wide ? series : least, last, r) * r};
}

/* 2^n x, for the n of a power. Without AVX-512 it is 0 or infinite where 2^n is no normal number. */
INLINE vec scaled(vec x, vec n) {
#ifdef __AVX512F__
  if (sizeof(REAL) == 8) return (vec)_mm512_scalef_pd((__m512d)x, (__m512d)n);
  return (vec)_mm512_scalef_ps((__m512)x, (__m512)n);
#else
  const int wide = sizeof(REAL) == 8;
  vec biased = n + splat(wide ? 0x1.8p52 + 1023 : 0x1.8p23 + 127);
  return x * (vec)((mask)biased << (wide ? 52 : 23));
#endif
}

/* 2^x; 0 of what is too small, minus infinity too */
INLINE vec raised(vec x) {
  Power found = power(x);
  return scaled(splat(1) + found.rest, found.n);
}

INLINE vec sigmoid(vec x) { return splat(1) / (splat(1) + exponential(-x)); }

/* log(1 + y) = 2 artanh(y / (2 + y)) on 0 <= y <= 1, by its series */
INLINE vec log_one_plus(vec y) {
  static const REAL series[][4] = {
      FOUR(1.0), FOUR(1.0 / 3), FOUR(1.0 / 5), FOUR(1.0 / 7), FOUR(1.0 / 9), FOUR(1.0 / 11),
      FOUR(1.0 / 13), FOUR(1.0 / 15), FOUR(1.0 / 17), FOUR(1.0 / 19), FOUR(1.0 / 21),
      FOUR(1.0 / 23), FOUR(1.0 / 25), FOUR(1.0 / 27), FOUR(1.0 / 29), FOUR(1.0 / 31),
      FOUR(1.0 / 33)};
  vec s = y / (splat(2) + y);
  return splat(2) * s * polynomial(series, sizeof(REAL) == 8 ? 16 : 7, s * s);
}

/* log(1 + exp(x)), and above 20 x itself, as in torch */
INLINE vec softplus(vec x) {
  vec zero = {0}, size = pick(x < zero, -x, x), shut = exponential(-size);
  shut = pick(size > splat(sizeof(REAL) == 8 ? 708 : 87), zero, shut);
  vec y = pick(x < zero, zero, x) + log_one_plus(shut);
  return pick(x > splat(20), x, y);
}

/* Scratch of a thread, aligned for vectors. */
INLINE void *scratch(int64_t bytes) {
  return aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
}

#endif
