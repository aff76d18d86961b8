/* Small products of matrices whose rows are padded to whole vectors, and what goes with them. */
#ifndef SSMZOO_MATRICES_H
#define SSMZOO_MATRICES_H

#include "vector.h"

enum {
#ifdef MANY_REGISTERS
  WIDE = 4 /* vectors of a block of sums that stays in registers */
#else
  WIDE = 2
#endif
};

INLINE int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* to = factor to +- a b for `rows` rows and `vectors` vectors of columns; no factor: to = +- a b */
INLINE void block(REAL *to, int64_t to_row, const REAL *factor, int64_t factor_step, const REAL *a,
                  int64_t a_row, int64_t a_column, const REAL *b, int64_t b_row, int64_t terms,
                  const int rows, const int vectors, const int minus) {
  vec sum[8][WIDE];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int c = 0; c < vectors; c++)
      sum[r][c] = splat(0); /* what is there is added last: long sums err less in pieces */
  for (int64_t i = 0; i < terms; i++) {
    vec x[WIDE];
    UNROLL for (int c = 0; c < vectors; c++) x[c] = load(b + i * b_row + c * LANES);
    UNROLL for (int r = 0; r < rows; r++) {
      REAL value = a[r * a_row + i * a_column];
      IN_TURN(value);
      vec y = splat(value);
      UNROLL for (int c = 0; c < vectors; c++)
        sum[r][c] = minus ? sum[r][c] - y * x[c] : sum[r][c] + y * x[c];
    }
  }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int c = 0; c < vectors; c++) {
      REAL *here = to + r * to_row + c * LANES;
      store(here, factor ? load(here) * splat(factor[r * factor_step]) + sum[r][c] : sum[r][c]);
    }
}

#define BLOCK(ROWS, VECTORS)                                                                     \
  block(to + m * to_row + n, to_row, factor ? factor + m * factor_step : 0, factor_step,         \
        a + m * a_row, a_row, a_column, b + n, b_row, terms, ROWS, VECTORS, minus)

#define STRIPS(ROWS, VECTORS)                                                                    \
  for (; n + (VECTORS) * LANES <= columns; n += (VECTORS) * LANES) {                             \
    int64_t m = 0;                                                                               \
    for (; m + (ROWS) <= rows; m += (ROWS)) BLOCK(ROWS, VECTORS);                                \
    for (; m + 4 <= rows; m += 4) BLOCK(4, VECTORS);                                             \
    for (; m + 2 <= rows; m += 2) BLOCK(2, VECTORS);                                             \
    for (; m < rows; m++) BLOCK(1, VECTORS);                                                     \
  }

INLINE void product(REAL *to, int64_t to_row, const REAL *factor, int64_t factor_step,
                    const REAL *a, int64_t a_row, int64_t a_column, const REAL *b, int64_t b_row,
                    int64_t rows, int64_t terms, int64_t columns, const int minus) {
  int64_t n = 0;
  STRIPS(6, WIDE)
  if (WIDE > 2) STRIPS(8, 2)
  STRIPS(8, 1)
}

#undef BLOCK
#undef STRIPS

/* to = a b */
static inline void multiply(REAL *to, int64_t to_row, const REAL *a, int64_t a_row,
                            int64_t a_column, const REAL *b, int64_t b_row, int64_t rows,
                            int64_t terms, int64_t columns) {
  product(to, to_row, 0, 0, a, a_row, a_column, b, b_row, rows, terms, columns, 0);
}

/* to = factor to + a b, a factor for every row */
static inline void add(REAL *to, int64_t to_row, const REAL *factor, int64_t factor_step,
                       const REAL *a, int64_t a_row, int64_t a_column, const REAL *b,
                       int64_t b_row, int64_t rows, int64_t terms, int64_t columns) {
  product(to, to_row, factor, factor_step, a, a_row, a_column, b, b_row, rows, terms, columns, 0);
}

INLINE REAL dot(const REAL *a, const REAL *b, int64_t columns) {
  vec sum = splat(0);
  for (int64_t n = 0; n < columns; n += LANES) sum = multiply_add(load(a + n), load(b + n), sum);
  return total(sum);
}

/* to [columns][rows] = from [rows][columns], both whole vectors */
static inline void turn(const REAL *from, int64_t from_row, REAL *to, int64_t to_row,
                        int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i += LANES)
    for (int64_t j = 0; j < columns; j += LANES) {
      vec x[LANES];
      UNROLL for (int r = 0; r < LANES; r++) x[r] = load(from + (i + r) * from_row + j);
      transpose(x);
      UNROLL for (int r = 0; r < LANES; r++) store(to + (j + r) * to_row + i, x[r]);
    }
}

INLINE void load_row(REAL *to, const REAL *from, int64_t size, int64_t row) {
  for (int64_t n = 0; n < row; n += LANES) store(to + n, load_some(from + n, size - n));
}

INLINE void store_row(REAL *to, const REAL *from, int64_t size) {
  for (int64_t n = 0; n < size; n += LANES) store_some(to + n, load(from + n), size - n);
}

#endif
