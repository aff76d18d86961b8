/* The generalised delta rule, forward and backward.
 *
 * A task is a head of a sequence; its state [keys][values] is a row a key. Columns of a state do not
 * see each other: a token takes them in blocks of vectors, whose sums over keys stay in registers.
 * Every sum is taken in one order, whatever the number of threads and wherever memory lies. Sequences
 * lie one behind the other; sequence s has the tokens offsets[s] to offsets[s + 1].
 *
 * The backward needs the state before every token. It runs the sequence forwards and keeps one
 * state an interval of about sqrt(tokens), then takes the intervals from the last one, each with its
 * states run again.
 */
#include "vector.h"

typedef struct {
  const int64_t *offsets;
  int64_t sequences, heads, keys, values;
} Sizes;

typedef struct {
  REAL *r, *w, *k, *v, *a, *b, *initial; /* [tokens][heads][keys or values]; initial may be null */
} Tensors;

/* A token of a head. */
static Tensors token(const Sizes *n, const Tensors *x, int64_t t, int64_t head) {
  int64_t key = (t * n->heads + head) * n->keys, value = (t * n->heads + head) * n->values;
  return (Tensors){x->r + key, x->w + key, x->k + key, x->v + value, x->a + key, x->b + key, 0};
}

/* Run a statement for all columns j, in blocks of WIDE vectors and the rest one by one. */
enum { WIDE = 4 };
#define BLOCKS(STATEMENT)                                             \
  {                                                                   \
    int64_t j = 0;                                                    \
    for (; j + WIDE * LANES <= n->values; j += WIDE * LANES) {        \
      const int wide = WIDE;                                          \
      STATEMENT;                                                      \
    }                                                                 \
    for (; j < n->values; j += LANES) {                               \
      const int wide = 1;                                             \
      STATEMENT;                                                      \
    }                                                                 \
  }

/* `wide` vectors of columns from j on; a single one may have fewer columns than lanes */
INLINE void get(vec *to, const REAL *row, const Sizes *n, int64_t j, const int wide) {
  UNROLL for (int c = 0; c < wide; c++)
    to[c] = load_some(row + j + c * LANES, wide > 1 ? LANES : n->values - j);
}

INLINE void put(REAL *row, const vec *x, const Sizes *n, int64_t j, const int wide) {
  UNROLL for (int c = 0; c < wide; c++)
    store_some(row + j + c * LANES, x[c], wide > 1 ? LANES : n->values - j);
}

/* to += factor x */
INLINE void add(vec *to, REAL factor, const vec *x, const int wide) {
  UNROLL for (int c = 0; c < wide; c++) to[c] = multiply_add(splat(factor), x[c], to[c]);
}

/* The state after a token, which may be `before`, and with y what is read from it. */
INLINE void step_columns(const Sizes *n, Tensors x, const REAL *before, REAL *after, REAL *y,
                         int64_t j, const int wide) {
  vec row[WIDE], v[WIDE], answer[WIDE] = {{0}}, read[WIDE] = {{0}};
  get(v, x.v, n, j, wide);
  for (int64_t i = 0; i < n->keys; i++) {
    get(row, before + i * n->values, n, j, wide);
    add(answer, x.a[i], row, wide);
  }
  for (int64_t i = 0; i < n->keys; i++) {
    get(row, before + i * n->values, n, j, wide);
    UNROLL for (int c = 0; c < wide; c++) row[c] *= splat(x.w[i]);
    add(row, x.b[i], answer, wide);
    add(row, x.k[i], v, wide);
    put(after + i * n->values, row, n, j, wide);
    add(read, x.r[i], row, wide);
  }
  if (y) put(y, read, n, j, wide);
}

static void step(const Sizes *n, Tensors x, const REAL *before, REAL *after, REAL *y) {
  BLOCKS(step_columns(n, x, before, after, y, j, wide))
}

static void begin(const Sizes *n, const Tensors *x, int64_t task, REAL *state) {
  int64_t size = n->keys * n->values;
  if (!size) return; /* memset takes no null pointer */
  if (x->initial)
    memcpy(state, x->initial + task * size, (size_t)size * sizeof(REAL));
  else
    memset(state, 0, (size_t)size * sizeof(REAL));
}

/* y [tokens][heads][values], final [sequences][heads][keys][values] */
void forward(const Sizes *n, const Tensors *x, REAL *y, REAL *final, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < n->sequences * n->heads; task++) {
    int64_t sequence = task / n->heads, head = task % n->heads;
    REAL *state = final + task * n->keys * n->values;
    begin(n, x, task, state);
    for (int64_t t = n->offsets[sequence]; t < n->offsets[sequence + 1]; t++) {
      Tensors now = token(n, x, t, head);
      step(n, now, state, state, y + (t * n->heads + head) * n->values);
    }
  }
}

