/* Gated linear attention by tiles of 16 tokens, forward and backward.
 *
 * A task is a head of a sequence; its state [keys][width] stays in the cache while tiles pass. A tile
 * is a few small products and, for the delta rule, a triangular solve: README.md has the equations,
 * and the names here are its words. Decays are multiplied, never divided by nor taken as differences
 * of logarithms. What lies above a diagonal is not read, so NaN and infinity never reach an earlier
 * token. Sums have one order whatever the number of threads.
 *
 * Matrices of a tile have rows padded with zeros to whole vectors. Absent tensors are null.
 */
#include "vector.h"

enum {
  TILE = 16,
#ifdef __AVX512F__
  WIDE = 4 /* vectors of a block of sums that stays in registers */
#else
  WIDE = 2
#endif
};

typedef struct {
  const REAL *q, *k, *v, *log_decay, *beta, *initial;
  const int64_t *offsets;
  int64_t segments, groups, heads, keys, width;
  int64_t rows;    /* numbers of a token's decay: 0, 1 or keys */
  int64_t between; /* tokens between saved states, whole tiles */
  int64_t delta;
  int64_t stride_q, stride_k, stride_v, stride_decay, stride_beta; /* from token to token */
  double scale;
} Inputs;

typedef struct {
  const REAL *out, *final;
  int64_t stride_out;
  REAL *q, *k, *v, *decay, *beta, *initial; /* of q and k a row for every head */
} Gradients;

/* What a thread works on: matrices [TILE][keys] or [TILE][width], padded, and [TILE][TILE]. */
typedef struct {
  int64_t keys, width, count, rows, delta;
  REAL *q, *k, *decay, *kept, *left; /* left behind the tile, and kept of the state before it */
  REAL *kept_q, *kept_k, *left_k;
  REAL *v, *errors, *written, *read;
  REAL *beta;
  REAL *transposed;                /* [keys or width][TILE] */
  REAL *pairs, *weights, *known;   /* decays from pair to pair; queries and keys by keys */
  /* backward */
  REAL *grad, *grad_errors, *grad_v;
  REAL *grad_q, *grad_k, *grad_left, *grad_decay;
  REAL *grad_weights, *grad_known;
  REAL *state_t, *carry_t;         /* [width][keys] */
} Tile;

static const REAL one = 1;

INLINE int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* --- small products ------------------------------------------------------------------------- */

/* to = factor to +- a b for `rows` rows and `vectors` vectors of columns; no factor: to = +- a b */
INLINE void block(REAL *to, int64_t to_row, const REAL *factor, int64_t factor_step, const REAL *a,
                  int64_t a_row, int64_t a_column, const REAL *b, int64_t b_row, int64_t terms,
                  const int rows, const int vectors, const int minus) {
  vec sum[8][WIDE];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int c = 0; c < vectors; c++)
      sum[r][c] = factor ? load(to + r * to_row + c * LANES) * splat(factor[r * factor_step])
                         : splat(0);
  for (int64_t i = 0; i < terms; i++) {
    vec x[WIDE];
    UNROLL for (int c = 0; c < vectors; c++) x[c] = load(b + i * b_row + c * LANES);
    UNROLL for (int r = 0; r < rows; r++) {
      vec y = splat(a[r * a_row + i * a_column]);
      UNROLL for (int c = 0; c < vectors; c++)
        sum[r][c] = minus ? sum[r][c] - y * x[c] : sum[r][c] + y * x[c];
    }
  }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int c = 0; c < vectors; c++) store(to + r * to_row + c * LANES, sum[r][c]);
}

#define BLOCK(ROWS, VECTORS)                                                                     \
  block(to + m * to_row + n, to_row, factor ? factor + m * factor_step : 0, factor_step,         \
        a + m * a_row, a_row, a_column, b + n, b_row, terms, ROWS, VECTORS, minus)

INLINE void product(REAL *to, int64_t to_row, const REAL *factor, int64_t factor_step,
                    const REAL *a, int64_t a_row, int64_t a_column, const REAL *b, int64_t b_row,
                    int64_t rows, int64_t terms, int64_t columns, const int minus) {
  int64_t n = 0;
  for (; n + WIDE * LANES <= columns; n += WIDE * LANES) {
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4) BLOCK(4, WIDE);
    for (; m < rows; m++) BLOCK(1, WIDE);
  }
  for (; n < columns; n += LANES) {
    int64_t m = 0;
    for (; m + 8 <= rows; m += 8) BLOCK(8, 1);
    for (; m < rows; m++) BLOCK(1, 1);
  }
}

