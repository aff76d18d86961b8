/* Numbers of fewer bits than REAL: bfloat16, float16. */
#ifndef SSMZOO_NUMBERS_H
#define SSMZOO_NUMBERS_H

#include "vector.h"
#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

enum { AS_REAL, BFLOAT16, FLOAT16, INT8, INT4 };

/* Numbers of one of the types above. */
typedef struct {
  const void *at;
  int64_t type;
} Numbers;

typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef float floats __attribute__((vector_size(4 * LANES)));

/* Convert x by the CPU's own instruction, for which GCC 12 takes four. */
#define CONVERTED(NARROW, WIDE, RESULT, INSTRUCTION) \
  do {                                               \
    NARROW narrow = {0};                             \
    memcpy(&narrow, &x, sizeof x);                   \
    WIDE wide = INSTRUCTION(narrow);                 \
    RESULT out;                                      \
    memcpy(&out, &wide, sizeof out);                 \
    return out;                                      \
  } while (0)

INLINE words widened(halves x) {
#ifdef __AVX512F__
  if (LANES == 16) CONVERTED(__m256i, __m512i, words, _mm512_cvtepu16_epi32);
#elif defined(__AVX2__)
  if (LANES == 8) CONVERTED(__m128i, __m256i, words, _mm256_cvtepu16_epi32);
#endif
  return __builtin_convertvector(x, words);
}

INLINE vec from_bfloat16(halves x) {
#ifdef NEON
#define ABOVE_ZEROS(narrow) vzip1q_u16(vdupq_n_u16(0), vcombine_u16(narrow, vdup_n_u16(0)))
  if (LANES == 4) CONVERTED(uint16x4_t, uint16x8_t, vec, ABOVE_ZEROS);
#endif
  return __builtin_convertvector((floats)(widened(x) << 16), vec);
}

INLINE vec from_float16(halves x) {
#ifdef __AVX512F__
  if (LANES == 16) CONVERTED(__m256i, __m512, vec, _mm512_cvtph_ps);
#elif defined(__F16C__)
  if (LANES == 8) CONVERTED(__m128i, __m256, vec, _mm256_cvtph_ps);
#elif defined(NEON)
  if (LANES == 4) CONVERTED(float16x4_t, float32x4_t, vec, vcvt_f32_f16);
#endif
  words bits = widened(x);
  words sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7fffu) << 13;
  floats small = (floats)magnitude * 0x1p112f; /* the exponent's other bias, and subnormals */
  words endless = (words)((bits & 0x7c00u) == 0x7c00u) & (magnitude | 0x7f800000u);
  return __builtin_convertvector((floats)((words)small | endless | sign), vec);
}

#undef CONVERTED

/* LANES numbers from the i-th on, or `count` of them and zeros. */
INLINE vec read(int type, const void *from, int64_t i, int64_t count) {
  if (type == AS_REAL) return load_some((const REAL *)from + i, count);
  int64_t some = count < LANES ? count : LANES;
  halves x = {0};
  const uint16_t *at = (const uint16_t *)from + i;
  if (count >= LANES)
    memcpy(&x, at, sizeof x);
  else
    LOAD_LANES(x, at, some);
  return type == BFLOAT16 ? from_bfloat16(x) : from_float16(x);
}

INLINE vec read_numbers(Numbers x, int64_t i, int64_t count) {
  if (x.type == AS_REAL) return read(AS_REAL, x.at, i, count);
  return x.type == BFLOAT16 ? read(BFLOAT16, x.at, i, count) : read(FLOAT16, x.at, i, count);
}

INLINE REAL number(Numbers x, int64_t i) {
  if (x.type == AS_REAL) return ((const REAL *)x.at)[i];
  return read_numbers(x, i, 1)[0];
}

/* Round to the nearest, ties to even. */
INLINE uint16_t to_bfloat16(REAL x) {
  float narrow = (float)x;
  uint32_t bits;
  memcpy(&bits, &narrow, sizeof bits);
  if (x != x) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t to_float16(REAL x) {
  float narrow = (float)x;
  uint32_t bits;
  memcpy(&bits, &narrow, sizeof bits);
  uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and more: infinite */
  if (bits < 0x38800000) { /* below 2^-14: a sum whose last bit weighs 2^-24 rounds it */
    float magnitude, sum;
    memcpy(&magnitude, &bits, sizeof bits);
    sum = magnitude + 0.5f;
    memcpy(&bits, &sum, sizeof bits);
    return (uint16_t)(sign | (bits - 0x3f000000));
  }
  return (uint16_t)(sign | ((bits + 0xc8000fff + (bits >> 13 & 1)) >> 13));
}

INLINE void write_number(void *to, int64_t type, int64_t i, REAL x) {
  if (type == AS_REAL)
    ((REAL *)to)[i] = x;
  else
    ((uint16_t *)to)[i] = type == BFLOAT16 ? to_bfloat16(x) : to_float16(x);
}

#endif