/* Add what the token read to the gradient; find S a, its gradient and that of v. */
INLINE void ask_back(const Sizes *n, Tensors x, Tensors to, const REAL *y, const REAL *before,
                     REAL *grad, REAL *answer, REAL *asked, int64_t j, const int wide) {
  vec row[WIDE], given[WIDE], sums[3][WIDE] = {{{0}}};
  if (y) get(given, y, n, j, wide);
  for (int64_t i = 0; i < n->keys; i++) {
    get(row, before + i * n->values, n, j, wide);
    add(sums[0], x.a[i], row, wide);
    get(row, grad + i * n->values, n, j, wide);
    if (y) {
      add(row, x.r[i], given, wide);
      put(grad + i * n->values, row, n, j, wide);
    }
    add(sums[1], x.b[i], row, wide);
    add(sums[2], x.k[i], row, wide);
  }
  put(answer, sums[0], n, j, wide);
  put(asked, sums[1], n, j, wide);
  put(to.v, sums[2], n, j, wide);
}

/* Gradients of a token and of the state before it, which replaces that of the state after it.
 * `answers` has room for S a and for its gradient. */
static void step_back(const Sizes *n, Tensors x, Tensors to, const REAL *y, const REAL *before,
                      const REAL *after, REAL *grad, REAL *answers) {
  int64_t values = n->values;
  REAL *answer = answers, *asked = answers + values;
  BLOCKS(ask_back(n, x, to, y, before, grad, answer, asked, j, wide))
  for (int64_t i = 0; i < n->keys; i++) {
    vec r = {0}, w = {0}, k = {0}, a = {0}, b = {0};
    for (int64_t j = 0; j < values; j += LANES) {
      int64_t place = i * values + j, left = values - j;
      vec now = load_some(grad + place, left), was = load_some(before + place, left);
      vec own = load_some(asked + j, left);
      if (y) r = multiply_add(load_some(y + j, left), load_some(after + place, left), r);
      w = multiply_add(now, was, w);
      k = multiply_add(now, load_some(x.v + j, left), k);
      a = multiply_add(own, was, a);
      b = multiply_add(now, load_some(answer + j, left), b);
      store_some(grad + place, multiply_add(splat(x.a[i]), own, splat(x.w[i]) * now), left);
    }
    to.r[i] = total(r), to.w[i] = total(w), to.k[i] = total(k);
    to.a[i] = total(a), to.b[i] = total(b);
  }
}

/* Returns 0, or 1 if memory ran out; the gradients of y and of the final state may be null. */
int backward(const Sizes *n, const Tensors *x, const REAL *y, const REAL *final, const Tensors *to,
             int threads) {
  int64_t size = n->keys * n->values;
  int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < n->sequences * n->heads; task++) {
    int64_t first = n->offsets[task / n->heads], head = task % n->heads, between = 1;
    int64_t count = n->offsets[task / n->heads + 1] - first;
    while (between * between < count) between++;
    int64_t intervals = (count + between - 1) / between;
    /* kept [intervals + 1], the states of one interval [between + 1], a gradient, two answers */
    int64_t room = (intervals + between + 3) * size + 2 * n->values;
    REAL *kept = malloc((size_t)(room + 1) * sizeof(REAL));
    if (!kept) {
#pragma omp atomic write
      failed = 1;
      continue;
    }
    REAL *states = kept + (intervals + 1) * size, *grad = states + (between + 1) * size;
    REAL *answers = grad + size;
    begin(n, x, task, kept);
    for (int64_t t = 0; t < count; t++) {
      REAL *state = kept + t / between * size; /* an interval's first step leaves it as it is */
      REAL *last = t % between ? kept + (t / between + 1) * size : state;
      step(n, token(n, x, first + t, head), last, kept + (t / between + 1) * size, 0);
    }
    if (final)
      memcpy(grad, final + task * size, (size_t)size * sizeof(REAL));
    else
      memset(grad, 0, (size_t)size * sizeof(REAL));
    for (int64_t start = (intervals - 1) * between; start >= 0; start -= between) {
      int64_t end = start + between < count ? start + between : count;
      memcpy(states, kept + start / between * size, (size_t)size * sizeof(REAL));
      for (int64_t t = start; t < end; t++) {
        REAL *before = states + (t - start) * size;
        step(n, token(n, x, first + t, head), before, before + size, 0);
      }
      for (int64_t t = end - 1; t >= start; t--) {
        const REAL *before = states + (t - start) * size;
        int64_t row = (first + t) * n->heads + head;
        step_back(n, token(n, x, first + t, head), token(n, to, first + t, head),
                  y ? y + row * n->values : 0, before, before + size, grad, answers);
      }
    }
    if (to->initial) memcpy(to->initial + task * size, grad, (size_t)size * sizeof(REAL));
    free(kept);
  }
  return failed;
}