/* to = a b */
static void multiply(REAL *to, int64_t to_row, const REAL *a, int64_t a_row, int64_t a_column,
                     const REAL *b, int64_t b_row, int64_t rows, int64_t terms, int64_t columns) {
  product(to, to_row, 0, 0, a, a_row, a_column, b, b_row, rows, terms, columns, 0);
}

/* to = factor to + a b, a factor for every row */
static void add(REAL *to, int64_t to_row, const REAL *factor, int64_t factor_step, const REAL *a,
                int64_t a_row, int64_t a_column, const REAL *b, int64_t b_row, int64_t rows,
                int64_t terms, int64_t columns) {
  product(to, to_row, factor, factor_step, a, a_row, a_column, b, b_row, rows, terms, columns, 0);
}

/* to -= a b */
static void subtract(REAL *to, int64_t to_row, const REAL *a, int64_t a_row, int64_t a_column,
                     const REAL *b, int64_t b_row, int64_t rows, int64_t terms, int64_t columns) {
  product(to, to_row, &one, 0, a, a_row, a_column, b, b_row, rows, terms, columns, 1);
}

/* to += factor from */
INLINE void add_row(REAL *to, REAL factor, const REAL *from, int64_t columns) {
  for (int64_t n = 0; n < columns; n += LANES)
    store(to + n, load(to + n) + splat(factor) * load(from + n));
}

INLINE REAL dot(const REAL *a, const REAL *b, int64_t columns) {
  vec sum = splat(0);
  for (int64_t n = 0; n < columns; n += LANES) sum += load(a + n) * load(b + n);
  return total(sum);
}

#if defined(__clang__) || __GNUC__ >= 12
/* Transpose a square by shuffling its rows like cards, the upper half into the lower, time and again. */
INLINE void turn(const REAL *from, int64_t from_row, REAL *to, int64_t to_row) {
  vec x[LANES], y[LANES];
  UNROLL for (int i = 0; i < LANES; i++) x[i] = load(from + i * from_row);
  UNROLL for (int round = 1; round < LANES; round *= 2) {
    UNROLL for (int i = 0; i < LANES / 2; i++) {
      vec a = x[i], b = x[i + LANES / 2];
#if VEC_BYTES == 64
      if (sizeof(REAL) == 4) {
        typedef float wide __attribute__((vector_size(64)));
        y[2 * i] = (vec)__builtin_shufflevector((wide)a, (wide)b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20,
                                                5, 21, 6, 22, 7, 23);
        y[2 * i + 1] = (vec)__builtin_shufflevector((wide)a, (wide)b, 8, 24, 9, 25, 10, 26, 11, 27,
                                                    12, 28, 13, 29, 14, 30, 15, 31);
      } else {
        typedef double wide __attribute__((vector_size(64)));
        y[2 * i] = (vec)__builtin_shufflevector((wide)a, (wide)b, 0, 8, 1, 9, 2, 10, 3, 11);
        y[2 * i + 1] = (vec)__builtin_shufflevector((wide)a, (wide)b, 4, 12, 5, 13, 6, 14, 7, 15);
      }
#elif VEC_BYTES == 32
      if (sizeof(REAL) == 4) {
        typedef float wide __attribute__((vector_size(32)));
        y[2 * i] = (vec)__builtin_shufflevector((wide)a, (wide)b, 0, 8, 1, 9, 2, 10, 3, 11);
        y[2 * i + 1] = (vec)__builtin_shufflevector((wide)a, (wide)b, 4, 12, 5, 13, 6, 14, 7, 15);
      } else {
        typedef double wide __attribute__((vector_size(32)));
        y[2 * i] = (vec)__builtin_shufflevector((wide)a, (wide)b, 0, 4, 1, 5);
        y[2 * i + 1] = (vec)__builtin_shufflevector((wide)a, (wide)b, 2, 6, 3, 7);
      }
#else
      if (sizeof(REAL) == 4) {
        typedef float wide __attribute__((vector_size(16)));
        y[2 * i] = (vec)__builtin_shufflevector((wide)a, (wide)b, 0, 4, 1, 5);
        y[2 * i + 1] = (vec)__builtin_shufflevector((wide)a, (wide)b, 2, 6, 3, 7);
      } else {
        typedef double wide __attribute__((vector_size(16)));
        y[2 * i] = (vec)__builtin_shufflevector((wide)a, (wide)b, 0, 2);
        y[2 * i + 1] = (vec)__builtin_shufflevector((wide)a, (wide)b, 1, 3);
      }
#endif
    }
    UNROLL for (int i = 0; i < LANES; i++) x[i] = y[i];
  }
  UNROLL for (int i = 0; i < LANES; i++) store(to + i * to_row, x[i]);
}
#else
INLINE void turn(const REAL *from, int64_t from_row, REAL *to, int64_t to_row) {
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) to[j * to_row + i] = from[i * from_row + j];
}
#endif

