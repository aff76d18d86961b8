/* Gated linear attention by tiles of 16 tokens, forward and backward.
 *
 * A task is a head of a sequence; its state [keys][width] stays in the cache while tiles pass. A tile
 * is a few small products and, for the delta rule, a triangular solve: README.md has the equations,
 * and the names here are its words. Decays are multiplied, never divided by nor taken as differences
 * of logarithms. What lies above a diagonal is not read, so NaN and infinity never reach an earlier
 * token. Sums have one order whatever the number of threads.
 *
 * Matrices of a tile have rows padded with zeros to whole vectors. Absent tensors are null. The
 * backward keeps the tiles between two saved states, and goes through them from the last one.
 */
#include "matrices.h"

enum { TILE = 16 };

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

/* What tokens and the state before them make: [TILE][keys] or [TILE][width], padded; [TILE][TILE].
 * Of two in a row the second begins where the first ends, so that one product takes both. */
typedef struct {
  int64_t keys, width, count, rows, delta;
  REAL *q, *k;
  REAL *decay, *kept, *left; /* left behind the tile, and kept of the state before it */
  REAL *kept_q, *kept_k;
  REAL *left_k;
  REAL *errors, *written;
  REAL *beta;
  REAL *pairs;           /* decays from pair to pair */
  REAL *weights, *known; /* queries and keys by keys */
} Tile;

/* A thread's buffers. */
typedef struct {
  REAL *turned; /* [keys or width][3 TILE] */
  REAL *read;   /* [TILE][width] */
  /* backward */
  REAL *across; /* [keys][3 TILE] */
  REAL *grad, *asks; /* of outputs, and of the state's answers to keys */
  REAL *grad_errors;
  REAL *grad_q, *grad_k, *grad_left;
  REAL *grad_decay;
  REAL *through; /* [keys] */
  REAL *grad_weights, *grad_known;
} Work;

static const REAL one = 1;

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

/* to += a b with a lower triangle a [count][TILE]; nothing else of it is read */
INLINE void add_lower(REAL *to, const REAL *a, const REAL *b, int64_t row, int64_t count) {
  for (int64_t i = 0; i < count; i += 4) {
    int64_t rows = smaller(4, count - i);
    add(to + i * row, row, &one, 0, a + i * TILE, TILE, 1, b, row, rows, i, row);
    for (int64_t r = i; r < i + rows; r++)
      for (int64_t j = i; j <= r; j++) add_row(to + r * row, a[r * TILE + j], b + j * row, row);
  }
}

/* Set the entries above the diagonal, or on it too, to zero. */
INLINE void clear_upper(REAL *a, int64_t count, int strict) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t j = i + !strict; j < TILE; j++) a[i * TILE + j] = 0;
}

/* --- a tile --------------------------------------------------------------------------------- */

INLINE void fill_row(REAL *to, REAL x, int64_t row) {
  for (int64_t n = 0; n < row; n += LANES) store(to + n, splat(x));
}

INLINE void times(REAL *to, const REAL *a, const REAL *b, int64_t size) {
  for (int64_t n = 0; n < size; n += LANES) store(to + n, load(a + n) * load(b + n));
}

