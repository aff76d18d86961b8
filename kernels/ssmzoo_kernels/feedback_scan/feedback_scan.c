/* COFFEE's scan on CPUs. Per channel and state, with the channel's u:
 *
 *     s = sigmoid(w x),   x += s (lam x + u),   y = sigmoid(sum filter x) sum C x + skip u
 *
 * where the gate looks at `drive` instead of x if there is one, and the first factor of y is 1
 * without a filter.
 *
 * Tokens lie flat, cut into segments by `offsets`. Columns are the channels of a segment, up to
 * BLOCK of them; where segments of equal length are narrower, several stand side by side, so that
 * lanes are full whatever the width is. A task is a block of channels and a share of the segments;
 * shares do not depend on the number of threads, nor do results. In a task, CHUNK tokens at a time:
 * a tile of VT vectors of columns by NT states stays in registers while it marches through the
 * chunk. Training keeps the state before every `interval` of tokens (numbering: scan/__init__.py);
 * the backward marches through an interval again for the states before its other chunks, recomputes
 * states and gates of a chunk, in the first cache, and marches back.
 *
 * Saved states are [slots, N, D]; initial and final ones [S, D, N]. Absent tensors are null.
 */
#include "vector.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#ifndef CHUNK
#error "CHUNK, the tokens whose states are recomputed at once, comes from the Python side"
#endif

enum { VECTORS = 4, BLOCK = VECTORS * LANES, TILE = 8, HALF = TILE / 2, TASKS = 32 };

typedef struct {
  const REAL *u, *lam, *w, *C, *filter, *skip, *drive, *initial;
  const int64_t *offsets;
  int64_t segments, width, states, interval;
  int64_t stride_u, stride_drive; /* between tokens */
} Inputs;

typedef struct {
  const REAL *out, *final; /* incoming */
  int64_t stride_out;
  REAL *u, *lam, *w, *C, *filter, *skip, *drive, *initial;
} Gradients;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* A tile is eight vectors of states: of one vector of columns, or two each of four. States are padded
 * to whole tiles; those beside them change nothing (see read_params). */
INLINE int64_t tile_states(int64_t states) { return states > 6 ? TILE : TILE / VECTORS; }

INLINE int64_t padded_states(int64_t states) {
  int64_t tile = tile_states(states);
  return (states + tile - 1) / tile * tile;
}

/* Where column c's state n lies among numbers: tile after tile, in a tile the vectors of columns in
 * turn. */
INLINE int64_t place(int64_t padded, int64_t c, int64_t n) {
  int64_t tile = tile_states(padded), v = c / LANES;
  int64_t vector = tile == TILE ? v * padded + n : n / tile * TILE + v * tile + n % tile;
  return vector * LANES + c % LANES;
}

/* --- one token ------------------------------------------------------------------------------- */

/* x between -limit and limit; NaN stays NaN: of it and a bound, min and max return the second. */
INLINE vec within(vec x, REAL limit) {
#ifdef __AVX512F__
  if (sizeof(REAL) == 8) {
    x = (vec)_mm512_min_pd((__m512d)splat(limit), (__m512d)x);
    return (vec)_mm512_max_pd((__m512d)splat(-limit), (__m512d)x);
  }
  x = (vec)_mm512_min_ps((__m512)splat(limit), (__m512)x);
  return (vec)_mm512_max_ps((__m512)splat(-limit), (__m512)x);
#else
  return at_least(at_most(x, limit), -limit);
#endif
}

/* 1 / (1 + exp(-x)) for x within +-80 (700), beyond which the gate does not move on: exp stays a
 * normal number, so no weight, however large, gives an infinity or, from that, a NaN. NaN stays NaN.
 * exp(-x) = 2^n 2^r with |r| <= 1/2; 2^r = 1 + r g(r), where g is fitted at Chebyshev's nodes to
 * 5e-9 (8e-18). */
INLINE vec gate(vec x) {
  const int wide = sizeof(REAL) == 8;
  const REAL limit = wide ? 700 : 80, shift = wide ? 0x1.8p52 : 0x1.8p23;
  static const REAL narrow_fit[][4] = {
      FOUR(1.0), FOUR(0.6931471880262287811), FOUR(0.2402265076056812694),
      FOUR(0.05550357114219077819), FOUR(0.009618082557277851491), FOUR(0.001339086336467123438),
      FOUR(0.0001545316294512069018)};
  static const REAL wide_fit[][4] = {
      FOUR(1.0), FOUR(0.6931471805599453094), FOUR(0.2402265069591009822),
      FOUR(0.05550410866482159434), FOUR(0.009618129107606888527), FOUR(0.001333355814641693531),
      FOUR(0.0001540353044173605015), FOUR(0.00001525273382983611839),
      FOUR(1.321544258792168965e-6), FOUR(1.017806244584577352e-7), FOUR(7.0725859492692237e-9),
      FOUR(4.454960598186518394e-10)};
  const vec scale = splat((REAL)-1.4426950408889634);
  x = within(x, limit);
  vec shifted = x * scale + splat(shift); /* n in the low bits */
  vec r = x * scale - (shifted - splat(shift));
  vec power = polynomial(wide ? wide_fit : narrow_fit, wide ? 11 : 6, r);
  power = (vec)((mask)power + ((mask)shifted << (wide ? 52 : 23)));
  return splat(1) / (splat(1) + power);
}