/* to [columns][rows] = from [rows][columns], both whole vectors */
static void transpose(const REAL *from, int64_t from_row, REAL *to, int64_t to_row, int64_t rows,
                      int64_t columns) {
  for (int64_t i = 0; i < rows; i += LANES)
    for (int64_t j = 0; j < columns; j += LANES)
      turn(from + i * from_row + j, from_row, to + j * to_row + i, to_row);
}

/* to += or -= a b with a lower triangle a [count][TILE]; nothing else of it is read */
INLINE void add_lower(REAL *to, const REAL *a, const REAL *b, int64_t row, int64_t count) {
  for (int64_t i = 0; i < count; i += 4) {
    int64_t rows = smaller(4, count - i);
    add(to + i * row, row, &one, 0, a + i * TILE, TILE, 1, b, row, rows, i, row);
    for (int64_t r = i; r < i + rows; r++)
      for (int64_t j = i; j <= r; j++) add_row(to + r * row, a[r * TILE + j], b + j * row, row);
  }
}

/* to += a^T b with a lower triangle a, zeros above it */
INLINE void add_upper(REAL *to, const REAL *a, const REAL *b, int64_t row, int64_t count) {
  for (int64_t j = 0; j < count; j += 4)
    add(to + j * row, row, &one, 0, a + j * TILE + j, 1, TILE, b + j * row, row,
        smaller(4, count - j), count - j, row);
}

/* Set the entries above the diagonal, or on it too, to zero. */
INLINE void clear_upper(REAL *a, int64_t count, int strict) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t j = i + !strict; j < TILE; j++) a[i * TILE + j] = 0;
}

/* --- a tile --------------------------------------------------------------------------------- */

INLINE void load_row(REAL *to, const REAL *from, int64_t size, int64_t row) {
  for (int64_t n = 0; n < row; n += LANES) store(to + n, load_some(from + n, size - n));
}

INLINE void store_row(REAL *to, const REAL *from, int64_t size) {
  for (int64_t n = 0; n < size; n += LANES) store_some(to + n, load(from + n), size - n);
}

INLINE void fill_row(REAL *to, REAL x, int64_t row) {
  for (int64_t n = 0; n < row; n += LANES) store(to + n, splat(x));
}

INLINE void times(REAL *to, const REAL *a, const REAL *b, int64_t size) {
  for (int64_t n = 0; n < size; n += LANES) store(to + n, load(a + n) * load(b + n));
}

/* Read a tile and find its decays. */
static void open_tile(const Inputs *in, Tile *x, int64_t token, int64_t count, int64_t head) {
  int64_t keys = in->keys, row = x->keys, group = head / (in->heads / in->groups);
  REAL logs[TILE] = {0}, decays[TILE];
  x->count = count;
  for (int64_t i = 0; i < count; i++) {
    int64_t t = token + i;
    load_row(x->q + i * row, in->q + t * in->stride_q + group * keys, keys, row);
    load_row(x->k + i * row, in->k + t * in->stride_k + group * keys, keys, row);
    load_row(x->v + i * x->width, in->v + t * in->stride_v + head * in->width, in->width, x->width);
    x->beta[i] = in->beta ? in->beta[t * in->stride_beta + head] : 1;
    if (in->rows == 1) logs[i] = in->log_decay[t * in->stride_decay + head];
  }
  for (int64_t i = 0; i < TILE; i += LANES) store(decays + i, exponential(load(logs + i)));
  for (int64_t i = 0; i < count; i++) {
    if (in->rows < 2) {
      fill_row(x->decay + i * row, in->rows ? decays[i] : 1, row);
      continue;
    }
    const REAL *from = in->log_decay + (token + i) * in->stride_decay + head * keys;
    for (int64_t n = 0; n < row; n += LANES)
      store(x->decay + i * row + n, exponential(load_some(from + n, keys - n)));
  }
  memcpy(x->kept, x->decay, (size_t)row * sizeof(REAL));
  for (int64_t i = 1; i < count; i++)
    times(x->kept + i * row, x->kept + (i - 1) * row, x->decay + i * row, row);
  fill_row(x->left + (count - 1) * row, 1, row);
  for (int64_t i = count - 2; i >= 0; i--)
    times(x->left + i * row, x->left + (i + 1) * row, x->decay + (i + 1) * row, row);
  times(x->kept_q, x->kept, x->q, count * row);
  times(x->left_k, x->left, x->k, count * row);
  if (x->delta) times(x->kept_k, x->kept, x->k, count * row);
}

