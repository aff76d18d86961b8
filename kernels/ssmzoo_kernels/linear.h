/* Products of a few rows with a matrix, and numbers of fewer bits than REAL.
 *
 * Sums run in REAL, in one order whatever the number of rows and threads.
 */
#ifndef SSMZOO_LINEAR_H
#define SSMZOO_LINEAR_H

#include "vector.h"
#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

enum { AS_REAL, BFLOAT16, FLOAT16, INT8 };
enum { STREAM_BYTES = 4096 }; /* bytes that a stream is asked for ahead */

/* Numbers of one of the types above. */
typedef struct {
  const void *at;
  int64_t type;
} Numbers;

typedef int8_t bytes __attribute__((vector_size(LANES)));
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

INLINE words widen(halves x) {
#ifdef __AVX512F__
  if (LANES == 16) CONVERTED(__m256i, __m512i, words, _mm512_cvtepu16_epi32);
#elif defined(__AVX2__)
  if (LANES == 8) CONVERTED(__m128i, __m256i, words, _mm256_cvtepu16_epi32);
#endif
  return __builtin_convertvector(x, words);
}

INLINE vec from_bfloat16(halves x) {
  return __builtin_convertvector((floats)(widen(x) << 16), vec);
}

INLINE vec from_float16(halves x) {
#ifdef __AVX512F__
  if (LANES == 16) CONVERTED(__m256i, __m512, vec, _mm512_cvtph_ps);
#elif defined(__F16C__)
  if (LANES == 8) CONVERTED(__m128i, __m256, vec, _mm256_cvtph_ps);
#endif
  words bits = widen(x);
  words sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7fffu) << 13;
  floats small = (floats)magnitude * 0x1p112f; /* the exponent's other bias, and subnormals */
  words endless = (words)((bits & 0x7c00u) == 0x7c00u) & (magnitude | 0x7f800000u);
  return __builtin_convertvector((floats)((words)small | endless | sign), vec);
}

INLINE vec from_int8(bytes x) {
#ifdef __AVX512F__
#define FLOATS(narrow) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(narrow))
  if (LANES == 16) CONVERTED(__m128i, __m512, vec, FLOATS);
#elif defined(__AVX2__)
#define FLOATS(narrow) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(narrow))
  if (LANES == 8) CONVERTED(__m128i, __m256, vec, FLOATS);
#endif
  return __builtin_convertvector(x, vec);
}
#undef FLOATS
#undef CONVERTED

/* LANES numbers from the i-th on, or `count` of them and zeros. */
INLINE vec read(int type, const void *from, int64_t i, int64_t count) {
  if (type == AS_REAL) return load_some((const REAL *)from + i, count);
  size_t some = (size_t)(count < LANES ? count : LANES);
  if (type == INT8) {
    bytes narrow = {0};
    if (count >= LANES)
      memcpy(&narrow, (const int8_t *)from + i, sizeof narrow);
    else
      memcpy(&narrow, (const int8_t *)from + i, some);
    return from_int8(narrow);
  }
  halves x = {0};
  if (count >= LANES)
    memcpy(&x, (const uint16_t *)from + i, sizeof x);
  else
    memcpy(&x, (const uint16_t *)from + i, 2 * some);
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

/* y[m, o] = scale[o] sum_i x[m, i] w[o, i] + bias[o] for o from `first` to `last`.
 *
 * Several outputs at a time: their sums do not wait for one another. Each sum's order is the same. */
INLINE void product_block(int type, int count, int together, const REAL *x, int64_t x_row,
                          const void *w, Numbers scale, Numbers bias, REAL *y, int64_t y_row, int64_t inputs,
                          int64_t first, int64_t last) {
  int64_t size = type == AS_REAL ? (int64_t)sizeof(REAL) : type == INT8 ? 1 : 2;
  int64_t whole = inputs / LANES * LANES;
  for (int64_t o = first; o < last; o += together) {
    const char *row[4];
    vec sums[4][4] = {{{0}}};
    UNROLL for (int r = 0; r < together; r++) /* past the end, the last one again */
      row[r] = (const char *)w + (o + r < last ? o + r : last - 1) * inputs * size;
    for (int64_t i = 0; i < whole; i += LANES) {
      /* rows are short: the CPU's own prefetching would begin anew with each few of them */
      int64_t ahead = together > 1 ? together * inputs * size : STREAM_BYTES;
      UNROLL for (int r = 0; r < together; r++) __builtin_prefetch(row[r] + i * size + ahead);
      vec values[4];
      UNROLL for (int m = 0; m < count; m++) values[m] = load(x + m * x_row + i);
      UNROLL for (int r = 0; r < together; r++) {
        vec weight = read(type, row[r], i, LANES);
        UNROLL for (int m = 0; m < count; m++) sums[r][m] = multiply_add(weight, values[m], sums[r][m]);
      }
    }
    if (whole < inputs) UNROLL for (int r = 0; r < together; r++) {
      vec weight = read(type, row[r], whole, inputs - whole);
      UNROLL for (int m = 0; m < count; m++)
        sums[r][m] =
            multiply_add(weight, load_some(x + m * x_row + whole, inputs - whole), sums[r][m]);
    }
    UNROLL for (int r = 0; r < together; r++) if (o + r < last) {
      UNROLL for (int m = 0; m < count; m++) {
        REAL sum = total(sums[r][m]);
        if (scale.at) sum *= number(scale, o + r);
        y[m * y_row + o + r] = bias.at ? sum + number(bias, o + r) : sum;
      }
    }
  }
}

/* The same for any number of rows: a few at a time, while the weights are in the cache. */
INLINE void product(Numbers w, Numbers scale, Numbers bias, int64_t rows, const REAL *x, int64_t x_row, REAL *y,
                    int64_t y_row, int64_t inputs, int64_t first, int64_t last) {
  const int64_t most = rows > 1 ? 16 : last - first;
#define BLOCK(type, count, together)                                                        \
  product_block(type, count, together, x + m * x_row, x_row, w.at, scale, bias, y + m * y_row,    \
                y_row, inputs, o, o + most < last ? o + most : last)
#define CASES(type)                       \
  if (count == 4) BLOCK(type, 4, 2);      \
  else if (count == 2) BLOCK(type, 2, 4); \
  else BLOCK(type, 1, 4);
#define STREAM                               \
  if (count == 4) BLOCK(AS_REAL, 4, 1);      \
  else if (count == 2) BLOCK(AS_REAL, 2, 1); \
  else BLOCK(AS_REAL, 1, 1);
  for (int64_t o = first; o < last; o += most)
    for (int64_t m = 0, count; m < rows; m += count) {
      count = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
      if (w.type == INT8) {
        CASES(INT8)
      } else if (w.type == AS_REAL || sizeof(REAL) == 8) { /* 16 bits go with float */
        /* vectors of 64 bytes wait for nothing but the memory, which is fastest in one stream */
        if (sizeof(vec) == 64) {
          STREAM
        } else {
          CASES(AS_REAL)
        }
      } else if (w.type == BFLOAT16) {
        CASES(BFLOAT16)
      } else {
        CASES(FLOAT16)
      }
    }
#undef STREAM
#undef CASES
#undef BLOCK
}

#endif