INLINE vec step(vec x, vec lam, vec s, vec u) { return x + s * (lam * x + u); }

/* --- columns --------------------------------------------------------------------------------- */

/* Consecutive segments of one length and a block of channels; column c is channel c % channels of
 * segment c / channels. */
typedef struct {
  int64_t segment, count, channel, channels, length;
} Group;

INLINE int64_t vectors_of(const Group *g) {
  return (g->count * g->channels + LANES - 1) / LANES;
}

INLINE void copy(REAL *to, const REAL *from, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
  for (; i < count; i++) to[i] = from[i];
}

/* Rows of one chunk [token, channel] to [token][column] and back. */
INLINE void read_rows(const Inputs *in, const Group *g, const REAL *from, int64_t stride,
                      int64_t first, int64_t tokens, vec *to) {
  for (int64_t s = 0; s < g->count; s++) {
    const REAL *row = from + (in->offsets[g->segment + s] + first) * stride + g->channel;
    REAL *columns = (REAL *)to + s * g->channels;
    for (int64_t t = 0; t < tokens; t++)
      copy(columns + t * BLOCK, row + t * stride, g->channels);
  }
}

INLINE void write_rows(const Inputs *in, const Group *g, REAL *to, int64_t first, int64_t tokens,
                       const vec *from) {
  for (int64_t s = 0; s < g->count; s++) {
    REAL *row = to + (in->offsets[g->segment + s] + first) * in->width + g->channel;
    const REAL *columns = (const REAL *)from + s * g->channels;
    for (int64_t t = 0; t < tokens; t++)
      copy(row + t * in->width, columns + t * BLOCK, g->channels);
  }
}

/* A chunk's rows are too far apart for the hardware to foresee. */
INLINE void fetch(const Inputs *in, const Group *g, const REAL *from, int64_t stride, int64_t first,
                  int64_t tokens) {
  if (!from || g->count > 1) return;
  const REAL *row = from + (in->offsets[g->segment] + first) * stride + g->channel;
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t c = 0; c < g->channels; c += 64 / (int64_t)sizeof(REAL))
      __builtin_prefetch(row + t * stride + c, 0, 2);
}

/* [segment, channel, n] in memory to tiles, and back. */
INLINE void read_states(const Inputs *in, const Group *g, const REAL *from, int64_t padded,
                        vec *to) {
  memset(to, 0, sizeof(vec) * VECTORS * (size_t)padded);
  if (!from) return;
  REAL *flat = (REAL *)to;
  for (int64_t s = 0, c = 0; s < g->count; s++) {
    const REAL *row = from + ((g->segment + s) * in->width + g->channel) * in->states;
    for (int64_t i = 0; i < g->channels; i++, c++)
      for (int64_t n = 0; n < in->states; n++)
        flat[place(padded, c, n)] = row[i * in->states + n];
  }
}

INLINE void write_states(const Inputs *in, const Group *g, REAL *to, int64_t padded,
                         const vec *from) {
  const REAL *flat = (const REAL *)from;
  for (int64_t s = 0, c = 0; s < g->count; s++) {
    REAL *row = to + ((g->segment + s) * in->width + g->channel) * in->states;
    for (int64_t i = 0; i < g->channels; i++, c++)
      for (int64_t n = 0; n < in->states; n++)
        row[i * in->states + n] = flat[place(padded, c, n)];
  }
}

/* [slot, n, channel] in memory. */
INLINE int64_t slot(const Inputs *in, int64_t segment, int64_t number) {
  return in->offsets[segment] / in->interval + segment + number;
}

INLINE void read_saved(const Inputs *in, const Group *g, const REAL *from, int64_t number,
                       int64_t padded, vec *to) {
  REAL *flat = (REAL *)to;
  for (int64_t s = 0; s < g->count; s++) {
    const REAL *state =
        from + slot(in, g->segment + s, number) * in->states * in->width + g->channel;
    for (int64_t n = 0; n < in->states; n++)
      for (int64_t i = 0, run; i < g->channels; i += run) {
        int64_t c = s * g->channels + i;
        run = smaller(LANES - c % LANES, g->channels - i);
        copy(flat + place(padded, c, n), state + n * in->width + i, run);
      }
  }
}

INLINE void write_saved(const Inputs *in, const Group *g, REAL *to, int64_t number, int64_t padded,
                        const vec *from) {
  const REAL *flat = (const REAL *)from;
  for (int64_t s = 0; s < g->count; s++) {
    REAL *state = to + slot(in, g->segment + s, number) * in->states * in->width + g->channel;
    for (int64_t n = 0; n < in->states; n++)
      for (int64_t i = 0, run; i < g->channels; i += run) {
        int64_t c = s * g->channels + i;
        run = smaller(LANES - c % LANES, g->channels - i);
        copy(state + n * in->width + i, flat + place(padded, c, n), run);
      }
  }
}

/* --- parameters ------------------------------------------------------------------------------ */

typedef struct {
  vec *lam, *w, *C, *filter;
} Params;

INLINE Params params_at(const Params *p, int64_t i) {
  return (Params){p->lam + i, p->w + i, p->C + i, p->filter + i};
}

INLINE Params params_in(vec *memory, int64_t padded) {
  int64_t size = VECTORS * padded;
  return (Params){memory, memory + size, memory + 2 * size, memory + 3 * size};
}

