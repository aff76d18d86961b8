/* Sequences to and from the transforms' layout: half as many complex numbers, turned.
 *
 * On a circle of 2 M places, where going round once changes the sign, z[m] = (x[m] + i x[M + m]) w^m
 * with w = e^{i pi / (2 M)}. What came before a sequence lies at the far end, negated.
 */
#include "vector.h"

typedef struct {
  REAL *x, *past; /* [b, length, c], [b, before, c] */
  REAL *z;        /* [b, c, M] pairs, rows z_row pairs apart */
  const REAL *turn; /* re w^m [M], im w^m [M], with any factor */
  const REAL *scale, *add; /* to x on the way back: scale[c] add[b, length, c] */
  int64_t batch, channels, length, before, half, z_row;
  int64_t x_batch, x_row, past_batch, past_row, add_batch, add_row;
} Sequences;

typedef struct {
  REAL *taps, *ahead; /* [d, taps], [d, ahead] */
  REAL *z;
  const REAL *turn;
  int64_t rows, count, count_ahead, half, z_row, taps_row, ahead_row;
} Taps;

/* Rows of a tile: LANES consecutive places from `place` on; NULL where there is nothing. */
typedef struct {
  REAL *row[LANES];
  const REAL *add[LANES];
  REAL sign[LANES];
  int any, whole; /* is there one; are all within the sequence, row[0] first */
} Tile;

INLINE Tile tile_at(const Sequences *s, int64_t b, int64_t m, int upper) {
  Tile t = {.any = 0};
  int64_t place = m + (upper ? s->half : 0), far = 2 * s->half - s->before;
  t.whole = m + LANES <= s->half && place + LANES <= s->length;
  t.row[0] = s->x + b * s->x_batch + place * s->x_row;
  t.add[0] = s->add ? s->add + b * s->add_batch + place * s->add_row : 0;
  if (t.whole) {
    t.any = 1;
    return t;
  }
  if (place >= s->length && place + LANES <= far) return t;
  for (int r = 0; r < LANES; r++, place++) {
    t.row[r] = 0, t.add[r] = 0, t.sign[r] = 1;
    if (m + r >= s->half) continue;
    if (place < s->length) {
      t.row[r] = s->x + b * s->x_batch + place * s->x_row;
      if (s->add) t.add[r] = s->add + b * s->add_batch + place * s->add_row;
    } else if (place >= far) {
      t.row[r] = s->past + b * s->past_batch + (place - far) * s->past_row;
      t.sign[r] = -1;
    }
    t.any |= t.row[r] != 0;
  }
  return t;
}

INLINE void store_pairs(REAL *to, vec re, vec im, int64_t count) {
  mask low, high;
  UNROLL for (int i = 0; i < LANES; i++) {
    low[i] = i / 2 + (i & 1 ? LANES : 0);
    high[i] = LANES / 2 + i / 2 + (i & 1 ? LANES : 0);
  }
  store_some(to, shuffle(re, im, low), 2 * count);
  if (2 * count > LANES) store_some(to + LANES, shuffle(re, im, high), 2 * count - LANES);
}

