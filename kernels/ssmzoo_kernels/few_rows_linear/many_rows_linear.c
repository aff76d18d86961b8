/* y = x w^T for many rows, by panels of w that lie in the cache as the sums read them.
 *
 * Sums run in one order whatever the number of rows and threads.
 */
#include "matrices.h"

enum { TERMS = 256, COLUMNS = WIDE * LANES, EDGE_ROWS = 48 };
enum { PART_ROWS = 96, PART_BYTES = 1 << 22 }; /* every panel reads a part of x from the cache */

typedef struct {
  const REAL *at;
  int64_t row, column; /* how far they are apart */
} Matrix;

static const REAL one = 1;

/* to [terms][COLUMNS] = some rows of w, turned; zeros up to whole vectors */
static void pack(Matrix w, int64_t rows, int64_t terms, REAL *to) {
  if (w.row == 1) {
    for (int64_t i = 0; i < terms; i++)
      load_row(to + i * COLUMNS, w.at + i * w.column, rows, padded(rows));
    return;
  }
  for (int64_t n = 0; n < rows; n += LANES)
    for (int64_t i = 0; i < terms; i += LANES) {
      vec x[LANES];
      UNROLL for (int r = 0; r < LANES; r++)
        x[r] = n + r < rows ? load_some(w.at + (n + r) * w.row + i, terms - i) : splat(0);
      transpose(x);
      UNROLL for (int r = 0; r < LANES; r++) if (i + r < terms)
        store(to + (i + r) * COLUMNS + n, x[r]);
    }
}

/* Multiply some rows of x with a panel of w; room: for a panel, and for rows of y. */
static void multiply_panel(Matrix x, Matrix w, REAL *y, int64_t y_row, int64_t rows, int64_t terms,
                           int64_t columns, REAL *room) {
  REAL *edge = room + TERMS * COLUMNS;
  int64_t step = columns % LANES ? EDGE_ROWS : rows;
  for (int64_t k = 0; k < terms; k += TERMS) {
    int64_t some = smaller(TERMS, terms - k);
    pack((Matrix){w.at + k * w.column, w.row, w.column}, columns, some, room);
    for (int64_t m = 0; m < rows; m += step) {
      const REAL *from = x.at + m * x.row + k * x.column;
      int64_t count = smaller(step, rows - m);
      if (columns % LANES == 0) {
        add(y + m * y_row, y_row, k ? &one : 0, 0, from, x.row, x.column, room, COLUMNS, count,
            some, columns);
        continue;
      }
      multiply(edge, COLUMNS, from, x.row, x.column, room, COLUMNS, count, some, padded(columns));
      for (int64_t r = 0; r < count; r++)
        for (int64_t n = 0; n < columns; n += LANES) {
          REAL *to = y + (m + r) * y_row + n;
          vec sum = load(edge + r * COLUMNS + n);
          store_some(to, k ? load_some(to, columns - n) + sum : sum, columns - n);
        }
    }
  }
}

/* x [rows, terms], w [columns, terms] with a 1 among its strides; returns 1 if memory ran out. */
int many_rows_linear(const REAL *x, int64_t x_row, int64_t x_column, const REAL *w, int64_t w_row,
                     int64_t w_column, REAL *y, int64_t rows, int64_t terms, int64_t columns,
                     int threads) {
  int64_t panels = (columns + COLUMNS - 1) / COLUMNS, row_bytes = terms * (int64_t)sizeof(REAL);
  int64_t parts = 1;
  int failed = 0;
  /* a part packs every panel anew, so that it needs some rows */
  while (rows > PART_ROWS * parts &&
         (panels * parts < 4 * threads || rows * row_bytes > PART_BYTES * parts))
    parts++;
  int64_t each = (rows + parts - 1) / parts;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    REAL *room = scratch((TERMS + EDGE_ROWS) * COLUMNS * (int64_t)sizeof(REAL));
    if (!room) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < panels * parts; task++) {
      int64_t m = task / panels * each, n = task % panels * COLUMNS;
      if (room && m < rows)
        multiply_panel((Matrix){x + m * x_row, x_row, x_column},
                       (Matrix){w + n * w_row, w_row, w_column}, y + m * columns + n, columns,
                       smaller(each, rows - m), terms, smaller(COLUMNS, columns - n), room);
    }
    free(room);
  }
  return failed;
}