/* The same for every segment of a group. A state that only pads decays, so that it stays finite,
 * and is not read. */
static void read_params(const Inputs *in, const Group *g, int64_t padded, const Params *p) {
  const REAL *from[] = {in->lam, in->w, in->C, in->filter};
  vec *to[] = {p->lam, p->w, p->C, p->filter};
  for (int k = 0; k < 4; k++) {
    REAL *flat = (REAL *)to[k];
    for (int64_t i = 0; i < VECTORS * padded * LANES; i++) flat[i] = k ? 0 : -1;
    for (int64_t c = 0; from[k] && c < g->count * g->channels; c++) {
      const REAL *row = from[k] + (g->channel + c % g->channels) * in->states;
      for (int64_t n = 0; n < in->states; n++)
        flat[place(padded, c, n)] = row[n];
    }
  }
}

/* --- tiles ----------------------------------------------------------------------------------- */

/* A chunk's inputs, [token][vector of columns]. */
typedef struct {
  vec u[CHUNK * VECTORS], drive[CHUNK * VECTORS];
  vec read[CHUNK * VECTORS], filter[CHUNK * VECTORS]; /* sum C x and sum filter x */
} Chunk;

enum { READ = 1, FILTER = 2 };

/* March a tile through a chunk, from vector `at` on. READ and FILTER add to these sums. To keep is to
 * write the states before, between and after the tokens, and the gates. */
INLINE void march(vec *states, const Params *p, Chunk *chunk, int64_t at, int64_t tokens, int what,
                  vec *history, vec *gates, const int keep, const int driven, const int VT,
                  const int NT) {
  vec x[TILE];
  const vec *w = p->w, *lam = p->lam;
  UNROLL for (int k = 0; k < TILE; k++) x[k] = states[k];
  for (int64_t t = 0; t < tokens; t++)
    UNROLL for (int v = 0; v < VT; v++) {
      int64_t here = t * VECTORS + at + v;
      vec u = chunk->u[here], drive = {0};
      if (driven) drive = chunk->drive[here];
      UNROLL for (int k = v * NT; k < v * NT + NT; k++) {
        vec s = gate(w[k] * (driven ? drive : x[k]));
        if (keep) {
          history[t * TILE + k] = x[k];
          gates[t * TILE + k] = s;
        }
        x[k] = step(x[k], lam[k], s, u);
        if (k % 2) {
          LOAD_AFTER(x[k], w);
          LOAD_AFTER(x[k - 1], lam);
        }
      }
      if (what & READ) {
        vec read = chunk->read[here];
        UNROLL for (int k = v * NT; k < v * NT + NT; k++) read += p->C[k] * x[k];
        chunk->read[here] = read;
      }
      if (what & FILTER) {
        vec filter = chunk->filter[here];
        UNROLL for (int k = v * NT; k < v * NT + NT; k++) filter += p->filter[k] * x[k];
        chunk->filter[here] = filter;
      }
    }
  vec *last = keep ? history + tokens * TILE : states;
  UNROLL for (int k = 0; k < TILE; k++) last[k] = x[k];
}

/* Sums of the gradients of a token's input, and of those for its drive. */
typedef struct {
  vec read[CHUNK * VECTORS], filter[CHUNK * VECTORS]; /* of what is read, incoming */
  vec u[CHUNK * VECTORS], drive[CHUNK * VECTORS];
} Back;

/* A sum over all tokens, and its rounding error so far. */
typedef struct {
  vec sum, excess;
} Sum;

INLINE void add(Sum *to, vec x) {
  vec corrected = x - to->excess, sum = to->sum + corrected;
  to->excess = (sum - to->sum) - corrected;
  to->sum = sum;
}

typedef struct {
  Sum *lam, *w, *C, *filter;
} Sums;

INLINE Sums sums_at(const Sums *s, int64_t i) {
  return (Sums){s->lam + i, s->w + i, s->C + i, s->filter + i};
}

/* Whether the gradients of C and filter have a loop of their own: NEON has no registers for these
 * sums beside those of lam and w. */
#ifdef NEON
enum { APART = 1 };
#else
enum { APART = 0 };
#endif

/* Carry the gradient of a part of a tile back through a chunk. Gradients of parameters are added to
 * `sums`, the same four as Params. */