INLINE void load_pairs(const REAL *from, vec *re, vec *im, int64_t count) {
  mask even, odd;
  UNROLL for (int i = 0; i < LANES; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
  vec a = load_some(from, 2 * count);
  vec b = 2 * count > LANES ? load_some(from + LANES, 2 * count - LANES) : (vec){0};
  *re = shuffle(a, b, even);
  *im = shuffle(a, b, odd);
}

/* Rows lie far apart: ask for those of the tile after next in good time. */
enum { AHEAD = 2 * LANES };

INLINE void read_tile(const Tile *t, int64_t c, const Sequences *s, vec *x) {
  if (t->whole && c + LANES <= s->channels) {
    const REAL *from = t->row[0] + c;
    UNROLL for (int r = 0; r < LANES; r++) {
      __builtin_prefetch(from + (r + AHEAD) * s->x_row);
      x[r] = load(from + r * s->x_row);
    }
  } else if (t->whole) {
    UNROLL for (int r = 0; r < LANES; r++)
      x[r] = load_some(t->row[0] + r * s->x_row + c, s->channels - c);
  } else {
    for (int r = 0; r < LANES; r++) {
      x[r] = (vec){0};
      if (t->any && t->row[r]) x[r] = load_some(t->row[r] + c, s->channels - c) * splat(t->sign[r]);
    }
  }
  transpose(x);
}

INLINE void write_tile(const Tile *t, int64_t c, const Sequences *s, vec *x) {
  int64_t left = s->channels - c;
  transpose(x);
  vec scale = s->scale ? load_some(s->scale + c, left) : (vec){0};
  if (t->whole && left >= LANES) {
    REAL *to = t->row[0] + c;
    if (t->add[0]) {
      UNROLL for (int r = 0; r < LANES; r++) x[r] += scale * load(t->add[0] + r * s->add_row + c);
    }
    UNROLL for (int r = 0; r < LANES; r++) {
      __builtin_prefetch(to + (r + AHEAD) * s->x_row, 1);
      store(to + r * s->x_row, x[r]);
    }
    return;
  }
  for (int r = 0; r < LANES; r++) {
    REAL *to = t->whole ? t->row[0] + r * s->x_row : t->row[r];
    const REAL *add = !t->whole ? t->add[r] : s->add ? t->add[0] + r * s->add_row : 0;
    if (!to) continue;
    vec y = t->whole ? x[r] : x[r] * splat(t->sign[r]);
    if (add) y += scale * load_some(add + c, left);
    store_some(to + c, y, left);
  }
}

INLINE void fold_tile(const Sequences *s, int64_t b, int64_t m) {
  Tile lower = tile_at(s, b, m, 0), upper = tile_at(s, b, m, 1);
  int64_t count = s->half - m;
  vec wr = load_some(s->turn + m, count), wi = load_some(s->turn + s->half + m, count);
  for (int64_t c = 0; c < s->channels; c += LANES) {
    REAL *to = s->z + 2 * ((b * s->channels + c) * s->z_row + m);
    vec x[LANES], y[LANES];
    read_tile(&lower, c, s, x);
    if (upper.any) {
      read_tile(&upper, c, s, y);
      UNROLL for (int i = 0; i < LANES; i++)
        if (c + i < s->channels)
          store_pairs(to + 2 * i * s->z_row, x[i] * wr - y[i] * wi, x[i] * wi + y[i] * wr, count);
    } else {
      UNROLL for (int i = 0; i < LANES; i++)
        if (c + i < s->channels) store_pairs(to + 2 * i * s->z_row, x[i] * wr, x[i] * wi, count);
    }
  }
}

INLINE void unfold_tile(const Sequences *s, int64_t b, int64_t m) {
  Tile lower = tile_at(s, b, m, 0), upper = tile_at(s, b, m, 1);
  if (!lower.any && !upper.any) return;
  int64_t count = s->half - m;
  vec wr = load_some(s->turn + m, count), wi = load_some(s->turn + s->half + m, count);
  for (int64_t c = 0; c < s->channels; c += LANES) {
    const REAL *from = s->z + 2 * ((b * s->channels + c) * s->z_row + m);
    vec x[LANES], y[LANES];
    UNROLL for (int i = 0; i < LANES; i++) {
      vec re = {0}, im = {0};
      if (c + i < s->channels) load_pairs(from + 2 * i * s->z_row, &re, &im, count);
      x[i] = re * wr + im * wi;
      y[i] = im * wr - re * wi;
    }
    if (lower.any) write_tile(&lower, c, s, x);
    if (upper.any) write_tile(&upper, c, s, y);
  }
}

void fold(const Sequences *s, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static) collapse(2)
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t m = 0; m < s->half; m += LANES) fold_tile(s, b, m);
}

void unfold(const Sequences *s, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static) collapse(2)
  for (int64_t b = 0; b < s->batch; b++)
    for (int64_t m = 0; m < s->half; m += LANES) unfold_tile(s, b, m);
}

/* Filters lie along time already; the taps that look ahead go backwards from the far end. Return
   whether memory ran out. */