/* Weights of queries (where they are wanted) and keys on what each token wrote. */
static void weigh(Tile *x, int reads) {
  int64_t count = x->count, row = x->keys;
  if (x->rows < 2) {
    REAL pair[TILE] = {0};
    for (int64_t i = 0; i < count; i++) {
      for (int64_t j = 0; j < i; j++) pair[j] *= x->decay[i * row];
      pair[i] = 1;
      memcpy(x->pairs + i * TILE, pair, sizeof pair);
    }
    for (int64_t i = count; i < TILE; i++) memset(x->k + i * row, 0, (size_t)row * sizeof(REAL));
    transpose(x->k, row, x->transposed, TILE, TILE, row);
    if (reads)
      multiply(x->weights, TILE, x->q, row, 1, x->transposed, TILE, count, row, TILE);
    if (x->delta)
      multiply(x->known, TILE, x->k, row, 1, x->transposed, TILE, count, row, TILE);
    if (reads) times(x->weights, x->weights, x->pairs, count * TILE);
    if (x->delta) times(x->known, x->known, x->pairs, count * TILE);
  } else { /* for every row of the state, what is left of each token's key, moved on by a token */
    memset(x->transposed, 0, (size_t)(row * TILE) * sizeof(REAL));
    for (int64_t i = 0; i < count; i++) {
      vec asked[TILE / LANES], met[TILE / LANES];
      UNROLL for (int n = 0; n < TILE / LANES; n++) asked[n] = met[n] = splat(0);
      const REAL *q = x->q + i * row, *k = x->k + i * row, *decay = x->decay + i * row;
      for (int64_t c = 0; c < row; c++) {
        REAL *reached = x->transposed + c * TILE;
        UNROLL for (int n = 0; n < TILE / LANES; n++) {
          vec on = load(reached + n * LANES) * splat(decay[c]);
          met[n] += splat(k[c]) * on;
          asked[n] += splat(q[c]) * on;
          store(reached + n * LANES, on);
        }
        reached[i] = k[c];
      }
      UNROLL for (int n = 0; n < TILE / LANES; n++) {
        store(x->known + i * TILE + n * LANES, met[n]);
        store(x->weights + i * TILE + n * LANES, asked[n]);
      }
      x->weights[i * TILE + i] = dot(q, k, row);
    }
  }
  if (reads) clear_upper(x->weights, count, 0);
  if (x->delta) clear_upper(x->known, count, 1);
}

/* What the tokens write: the values, or what they differ from the state's answers to the keys. */
static void find_errors(Tile *x, const REAL *state, int64_t keys) {
  int64_t count = x->count, row = x->width;
  memcpy(x->errors, x->v, (size_t)(count * row) * sizeof(REAL));
  if (x->delta)
    subtract(x->errors, row, x->kept_k, x->keys, 1, state, row, count, keys, row);
  for (int64_t i = 0; i < count; i += 4) {
    int64_t rows = smaller(4, count - i);
    if (x->delta)
      subtract(x->errors + i * row, row, x->known + i * TILE, TILE, 1, x->written, row, rows, i,
               row);
    for (int64_t r = i; r < i + rows; r++) {
      for (int64_t j = i; x->delta && j < r; j++)
        add_row(x->errors + r * row, -x->known[r * TILE + j], x->written + j * row, row);
      for (int64_t n = 0; n < row; n += LANES)
        store(x->written + r * row + n, splat(x->beta[r]) * load(x->errors + r * row + n));
    }
  }
}

/* The state behind the tile. */
static void advance(const Tile *x, REAL *state, int64_t keys) {
  add(state, x->width, x->kept + (x->count - 1) * x->keys, 1, x->left_k, 1, x->keys, x->written,
      x->width, keys, x->count, x->width);
}

/* --- one token ------------------------------------------------------------------------------ */