INLINE void march_back(vec *carry, const Params *p, const Chunk *chunk, Back *back, int64_t at,
                       int64_t tokens, const vec *history, const vec *gates,
                       const Sums *sums, const int filtered, const int driven, const int VT,
                       const int NT) {
  vec G[HALF], after[HALF], lam[HALF], w[HALF], C[HALF], filter[HALF];
  UNROLL for (int k = 0; k < HALF; k++) {
    G[k] = carry[k];
    after[k] = history[tokens * TILE + k];
    lam[k] = w[k] = C[k] = filter[k] = (vec){0};
  }
  for (int64_t t = tokens - 1; t >= 0; t--)
    UNROLL for (int v = 0; v < VT; v++) {
      int64_t here = t * VECTORS + at + v;
      vec g = back->read[here], h = {0}, u = chunk->u[here], drive = {0};
      vec grad_u = back->u[here], grad_drive = {0};
      if (filtered) h = back->filter[here];
      if (driven) drive = chunk->drive[here], grad_drive = back->drive[here];
      UNROLL for (int k = v * NT; k < v * NT + NT; k++) {
        vec before = history[t * TILE + k], s = gates[t * TILE + k];
        vec a = G[k] + g * p->C[k];
        if (!APART) C[k] += g * after[k];
        if (filtered) {
          a += h * p->filter[k];
          if (!APART) filter[k] += h * after[k];
        }
        vec written = a * s;
        vec opened = a * (p->lam[k] * before + u) * (s - s * s);
        grad_u += written;
        lam[k] += written * before;
        w[k] += opened * (driven ? drive : before);
        G[k] = a + p->lam[k] * written;
        if (driven)
          grad_drive += opened * p->w[k];
        else
          G[k] += opened * p->w[k];
        after[k] = before;
      }
      back->u[here] = grad_u;
      if (driven) back->drive[here] = grad_drive;
    }
  UNROLL for (int k = 0; k < HALF; k++) {
    carry[k] = G[k];
    add(&sums->lam[k], lam[k]);
    add(&sums->w[k], w[k]);
    if (APART) continue;
    add(&sums->C[k], C[k]);
    if (filtered) add(&sums->filter[k], filter[k]);
  }
}

/* The gradients of C and filter, where they have a loop of their own. */
INLINE void read_back(const Back *back, int64_t at, int64_t tokens, const vec *history,
                      const Sums *sums, const int filtered, const int VT, const int NT) {
  vec C[HALF] = {{0}}, filter[HALF] = {{0}};
  for (int64_t t = tokens - 1; t >= 0; t--)
    UNROLL for (int v = 0; v < VT; v++) {
      int64_t here = t * VECTORS + at + v;
      vec g = back->read[here], h = {0};
      if (filtered) h = back->filter[here];
      UNROLL for (int k = v * NT; k < v * NT + NT; k++) {
        vec after = history[(t + 1) * TILE + k];
        C[k] += g * after;
        if (filtered) filter[k] += h * after;
      }
    }
  UNROLL for (int k = 0; k < HALF; k++) {
    add(&sums->C[k], C[k]);
    if (filtered) add(&sums->filter[k], filter[k]);
  }
}

/* Settings that are constant within a call are compiled in. */
#define MARCH(...) march(states, p, chunk, at, tokens, what, history, gates, __VA_ARGS__)

static void march_tile(int wide, vec *states, const Params *p, Chunk *chunk, int64_t at,
                       int64_t tokens, int what, int driven) {
  vec *history = NULL, *gates = NULL;
  if (wide && driven) MARCH(0, 1, 1, TILE);
  else if (wide) MARCH(0, 0, 1, TILE);
  else if (driven) MARCH(0, 1, VECTORS, TILE / VECTORS);
  else MARCH(0, 0, VECTORS, TILE / VECTORS);
}

static void keep_tile(int wide, vec *states, const Params *p, Chunk *chunk, int64_t at,
                      int64_t tokens, int what, vec *history, vec *gates, int driven) {
  if (wide && driven) MARCH(1, 1, 1, TILE);
  else if (wide) MARCH(1, 0, 1, TILE);
  else if (driven) MARCH(1, 1, VECTORS, TILE / VECTORS);
  else MARCH(1, 0, VECTORS, TILE / VECTORS);
}

/* Going back, a state needs four vectors: half a tile at a time. */
#define MARCH_BACK(FILTERED, DRIVEN, ...)                                                         \
  do {                                                                                            \
    if (APART) read_back(back, v, tokens, history + k, &to, FILTERED, __VA_ARGS__);               \
    march_back(carry + k, &own, chunk, back, v, tokens, history + k, gates + k, &to, FILTERED,    \
               DRIVEN, __VA_ARGS__);                                                              \
  } while (0)

static void march_tile_back(int wide, vec *carry, const Params *p, const Chunk *chunk, Back *back,
                            int64_t at, int64_t tokens, const vec *history, const vec *gates,
                            const Sums *sums, int filtered, int driven) {
  for (int k = 0; k < TILE; k += HALF) {
    int64_t v = wide ? at : at + k / 2;
    Params own = params_at(p, k);
    Sums to = sums_at(sums, k);
    if (wide && filtered) MARCH_BACK(1, driven, 1, HALF);
    else if (wide && driven) MARCH_BACK(0, 1, 1, HALF);
    else if (wide) MARCH_BACK(0, 0, 1, HALF);
    else if (filtered) MARCH_BACK(1, driven, 2, 2);
    else if (driven) MARCH_BACK(0, 1, 2, 2);
    else MARCH_BACK(0, 0, 2, 2);
  }
}

/* How many tiles a group has; those of one vector of columns, or of all four, follow one another. */
INLINE int64_t tiles_of(const Group *g, int64_t padded) {
  return tile_states(padded) == TILE ? vectors_of(g) * padded / TILE : padded * VECTORS / TILE;
}

/* The first vector of columns of a tile. */
INLINE int64_t vector_of(int64_t padded, int64_t tile) {
  return tile_states(padded) == TILE ? tile * TILE / padded : 0;
}

static void read_chunk(const Inputs *in, const Group *g, int64_t first, int64_t tokens,
                       Chunk *chunk) {
  read_rows(in, g, in->u, in->stride_u, first, tokens, chunk->u);
  if (in->drive) read_rows(in, g, in->drive, in->stride_drive, first, tokens, chunk->drive);
}