/* Read a tile, values where errors will be, and find its decays. */
static void open_tile(const Inputs *in, Tile *x, int64_t token, int64_t count, int64_t head) {
  int64_t keys = in->keys, row = x->keys, group = head / (in->heads / in->groups);
  REAL logs[TILE] = {0}, decays[TILE];
  x->count = count;
  for (int64_t i = 0; i < count; i++) {
    int64_t t = token + i;
    load_row(x->q + i * row, in->q + t * in->stride_q + group * keys, keys, row);
    load_row(x->k + i * row, in->k + t * in->stride_k + group * keys, keys, row);
    load_row(x->errors + i * x->width, in->v + t * in->stride_v + head * in->width, in->width,
             x->width);
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

/* Weights of queries and keys on what each token wrote. */
static void weigh(Tile *x, Work *w) {
  int64_t count = x->count, row = x->keys;
  if (x->rows < 2) {
    REAL pair[TILE] = {0};
    for (int64_t i = 0; i < count; i++) {
      for (int64_t j = 0; j < i; j++) pair[j] *= x->decay[i * row];
      pair[i] = 1;
      memcpy(x->pairs + i * TILE, pair, sizeof pair);
    }
    turn(x->k, row, w->turned, TILE, TILE, row);
    multiply(x->weights, TILE, x->q, row, 1, w->turned, TILE, count, row, TILE);
    times(x->weights, x->weights, x->pairs, count * TILE);
    if (x->delta) {
      multiply(x->known, TILE, x->k, row, 1, w->turned, TILE, count, row, TILE);
      times(x->known, x->known, x->pairs, count * TILE);
    }
  } else { /* for every row of the state, what is left of each token's key, moved on by a token */
    memset(w->turned, 0, (size_t)(row * TILE) * sizeof(REAL));
    for (int64_t i = 0; i < count; i++) {
      vec asked[TILE / LANES], met[TILE / LANES];
      UNROLL for (int n = 0; n < TILE / LANES; n++) asked[n] = met[n] = splat(0);
      const REAL *q = x->q + i * row, *k = x->k + i * row, *decay = x->decay + i * row;
      for (int64_t c = 0; c < row; c++) {
        REAL *reached = w->turned + c * TILE;
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
  clear_upper(x->weights, count, 0);
  if (x->delta) clear_upper(x->known, count, 1);
}

/* The tokens' writes: the values, or their difference from the state's answers to the keys. */
static void find_errors(Tile *x, const REAL *state, int64_t keys) {
  int64_t count = x->count, row = x->width;
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

/* Read a tile and find its tokens' writes, given the state before it. */
static void take_tile(const Inputs *in, Tile *x, Work *w, const REAL *state, int64_t token,
                      int64_t count, int64_t head) {
  if (count < TILE) memset(x->q, 0, (size_t)(x->beta - x->q) * sizeof(REAL)); /* rows behind it */
  open_tile(in, x, token, count, head);
  weigh(x, w);
  find_errors(x, state, in->keys);
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
    vec error = load(x->errors + n + i * LANES);
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

typedef struct {
  REAL **at;
  int64_t size;
} Part;

/* Lay matrices out in one piece of memory, and return how much they take; `from` null counts only. */
static int64_t lay_out(const Part *parts, int count, REAL *from) {
  int64_t used = 0;
  for (int i = 0; i < count; i++) {
    if (from) *parts[i].at = from + used;
    used += padded(parts[i].size);
  }
  return used;
}

static int64_t lay_out_tile(Tile *x, const Inputs *in, REAL *from) {
  int64_t keys = TILE * padded(in->keys), width = TILE * padded(in->width), pairs = TILE * TILE;
  const Part parts[] = {{&x->q, keys},      {&x->k, keys},        {&x->decay, keys},
                        {&x->kept, keys},   {&x->left, keys},     {&x->kept_q, keys},
                        {&x->kept_k, keys}, {&x->left_k, keys},   {&x->errors, width},
                        {&x->written, width}, {&x->beta, TILE},   {&x->pairs, pairs},
                        {&x->weights, pairs}, {&x->known, pairs}};
  x->keys = padded(in->keys), x->width = padded(in->width), x->rows = in->rows;
  x->delta = in->delta;
  return lay_out(parts, sizeof parts / sizeof *parts, from);
}

static int64_t lay_out_work(Work *w, const Inputs *in, REAL *from, int back) {
  int64_t keys = TILE * padded(in->keys), width = TILE * padded(in->width), pairs = TILE * TILE;
  const Part parts[] = {{&w->turned, 3 * (keys > width ? keys : width)},
                        {&w->read, width},
                        {&w->across, 3 * keys},
                        {&w->grad, width},
                        {&w->asks, width},
                        {&w->grad_errors, width},
                        {&w->grad_q, keys},
                        {&w->grad_k, keys},
                        {&w->grad_left, keys},
                        {&w->grad_decay, keys},
                        {&w->through, padded(in->keys)},
                        {&w->grad_weights, pairs},
                        {&w->grad_known, pairs}};
  return lay_out(parts, back ? sizeof parts / sizeof *parts : 2, from);
}

/* Copy a state [keys][width] to or from one whose rows are padded. */
INLINE void copy_state(REAL *to, int64_t to_row, const REAL *from, int64_t from_row, int64_t keys,
                       int64_t width) {
  for (int64_t c = 0; width && c < keys; c++) /* without numbers it lies nowhere */
    memcpy(to + c * to_row, from + c * from_row, (size_t)width * sizeof(REAL));
}

/* Where the state before a token is saved, as the declaration counts. */
INLINE int64_t slot(const Inputs *in, int64_t segment, int64_t head, int64_t first) {
  int64_t at = in->offsets[segment] / in->between + segment + first / in->between;
  return (at * in->heads + head) * in->keys * in->width;
}

static void march(const Inputs *in, Tile *x, Work *w, REAL *state, int64_t segment, int64_t head, REAL *out,
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
    take_tile(in, x, w, state, begin + first, smaller(TILE, length - first), head);
    multiply(w->read, x->width, x->kept_q, x->keys, 1, state, x->width, x->count, keys, x->width);
    add_lower(w->read, x->weights, x->written, x->width, x->count);
    for (int64_t n = 0; n < x->count * x->width; n += LANES)
      store(w->read + n, splat((REAL)in->scale) * load(w->read + n));
    for (int64_t i = 0; i < x->count; i++)
      store_row(out + ((begin + first + i) * in->heads + head) * width, w->read + i * x->width,
                width);
    advance(x, state, keys);
  }
  copy_state(end, width, state, x->width, keys, width);
}

/* --- backward ------------------------------------------------------------------------------- */

/* Gradients of errors, from the last token to the first where each sees the next, and what they are
 * times -beta: the gradients of the state's answers to keys. */
static void solve_back(const Tile *x, Work *w) {
  int64_t count = x->count, row = x->width;
  for (int64_t j = (count - 1) / 4 * 4; j >= 0; j -= 4) {
    int64_t rows = smaller(4, count - j), next = j + rows;
    if (x->delta && next < count)
      add(w->grad_errors + j * row, row, &one, 0, x->known + next * TILE + j, 1, TILE,
          w->asks + next * row, row, rows, count - next, row);
    for (int64_t r = next - 1; r >= j; r--) {
      for (int64_t i = r + 1; x->delta && i < next; i++)
        add_row(w->grad_errors + r * row, x->known[i * TILE + r], w->asks + i * row, row);
      for (int64_t n = 0; n < row; n += LANES)
        store(w->asks + r * row + n, splat(-x->beta[r]) * load(w->grad_errors + r * row + n));
    }
  }
}

/* Gradients from pairs of a tile's tokens, where a decay is a number a head. */
static void pairs_of_heads(const Tile *x, Work *w, REAL *decay) {
  int64_t count = x->count, row = x->keys, both = x->delta ? 2 * TILE : TILE;
  REAL below[TILE] = {0};
  for (int64_t t = count - 1; t > 0; t--) { /* all that is read at t or later, by who wrote it */
    REAL *own = w->grad_weights + t * TILE, *other = w->grad_known + t * TILE, sum = 0;
    for (int64_t j = 0; j < t; j++) {
      below[j] += own[j] * x->weights[t * TILE + j];
      if (x->delta) below[j] += other[j] * x->known[t * TILE + j];
      sum += below[j];
    }
    decay[t] = sum;
  }
  decay[0] = 0;
  times(w->grad_weights, w->grad_weights, x->pairs, count * TILE);
  if (x->delta) times(w->grad_known, w->grad_known, x->pairs, count * TILE);
  add(w->grad_q, row, &one, 0, w->grad_weights, TILE, 1, x->k, row, both, count, row);
  add(w->grad_k, row, &one, 0, w->grad_weights, 1, TILE, x->q, row, count, both, row);
}

/* The same where each row of the state decays by a number of its own. */
static void pairs_of_rows(const Tile *x, Work *w) {
  int64_t count = x->count, row = x->keys;
  for (int64_t c = 0; c < row; c += LANES) {
    const REAL *q = x->q + c, *k = x->k + c, *decay = x->decay + c;
    REAL *grad_q = w->grad_q + c, *grad_k = w->grad_k + c, *grad_decay = w->grad_decay + c;
    for (int64_t j = 0; j < count; j++) {
      vec reached[TILE], back = splat(0);
      reached[j] = load(k + j * row);
      store(grad_q + j * row,
            load(grad_q + j * row) + splat(w->grad_weights[j * TILE + j]) * reached[j]);
      for (int64_t t = j + 1; t < count; t++) { /* what is left of key j at token t */
        vec on = reached[t] = reached[t - 1] * load(decay + t * row);
        store(grad_q + t * row,
              load(grad_q + t * row) + splat(w->grad_weights[t * TILE + j]) * on);
        if (x->delta)
          store(grad_k + t * row, load(grad_k + t * row) + splat(w->grad_known[t * TILE + j]) * on);
      }
      for (int64_t t = count - 1; t > j; t--) { /* what tokens from t on read of it */
        back += splat(w->grad_weights[t * TILE + j]) * load(q + t * row);
        if (x->delta) back += splat(w->grad_known[t * TILE + j]) * load(k + t * row);
        store(grad_decay + t * row, load(grad_decay + t * row) + reached[t] * back);
        back *= load(decay + t * row);
      }
      back += splat(w->grad_weights[j * TILE + j]) * load(q + j * row);
      store(grad_k + j * row, load(grad_k + j * row) + back);
    }
  }
}

/* to [keys] = factor * the rows of two states, multiplied and summed */
static void sum_rows(REAL *to, const REAL *factor, const REAL *a, const REAL *b, int64_t keys,
                     int64_t width) {
  for (int64_t c = 0; c < keys; c += LANES) {
    vec rows[LANES], sum = splat(0);
    for (int r = 0; r < LANES; r++) {
      rows[r] = splat(0);
      for (int64_t n = 0; n < width; n += LANES)
        rows[r] += load(a + (c + r) * width + n) * load(b + (c + r) * width + n);
    }
    transpose(rows);
    UNROLL for (int r = 0; r < LANES; r++) sum += rows[r];
    store(to + c, load(factor + c) * sum);
  }
}

/* A tile back: from the state before it and the gradient of the one behind it, which moves on. */
static void tile_back(const Inputs *in, const Gradients *to, const Tile *x, Work *w,
                      const REAL *state, REAL *carry, int64_t token, int64_t head) {
  int64_t count = x->count, keys = x->keys, width = x->width, heads = in->heads;
  int64_t both = x->delta ? 2 * TILE : TILE, three = 3 * TILE;
  REAL *through = w->through, *last = x->kept + (count - 1) * keys, sums[TILE];
  memset(w->grad, 0, (size_t)(2 * TILE * width) * sizeof(REAL));
  for (int64_t i = 0; to->out && i < count; i++) {
    REAL *row = w->grad + i * width;
    load_row(row, to->out + (token + i) * to->stride_out + head * in->width, in->width, width);
    for (int64_t n = 0; n < width; n += LANES)
      store(row + n, splat((REAL)in->scale) * load(row + n));
  }
  multiply(w->grad_errors, width, x->left_k, keys, 1, carry, width, count, in->keys, width);
  add(w->grad_errors, width, &one, 0, x->weights, 1, TILE, w->grad, width, count, count, width);
  solve_back(x, w);
  for (int64_t i = 0; i < count; i++) {
    int64_t at = (token + i) * heads + head;
    for (int64_t n = 0; n < in->width; n += LANES)
      store_some(to->v + at * in->width + n, -load(w->asks + i * width + n), in->width - n);
    if (to->beta) to->beta[at] = dot(x->errors + i * width, w->grad_errors + i * width, width);
  }
  /* what queries and keys read of the state before, and what is left of keys behind */
  turn(w->grad, width, w->turned, three, both, width);
  turn(x->written, width, w->turned + 2 * TILE, three, TILE, width);
  multiply(w->across, three, state, width, 1, w->turned, three, keys, in->width, both);
  multiply(w->across + 2 * TILE, three, carry, width, 1, w->turned + 2 * TILE, three, keys,
           in->width, TILE);
  if (!x->delta)
    for (int64_t c = 0; c < keys; c++)
      memset(w->across + c * three + TILE, 0, TILE * sizeof(REAL));
  turn(w->across, three, w->grad_q, keys, keys, three);
  sum_rows(through, last, state, carry, keys, width);
  /* pairs of tokens */
  multiply(w->grad_weights, TILE, w->grad, width, 1, w->turned + 2 * TILE, three, both, in->width,
           TILE);
  clear_upper(w->grad_weights, count, 0);
  if (x->delta) clear_upper(w->grad_known, count, 1);
  add(carry, width, last, 1, x->kept_q, 1, keys, w->grad, width, in->keys, both, width);

  /* a decay counts for all that is written before its token and read at it or later */
  for (int64_t n = 0; n < keys; n += LANES) {
    vec handed = load(through + n), read = splat(0);
    for (int64_t i = 0; i < count; i++) {
      int64_t at = i * keys + n;
      store(w->grad_decay + at, handed);
      handed += load(x->left_k + at) * load(w->grad_left + at);
    }
    for (int64_t i = count - 1; i >= 0; i--) {
      int64_t at = i * keys + n;
      read += load(x->kept_q + at) * load(w->grad_q + at);
      if (x->delta) read += load(x->kept_k + at) * load(w->grad_k + at);
      store(w->grad_decay + at, load(w->grad_decay + at) + read);
    }
  }
  for (int64_t n = 0; n < count * keys; n += LANES) {
    store(w->grad_q + n, load(x->kept + n) * load(w->grad_q + n));
    store(w->grad_k + n, load(x->kept + n) * load(w->grad_k + n) +
                             load(x->left + n) * load(w->grad_left + n));
  }
  if (x->rows < 2)
    pairs_of_heads(x, w, sums);
  else
    pairs_of_rows(x, w);
  for (int64_t i = 0; i < count; i++) {
    int64_t at = (token + i) * heads + head;
    store_row(to->q + at * in->keys, w->grad_q + i * keys, in->keys);
    store_row(to->k + at * in->keys, w->grad_k + i * keys, in->keys);
    if (in->rows == 1) {
      vec sum = splat(0);
      for (int64_t n = 0; n < keys; n += LANES) sum += load(w->grad_decay + i * keys + n);
      to->decay[at] = total(sum) + sums[i];
    } else if (in->rows) {
      store_row(to->decay + at * in->keys, w->grad_decay + i * keys, in->keys);
    }
  }
}

static void march_back(const Inputs *in, const Gradients *to, Tile *tiles, Work *w, REAL *states,
                       REAL *carry, int64_t segment, int64_t head, const REAL *saved) {
  int64_t begin = in->offsets[segment], length = in->offsets[segment + 1] - begin;
  int64_t keys = in->keys, width = in->width, row = tiles->width;
  int64_t place = (segment * in->heads + head) * keys * width, room = tiles->keys * row;
  memset(carry, 0, (size_t)room * sizeof(REAL));
  if (to->final) copy_state(carry, row, to->final + place, width, keys, width);
  for (int64_t first = (length - 1) / in->between * in->between; length && first >= 0;
       first -= in->between) {
    int64_t last = smaller(length, first + in->between), count = (last - first + TILE - 1) / TILE;
    memset(states, 0, (size_t)room * sizeof(REAL));
    copy_state(states, row, saved + slot(in, segment, head, first), width, keys, width);
    for (int64_t i = 0; i < count; i++) {
      int64_t done = first + i * TILE;
      REAL *state = states + i * room;
      take_tile(in, tiles + i, w, state, begin + done, smaller(TILE, last - done), head);
      if (i + 1 == count) break;
      memcpy(state + room, state, (size_t)room * sizeof(REAL));
      advance(tiles + i, state + room, keys);
    }
    for (int64_t i = count - 1; i >= 0; i--)
      tile_back(in, to, tiles + i, w, states + i * room, carry, begin + first + i * TILE, head);
  }
  if (to->initial) copy_state(to->initial + place, width, carry, row, keys, width);
}

/* --- all heads of all sequences -------------------------------------------------------------- */

/* Return 0, or 1 if memory ran out. */
int gated_linear_attention_forward(const Inputs *in, REAL *out, REAL *final, REAL *saved,
                                   int threads) {
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Tile x;
    Work w;
    int64_t state = padded(in->keys) * padded(in->width), tile = lay_out_tile(&x, in, 0);
    REAL *room = scratch((state + tile + lay_out_work(&w, in, 0, 0)) * (int64_t)sizeof(REAL));
    if (!room) {
#pragma omp atomic write
      failed = 1;
    } else {
      lay_out_tile(&x, in, room + state);
      lay_out_work(&w, in, room + state + tile, 0);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < in->segments * in->heads; task++) {
      int64_t segment = task / in->heads, head = task % in->heads;
      if (!room) continue;
      if (in->offsets[segment + 1] - in->offsets[segment] == 1 && !saved)
        step(in, &x, segment, head, out, final);
      else
        march(in, &x, &w, room, segment, head, out, final, saved);
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
    Work w;
    int64_t state = padded(in->keys) * padded(in->width), count = in->between / TILE;
    Tile *tiles = malloc((size_t)count * sizeof(Tile));
    int64_t tile = lay_out_tile(&(Tile){0}, in, 0), need = count * (state + tile) + state;
    REAL *room = scratch((need + lay_out_work(&w, in, 0, 1)) * (int64_t)sizeof(REAL));
    if (!room || !tiles) {
#pragma omp atomic write
      failed = 1;
    } else {
      for (int64_t i = 0; i < count; i++)
        lay_out_tile(tiles + i, in, room + (count + 1) * state + i * tile);
      lay_out_work(&w, in, room + need, 1);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < in->segments * in->heads; task++)
      if (room && tiles)
        march_back(in, to, tiles, &w, room, room + count * state, task / in->heads,
                   task % in->heads, saved);
    free(room);
    free(tiles);
  }
  return failed;
}
