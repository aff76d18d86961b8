/* Eidetic attention by blocks of queries, forward and backward; a query alone has its own forward.
 *
 * Whatever a key is (of the window or remembered), the queries of a block that see it are
 * neighbours. So a block goes over tiles of keys of any kind, and each key has the first query that
 * sees it and the one behind the last. Scores are turned, a row a key, so that maxima and sums run
 * over whole vectors of queries. README.md has the equations; its names are the words here.
 *
 * A task of the forward is a block of a head; one of the backward is a head of keys in a sequence, so
 * that gradients are added in one order whatever the number of threads. Absent tensors are null.
 */
#include <math.h>

#include "matrices.h"

enum { QUERIES = 64, KEYS = 64, TABLES = 3, AHEAD = 16 }; /* AHEAD: rows that are fetched early */
enum { TOKENS, PAST, MEMORY };

/* Keys and values of some tokens, and how many rows each sequence or chunk has if they lie apart. */
typedef struct {
  const REAL *k, *v;
  int64_t stride_k, stride_v, rows;
} Table;

typedef struct {
  const REAL *q;
  int64_t stride_q;
  Table tables[TABLES];
  const int64_t *mem_count, *mem_positions, *offsets, *seen;
  int64_t segments, heads, groups, width;
  int64_t window; /* of all tokens, it is longer than any sequence */
  double scale;
} Inputs;

typedef struct {
  const REAL *out, *total, *grad_out; /* total: the logarithms of sums */
  int64_t stride_out, stride_grad;
  REAL *q;
  struct {
    REAL *k, *v;
  } tables[TABLES];
} Gradients;

/* Queries of one chunk that lie one behind the other. */
typedef struct {
  int64_t segment, chunk; /* of all sequences' chunks */
  int64_t token, position, count;
} Block;

/* Rows of a table, read one behind the other. The first one is seen by the queries from `first` on,
 * the i-th one from i queries later; each by `reach` queries. A memory's rows are seen by all, or
 * from `reach` tokens behind theirs on. */
typedef struct {
  int64_t table, row, count, first, reach;
} Run;

/* Some keys: rows of a thread's scratch, where they come from, and which queries see them. */
typedef struct {
  int64_t count;
  int64_t table[KEYS], row[KEYS], from[KEYS], to[KEYS];
} Tile;

/* What a thread works with; rows of `width` or QUERIES numbers, padded. */
typedef struct {
  int64_t width;
  REAL *k, *v;          /* [KEYS][width] */
  REAL *q, *turned;     /* [QUERIES][width], [width][QUERIES] */
  REAL *scores;         /* [KEYS][QUERIES], then the weights */
  REAL *out;            /* [QUERIES][width] */
  REAL *most, *sum, *factor; /* [QUERIES] */
  /* backward */
  REAL *grad, *grad_turned;
  REAL *change;              /* [KEYS][QUERIES] */
  REAL *grad_rows;           /* [KEYS][width] */
} Work;

static const REAL log2_e = (REAL)1.4426950408889634, one = 1;

/* --- which keys ------------------------------------------------------------------------------ */

/* Find the runs of keys that a block reads: of its window, then of its chunk's memory. */
static int64_t find_runs(const Inputs *in, const Block *x, Run *runs) {
  int64_t seen = in->seen[x->segment], begin = in->offsets[x->segment], found = 0;
  int64_t rows = in->tables[PAST].rows, low = x->position - in->window + 1;
  int64_t end = x->position + x->count;
  if (low < 0) low = 0;
  if (low < seen - rows) low = seen - rows;
  if (low < seen) {
    runs[found++] = (Run){PAST, x->segment * rows + rows - seen + low, seen - low,
                          low - x->position, in->window};
    low = seen;
  }
  runs[found++] = (Run){TOKENS, begin + low - seen, end - low, low - x->position, in->window};
  if (in->tables[MEMORY].k && in->mem_count[x->chunk])
    runs[found++] = (Run){MEMORY, x->chunk * in->tables[MEMORY].rows, in->mem_count[x->chunk], 0, 0};
  return found;
}

/* Return the first query of a block that sees a memory's row. Its position may be any int64. */
static int64_t seen_from(int64_t position, int64_t window, const Block *x) {
  int64_t last = x->position - window; /* the last position that the block's first query sees */
  if (position <= last) return 0;
  return position >= last + x->count ? x->count : position - last;
}