/* March all columns through a chunk. */
static void march_chunk(const Inputs *in, const Group *g, vec *states, int64_t padded,
                        const Params *p, Chunk *chunk, int64_t tokens, int what) {
  for (int64_t i = 0; i < tiles_of(g, padded); i++) {
    Params own = params_at(p, i * TILE);
    march_tile(tile_states(padded) == TILE, states + i * TILE, &own, chunk, vector_of(padded, i),
               tokens, what, in->drive != NULL);
  }
}

/* --- Newton's method ------------------------------------------------------------------------- */

typedef struct {
  double tolerance, damping;
  int64_t most; /* steps; 0 for twice the tokens of a chunk */
} Newton;

/* Lanes that did not converge, the first token of a chunk where that was, the largest residual. */
typedef struct {
  int64_t lanes, token;
  double residual;
} Failure;

INLINE vec magnitude(vec x) { return pick(x < (vec){0}, -x, x); }

/* Solve for a chunk's states in a vector of lanes, `path` from 1 on; `path[0]` is where they start.
 * Returns their relative residuals. */
static vec solve(vec lam, vec w, const vec *u, const vec *drive, int64_t tokens, const Newton *how,
                 vec *path) {
  const REAL limit = (REAL)1e15; /* far from the solution Newton overshoots */
  const vec one = splat(1), none = {0};
  vec slopes[CHUNK], residuals[CHUNK], worst;
  int64_t most = how->most ? how->most : 2 * tokens;
  for (int64_t t = 0; t < tokens; t++)
    path[t + 1] = step(path[t], lam, splat((REAL)0.5), u[t * VECTORS]);
  for (int64_t count = 0;; count++) {
    worst = none;
    for (int64_t t = 0; t < tokens; t++) {
      vec before = path[t], s = gate(w * (drive ? drive[t * VECTORS] : before));
      vec moved = lam * before + u[t * VECTORS];
      slopes[t] = one + lam * s;
      if (!drive) slopes[t] += w * (s - s * s) * moved;
      residuals[t] = path[t + 1] - (before + s * moved);
      vec size = magnitude(path[t + 1]);
      vec relative = magnitude(residuals[t]) / pick(size > one, size, one);
      worst = pick((relative > worst) | (relative != relative), relative, worst);
    }
    mask open = ~(worst <= splat((REAL)how->tolerance)); /* NaN is open */
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= open[i] != 0;
    if (!any || count == most) return worst;
    vec change = none, kept = splat((REAL)(1 - how->damping));
    for (int64_t t = 0; t < tokens; t++) {
      change = kept * slopes[t] * change - residuals[t];
      change = within(pick(change == change, change, none), limit);
      path[t + 1] = within(path[t + 1] + pick(open, change, none), limit);
    }
  }
}

/* Solve all columns of a chunk and add to what is read, as march_chunk does. */
static void solve_chunk(const Inputs *in, const Group *g, vec *states, int64_t padded,
                        const Params *p, Chunk *chunk, int64_t first, int64_t tokens,
                        const Newton *how, Failure *failure) {
  int64_t tile = tile_states(padded);
  for (int64_t i = 0; i < tiles_of(g, padded) * TILE; i++) {
    int64_t v = vector_of(padded, i / TILE) + i % TILE / tile;
    int64_t n = tile == TILE ? i % padded : i / TILE * tile + i % tile;
    if (n >= in->states || v >= vectors_of(g)) continue;
    vec path[CHUNK + 1];
    path[0] = states[i];
    vec residual = solve(p->lam[i], p->w[i], chunk->u + v, in->drive ? chunk->drive + v : NULL,
                         tokens, how, path);
    for (int c = 0; c < LANES && v * LANES + c < g->count * g->channels; c++)
      if (!(residual[c] <= (REAL)how->tolerance)) {
        failure->token = failure->lanes++ ? smaller(failure->token, first) : first;
        if (!(residual[c] <= failure->residual)) failure->residual = residual[c];
      }
    for (int64_t t = 0; t < tokens; t++) {
      chunk->read[t * VECTORS + v] += p->C[i] * path[t + 1];
      chunk->filter[t * VECTORS + v] += p->filter[i] * path[t + 1];
    }
    states[i] = path[tokens];
  }
}

/* --- forward --------------------------------------------------------------------------------- */

/* A lone token touches its states once: along n, where they lie. */
static void step_rows(const Inputs *in, const Group *g, REAL *out, REAL *final) {
  int64_t states = in->states;
  for (int64_t s = 0; s < g->count; s++) {
    int64_t segment = g->segment + s, t = in->offsets[segment];
    for (int64_t i = g->channel; i < g->channel + g->channels; i++) {
      int64_t row = (segment * in->width + i) * states;
      REAL u = in->u[t * in->stride_u + i];
      vec read = {0}, filter = {0}, drive = {0};
      if (in->drive) drive = splat(in->drive[t * in->stride_drive + i]);
      for (int64_t n = 0; n < states; n += LANES) {
        int64_t some = smaller(LANES, states - n), at = i * states + n;
        vec x = in->initial ? load_some(in->initial + row + n, some) : (vec){0};
        vec opened = gate(load_some(in->w + at, some) * (in->drive ? drive : x));
        x = step(x, load_some(in->lam + at, some), opened, splat(u));
        read += load_some(in->C + at, some) * x;
        if (in->filter) filter += load_some(in->filter + at, some) * x;
        store_some(final + row + n, x, some);
      }
      REAL y = total(read);
      if (in->filter) y *= gate(splat(total(filter)))[0];
      out[t * in->width + i] = y + (in->skip ? in->skip[i] * u : 0);
    }
  }
}

