/* Products of a few rows with a matrix of eight or four bits, for float alone. */
#ifndef SSMZOO_FEW_BITS_H
#define SSMZOO_FEW_BITS_H

#include "numbers.h"

enum { STREAM_BYTES = 8192 }; /* bytes that a stream is asked for ahead */

/* Weights of eight and four bits: sums of a group of inputs are whole numbers. The inputs of a group are
 * rounded to 16 bits, by at most a 65,278th of the largest of them. */
enum { MOST_ROUNDED = 2048, INT8_GROUP = 256, INT4_GROUP = 32, INT4_OUTPUTS = 64 };
enum { LARGEST = 127 * 256 + 127 }; /* whose higher byte is a signed one, too, if the lower one is */
typedef int16_t shorts __attribute__((vector_size(VEC_BYTES)));
typedef uint16_t unsigned_shorts __attribute__((vector_size(VEC_BYTES)));
typedef int32_t ints __attribute__((vector_size(VEC_BYTES)));
typedef float singles __attribute__((vector_size(VEC_BYTES)));
typedef int16_t stored_shorts __attribute__((vector_size(VEC_BYTES), aligned(2), may_alias));
enum { INTS = VEC_BYTES / 4, SHORTS = VEC_BYTES / 2, PARTS = 16 / INTS };

/* Some of a row of x. */
typedef struct {
  int16_t value[MOST_ROUNDED];
  int32_t sum[MOST_ROUNDED / INT4_GROUP];
  float scale[MOST_ROUNDED / INT4_GROUP];
} RoundedInputs;

/* Round `inputs` of a row, and zeros behind them up to whole groups. A group that holds a NaN or an
 * infinity makes outputs NaN; one whose largest input is below 1e-30 counts as zeros. */
static __attribute__((noinline)) void round_piece(const REAL *x, int64_t inputs, int64_t group,
                                                  RoundedInputs *to) {
  typedef int16_t narrow __attribute__((vector_size(VEC_BYTES / 2)));
  for (int64_t g = 0; g * group < inputs; g++) {
    const REAL *from = x + g * group;
    int64_t left = inputs - g * group;
    ints most = {0}, sum = {0};
    for (int64_t i = 0; i < group && i < left; i += INTS) {
      ints size = (ints)load_some(from + i, left - i) & 0x7fffffff, more = size > most;
      most = (size & more) | (most & ~more);
    }
    int32_t bits = 0, whole_sum = 0;
    float largest;
    UNROLL for (int i = 0; i < INTS; i++) bits = most[i] > bits ? most[i] : bits;
    memcpy(&largest, &bits, sizeof bits);
    int finite = bits < 0x7f800000;
    float inverse = finite && largest > 1e-30f ? LARGEST / largest : 0;
    for (int64_t i = 0; i < group; i += INTS) { /* whole numbers, in the last bits */
      vec value = finite && i < left ? load_some(from + i, left - i) : splat(0);
      vec moved = multiply_add(value, splat((REAL)inverse), splat((REAL)0x1.8p23));
      ints whole = (ints)moved - 0x4b400000;
      narrow some = __builtin_convertvector(whole, narrow);
      memcpy(to->value + g * group + i, &some, sizeof some);
      sum += whole;
    }
    UNROLL for (int i = 0; i < INTS; i++) whole_sum += sum[i];
    to->sum[g] = whole_sum;
    to->scale[g] = largest / LARGEST; /* times zeros if it is infinite */
  }
}