/* Read the next keys that some query sees, up to a tile of them; `run` and `at` say how far it is. */
static void read_keys(const Inputs *in, const Block *x, const Run *runs, int64_t found,
                      int64_t *run, int64_t *at, int64_t group, Tile *tile, Work *w) {
  int64_t count = 0;
  for (; *run < found; (*run)++, *at = 0) {
    const Run *here = runs + *run;
    const Table *table = in->tables + here->table;
    for (; *at < here->count; (*at)++) {
      if (count == KEYS) {
        tile->count = count;
        return;
      }
      int64_t row = here->row + *at, from = here->first + *at, to = from + here->reach;
      if (here->table == MEMORY) {
        from = in->mem_positions ? seen_from(in->mem_positions[row], in->window, x) : 0;
        to = x->count;
      }
      from = from < 0 ? 0 : from;
      to = smaller(to, x->count);
      if (from >= to) continue;
      tile->table[count] = here->table;
      tile->row[count] = row;
      tile->from[count] = from;
      tile->to[count] = to;
      load_row(w->k + count * w->width, table->k + row * table->stride_k + group * in->width,
               in->width, w->width);
      load_row(w->v + count * w->width, table->v + row * table->stride_v + group * in->width,
               in->width, w->width);
      count++;
    }
  }
  tile->count = count;
}

/* Read rows of a head and turn them. */
static void read_queries(const REAL *from, int64_t stride, const Block *x, int64_t width, Work *w,
                         REAL *rows, REAL *turned) {
  int64_t columns = padded(x->count);
  for (int64_t r = 0; r < x->count; r++)
    load_row(rows + r * w->width, from + (x->token + r) * stride, width, w->width);
  memset(rows + x->count * w->width, 0,
         (size_t)((columns - x->count) * w->width) * sizeof(REAL));
  turn(rows, w->width, turned, QUERIES, columns, w->width);
}

/* x where a query sees a key, else `hidden`; c: the first of the queries */
INLINE vec where_seen(vec x, const Tile *tile, int64_t key, int64_t c, vec lanes, REAL hidden) {
  vec from = splat((REAL)(tile->from[key] - c)), to = splat((REAL)(tile->to[key] - c));
  return pick((lanes >= from) & (lanes < to), x, splat(hidden));
}

INLINE int seen_by_all(const Tile *tile, int64_t key, const Block *x) {
  return tile->from[key] == 0 && tile->to[key] == x->count;
}

/* --- forward --------------------------------------------------------------------------------- */

/* Turn scores into weights beside the greatest score so far; leave by what older sums shrink. */
static void weigh(const Inputs *in, const Block *x, const Tile *tile, Work *w, vec lanes) {
  const vec scale = splat((REAL)in->scale), endless = splat(-(REAL)INFINITY);
  for (int64_t c = 0; c < x->count; c += LANES) {
    vec before = load(w->most + c), most = before, sum = splat(0);
    for (int64_t j = 0; j < tile->count; j++) {
      vec score = load(w->scores + j * QUERIES + c) * scale;
      if (!seen_by_all(tile, j, x)) score = where_seen(score, tile, j, c, lanes, -(REAL)INFINITY);
      store(w->scores + j * QUERIES + c, score);
      most = pick(score > most, score, most);
    }
    vec from = pick(most > endless, most, splat(0)); /* nothing seen yet: no weight */
    for (int64_t j = 0; j < tile->count; j++) {
      vec weight = raised((load(w->scores + j * QUERIES + c) - from) * splat(log2_e));
      store(w->scores + j * QUERIES + c, weight);
      sum += weight;
    }
    vec factor = raised((before - from) * splat(log2_e));
    store(w->most + c, most);
    store(w->factor + c, factor);
    store(w->sum + c, load(w->sum + c) * factor + sum);
  }
}

