/* token_step's attention, and B'MOJO's choice of tokens. */
#ifndef SSMZOO_ATTENTION_H
#define SSMZOO_ATTENTION_H

#include "instructions.h"

enum { AHEAD = 32 }; /* rows of keys and values that are fetched early */

/* Rotary positions, which turn the halves of heads against each other: size: width, columns of a
 * head, the number of the positions; number: their base. */
static void rotate(const Call *call, const Instruction *x) {
  int64_t size = x->size[1], half = size / 2;
  const int64_t *seen = call->given[x->size[2]];
  Span span = share(call, call->rows * half, 1);
  for (int64_t k = span.first; k < span.last; k++) {
    int64_t m = k / half, i = k % half;
    double angle = (double)seen[m] * pow(x->number[0], -2.0 * (double)i / (double)size);
    REAL along = (REAL)cos(angle), across = (REAL)sin(angle);
    const REAL *from = at(call, x->in[0]) + m * x->in[0].stride;
    REAL *to = at(call, x->out) + m * x->out.stride;
    for (int64_t c = i; c < x->size[0]; c += size) {
      REAL one = from[c], two = from[c + half];
      to[c] = one * along - two * across;
      to[c + half] = two * along + one * across;
    }
  }
}

/* Where a position lies in a ring, whatever a state may say: it is data. */
INLINE int64_t ring_place(int64_t position, int64_t rows) {
  int64_t place = position % rows;
  return place < 0 ? place + rows : place;
}

/* Write a row of a ring: size: width, the ring's number, its rows, the number of the positions. */
static void keep(const Call *call, const Instruction *x) {
  int64_t width = x->size[0], rows = x->size[2];
  REAL *ring = call->given[x->size[1]];
  const int64_t *seen = call->given[x->size[3]];
  Span span = share(call, width, LANES);
  if (span.first < span.last) for (int64_t m = 0; m < call->rows; m++)
    memcpy(ring + (m * rows + ring_place(seen[m], rows)) * width + span.first,
           at(call, x->in[0]) + m * x->in[0].stride + span.first,
           (size_t)(span.last - span.first) * sizeof(REAL));
}

/* Keys and values of a head: the rows that hold something. */
typedef struct {
  const REAL *k, *v;
  int64_t count;
} Rows;

/* to[n] = sum_j w[j] v[j, n] of some vectors of columns; `left`: columns from the first one on */
INLINE void sum_rows(REAL *to, const Rows *tables, const REAL *w, int64_t stride, int64_t n,
                     const int vectors, int64_t left, REAL share) {
  vec sum[4] = {{0}};
  for (int t = 0; t < 3; t++)
    for (int64_t j = 0; j < tables[t].count; j++, w++) {
      const REAL *v = tables[t].v + j * stride + n;
      UNROLL for (int c = 0; c < vectors; c++) __builtin_prefetch(v + AHEAD * stride + c * LANES);
      UNROLL for (int c = 0; c < vectors; c++)
        sum[c] += splat(*w) * load_some(v + c * LANES, vectors > 1 ? LANES : left);
    }
  UNROLL for (int c = 0; c < vectors; c++)
    store_some(to + n + c * LANES, sum[c] * splat(share), vectors > 1 ? LANES : left);
}

/* One softmax over a ring and two memories: size: heads, groups, columns of a head, rows of the ring,
 * of the first and of the second memory; the numbers of the positions, of keys and values of each,
 * of the first memory's own positions, and whether those in the ring are hidden there; in: q, room
 * for weights; number: scale. */