/* Add products of pairs to a sum each; NEON adds those of other pairs. */
INLINE ints add_pairs(shorts a, shorts b, ints sums) {
#ifdef NEON
  int32x4_t low = vmlal_s16((int32x4_t)sums, vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
  return (ints)vmlal_high_s16(low, (int16x8_t)a, (int16x8_t)b);
#elif defined(__AVX512VNNI__)
  return (ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sums + (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sums + (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  ints x = (ints)a, y = (ints)b;
  return sums + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

/* Eight bits, a row an output. Where the CPU multiplies bytes, x is 256 times its higher ones and its
 * lower ones. */
#ifdef __ARM_FEATURE_DOTPROD
enum { STEP = 16, SUMS = 2 };
typedef int8x16_t Weights;
typedef struct {
  int8x16_t low, high;
} Values;

INLINE Values read_values(const int16_t *x) {
  int16x8_t a = vld1q_s16(x), b = vld1q_s16(x + 8);
  int16x8_t carry = vdupq_n_s16(128); /* a lower byte above 127 means 256 less */
  int8x16_t c = (int8x16_t)vaddq_s16(a, carry), d = (int8x16_t)vaddq_s16(b, carry);
  return (Values){vuzp1q_s8((int8x16_t)a, (int8x16_t)b), vuzp2q_s8(c, d)};
}

INLINE void add_bytes(Weights w, Values x, ints *to) {
  to[0] = (ints)vdotq_s32((int32x4_t)to[0], w, x.low);
  to[1] = (ints)vdotq_s32((int32x4_t)to[1], w, x.high);
}
#else
enum { STEP = SHORTS, SUMS = 1 };
typedef int8_t Weights __attribute__((vector_size(STEP)));
typedef shorts Values;

INLINE Values read_values(const int16_t *x) {
  Values value = *(const stored_shorts *)x;
  IN_REGISTER(value);
  return value;
}

INLINE void add_bytes(Weights w, Values x, ints *to) {
#ifdef __AVX512BW__ /* GCC 12 widens halves and joins them */
  shorts wide = (shorts)_mm512_cvtepi8_epi16((__m256i)w);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  shorts wide = (shorts)_mm256_cvtepi8_epi16((__m128i)w);
#else
  shorts wide = __builtin_convertvector(w, shorts);
#endif
  *to = add_pairs(wide, x, *to);
}
#endif

/* Add the products of a group's first `inputs` to the sums. Meanwhile ask for lines of the cache, `apart`
 * from one another, the next ones `step` times as far on as the row. */
INLINE void add_int8_group(int count, int together, const int8_t *const *row, const char *next,
                           int64_t apart, int64_t step, const RoundedInputs *x, int64_t group,
                           int64_t inputs, singles (*sums)[4]) {
  ints part[4][4][SUMS] = {{{{0}}}};
  int64_t at = group * INT8_GROUP, i = 0;
#define TAKE                                                                  \
  do {                                                                        \
    Weights weight[4];                                                        \
    UNROLL for (int r = 0; r < together; r++)                                 \
      memcpy(&weight[r], row[r] + at + i, sizeof weight[r]);                  \
    UNROLL for (int m = 0; m < count; m++) {                                  \
      Values value = read_values(x[m].value + at + i);                        \
      UNROLL for (int r = 0; r < together; r++)                               \
        add_bytes(weight[r], value, part[r][m]);                              \
    }                                                                         \
    i += STEP;                                                                \
  } while (0)
  while (i + 64 <= inputs) {
    const char *line = next + (at + i) * step;
    UNROLL for (int r = 0; r < together; r++) __builtin_prefetch(line + r * apart);
    UNROLL for (int n = 0; n < 64; n += STEP) TAKE;
  }
  while (i + STEP <= inputs) TAKE;
#undef TAKE
  for (; i < inputs; i++)
    UNROLL for (int r = 0; r < together; r++)
      UNROLL for (int m = 0; m < count; m++)
        part[r][m][0][0] += row[r][at + i] * x[m].value[at + i];
  UNROLL for (int r = 0; r < together; r++) UNROLL for (int m = 0; m < count; m++) {
    ints sum = part[r][m][0];
    if (SUMS == 2) sum += part[r][m][SUMS - 1] << 8;
    singles product = __builtin_convertvector(sum, singles);
    vec factor = (vec)(x[m].scale[group] - (singles){0});
    sums[r][m] = (singles)multiply_add((vec)product, factor, (vec)sums[r][m]);
  }
}

/* The same as product_block for weights of eight bits. */
INLINE void product_of_int8(int count, int together, const REAL *x, int64_t x_row, const void *w,
                            Numbers scale, Numbers bias, REAL *y, int64_t y_row, int64_t inputs,
                            int64_t first, int64_t last) {
  const int in_order = inputs <= MOST_ROUNDED; /* short rows are asked for as they lie in memory */
  const int64_t apart = in_order ? 64 : inputs, step = in_order ? together : 1;
  for (int64_t begin = 0; begin < inputs; begin += MOST_ROUNDED) {
    RoundedInputs piece[4];
    int64_t some = inputs - begin < MOST_ROUNDED ? inputs - begin : MOST_ROUNDED;
    UNROLL for (int m = 0; m < count; m++)
      round_piece(x + m * x_row + begin, some, INT8_GROUP, &piece[m]);
    for (int64_t o = first; o < last; o += together) {
      const int8_t *row[4];
      singles sums[4][4] = {{{0}}};
      UNROLL for (int r = 0; r < together; r++) /* past the end, the last one again */
        row[r] = (const int8_t *)w + (o + r < last ? o + r : last - 1) * inputs + begin;
      for (int64_t g = 0, left = some; left > 0; g++, left -= INT8_GROUP)
        add_int8_group(count, together, row, (const char *)(row[0] + together * inputs), apart, step,
                       piece, g, left < INT8_GROUP ? left : INT8_GROUP, sums);
      UNROLL for (int r = 0; r < together; r++) if (o + r < last) {
        UNROLL for (int m = 0; m < count; m++) {
          REAL *to = y + m * y_row + o + r, sum = total((vec)sums[r][m]) * number(scale, o + r);
          *to = begin ? *to + sum : bias.at ? sum + number(bias, o + r) : sum;
        }
      }
    }
  }
}

/* Four bits: weights plus 8, of INT4_OUTPUTS outputs at a time. A line of the cache holds those of two
 * inputs: number 2 l + h, of 16 bits, has that of output 16 k + l and input h in its bits from 4 k on.
 * INT4_GROUP inputs share a scale: behind one another lie those of the 64 outputs. Where k is 1, weights
 * are read as 16 times what they are, and scales divided by 16.
 *
 * Add to sums of INTS outputs each the products of their weights with two numbers of x. */
INLINE void add_two_inputs(const shorts *weight, const int16_t *x, ints *sums) {
  int32_t both;
  memcpy(&both, x, sizeof both);
#ifdef NEON /* no sums of pairs: numbers of the first input, then those of the second one */
  int16x4_t pair = (int16x4_t)vdup_n_s32(both);
  UNROLL for (int k = 0; k < 4; k += 2) {
    int16x8_t a = (int16x8_t)weight[k], b = (int16x8_t)weight[k + 1];
    int16x8_t first = vuzp1q_s16(a, b), second = vuzp2q_s16(a, b);
    int32x4_t low = vmlal_lane_s16((int32x4_t)sums[k], vget_low_s16(first), pair, 0);
    int32x4_t high = vmlal_high_lane_s16((int32x4_t)sums[k + 1], first, pair, 0);
    sums[k] = (ints)vmlal_lane_s16(low, vget_low_s16(second), pair, 1);
    sums[k + 1] = (ints)vmlal_high_lane_s16(high, second, pair, 1);
  }
#else
  shorts pair = (shorts)(both - (ints){0});
  UNROLL for (int k = 0; k < 4; k++) sums[k] = add_pairs(weight[k], pair, sums[k]);
#endif
}

/* Add the products of a group to the sums of 4 INTS outputs. */
INLINE void add_int4_group(int count, const char *w, const float *scale, const RoundedInputs *x,
                           int64_t g, singles (*sums)[4]) {
  ints part[4][4];
  UNROLL for (int m = 0; m < count; m++) {
    ints start = -8 * x[m].sum[g] - (ints){0}; /* what the weights' 8 add too much */
    UNROLL for (int k = 0; k < 4; k++) part[m][k] = k == 1 ? start * 16 : start;
  }
  for (int i = 0; i < INT4_GROUP; i += 2, w += 64) {
    __builtin_prefetch(w + STREAM_BYTES);
    shorts word = *(const stored_shorts *)w;
    shorts weight[4] = {word & 0x0f, word & 0xf0, word >> 8 & 0x0f,
                        (shorts)((unsigned_shorts)word >> 12)};
    UNROLL for (int m = 0; m < count; m++)
      add_two_inputs(weight, x[m].value + g * INT4_GROUP + i, part[m]);
  }
  UNROLL for (int m = 0; m < count; m++) UNROLL for (int k = 0; k < 4; k++) {
    vec factor, product = (vec)(__builtin_convertvector(part[m][k], singles) * x[m].scale[g]);
    memcpy(&factor, scale + 16 * k, sizeof factor);
    sums[m][k] = (singles)multiply_add(product, factor, (vec)sums[m][k]);
  }
}

/* The same as product_block for weights of four bits; `first` is a multiple of INT4_OUTPUTS. */
INLINE void product_of_int4(int count, const REAL *x, int64_t x_row, const void *w,
                            const void *scale, Numbers bias, REAL *y, int64_t y_row, int64_t inputs,
                            int64_t first, int64_t last) {
  const int64_t groups = (inputs + INT4_GROUP - 1) / INT4_GROUP;
  const int64_t group_bytes = INT4_GROUP / 2 * 64;
  for (int64_t begin = 0; begin < inputs; begin += MOST_ROUNDED) {
    RoundedInputs piece[4];
    int64_t some = inputs - begin < MOST_ROUNDED ? inputs - begin : MOST_ROUNDED;
    int64_t group = begin / INT4_GROUP;
    UNROLL for (int m = 0; m < count; m++)
      round_piece(x + m * x_row + begin, some, INT4_GROUP, &piece[m]);
    for (int64_t o = first; o < last; o += INT4_OUTPUTS) {
      const char *from = (const char *)w + (o / INT4_OUTPUTS * groups + group) * group_bytes;
      const float *factor = (const float *)scale + o * groups + group * INT4_OUTPUTS;
      singles sums[PARTS][4][4] = {{{{0}}}};
      for (int64_t g = 0; g * INT4_GROUP < some; g++)
        UNROLL for (int part = 0; part < PARTS; part++)
          add_int4_group(count, from + g * group_bytes + part * VEC_BYTES,
                         factor + g * INT4_OUTPUTS + part * INTS, piece, g, sums[part]);
      UNROLL for (int m = 0; m < count; m++)
        for (int64_t r = 0; r < INT4_OUTPUTS && o + r < last; r++) {
          REAL *to = y + m * y_row + o + r, sum = sums[r % 16 / INTS][m][r / 16][r % INTS];
          *to = begin ? *to + sum : bias.at ? sum + number(bias, o + r) : sum;
        }
    }
  }
}

#endif
