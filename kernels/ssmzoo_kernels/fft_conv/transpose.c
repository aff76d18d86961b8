/* to[b, c, r] = from[b, r, c] (+ scale[r] add[b, c, r]): tiles small enough for the first cache. */
#include "vector.h"

enum { TILE = 16 };

typedef struct {
  const REAL *from, *add, *scale;
  REAL *to;
  int64_t batch, rows, columns, from_batch, from_row, to_batch, to_row, add_batch, add_row;
} Job;

INLINE void whole_tile(const REAL *from, int64_t stride, REAL *tile) {
  UNROLL for (int r = 0; r < TILE; r++)
    UNROLL for (int c = 0; c < TILE; c++) tile[c * TILE + r] = from[r * stride + c];
}

INLINE void some_tile(const REAL *from, int64_t stride, REAL *tile, int rows, int columns) {
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) tile[c * TILE + r] = from[r * stride + c];
}

INLINE void strip(const Job *j, int64_t b, int64_t r, int64_t c) {
  REAL tile[TILE * TILE];
  const REAL *from = j->from + b * j->from_batch + r * j->from_row + c;
  REAL *to = j->to + b * j->to_batch + c * j->to_row + r;
  int rows = j->rows - r < TILE ? (int)(j->rows - r) : TILE;
  int columns = j->columns - c < TILE ? (int)(j->columns - c) : TILE;
  if (rows == TILE && columns == TILE)
    whole_tile(from, j->from_row, tile);
  else
    some_tile(from, j->from_row, tile, rows, columns);
  if (j->add) {
    const REAL *add = j->add + b * j->add_batch + c * j->add_row + r;
    for (int i = 0; i < columns; i++)
      for (int k = 0; k < rows; k++)
        tile[i * TILE + k] += j->scale[r + k] * add[i * j->add_row + k];
  }
  if (rows == TILE) {
    for (int i = 0; i < columns; i++)
      memcpy(to + i * j->to_row, tile + i * TILE, TILE * sizeof(REAL));
  } else {
    for (int i = 0; i < columns; i++)
      memcpy(to + i * j->to_row, tile + i * TILE, (size_t)rows * sizeof(REAL));
  }
}

void transpose(const Job *j, int threads) {
  int64_t strips = (j->columns + TILE - 1) / TILE;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static) collapse(2)
  for (int64_t b = 0; b < j->batch; b++)
    for (int64_t i = 0; i < strips; i++)
      for (int64_t r = 0; r < j->rows; r += TILE) strip(j, b, r, i * TILE);
}