/* A token for some columns of the state, in two passes over them; a null state is zero. */
INLINE void step_columns(const Inputs *in, const Tile *x, REAL own, const REAL *state, int64_t n,
                         const int vectors, REAL *out, REAL *final) {
  int64_t keys = in->keys, width = in->width, rest = vectors > 1 ? LANES : width - n;
  vec known[WIDE], read[WIDE], written[WIDE];
  UNROLL for (int i = 0; i < vectors; i++) known[i] = read[i] = splat(0);
  for (int64_t c = 0; c < keys; c++)
    UNROLL for (int i = 0; i < vectors; i++) {
      int64_t at = c * width + n + i * LANES;
      vec left = splat(x->decay[c]) * (state ? load_some(state + at, rest) : splat(0));
      known[i] += splat(x->k[c]) * left;
      read[i] += splat(x->q[c]) * left;
    }
  UNROLL for (int i = 0; i < vectors; i++) {
    vec error = load(x->v + n + i * LANES);
    if (x->delta) error -= known[i];
    written[i] = splat(x->beta[0]) * error;
    read[i] = splat((REAL)in->scale) * (read[i] + splat(own) * written[i]);
    store_some(out + n + i * LANES, read[i], rest);
  }
  for (int64_t c = 0; c < keys; c++)
    UNROLL for (int i = 0; i < vectors; i++) {
      int64_t at = c * width + n + i * LANES;
      vec left = splat(x->decay[c]) * (state ? load_some(state + at, rest) : splat(0));
      store_some(final + at, left + splat(x->k[c]) * written[i], rest);
    }
}

/* Decay, write and read without a tile. */
static void step(const Inputs *in, Tile *x, int64_t segment, int64_t head, REAL *out, REAL *final) {
  int64_t width = in->width, n = 0, at = (segment * in->heads + head) * in->keys * width;
  const REAL *state = in->initial ? in->initial + at : 0;
  open_tile(in, x, in->offsets[segment], 1, head);
  REAL own = dot(x->q, x->k, x->keys);
  out += (in->offsets[segment] * in->heads + head) * width;
  for (; n + WIDE * LANES <= width; n += WIDE * LANES)
    step_columns(in, x, own, state, n, WIDE, out, final + at);
  for (; n < width; n += LANES) step_columns(in, x, own, state, n, 1, out, final + at);
}

/* --- sequences ------------------------------------------------------------------------------ */

/* Lay the matrices of a tile out in one piece of memory; `from` null counts only. */
static int64_t lay_out(Tile *x, const Inputs *in, REAL *from, int back) {
  int64_t keys = padded(in->keys), width = padded(in->width), used = 0;
  int64_t longer = keys > width ? keys : width;
  x->keys = keys, x->width = width, x->rows = in->rows, x->delta = in->delta;
  struct {
    REAL **at;
    int64_t size;
  } parts[] = {{&x->q, TILE * keys},           {&x->k, TILE * keys},
               {&x->decay, TILE * keys},       {&x->kept, TILE * keys},
               {&x->left, TILE * keys},        {&x->kept_q, TILE * keys},
               {&x->kept_k, TILE * keys},      {&x->left_k, TILE * keys},
               {&x->v, TILE * width},          {&x->errors, TILE * width},
               {&x->written, TILE * width},    {&x->read, TILE * width},
               {&x->beta, TILE},               {&x->transposed, TILE * longer},
               {&x->pairs, TILE * TILE},       {&x->weights, TILE * TILE},
               {&x->known, TILE * TILE},       {&x->grad, TILE * width},
               {&x->grad_errors, TILE * width}, {&x->grad_v, TILE * width},
               {&x->grad_q, TILE * keys},      {&x->grad_k, TILE * keys},
               {&x->grad_left, TILE * keys},   {&x->grad_decay, TILE * keys},
               {&x->grad_weights, TILE * TILE}, {&x->grad_known, TILE * TILE},
               {&x->state_t, width * keys},    {&x->carry_t, width * keys}};
  int forward = 17, count = back ? (int)(sizeof parts / sizeof *parts) : forward;
  for (int i = 0; i < count; i++) {
    if (from) *parts[i].at = from + used;
    used += padded(parts[i].size);
  }
  return used;
}

/* Copy a state [keys][width] to or from one whose rows are padded. */
INLINE void copy_state(REAL *to, int64_t to_row, const REAL *from, int64_t from_row, int64_t keys,
                       int64_t width) {
  for (int64_t c = 0; c < keys; c++)
    memcpy(to + c * to_row, from + c * from_row, (size_t)width * sizeof(REAL));
}

/* Where the state before a token is saved, as the declaration counts. */
INLINE int64_t slot(const Inputs *in, int64_t segment, int64_t head, int64_t first) {
  int64_t at = in->offsets[segment] / in->between + segment + first / in->between;
  return (at * in->heads + head) * in->keys * in->width;
}