int fold_taps(const Taps *t, int threads) {
  const int64_t half = t->half;
  int failed = 0;
  const REAL *wr = t->turn, *wi = t->turn + half;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t d = 0; d < t->rows; d++) {
    REAL *x = scratch(2 * half * sizeof(REAL)), *y = x + half, *z = t->z + 2 * d * t->z_row;
    if (!x) {
#pragma omp atomic write
      failed = 1;
      continue;
    }
    memcpy(x, t->taps + d * t->taps_row, (size_t)t->count * sizeof(REAL));
    memset(x + t->count, 0, (size_t)(2 * half - t->count) * sizeof(REAL));
    for (int64_t j = 0; j < t->count_ahead; j++)
      x[2 * half - 1 - j] = -t->ahead[d * t->ahead_row + j];
    for (int64_t m = 0; m < half; m++) {
      z[2 * m] = x[m] * wr[m] - y[m] * wi[m];
      z[2 * m + 1] = x[m] * wi[m] + y[m] * wr[m];
    }
    free(x);
  }
  return failed;
}

int unfold_taps(const Taps *t, int threads) {
  const int64_t half = t->half;
  int failed = 0;
  const REAL *wr = t->turn, *wi = t->turn + half;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t d = 0; d < t->rows; d++) {
    REAL *x = scratch(2 * half * sizeof(REAL)), *y = x + half, *z = t->z + 2 * d * t->z_row;
    if (!x) {
#pragma omp atomic write
      failed = 1;
      continue;
    }
    for (int64_t m = 0; m < half; m++) {
      x[m] = z[2 * m] * wr[m] + z[2 * m + 1] * wi[m];
      y[m] = z[2 * m + 1] * wr[m] - z[2 * m] * wi[m];
    }
    memcpy(t->taps + d * t->taps_row, x, (size_t)t->count * sizeof(REAL));
    for (int64_t j = 0; j < t->count_ahead; j++)
      t->ahead[d * t->ahead_row + j] = -x[2 * half - 1 - j];
    free(x);
  }
  return failed;
}

typedef struct {
  const REAL *inputs, *taps; /* [b, n], [n] pairs */
  REAL *outputs, *sums;      /* [b, n], [n] pairs */
  int64_t batch, count;
} Spectra;

/* a b of complex numbers, a or its conjugate */
INLINE vec product(vec a, vec b, int conjugate) {
  mask real, imaginary, swapped;
  vec sign = {0};
  UNROLL for (int i = 0; i < LANES; i++) {
    real[i] = i & ~1, imaginary[i] = i | 1, swapped[i] = i ^ 1;
    sign[i] = (i & 1) == conjugate ? -1 : 1;
  }
  vec turned = shuffle(b, b, swapped) * sign;
  return shuffle(a, a, real) * b + shuffle(a, a, imaginary) * turned;
}

enum { BLOCK = 1024 }; /* numbers whose taps and sums stay close while the rows pass */

/* outputs *= taps, every row */
void multiply(const Spectra *s, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t start = 0; start < 2 * s->count; start += BLOCK) {
    int64_t stop = start + BLOCK < 2 * s->count ? start + BLOCK : 2 * s->count;
    for (int64_t b = 0; b < s->batch; b++) {
      REAL *y = s->outputs + 2 * b * s->count;
      for (int64_t i = start; i < stop; i += LANES) {
        int64_t left = stop - i;
        store_some(y + i, product(load_some(s->taps + i, left), load_some(y + i, left), 0), left);
      }
    }
  }
}

/* sums += conj(inputs) outputs over the rows; then outputs *= conj(taps) */
void correlate(const Spectra *s, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t start = 0; start < 2 * s->count; start += BLOCK) {
    int64_t stop = start + BLOCK < 2 * s->count ? start + BLOCK : 2 * s->count;
    for (int64_t b = 0; b < s->batch; b++) {
      const REAL *u = s->inputs + 2 * b * s->count;
      REAL *g = s->outputs + 2 * b * s->count;
      for (int64_t i = start; i < stop; i += LANES) {
        int64_t left = stop - i;
        vec outer = load_some(g + i, left), sum = load_some(s->sums + i, left);
        store_some(s->sums + i, sum + product(load_some(u + i, left), outer, 1), left);
        store_some(g + i, product(load_some(s->taps + i, left), outer, 1), left);
      }
    }
  }
}
