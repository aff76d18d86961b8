/* Products of a few rows with a matrix.
 *
 * Sums run in REAL, in one order whatever the number of rows and threads.
 */
#ifndef SSMZOO_LINEAR_H
#define SSMZOO_LINEAR_H

#include "few_bits.h"

/* A vector as it lies in memory. GCC 12 keeps what memcpy loads in arrays on the stack. */
typedef REAL stored __attribute__((vector_size(VEC_BYTES), aligned(sizeof(REAL)), may_alias));

INLINE vec read_weights(int type, const char *row, int64_t i) {
  if (type == AS_REAL) return *(const stored *)((const REAL *)row + i);
  return read(type, row, i, LANES);
}

/* y[m, o] = scale[o] sum_i x[m, i] w[o, i] + bias[o] for o from `first` to `last`.
 *
 * Several outputs at a time: their sums do not wait for one another. Each sum's order is the same. */
INLINE void product_block(int type, int count, int together, const REAL *x, int64_t x_row,
                          const void *w, Numbers bias, REAL *y, int64_t y_row,
                          int64_t inputs, int64_t first, int64_t last) {
  const int64_t size = type == AS_REAL ? (int64_t)sizeof(REAL) : 2;
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
      UNROLL for (int n = 0; n < line; n += LANES) TAKE(i + n, read_weights(type, row[r], i + n));
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
        y[m * y_row + o + r] = bias.at ? sum + number(bias, o + r) : sum;
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
  for (int64_t r = 0; r < tile->outputs; r++) {
    const char *from = (const char *)w + (r * inputs + begin) * 2;
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
static __attribute__((noinline)) void product_tile(Numbers w, Numbers bias, int64_t rows,
                                                   const REAL *x, int64_t x_row, REAL *y,
                                                   int64_t y_row, int64_t inputs, int64_t first,
                                                   int64_t last) {
  const int real = w.type == AS_REAL || sizeof(REAL) == 8; /* 16 bits go with float */
  const int64_t size = real ? (int64_t)sizeof(REAL) : 2;
  const char *rows_of_w = (const char *)w.at + first * inputs * size;
  REAL wide[TILE_OUTPUTS * TILE_INPUTS];
  vec sums[TILE_ROWS][TILE_OUTPUTS];
  memset(sums, 0, (size_t)rows * sizeof *sums);
  for (int64_t begin = 0; begin < inputs; begin += TILE_INPUTS) {
    const char *at = rows_of_w + begin * size;
    Tile tile = {(const REAL *)at, inputs, last - first, TILE_INPUTS, 0, inputs * size, size};
    if (inputs - begin < TILE_INPUTS) tile.inputs = inputs - begin;
    tile.next = at + TILE_OUTPUTS * tile.next_row;
    if (!real && w.type == BFLOAT16)
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
      y[m * y_row + o] = bias.at ? sum + number(bias, o) : sum;
    }
}

/* The same for any number of rows. A row has the same bits among others. */
INLINE void product(Numbers w, Numbers scale, Numbers bias, int64_t rows, const REAL *x,
                    int64_t x_row, REAL *y, int64_t y_row, int64_t inputs, int64_t first,
                    int64_t last) {
  const int few_bits = w.type == INT8 || w.type == INT4;
  if (few_bits && sizeof(REAL) == 8) return; /* none stand beside float64 */
  if (rows > 8 && !few_bits) { /* fewer wait for the memory */
    int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, each = (rows + tiles - 1) / tiles;
    for (int64_t m = 0; m < rows; m += each)
      for (int64_t o = first; o < last; o += TILE_OUTPUTS)
        product_tile(w, bias, rows - m < each ? rows - m : each, x + m * x_row, x_row,
                     y + m * y_row, y_row, inputs, o,
                     o + TILE_OUTPUTS < last ? o + TILE_OUTPUTS : last);
    return;
  }
  /* outputs whose weights stay in the cache; each block of few bits rounds x anew */
  const int64_t most = rows == 1 ? last - first : few_bits ? 8 * INT4_OUTPUTS : 16;
#define INPUTS x + m * x_row, x_row, w.at
#define OUTPUTS bias, y + m * y_row, y_row, inputs, o, o + most < last ? o + most : last
#define CASES(TAKE, one, two, four) \
  if (count == 4)                   \
    TAKE(4, four);                  \
  else if (count == 2)              \
    TAKE(2, two);                   \
  else                              \
    TAKE(1, one);
#define OF_INT8(count, together) product_of_int8(count, together, INPUTS, scale, OUTPUTS)
#define OF_INT4(count, together) product_of_int4(count, INPUTS, scale.at, OUTPUTS)
#define OF_REAL(count, together) product_block(AS_REAL, count, together, INPUTS, OUTPUTS)
#define OF_BFLOAT16(count, together) product_block(BFLOAT16, count, together, INPUTS, OUTPUTS)
#define OF_FLOAT16(count, together) product_block(FLOAT16, count, together, INPUTS, OUTPUTS)
  for (int64_t o = first; o < last; o += most)
    for (int64_t m = 0, count; m < rows; m += count) {
      count = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
      if (w.type == INT8) {
        CASES(OF_INT8, 4, 4, 2)
      } else if (w.type == INT4) {
        CASES(OF_INT4, 1, 1, 1)
      } else if (w.type == AS_REAL || sizeof(REAL) == 8) {
        /* vectors of 32 bytes wait for nothing but the memory, which is fastest in one stream */
        if (sizeof(vec) >= 32) {
          CASES(OF_REAL, 1, 1, 1)
        } else {
          CASES(OF_REAL, 4, 4, 2)
        }
      } else if (w.type == BFLOAT16) {
        CASES(OF_BFLOAT16, 4, 4, 2)
      } else {
        CASES(OF_FLOAT16, 4, 4, 2)
      }
    }
#undef INPUTS
#undef OUTPUTS
#undef CASES
#undef OF_INT8
#undef OF_INT4
#undef OF_REAL
#undef OF_BFLOAT16
#undef OF_FLOAT16
}

#endif