static void march(const Inputs *in, Tile *x, REAL *state, int64_t segment, int64_t head, REAL *out,
                  REAL *final, REAL *saved) {
  int64_t begin = in->offsets[segment], length = in->offsets[segment + 1] - begin;
  int64_t keys = in->keys, width = in->width, size = keys * width;
  REAL *end = final + (segment * in->heads + head) * size;
  memset(state, 0, (size_t)(x->keys * x->width) * sizeof(REAL));
  if (in->initial)
    copy_state(state, x->width, in->initial + (segment * in->heads + head) * size, width, keys,
               width);
  for (int64_t first = 0; first < length; first += TILE) {
    if (saved && first % in->between == 0)
      copy_state(saved + slot(in, segment, head, first), width, state, x->width, keys, width);
    open_tile(in, x, begin + first, smaller(TILE, length - first), head);
    weigh(x, 1);
    find_errors(x, state, keys);
    multiply(x->read, x->width, x->kept_q, x->keys, 1, state, x->width, x->count, keys, x->width);
    add_lower(x->read, x->weights, x->written, x->width, x->count);
    for (int64_t n = 0; n < x->count * x->width; n += LANES)
      store(x->read + n, splat((REAL)in->scale) * load(x->read + n));
    for (int64_t i = 0; i < x->count; i++)
      store_row(out + ((begin + first + i) * in->heads + head) * width, x->read + i * x->width,
                width);
    advance(x, state, keys);
  }
  copy_state(end, width, state, x->width, keys, width);
}

/* --- backward ------------------------------------------------------------------------------- */

/* Gradients of errors and values, from the last token to the first where each sees the next. */
static void solve_back(Tile *x) {
  int64_t count = x->count, row = x->width;
  for (int64_t j = (count - 1) / 4 * 4; j >= 0; j -= 4) {
    int64_t rows = smaller(4, count - j), next = j + rows;
    if (x->delta && next < count)
      subtract(x->grad_errors + j * row, row, x->known + next * TILE + j, 1, TILE,
               x->grad_v + next * row, row, rows, count - next, row);
    for (int64_t r = next - 1; r >= j; r--) {
      for (int64_t i = r + 1; x->delta && i < next; i++)
        add_row(x->grad_errors + r * row, -x->known[i * TILE + r], x->grad_v + i * row, row);
      for (int64_t n = 0; n < row; n += LANES)
        store(x->grad_v + r * row + n, splat(x->beta[r]) * load(x->grad_errors + r * row + n));
    }
  }
}

/* What pairs of a tile's tokens give to gradients, where a decay is a number a head. */
static void pairs_of_heads(Tile *x, REAL *decay) {
  int64_t count = x->count, row = x->keys;
  REAL below[TILE] = {0};
  for (int64_t t = count - 1; t > 0; t--) { /* all that is read at t or later, by who wrote it */
    REAL *own = x->grad_weights + t * TILE, *other = x->grad_known + t * TILE, sum = 0;
    for (int64_t j = 0; j < t; j++) {
      below[j] += own[j] * x->weights[t * TILE + j];
      if (x->delta) below[j] += other[j] * x->known[t * TILE + j];
      sum += below[j];
    }
    decay[t] = sum;
  }
  decay[0] = 0;
  times(x->grad_weights, x->grad_weights, x->pairs, count * TILE);
  add(x->grad_q, row, &one, 0, x->grad_weights, TILE, 1, x->k, row, count, count, row);
  add_upper(x->grad_k, x->grad_weights, x->q, row, count);
  if (!x->delta) return;
  times(x->grad_known, x->grad_known, x->pairs, count * TILE);
  add(x->grad_k, row, &one, 0, x->grad_known, TILE, 1, x->k, row, count, count, row);
  add_upper(x->grad_k, x->grad_known, x->k, row, count);
}

/* The same where each row of the state decays by a number of its own. */
static void pairs_of_rows(Tile *x) {
  int64_t count = x->count, row = x->keys;
  for (int64_t c = 0; c < row; c += LANES) {
    const REAL *q = x->q + c, *k = x->k + c, *decay = x->decay + c;
    REAL *grad_q = x->grad_q + c, *grad_k = x->grad_k + c, *grad_decay = x->grad_decay + c;
    for (int64_t j = 0; j < count; j++) {
      vec reached[TILE], back = splat(0);
      reached[j] = load(k + j * row);
      store(grad_q + j * row,
            load(grad_q + j * row) + splat(x->grad_weights[j * TILE + j]) * reached[j]);
      for (int64_t t = j + 1; t < count; t++) { /* what is left of key j at token t */
        vec on = reached[t] = reached[t - 1] * load(decay + t * row);
        store(grad_q + t * row,
              load(grad_q + t * row) + splat(x->grad_weights[t * TILE + j]) * on);
        if (x->delta)
          store(grad_k + t * row, load(grad_k + t * row) + splat(x->grad_known[t * TILE + j]) * on);
      }
      for (int64_t t = count - 1; t > j; t--) { /* what tokens from t on read of it */
        back += splat(x->grad_weights[t * TILE + j]) * load(q + t * row);
        if (x->delta) back += splat(x->grad_known[t * TILE + j]) * load(k + t * row);
        store(grad_decay + t * row, load(grad_decay + t * row) + reached[t] * back);
        back *= load(decay + t * row);
      }
      back += splat(x->grad_weights[j * TILE + j]) * load(q + j * row);
      store(grad_k + j * row, load(grad_k + j * row) + back);
    }
  }
}