static void attend(const Inputs *in, const Block *x, int64_t head, Tile *tile, Work *w, vec lanes,
                   REAL *out, REAL *total) {
  int64_t group = head / (in->heads / in->groups), columns = padded(x->count), row = w->width;
  Run runs[TABLES];
  int64_t found = find_runs(in, x, runs), run = 0, at = 0;
  read_queries(in->q + head * in->width, in->stride_q, x, in->width, w, w->q, w->turned);
  for (int64_t c = 0; c < columns; c += LANES) {
    store(w->most + c, splat(-(REAL)INFINITY));
    store(w->sum + c, splat(0));
  }
  for (int64_t tiles = 0;; tiles++) {
    read_keys(in, x, runs, found, &run, &at, group, tile, w);
    if (!tile->count) break;
    multiply(w->scores, QUERIES, w->k, row, 1, w->turned, QUERIES, tile->count, row, columns);
    weigh(in, x, tile, w, lanes);
    add(w->out, row, tiles ? w->factor : 0, 1, w->scores, 1, QUERIES, w->v, row, x->count,
        tile->count, row);
  }
  for (int64_t r = 0; r < x->count; r++) {
    int64_t to = (x->token + r) * in->heads + head;
    vec share = splat(1 / w->sum[r]);
    for (int64_t n = 0; n < in->width; n += LANES)
      store_some(out + to * in->width + n, load(w->out + r * row + n) * share, in->width - n);
    total[to] = w->most[r] + (REAL)log(w->sum[r]);
  }
}

/* The scores of some keys, as they lie `stride` apart; each has its own sum. */
INLINE void score_keys(const REAL *q, const REAL *k, int64_t stride, int64_t width, int64_t count,
                       REAL scale, REAL *scores) {
  for (int64_t j = 0; j < count; j += 4) {
    const REAL *key[4];
    vec sums[4] = {{0}};
    UNROLL for (int i = 0; i < 4; i++) { /* past the end, the last one again */
      key[i] = k + smaller(j + i, count - 1) * stride;
      for (int64_t n = 0; n < width; n += 64 / (int64_t)sizeof(REAL))
        __builtin_prefetch(key[i] + AHEAD * stride + n);
    }
    for (int64_t n = 0; n < width; n += LANES) {
      vec query = load_some(q + n, width - n);
      UNROLL for (int i = 0; i < 4; i++)
        sums[i] = multiply_add(query, load_some(key[i] + n, width - n), sums[i]);
    }
    UNROLL for (int i = 0; i < 4; i++) if (j + i < count) scores[j + i] = total(sums[i]) * scale;
  }
}

/* to = factor to + sum_j w[j] v[j] of some vectors of columns; `left`: columns from the first on */
INLINE void sum_values(REAL *to, REAL factor, const REAL *w, const REAL *v, int64_t stride,
                       int64_t count, const int vectors, int64_t left) {
  vec sums[4] = {{0}};
  for (int64_t j = 0; j < count; j++, v += stride) {
    UNROLL for (int c = 0; c < vectors; c++) {
      __builtin_prefetch(v + AHEAD * stride + c * LANES);
      vec value = load_some(v + c * LANES, vectors > 1 ? LANES : left);
      sums[c] = multiply_add(splat(w[j]), value, sums[c]);
    }
  }
  UNROLL for (int c = 0; c < vectors; c++)
    store(to + c * LANES, load(to + c * LANES) * splat(factor) + sums[c]);
}

/* A query alone reads keys and values where they lie, KEYS at a time. */
static void attend_alone(const Inputs *in, const Block *x, int64_t head, Work *w, REAL *out,
                         REAL *log_sum) {
  int64_t group = head / (in->heads / in->groups), width = in->width;
  int64_t to = x->token * in->heads + head;
  const REAL *q = in->q + x->token * in->stride_q + head * width;
  Run runs[TABLES];
  int64_t found = find_runs(in, x, runs);
  REAL most = -(REAL)INFINITY, sum = 0, *scores = w->scores;
  memset(w->out, 0, (size_t)w->width * sizeof(REAL));
  for (int64_t r = 0; r < found; r++)
    for (int64_t at = 0; at < runs[r].count; at += KEYS) {
      const Table *table = in->tables + runs[r].table;
      int64_t row = runs[r].row + at, count = smaller(KEYS, runs[r].count - at);
      const REAL *k = table->k + row * table->stride_k + group * width;
      const REAL *v = table->v + row * table->stride_v + group * width;
      score_keys(q, k, table->stride_k, width, count, (REAL)in->scale, scores);
      if (runs[r].table == MEMORY && in->mem_positions)
        for (int64_t j = 0; j < count; j++)
          if (seen_from(in->mem_positions[row + j], in->window, x)) scores[j] = -(REAL)INFINITY;
      REAL before = most;
      for (int64_t j = 0; j < count; j++) most = scores[j] > most ? scores[j] : most;
      REAL from = most > -(REAL)INFINITY ? most : 0; /* nothing seen yet: no weight */
      vec sums = splat(0);
      for (int64_t j = 0; j < count; j += LANES) {
        vec weight = raised((load_some(scores + j, count - j) - splat(from)) * splat(log2_e));
        store_some(scores + j, weight, count - j);
        sums += load_some(scores + j, count - j); /* 0 behind the last */
      }
      REAL factor = raised(splat((before - from) * log2_e))[0];
      sum = sum * factor + total(sums);
      int64_t n = 0;
      for (; n + 4 * LANES <= width; n += 4 * LANES)
        sum_values(w->out + n, factor, scores, v + n, table->stride_v, count, 4, 0);
      for (; n < width; n += LANES)
        sum_values(w->out + n, factor, scores, v + n, table->stride_v, count, 1, width - n);
    }
  vec share = splat(1 / sum);
  for (int64_t n = 0; n < width; n += LANES)
    store_some(out + to * width + n, load(w->out + n) * share, width - n);
  log_sum[to] = most + (REAL)log(sum);
}