static void forward_group(const Inputs *in, const Group *g, const Params *p, int64_t padded,
                          vec *states, const vec *skip, Chunk *chunk, REAL *out, REAL *final,
                          REAL *saved, const Newton *how, Failure *failure) {
  read_states(in, g, in->initial, padded, states);
  for (int64_t first = 0; first < g->length; first += CHUNK) {
    int64_t tokens = smaller(CHUNK, g->length - first), next = first + CHUNK;
    read_chunk(in, g, first, tokens, chunk);
    fetch(in, g, in->u, in->stride_u, next, smaller(CHUNK, g->length - next));
    fetch(in, g, in->drive, in->stride_drive, next, smaller(CHUNK, g->length - next));
    if (saved && first % in->interval == 0)
      write_saved(in, g, saved, first / in->interval, padded, states);
    memset(chunk->read, 0, sizeof chunk->read);
    if (in->filter) memset(chunk->filter, 0, sizeof chunk->filter);
    if (how)
      solve_chunk(in, g, states, padded, p, chunk, first, tokens, how, failure);
    else
      march_chunk(in, g, states, padded, p, chunk, tokens, READ | (in->filter ? FILTER : 0));
    if (how && failure->lanes) return;
    for (int64_t i = 0; i < tokens * VECTORS; i++) {
      if (in->filter) chunk->read[i] *= gate(chunk->filter[i]);
      chunk->read[i] += skip[i % VECTORS] * chunk->u[i];
    }
    write_rows(in, g, out, first, tokens, chunk->read);
  }
  write_states(in, g, final, padded, states);
  for (int64_t s = 0; saved && s < g->count; s++) {
    /* slots between a segment's last interval and the next segment are nobody's */
    int64_t segment = g->segment + s, used = (g->length + in->interval - 1) / in->interval;
    for (int64_t i = slot(in, segment, used); i < slot(in, segment + 1, 0); i++)
      for (int64_t n = 0; n < in->states; n++)
        memset(saved + (i * in->states + n) * in->width + g->channel, 0,
               (size_t)g->channels * sizeof(REAL));
  }
}

/* How the work is cut: groups of segments, blocks of channels, and shares of the groups. */
typedef struct {
  int64_t *starts; /* first segment of each group, and their number */
  int64_t groups, blocks, shares;
} Plan;

/* Returns 0, or 1 if memory ran out. */
static int make_plan(const Inputs *in, Plan *plan) {
  int64_t abreast = larger(1, BLOCK / larger(1, in->width));
  plan->starts = malloc((size_t)(in->segments + 1) * sizeof(int64_t));
  if (!plan->starts) return 1;
  plan->groups = 0;
  for (int64_t s = 0; s < in->segments;) {
    int64_t first = s, length = in->offsets[s + 1] - in->offsets[s];
    plan->starts[plan->groups++] = first;
    while (s < in->segments && s < first + abreast &&
           in->offsets[s + 1] - in->offsets[s] == length)
      s++;
  }
  plan->starts[plan->groups] = in->segments;
  plan->blocks = (in->width + BLOCK - 1) / BLOCK;
  plan->shares = smaller(plan->groups, larger(1, TASKS / larger(1, plan->blocks)));
  return 0;
}

INLINE int64_t share_start(const Plan *plan, int64_t share) {
  return plan->groups * share / plan->shares;
}

INLINE Group group_of(const Inputs *in, const Plan *plan, int64_t group, int64_t block) {
  int64_t segment = plan->starts[group], channel = block * BLOCK;
  return (Group){segment, plan->starts[group + 1] - segment, channel,
                 smaller(BLOCK, in->width - channel),
                 in->offsets[segment + 1] - in->offsets[segment]};
}

/* The largest group's columns; a smaller group's are the first of them. */
INLINE Group widest_of(const Inputs *in, int64_t block) {
  int64_t channel = block * BLOCK, channels = smaller(BLOCK, in->width - channel);
  return (Group){0, larger(1, BLOCK / in->width), channel, channels, 0};
}

static void read_skip(const Inputs *in, const Group *widest, vec *skip) {
  REAL *flat = (REAL *)skip;
  memset(skip, 0, sizeof(vec) * VECTORS);
  for (int64_t c = 0; in->skip && c < widest->count * widest->channels; c++)
    flat[c] = in->skip[widest->channel + c % widest->channels];
}

