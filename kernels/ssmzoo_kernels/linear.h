/* Products of a few rows with a matrix.
 *
 * Sums run in REAL, in one order whatever the number of rows and threads.
 */
#ifndef SSMZOO_LINEAR_H
#define SSMZOO_LINEAR_H

#include "numbers.h"

enum { STREAM_BYTES = 8192 }; /* bytes that a stream is asked for ahead */

/* A vector as it lies in memory. GCC 12 keeps what memcpy loads in arrays on the stack. */
typedef REAL stored __attribute__((vector_size(VEC_BYTES), aligned(sizeof(REAL)), may_alias));

INLINE vec read_weights(int type, const char *row, int64_t i) {
  if (type == AS_REAL) return *(const stored *)((const REAL *)row + i);
  return read(type, row, i, LANES);
}

/* Of a line of the cache from the i-th on, the n-th ones; n is a constant. */
INLINE vec read_line(int type, const char *row, int64_t i, int n) {
#ifdef NEON
  if (type == INT8 && LANES == 4) {
    float32x4_t four = four_of_bytes(vld1q_s8((const int8_t *)row + i + n / 16 * 16), n % 16);
    return (vec)four;
  }
#endif
  return read_weights(type, row, i + n);
}

/* y[m, o] = scale[o] sum_i x[m, i] w[o, i] + bias[o] for o from `first` to `last`.
 *
 * Several outputs at a time: their sums do not wait for one another. Each sum's order is the same. */