/* --- backward -------------------------------------------------------------------------------- */

/* Make weights of scores, and of what values give a weight's own gradient a score's. */
static void weigh_back(const Inputs *in, const Block *x, const Tile *tile, Work *w, vec lanes) {
  const vec scale = splat((REAL)in->scale);
  for (int64_t c = 0; c < x->count; c += LANES) {
    vec total = load(w->most + c), delta = load(w->sum + c);
    for (int64_t j = 0; j < tile->count; j++) {
      int64_t here = j * QUERIES + c;
      vec weight = raised((load(w->scores + here) * scale - total) * splat(log2_e));
      if (!seen_by_all(tile, j, x)) weight = where_seen(weight, tile, j, c, lanes, 0);
      store(w->scores + here, weight);
      store(w->change + here, weight * (load(w->change + here) - delta) * scale);
    }
  }
}

/* Add rows of gradients to where their keys lie. */
INLINE void hand_out(const Inputs *in, const Tile *tile, const Work *w, REAL *const *tables,
                     int64_t group) {
  for (int64_t j = 0; j < tile->count; j++) {
    REAL *to = tables[tile->table[j]] + (tile->row[j] * in->groups + group) * in->width;
    for (int64_t n = 0; n < in->width; n += LANES) {
      vec sum = load_some(to + n, in->width - n) + load(w->grad_rows + j * w->width + n);
      store_some(to + n, sum, in->width - n);
    }
  }
}

static void attend_back(const Inputs *in, const Gradients *to, const Block *x, int64_t head,
                        Tile *tile, Work *w, vec lanes) {
  int64_t group = head / (in->heads / in->groups), columns = padded(x->count), row = w->width;
  Run runs[TABLES];
  REAL *keys[TABLES], *values[TABLES];
  int64_t found = find_runs(in, x, runs), run = 0, at = 0;
  for (int i = 0; i < TABLES; i++) {
    keys[i] = to->tables[i].k;
    values[i] = to->tables[i].v;
  }
  read_queries(in->q + head * in->width, in->stride_q, x, in->width, w, w->q, w->turned);
  read_queries(to->grad_out + head * in->width, to->stride_grad, x, in->width, w, w->grad,
               w->grad_turned);
  memset(w->out, 0, (size_t)(x->count * row) * sizeof(REAL)); /* gradients of the queries */
  for (int64_t c = 0; c < columns; c += LANES) {
    store(w->most + c, splat(0));
    store(w->sum + c, splat(0));
  }
  for (int64_t r = 0; r < x->count; r++) {
    const REAL *out = to->out + (x->token + r) * to->stride_out + head * in->width;
    vec delta = splat(0);
    for (int64_t n = 0; n < in->width; n += LANES)
      delta += load_some(out + n, in->width - n) * load(w->grad + r * row + n);
    w->sum[r] = total(delta);
    w->most[r] = to->total[(x->token + r) * in->heads + head];
  }
  for (;;) {
    read_keys(in, x, runs, found, &run, &at, group, tile, w);
    if (!tile->count) break;
    int64_t count = tile->count;
    multiply(w->scores, QUERIES, w->k, row, 1, w->turned, QUERIES, count, row, columns);
    multiply(w->change, QUERIES, w->v, row, 1, w->grad_turned, QUERIES, count, row, columns);
    weigh_back(in, x, tile, w, lanes);
    multiply(w->grad_rows, row, w->scores, QUERIES, 1, w->grad, row, count, x->count, row);
    hand_out(in, tile, w, values, group);
    multiply(w->grad_rows, row, w->change, QUERIES, 1, w->q, row, count, x->count, row);
    hand_out(in, tile, w, keys, group);
    add(w->out, row, &one, 0, w->change, 1, QUERIES, w->k, row, x->count, count, row);
  }
  for (int64_t r = 0; r < x->count; r++)
    store_row(to->q + ((x->token + r) * in->heads + head) * in->width, w->out + r * row,
              in->width);
}