static void forward_task(const Inputs *in, const Plan *plan, int64_t share, int64_t block,
                         REAL *out, REAL *final, REAL *saved, const Newton *how,
                         Failure *failure, void *memory) {
  int64_t padded = padded_states(in->states);
  vec *states = memory, skip[VECTORS];
  Params p = params_in(states + VECTORS * padded, padded);
  Group widest = widest_of(in, block);
  Chunk chunk;
  int ready = 0;
  for (int64_t i = share_start(plan, share); i < share_start(plan, share + 1); i++) {
    Group g = group_of(in, plan, i, block);
    if (g.length == 1 && !saved) {
      step_rows(in, &g, out, final);
      continue;
    }
    if (!ready) {
      memset(&chunk, 0, sizeof chunk);
      read_params(in, &widest, padded, &p);
      read_skip(in, &widest, skip);
      ready = 1;
    }
    Failure own = {0};
    forward_group(in, &g, &p, padded, states, skip, &chunk, out, final, saved, how, &own);
    if (!own.lanes) continue;
#pragma omp critical
    {
      failure->token = failure->lanes ? smaller(failure->token, own.token) : own.token;
      failure->lanes += own.lanes;
      if (!(own.residual <= failure->residual)) failure->residual = own.residual;
    }
  }
}

/* March, or solve by Newton's method if `how` is not null; where that fails the results mean nothing.
 * Returns 0, or 1 if memory ran out. */
int scan_forward(const Inputs *in, REAL *out, REAL *final, REAL *saved, const Newton *how,
                 Failure *failure, int threads) {
  Plan plan;
  int failed = make_plan(in, &plan);
  if (failed) return failed;
  int64_t size = 5 * VECTORS * padded_states(in->states) * (int64_t)sizeof(vec);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    void *memory = scratch(size);
    if (!memory) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan.shares * plan.blocks; i++)
      if (memory)
        forward_task(in, &plan, i / plan.blocks, i % plan.blocks, out, final, saved, how, failure,
                     memory);
    free(memory);
  }
  free(plan.starts);
  return failed;
}

/* --- backward -------------------------------------------------------------------------------- */

/* A task's memory. */
typedef struct {
  vec *carry, *starts, *history, *gates;
  Params params;
  Sums sums;
  Sum skip[VECTORS];
  Chunk chunk;
  Back back;
} Work;

/* Tiles whose history is kept at once: all that a filter reads together. */
INLINE int64_t together(const Inputs *in, int64_t padded) {
  return in->filter ? larger(1, padded / tile_states(padded)) : 1;
}

INLINE int64_t work_vectors(const Inputs *in, int64_t padded) {
  return (5 + 8 + in->interval / CHUNK) * VECTORS * padded +
         (2 * CHUNK + 1) * TILE * together(in, padded);
}

/* What comes in behind the filter, y = sigmoid(f) r: of r, and of f. */
static void filter_back(Chunk *chunk, Back *back, int64_t at, int64_t vectors, int64_t tokens) {
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t i = t * VECTORS + at; i < t * VECTORS + at + vectors; i++) {
      vec open = gate(chunk->filter[i]), g = back->read[i];
      back->filter[i] = g * chunk->read[i] * (open - open * open);
      back->read[i] = g * open;
    }
}

static void backward_chunk(const Inputs *in, const Group *g, Work *work, int64_t padded,
                           vec *states, int64_t tokens) {
  int filtered = in->filter != NULL, driven = in->drive != NULL;
  int what = filtered ? READ | FILTER : 0, wide = tile_states(padded) == TILE;
  int64_t several = together(in, padded);
  for (int64_t first = 0; first < tiles_of(g, padded); first += several) {
    int64_t v = vector_of(padded, first);
    for (int64_t i = 0; i < several; i++) {
      Params own = params_at(&work->params, (first + i) * TILE);
      keep_tile(wide, states + (first + i) * TILE, &own, &work->chunk, v, tokens, what,
                work->history + i * (CHUNK + 1) * TILE, work->gates + i * CHUNK * TILE, driven);
    }
    if (filtered) filter_back(&work->chunk, &work->back, v, wide ? 1 : VECTORS, tokens);
    for (int64_t i = 0; i < several; i++) {
      int64_t at = (first + i) * TILE;
      Params own = params_at(&work->params, at);
      Sums sums = sums_at(&work->sums, at);
      march_tile_back(wide, work->carry + at, &own, &work->chunk, &work->back, v, tokens,
                      work->history + i * (CHUNK + 1) * TILE, work->gates + i * CHUNK * TILE,
                      &sums, filtered, driven);
    }
  }
}