static void attend(const Call *call, const Instruction *x) {
  int64_t heads = x->size[0], groups = x->size[1], size = x->size[2], window = x->size[3];
  int64_t stride = groups * size, most_rows = window + x->size[4] + x->size[5];
  const int64_t *seen = call->given[x->size[6]];
  Span span = share(call, call->rows * heads, 1);
  for (int64_t k = span.first; k < span.last; k++) {
    int64_t m = k / heads, head = k % heads, column = head / (heads / groups) * size;
    int64_t position = seen[m], before = position / window * window, number = 0;
    const REAL *q = at(call, x->in[0]) + m * x->in[0].stride + head * size;
    REAL *w = at(call, x->in[1]) + m * x->in[1].stride + head * most_rows;
    REAL *to = at(call, x->out) + m * x->out.stride + head * size;
    Rows tables[3] = {{0}};
    for (int t = 0; t < 3; t++) {
      int64_t rows = x->size[3 + t], known = t ? before : position + 1;
      if (!rows) continue;
      int64_t first = m * rows * stride + column;
      tables[t] = (Rows){(const REAL *)call->given[x->size[7 + 2 * t]] + first,
                         (const REAL *)call->given[x->size[8 + 2 * t]] + first,
                         known < rows ? known : rows};
      const int64_t *hidden = t == 1 && x->size[13] ? call->given[x->size[13]] : 0;
      for (int64_t j = 0; j < tables[t].count; j++, number++) {
        const REAL *key = tables[t].k + j * stride;
        for (int64_t i = 0; i < size; i += 64 / (int64_t)sizeof(REAL))
          __builtin_prefetch(key + AHEAD * stride + i);
        REAL score = sum_of_products(q, key, size);
        if (hidden && hidden[m * rows + j] > position - window)
          w[number] = -(REAL)INFINITY;
        else
          w[number] = score * (REAL)x->number[0];
      }
    }
    vec most = splat(-(REAL)INFINITY), sum = {0};
    for (int64_t i = 0; i + LANES <= number; i += LANES) {
      vec score = load(w + i);
      most = pick(score > most, score, most);
    }
    REAL top = most[0];
    for (int i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
    for (int64_t i = number / LANES * LANES; i < number; i++) top = w[i] > top ? w[i] : top;
    for (int64_t i = 0; i < number; i += LANES) {
      vec weight = raised((load_some(w + i, number - i) - splat(top)) *
                          splat((REAL)1.4426950408889634));
      store_some(w + i, weight, number - i);
      sum += load_some(w + i, number - i); /* nothing behind the last one */
    }
    REAL share = 1 / total(sum);
    int64_t n = 0;
    for (; n + 4 * LANES <= size; n += 4 * LANES) sum_rows(to, tables, w, stride, n, 4, 0, share);
    for (; n < size; n += LANES) sum_rows(to, tables, w, stride, n, 1, size - n, share);
  }
}

/* B'MOJO's outputs: size: width, rows kept, outputs that predict, the numbers of what is kept, of the
 * scores and of the positions, rows of the scores, whether errors are relative; data: the predictor.
 * A score that is not finite fails the call. */
static void innovate(const Call *call, const Instruction *x) {
  int64_t width = x->size[0], kept = x->size[1], span = x->size[2];
  Span part = share(call, call->rows, 1);
  for (int64_t m = part.first; m < part.last; m++) {
    const REAL *y = at(call, x->in[0]) + m * x->in[0].stride, *by = x->data[0].at;
    REAL *rows = (REAL *)call->given[x->size[3]] + m * kept * width;
    if (span) {
      vec errors = {0}, sizes = {0};
      for (int64_t c = 0; c < width; c += LANES) {
        vec now = load_some(y + c, width - c), error = now;
        for (int64_t i = 0; i < span; i++)
          error -= splat(by[i]) * load_some(rows + (kept - 1 - i) * width + c, width - c);
        errors += error * error;
        sizes += now * now;
      }
      REAL over = x->size[7] ? total(sizes) + (REAL)1e-6 : (REAL)width;
      REAL score = total(errors) / over;
      if (!isfinite(score)) {
#pragma omp atomic write
        *call->failed = 2;
      }
      int64_t window = x->size[6], position = ((const int64_t *)call->given[x->size[5]])[m];
      ((REAL *)call->given[x->size[4]])[m * window + ring_place(position, window)] = score;
    }
    memmove(rows, rows + width, (size_t)((kept - 1) * width) * sizeof(REAL));
    memcpy(rows + (kept - 1) * width, y, (size_t)width * sizeof(REAL));
  }
}

#endif