INLINE void product_block(int type, int count, int together, const REAL *x, int64_t x_row,
                          const void *w, Numbers scale, Numbers bias, REAL *y, int64_t y_row,
                          int64_t inputs, int64_t first, int64_t last) {
  const int64_t size = type == AS_REAL ? (int64_t)sizeof(REAL) : type == INT8 ? 1 : 2;
  const int64_t line = 64 / size; /* numbers of a line of the cache */
  int64_t lines = inputs / line * line, whole = inputs / LANES * LANES;
  /* rows are short: the CPU's own prefetching would begin anew with each few of them. The next ones are
   * asked for in the order in which they lie in memory, which is the fastest but for the longest ones. */
  int64_t ahead = together > 1 ? together * inputs * size : STREAM_BYTES;
  for (int64_t o = first; o < last; o += together) {
    const char *row[4];
    const REAL *from[4];
    vec sums[4][4] = {{{0}}};
    UNROLL for (int r = 0; r < together; r++) /* past the end, the last one again */
      row[r] = (const char *)w + (o + r < last ? o + r : last - 1) * inputs * size;
    UNROLL for (int m = 0; m < count; m++) from[m] = x + m * x_row;
#define TAKE(at, WEIGHTS)                                                                   \
  do {                                                                                      \
    vec weight[4];                                                                          \
    UNROLL for (int r = 0; r < together; r++) weight[r] = WEIGHTS;                          \
    UNROLL for (int m = 0; m < count; m++) {                                                \
      vec value = *(const stored *)(from[m] + (at));                                        \
      UNROLL for (int r = 0; r < together; r++)                                             \
        sums[r][m] = multiply_add(weight[r], value, sums[r][m]);                            \
    }                                                                                       \
  } while (0)
    for (int64_t i = 0; i < lines; i += line) {
      const char *next = row[0] + ahead + i * size * together;
      UNROLL for (int r = 0; r < together; r++)
        __builtin_prefetch(type == AS_REAL ? row[r] + i * size + ahead : next + 64 * r);
      UNROLL for (int n = 0; n < line; n += LANES) TAKE(i + n, read_line(type, row[r], i, n));
    }
    for (int64_t i = lines; i < whole; i += LANES) TAKE(i, read_weights(type, row[r], i));
#undef TAKE
    if (whole < inputs) UNROLL for (int r = 0; r < together; r++) {
      vec weight = read(type, row[r], whole, inputs - whole);
      UNROLL for (int m = 0; m < count; m++) {
        vec value = load_some(from[m] + whole, inputs - whole);
        sums[r][m] = multiply_add(weight, value, sums[r][m]);
      }
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

/* Four bits: weights plus 8, of INT4_OUTPUTS outputs at a time. A line of the cache holds those of two
 * inputs: number 2 l + h, of 16 bits, has that of output 16 k + l and input h in its bits from 4 k on.
 * GROUP inputs share a scale: behind one another lie those of the 64 outputs. Where k is 1, weights are
 * read as 16 times what they are, and scales divided by 16.
 *
 * Sums of a group are whole numbers: its inputs are rounded to 16 bits, by at most a 65,534th of the
 * largest of them. */
enum { GROUP = 32, INT4_OUTPUTS = 64, INT4_INPUTS = 2048 };
typedef int16_t shorts __attribute__((vector_size(VEC_BYTES)));
typedef uint16_t unsigned_shorts __attribute__((vector_size(VEC_BYTES)));
typedef int32_t ints __attribute__((vector_size(VEC_BYTES)));
typedef float singles __attribute__((vector_size(VEC_BYTES)));
enum { INTS = VEC_BYTES / 4, PARTS = 16 / INTS };

/* Some of a row of x. */
typedef struct {
  int16_t value[INT4_INPUTS];
  int32_t start[INT4_INPUTS / GROUP]; /* -8 sums of x: what the weights' 8 add too much */
  float scale[INT4_INPUTS / GROUP];
} Rounded;

/* Add to sums of INTS outputs each the products of their weights with two numbers of x. */
INLINE void add_pairs(const shorts *weight, const int16_t *x, ints *sums) {
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
  ints pair = both - (ints){0};
  UNROLL for (int k = 0; k < 4; k++) {
#ifdef __AVX512VNNI__
    sums[k] = (ints)_mm512_dpwssd_epi32((__m512i)sums[k], (__m512i)weight[k], (__m512i)pair);
#elif defined(__AVX512BW__)
    sums[k] += (ints)_mm512_madd_epi16((__m512i)weight[k], (__m512i)pair);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    sums[k] += (ints)_mm256_madd_epi16((__m256i)weight[k], (__m256i)pair);
#else
    ints w = (ints)weight[k];
    sums[k] += (w << 16 >> 16) * (pair << 16 >> 16) + (w >> 16) * (pair >> 16);
#endif
  }
#endif
}

/* Round `inputs` of a row, and zeros behind them up to whole groups. A group that holds a NaN or an
 * infinity makes outputs NaN; one whose largest input is below 1e-30 counts as zeros. */
static __attribute__((noinline)) void round_piece(const REAL *x, int64_t inputs, Rounded *to) {
  enum { VECTORS = GROUP / INTS };
  typedef int16_t narrow __attribute__((vector_size(VEC_BYTES / 2)));
  for (int64_t g = 0; g * GROUP < inputs; g++) {
    int64_t left = inputs - g * GROUP;
    vec value[VECTORS];
    ints most = {0}, sum = {0};
    UNROLL for (int v = 0; v < VECTORS; v++) {
      value[v] = left > v * INTS ? load_some(x + g * GROUP + v * INTS, left - v * INTS) : splat(0);
      ints size = (ints)value[v] & 0x7fffffff, more = size > most;
      most = (size & more) | (most & ~more);
    }
    int32_t bits = 0;
    uint32_t start = 0;
    float largest;
    UNROLL for (int i = 0; i < INTS; i++) bits = most[i] > bits ? most[i] : bits;
    memcpy(&largest, &bits, sizeof bits);
    int finite = bits < 0x7f800000;
    float inverse = finite && largest > 1e-30f ? 32767 / largest : 0;
    UNROLL for (int v = 0; v < VECTORS; v++) { /* whole numbers, in the last bits */
      vec moved = multiply_add(value[v], splat((REAL)inverse), splat((REAL)0x1.8p23));
      ints whole = finite ? (ints)moved - 0x4b400000 : (ints){0};
      narrow some = __builtin_convertvector(whole, narrow);
      memcpy(to->value + g * GROUP + v * INTS, &some, sizeof some);
      sum += whole;
    }
    UNROLL for (int i = 0; i < INTS; i++) start -= 8 * (uint32_t)sum[i];
    to->start[g] = (int32_t)start;
    to->scale[g] = finite ? largest / 32767 : (float)__builtin_nan("");
  }
}

/* Add the products of a group to the sums of 4 INTS outputs. */
INLINE void add_group(int count, const char *w, const float *scale, const Rounded *x, int64_t g,
                      singles (*sums)[4]) {
  ints part[4][4];
  UNROLL for (int m = 0; m < count; m++) {
    ints start = x[m].start[g] - (ints){0};
    UNROLL for (int k = 0; k < 4; k++) part[m][k] = k == 1 ? start * 16 : start;
  }
  for (int i = 0; i < GROUP; i += 2, w += 64) {
    typedef int16_t stored_shorts __attribute__((vector_size(VEC_BYTES), aligned(2), may_alias));
    __builtin_prefetch(w + STREAM_BYTES);
    shorts word = *(const stored_shorts *)w;
    shorts weight[4] = {word & 0x0f, word & 0xf0, word >> 8 & 0x0f,
                        (shorts)((unsigned_shorts)word >> 12)};
    UNROLL for (int m = 0; m < count; m++)
      add_pairs(weight, x[m].value + g * GROUP + i, part[m]);
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
  const int64_t groups = (inputs + GROUP - 1) / GROUP, bytes = groups * GROUP / 2 * 64;
  for (int64_t begin = 0; begin < inputs; begin += INT4_INPUTS) {
    Rounded piece[4];
    int64_t some = inputs - begin < INT4_INPUTS ? inputs - begin : INT4_INPUTS, group = begin / GROUP;
    UNROLL for (int m = 0; m < count; m++) round_piece(x + m * x_row + begin, some, &piece[m]);
    for (int64_t o = first; o < last; o += INT4_OUTPUTS) {
      const char *from = (const char *)w + o / INT4_OUTPUTS * bytes + group * GROUP / 2 * 64;
      const float *factor = (const float *)scale + o * groups + group * INT4_OUTPUTS;
      singles sums[PARTS][4][4] = {{{{0}}}};
      for (int64_t g = 0; g * GROUP < some; g++)
        UNROLL for (int part = 0; part < PARTS; part++)
          add_group(count, from + g * GROUP / 2 * 64 + part * VEC_BYTES,
                    factor + g * INT4_OUTPUTS + part * INTS, piece, g, sums[part]);
      UNROLL for (int m = 0; m < count; m++)
        for (int64_t r = 0; r < INT4_OUTPUTS && o + r < last; r++) {
          REAL *to = y + m * y_row + o + r, sum = sums[r % 16 / INTS][m][r / 16][r % INTS];
          *to = begin ? *to + sum : bias.at ? sum + number(bias, o + r) : sum;
        }
    }
  }
}

/* A part of a product with more rows: weights as REAL, a row an output, which all rows of x read from
 * the nearest cache. What lies behind it is asked for meanwhile, from row to row of x a few rows of it. */
enum { TILE_ROWS = 64, TILE_OUTPUTS = 16, TILE_INPUTS = 256 };
enum {
#ifdef MANY_REGISTERS
  TOGETHER = 4 /* outputs whose sums for six rows fit the registers */
#else
  TOGETHER = 2
#endif
};
typedef struct {
  const REAL *weights;
  int64_t row, outputs, inputs;
  const char *next;
  int64_t next_row, next_size;
} Tile;

/* GCC would load x anew for each product: two thirds of the speed (Zen 3). */
#ifdef __x86_64__
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define IN_REGISTER(x) IN_TURN(x)
#endif

/* Add the products of a tile to the sums of a few rows; ask for the rows of what lies behind the tile
 * from `first` to `last`. */
INLINE void add_products(int count, const REAL *x, int64_t x_row, const Tile *tile, int64_t first,
                         int64_t last, vec (*to)[TILE_OUTPUTS]) {
  int64_t whole = tile->inputs / LANES * LANES, left = tile->inputs - whole;
  for (int64_t o = 0; o < tile->outputs; o += TOGETHER) {
    const REAL *row[TOGETHER];
    vec sums[6][TOGETHER], weight[TOGETHER];
    UNROLL for (int r = 0; r < TOGETHER; r++) /* past the end, the last one again */
      row[r] = tile->weights + (o + r < tile->outputs ? o + r : tile->outputs - 1) * tile->row;
    UNROLL for (int m = 0; m < count; m++)
      UNROLL for (int r = 0; r < TOGETHER; r++) sums[m][r] = to[m][o + r];
    int asks = o >= first && o < last;
    const char *ahead = asks ? tile->next + o * tile->next_row : (const char *)row[0];
    for (int64_t i = 0; i < whole; i += LANES) {
      UNROLL for (int r = 0; r < TOGETHER; r++) {
        weight[r] = *(const stored *)(row[r] + i);
        __builtin_prefetch(ahead + r * tile->next_row + i * tile->next_size);
      }
      UNROLL for (int m = 0; m < count; m++) {
        vec value = *(const stored *)(x + m * x_row + i);
        IN_REGISTER(value);
        UNROLL for (int r = 0; r < TOGETHER; r++)
          sums[m][r] = multiply_add(weight[r], value, sums[m][r]);
      }
    }
    if (left) UNROLL for (int m = 0; m < count; m++) {
      vec value = load_some(x + m * x_row + whole, left);
      UNROLL for (int r = 0; r < TOGETHER; r++)
        sums[m][r] = multiply_add(load_some(row[r] + whole, left), value, sums[m][r]);
    }
    UNROLL for (int m = 0; m < count; m++)
      UNROLL for (int r = 0; r < TOGETHER; r++) to[m][o + r] = sums[m][r];
  }
}

INLINE void widen(int type, const void *w, int64_t inputs, int64_t begin, Tile *tile, REAL *to) {
  const int64_t size = type == INT8 ? 1 : 2;
  for (int64_t r = 0; r < tile->outputs; r++) {
    const char *from = (const char *)w + (r * inputs + begin) * size;
    REAL *row = to + r * TILE_INPUTS;
    if (tile->inputs == TILE_INPUTS)
      UNROLL for (int i = 0; i < TILE_INPUTS; i += LANES)
        store(row + i, read(type, from, i, LANES));
    else
      for (int64_t i = 0; i < tile->inputs; i += LANES)
        store(row + i, read(type, from, i, tile->inputs - i));
  }
  tile->weights = to;
  tile->row = TILE_INPUTS;
}

/* At most TILE_OUTPUTS outputs from `first` on, of more than two and at most TILE_ROWS rows. */
static __attribute__((noinline)) void product_tile(Numbers w, Numbers scale, Numbers bias,
                                                   int64_t rows, const REAL *x, int64_t x_row,
                                                   REAL *y, int64_t y_row, int64_t inputs,
                                                   int64_t first, int64_t last) {
  const int real = w.type == AS_REAL || sizeof(REAL) == 8; /* 16 bits go with float */
  const int64_t size = w.type == INT8 ? 1 : real ? (int64_t)sizeof(REAL) : 2;
  const char *rows_of_w = (const char *)w.at + first * inputs * size;
  REAL wide[TILE_OUTPUTS * TILE_INPUTS];
  vec sums[TILE_ROWS][TILE_OUTPUTS];
  memset(sums, 0, (size_t)rows * sizeof *sums);
  for (int64_t begin = 0; begin < inputs; begin += TILE_INPUTS) {
    const char *at = rows_of_w + begin * size;
    Tile tile = {(const REAL *)at, inputs, last - first, TILE_INPUTS, 0, inputs * size, size};
    if (inputs - begin < TILE_INPUTS) tile.inputs = inputs - begin;
    tile.next = at + TILE_OUTPUTS * tile.next_row;
    if (w.type == INT8)
      widen(INT8, rows_of_w, inputs, begin, &tile, wide);
    else if (!real && w.type == BFLOAT16)
      widen(BFLOAT16, rows_of_w, inputs, begin, &tile, wide);
    else if (!real)
      widen(FLOAT16, rows_of_w, inputs, begin, &tile, wide);
    for (int64_t m = 0, count, asked = 0; m < rows; m += count) {
      int64_t left = rows - m, ask = 0;
      count = (left + (left + 5) / 6 - 1) / ((left + 5) / 6); /* six at most, and alike */
      ask = TILE_OUTPUTS * (m + count) / rows / TOGETHER * TOGETHER;
#define ADD(some) add_products(some, x + m * x_row + begin, x_row, &tile, asked, ask, sums + m)
      if (count == 6)
        ADD(6);
      else if (count == 5)
        ADD(5);
      else if (count == 4)
        ADD(4);
      else
        ADD(3);
#undef ADD
      asked = ask;
    }
  }
  for (int64_t m = 0; m < rows; m++)
    for (int64_t o = first; o < last; o++) {
      REAL sum = total(sums[m][o - first]);
      if (scale.at) sum *= number(scale, o);
      y[m * y_row + o] = bias.at ? sum + number(bias, o) : sum;
    }
}

/* The same for any number of rows. A row has the same bits among others. */
INLINE void product(Numbers w, Numbers scale, Numbers bias, int64_t rows, const REAL *x,
                    int64_t x_row, REAL *y, int64_t y_row, int64_t inputs, int64_t first,
                    int64_t last) {
  if (rows > 8 && w.type != INT4) { /* fewer wait for the memory */
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, each = (rows + tiles - 1) / tiles;
    for (int64_t m = 0; m < rows; m += each)
      for (int64_t o = first; o < last; o += TILE_OUTPUTS)
        product_tile(w, scale, bias, rows - m < each ? rows - m : each, x + m * x_row, x_row,
                     y + m * y_row, y_row, inputs, o,
                     o + TILE_OUTPUTS < last ? o + TILE_OUTPUTS : last);
    return;
  }
  /* outputs whose weights stay in the cache; each block of four bits rounds x anew */
  const int64_t most = rows == 1 ? last - first : w.type == INT4 ? 8 * INT4_OUTPUTS : 16;
#define BLOCK(type, count, together)                                                              \
  product_block(type, count, together, x + m * x_row, x_row, w.at, scale, bias, y + m * y_row,    \
                y_row, inputs, o, o + most < last ? o + most : last)
#define CASES(type)                       \
  if (count == 4) BLOCK(type, 4, 2);      \
  else if (count == 2) BLOCK(type, 2, 4); \
  else BLOCK(type, 1, 4);
#define BLOCK_OF_INT4(count)                                                                      \
  product_of_int4(count, x + m * x_row, x_row, w.at, scale.at, bias, y + m * y_row, y_row, inputs, \
                  o, o + most < last ? o + most : last)
#define STREAM                               \
  if (count == 4) BLOCK(AS_REAL, 4, 1);      \
  else if (count == 2) BLOCK(AS_REAL, 2, 1); \
  else BLOCK(AS_REAL, 1, 1);
  for (int64_t o = first; o < last; o += most)
    for (int64_t m = 0, count; m < rows; m += count) {
      count = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
      if (w.type == INT8) {
        CASES(INT8)
      } else if (w.type == INT4) {
        if (sizeof(REAL) == 8) continue; /* no weight of four bits stands beside float64 */
        if (count == 4)
          BLOCK_OF_INT4(4);
        else if (count == 2)
          BLOCK_OF_INT4(2);
        else
          BLOCK_OF_INT4(1);
      } else if (w.type == AS_REAL || sizeof(REAL) == 8) {
        /* vectors of 32 bytes wait for nothing but the memory, which is fastest in one stream */
        if (sizeof(vec) >= 32) {
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
#undef BLOCK_OF_INT4
#undef BLOCK
}

#endif