/* A tile back: from the state before it and the gradient of the one behind it, which moves on. */
static void tile_back(const Inputs *in, const Gradients *to, Tile *x, const REAL *state,
                      REAL *carry, int64_t token, int64_t head) {
  int64_t count = x->count, keys = x->keys, width = x->width, heads = in->heads;
  REAL through[keys], *last = x->kept + (count - 1) * keys, sums[TILE];
  for (int64_t i = 0; i < count; i++) {
    REAL *row = x->grad + i * width;
    if (to->out) {
      load_row(row, to->out + (token + i) * to->stride_out + head * in->width, in->width, width);
      for (int64_t n = 0; n < width; n += LANES)
        store(row + n, splat((REAL)in->scale) * load(row + n));
    } else {
      memset(row, 0, (size_t)width * sizeof(REAL));
    }
  }
  multiply(x->grad_errors, width, x->left_k, keys, 1, carry, width, count, in->keys, width);
  add_upper(x->grad_errors, x->weights, x->grad, width, count);
  solve_back(x);
  for (int64_t i = 0; i < count; i++) {
    int64_t at = (token + i) * heads + head;
    store_row(to->v + at * in->width, x->grad_v + i * width, in->width);
    if (to->beta) to->beta[at] = dot(x->errors + i * width, x->grad_errors + i * width, width);
  }
  /* what queries and keys read of the state before, and what is left of keys behind */
  transpose(state, width, x->state_t, keys, keys, width);
  transpose(carry, width, x->carry_t, keys, keys, width);
  multiply(x->grad_q, keys, x->grad, width, 1, x->state_t, keys, count, in->width, keys);
  multiply(x->grad_left, keys, x->written, width, 1, x->carry_t, keys, count, in->width, keys);
  memset(x->grad_k, 0, (size_t)(count * keys) * sizeof(REAL));
  if (x->delta)
    subtract(x->grad_k, keys, x->grad_v, width, 1, x->state_t, keys, count, in->width, keys);
  for (int64_t c = 0; c < keys; c += LANES) {
    vec sum = splat(0);
    for (int64_t i = 0; i < in->width; i++)
      sum += load(x->state_t + i * keys + c) * load(x->carry_t + i * keys + c);
    store(through + c, sum * load(last + c));
  }
  /* pairs of tokens */
  for (int64_t i = count; i < TILE; i++)
    memset(x->written + i * width, 0, (size_t)width * sizeof(REAL));
  transpose(x->written, width, x->transposed, TILE, TILE, width);
  multiply(x->grad_weights, TILE, x->grad, width, 1, x->transposed, TILE, count, in->width, TILE);
  clear_upper(x->grad_weights, count, 0);
  if (x->delta) {
    memset(x->grad_known, 0, TILE * TILE * sizeof(REAL));
    subtract(x->grad_known, TILE, x->grad_v, width, 1, x->transposed, TILE, count, in->width, TILE);
    clear_upper(x->grad_known, count, 1);
  }
  add(carry, width, last, 1, x->kept_q, 1, keys, x->grad, width, in->keys, count, width);
  if (x->delta)
    subtract(carry, width, x->kept_k, 1, keys, x->grad_v, width, in->keys, count, width);

  /* a decay counts for all that is written before its token and read at it or later */
  for (int64_t n = 0; n < keys; n += LANES) {
    vec handed = load(through + n), read = splat(0);
    for (int64_t i = 0; i < count; i++) {
      int64_t at = i * keys + n;
      store(x->grad_decay + at, handed);
      handed += load(x->left_k + at) * load(x->grad_left + at);
    }
    for (int64_t i = count - 1; i >= 0; i--) {
      int64_t at = i * keys + n;
      read += load(x->kept_q + at) * load(x->grad_q + at);
      if (x->delta) read += load(x->kept_k + at) * load(x->grad_k + at);
      store(x->grad_decay + at, load(x->grad_decay + at) + read);
    }
  }
  for (int64_t n = 0; n < count * keys; n += LANES) {
    store(x->grad_q + n, load(x->kept + n) * load(x->grad_q + n));
    store(x->grad_k + n, load(x->kept + n) * load(x->grad_k + n) +
                             load(x->left + n) * load(x->grad_left + n));
  }
  if (x->rows < 2)
    pairs_of_heads(x, sums);
  else
    pairs_of_rows(x);
  for (int64_t i = 0; i < count; i++) {
    int64_t at = (token + i) * heads + head;
    store_row(to->q + at * in->keys, x->grad_q + i * keys, in->keys);
    store_row(to->k + at * in->keys, x->grad_k + i * keys, in->keys);
    if (in->rows == 1) {
      vec sum = splat(0);
      for (int64_t n = 0; n < keys; n += LANES) sum += load(x->grad_decay + i * keys + n);
      to->decay[at] = total(sum) + sums[i];
    } else if (in->rows) {
      store_row(to->decay + at * in->keys, x->grad_decay + i * keys, in->keys);
    }
  }
}