static void backward_group(const Inputs *in, const Gradients *grad, const REAL *saved,
                           const Group *g, Work *work, int64_t padded, const vec *skip) {
  int64_t per_interval = in->interval / CHUNK, size = VECTORS * padded;
  Chunk *chunk = &work->chunk;
  Back *back = &work->back;
  read_states(in, g, grad->final, padded, work->carry);
  int64_t last = (g->length + CHUNK - 1) / CHUNK - 1;
  for (int64_t i = last; i >= 0; i--) {
    int64_t first = i * CHUNK, tokens = smaller(CHUNK, g->length - first);
    int64_t place = i % per_interval, next = first - CHUNK;
    if (i == last || place == per_interval - 1) {
      /* the states before this interval's chunks */
      read_saved(in, g, saved, i / per_interval, padded, work->starts);
      for (int64_t j = 0; j < place; j++) {
        vec *states = work->starts + (j + 1) * size;
        memcpy(states, states - size, sizeof(vec) * (size_t)size);
        read_chunk(in, g, first + (j - place) * CHUNK, CHUNK, chunk);
        march_chunk(in, g, states, padded, &work->params, chunk, CHUNK, 0);
      }
    }
    read_chunk(in, g, first, tokens, chunk);
    if (grad->out) read_rows(in, g, grad->out, grad->stride_out, first, tokens, back->read);
    fetch(in, g, in->u, in->stride_u, next, next < 0 ? 0 : CHUNK);
    fetch(in, g, in->drive, in->stride_drive, next, next < 0 ? 0 : CHUNK);
    fetch(in, g, grad->out, grad->stride_out, next, next < 0 ? 0 : CHUNK);
    vec skip_sums[VECTORS] = {{0}};
    for (int64_t k = 0; k < tokens * VECTORS; k++) {
      back->u[k] = skip[k % VECTORS] * back->read[k];
      skip_sums[k % VECTORS] += back->read[k] * chunk->u[k];
    }
    for (int v = 0; v < VECTORS; v++) add(&work->skip[v], skip_sums[v]);
    if (in->drive) memset(back->drive, 0, sizeof back->drive);
    if (in->filter) memset(chunk->read, 0, sizeof chunk->read);
    if (in->filter) memset(chunk->filter, 0, sizeof chunk->filter);
    backward_chunk(in, g, work, padded, work->starts + place * size, tokens);
    write_rows(in, g, grad->u, first, tokens, back->u);
    if (in->drive) write_rows(in, g, grad->drive, first, tokens, back->drive);
  }
  if (grad->initial) write_states(in, g, grad->initial, padded, work->carry);
}

INLINE double sum_at(const Sum *sums, int64_t i) {
  const Sum *s = sums + i / LANES;
  return (double)s->sum[i % LANES] - s->excess[i % LANES];
}

/* A task's sums over columns, into the share's [5][D, N] part; the last is [D], of the skip. */
static void write_sums(const Inputs *in, const Group *widest, const Work *work, int64_t padded,
                       double *part) {
  const Sum *from[] = {work->sums.lam, work->sums.w, work->sums.C, work->sums.filter};
  int64_t size = in->width * in->states;
  for (int64_t i = 0; i < widest->channels; i++) {
    int64_t channel = widest->channel + i;
    double skip = 0;
    for (int64_t s = 0; s < widest->count; s++) skip += sum_at(work->skip, s * widest->channels + i);
    part[4 * size + channel] = skip;
    for (int k = 0; k < 4; k++)
      for (int64_t n = 0; n < in->states; n++) {
        double sum = 0;
        for (int64_t s = 0; s < widest->count; s++)
          sum += sum_at(from[k], place(padded, s * widest->channels + i, n));
        part[k * size + channel * in->states + n] = sum;
      }
  }
}

static void backward_task(const Inputs *in, const Gradients *grad, const REAL *saved,
                          const Plan *plan, int64_t share, int64_t block, double *part,
                          void *memory) {
  int64_t padded = padded_states(in->states), size = VECTORS * padded;
  int64_t per_interval = in->interval / CHUNK;
  Work work;
  vec skip[VECTORS];
  work.carry = memory;
  work.params = params_in(work.carry + size, padded);
  work.starts = work.carry + 5 * size;
  work.history = work.starts + per_interval * size;
  work.gates = work.history + (CHUNK + 1) * TILE * together(in, padded);
  Sum *sums = (Sum *)(work.gates + CHUNK * TILE * together(in, padded));
  work.sums = (Sums){sums, sums + size, sums + 2 * size, sums + 3 * size};
  memset(sums, 0, sizeof(Sum) * 4 * (size_t)size);
  memset(work.skip, 0, sizeof work.skip);
  memset(work.starts, 0, sizeof(vec) * (size_t)(per_interval * size));
  memset(&work.chunk, 0, sizeof work.chunk);
  memset(&work.back, 0, sizeof work.back);
  Group widest = widest_of(in, block);
  read_params(in, &widest, padded, &work.params);
  read_skip(in, &widest, skip);
  for (int64_t i = share_start(plan, share); i < share_start(plan, share + 1); i++) {
    Group g = group_of(in, plan, i, block);
    backward_group(in, grad, saved, &g, &work, padded, skip);
  }
  write_sums(in, &widest, &work, padded, part);
}

/* Returns 0, or 1 if memory ran out. */
int scan_backward(const Inputs *in, const Gradients *grad, const REAL *saved, int threads) {
  Plan plan;
  if (make_plan(in, &plan)) return 1;
  int64_t padded = padded_states(in->states), size = in->width * in->states, failed = 0;
  int64_t part = 4 * size + in->width;
  double *parts = malloc(sizeof(double) * (size_t)(larger(1, plan.shares * part)));
  int64_t bytes = work_vectors(in, padded) * (int64_t)sizeof(vec);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    void *memory = scratch(bytes);
    if (!memory || !parts) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan.shares * plan.blocks; i++)
      if (memory && parts)
        backward_task(in, grad, saved, &plan, i / plan.blocks, i % plan.blocks,
                      parts + i / plan.blocks * part, memory);
    free(memory);
  }
  REAL *to[] = {grad->lam, grad->w, grad->C, grad->filter, grad->skip};
  for (int k = 0; !failed && k < 5; k++)
    for (int64_t i = 0; to[k] && i < (k < 4 ? size : in->width); i++) {
      double sum = 0;
      for (int64_t j = 0; j < plan.shares; j++) sum += parts[j * part + k * size + i];
      to[k][i] = (REAL)sum;
    }
  free(parts);
  free(plan.starts);
  return failed != 0;
}