/* --- all blocks ------------------------------------------------------------------------------ */

/* Find the blocks, sequence after sequence, and where each sequence's begin; return their number. */
static int64_t find_blocks(const Inputs *in, Block *blocks, int64_t *begins) {
  int64_t found = 0, chunk = 0;
  for (int64_t s = 0; s < in->segments; s++) {
    int64_t begin = in->offsets[s], length = in->offsets[s + 1] - begin, seen = in->seen[s];
    if (begins) begins[s] = found;
    for (int64_t i = 0; i < length; chunk++) {
      int64_t end = smaller(length, i + in->window - (seen + i) % in->window);
      for (; i < end; i += QUERIES, found++)
        if (blocks)
          blocks[found] = (Block){s, chunk, begin + i, seen + i, smaller(QUERIES, end - i)};
      i = end;
    }
  }
  if (begins) begins[in->segments] = found;
  return found;
}

/* Lay out the scratch; return how many numbers it has. */
static int64_t lay_out(Work *w, const Inputs *in, REAL *room, int back) {
  int64_t row = w->width = padded(in->width), need = 0;
  struct {
    REAL **at;
    int64_t size;
  } parts[] = {
      {&w->k, KEYS * row},        {&w->v, KEYS * row},           {&w->q, QUERIES * row},
      {&w->turned, row * QUERIES}, {&w->scores, KEYS * QUERIES},  {&w->out, QUERIES * row},
      {&w->most, QUERIES},        {&w->sum, QUERIES},            {&w->factor, QUERIES},
      {&w->grad, QUERIES * row},  {&w->grad_turned, row * QUERIES}, {&w->change, KEYS * QUERIES},
      {&w->grad_rows, KEYS * row},
  };
  int count = back ? 13 : 9;
  for (int i = 0; i < count; i++) {
    *parts[i].at = room ? room + need : 0;
    need += parts[i].size;
  }
  return need;
}

/* Return 0, or 1 if memory ran out. */
static int run(const Inputs *in, const Gradients *to, REAL *out, REAL *total, int threads) {
  int failed = 0;
  int64_t count = find_blocks(in, 0, 0), tasks = to ? in->segments * in->groups : count * in->heads;
  Block *blocks = malloc((size_t)(count + 1) * sizeof(Block));
  int64_t *begins = malloc((size_t)(in->segments + 1) * sizeof(int64_t));
  vec lanes;
  UNROLL for (int i = 0; i < LANES; i++) lanes[i] = (REAL)i;
  if (!blocks || !begins) {
    free(blocks);
    free(begins);
    return 1;
  }
  find_blocks(in, blocks, begins);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Work w;
    Tile tile;
    REAL *room = scratch(lay_out(&w, in, 0, to != 0) * (int64_t)sizeof(REAL));
    if (!room) {
#pragma omp atomic write
      failed = 1;
    } else {
      lay_out(&w, in, room, to != 0);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < tasks; task++) {
      if (!room) continue;
      if (!to) {
        const Block *block = blocks + task / in->heads;
        if (block->count == 1)
          attend_alone(in, block, task % in->heads, &w, out, total);
        else
          attend(in, block, task % in->heads, &tile, &w, lanes, out, total);
        continue;
      }
      int64_t segment = task / in->groups, each = in->heads / in->groups;
      int64_t first = task % in->groups * each;
      for (int64_t i = begins[segment]; i < begins[segment + 1]; i++)
        for (int64_t head = first; head < first + each; head++)
          attend_back(in, to, blocks + i, head, &tile, &w, lanes);
    }
    free(room);
  }
  free(blocks);
  free(begins);
  return failed;
}

int eidetic_attention_forward(const Inputs *in, REAL *out, REAL *total, int threads) {
  return run(in, 0, out, total, threads);
}

int eidetic_attention_backward(const Inputs *in, const Gradients *to, int threads) {
  return run(in, to, 0, 0, threads);
}