static void march_back(const Inputs *in, const Gradients *to, Tile *x, REAL *states, REAL *carry,
                       int64_t segment, int64_t head, const REAL *saved) {
  int64_t begin = in->offsets[segment], length = in->offsets[segment + 1] - begin;
  int64_t keys = in->keys, width = in->width, size = keys * width, room = x->keys * x->width;
  int64_t place = (segment * in->heads + head) * size;
  memset(carry, 0, (size_t)room * sizeof(REAL));
  if (to->final) copy_state(carry, x->width, to->final + place, width, keys, width);
  for (int64_t first = (length - 1) / in->between * in->between; length && first >= 0;
       first -= in->between) {
    int64_t last = smaller(length, first + in->between), tiles = (last - first + TILE - 1) / TILE;
    memset(states, 0, (size_t)room * sizeof(REAL));
    copy_state(states, x->width, saved + slot(in, segment, head, first), width, keys, width);
    for (int64_t i = 0; i + 1 < tiles; i++) {
      open_tile(in, x, begin + first + i * TILE, TILE, head);
      if (x->delta) weigh(x, 0);
      find_errors(x, states + i * room, keys);
      memcpy(states + (i + 1) * room, states + i * room, (size_t)room * sizeof(REAL));
      advance(x, states + (i + 1) * room, keys);
    }
    for (int64_t i = tiles - 1; i >= 0; i--) {
      int64_t token = begin + first + i * TILE;
      open_tile(in, x, token, smaller(TILE, begin + last - token), head);
      weigh(x, 1);
      find_errors(x, states + i * room, keys);
      tile_back(in, to, x, states + i * room, carry, token, head);
    }
  }
  if (to->initial) copy_state(to->initial + place, width, carry, x->width, keys, width);
}

/* --- all heads of all sequences -------------------------------------------------------------- */

/* Return 0, or 1 if memory ran out. */
int gated_linear_attention_forward(const Inputs *in, REAL *out, REAL *final, REAL *saved,
                                   int threads) {
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Tile x;
    int64_t state = padded(in->keys) * padded(in->width);
    int64_t need = lay_out(&x, in, 0, 0) + state;
    REAL *room = scratch(need * (int64_t)sizeof(REAL));
    if (!room) {
#pragma omp atomic write
      failed = 1;
    } else {
      lay_out(&x, in, room + state, 0);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < in->segments * in->heads; task++) {
      int64_t segment = task / in->heads, head = task % in->heads;
      if (!room) continue;
      if (in->offsets[segment + 1] - in->offsets[segment] == 1 && !saved)
        step(in, &x, segment, head, out, final);
      else
        march(in, &x, room, segment, head, out, final, saved);
    }
    free(room);
  }
  return failed;
}

int gated_linear_attention_backward(const Inputs *in, const Gradients *to, const REAL *saved,
                                    int threads) {
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Tile x;
    int64_t state = padded(in->keys) * padded(in->width), count = in->between / TILE + 1;
    int64_t need = lay_out(&x, in, 0, 1) + count * state;
    REAL *room = scratch(need * (int64_t)sizeof(REAL));
    if (!room) {
#pragma omp atomic write
      failed = 1;
    } else {
      lay_out(&x, in, room + count * state, 1);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < in->segments * in->heads; task++)
      if (room)
        march_back(in, to, &x, room, room + (count - 1) * state, task / in->heads,
                   task % in->heads, saved);
    free(room);
  }
  return failed;
}
