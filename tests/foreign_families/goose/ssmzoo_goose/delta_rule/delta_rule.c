/* The generalised delta rule, forward and backward.
 *
 * One file, plain C: the zoo defines REAL, float or double, and adds OpenMP where the compiler has
 * it. A task is a head of a sequence; its state [keys][values] is S^T of the equation. Every sum is
 * taken in one order, whatever the number of threads and wherever memory lies. Sequences lie one
 * behind the other; sequence s has the tokens offsets[s] to offsets[s + 1].
 *
 * The backward needs the state before every token. It runs the sequence forwards and keeps one
 * state an interval of about sqrt(tokens), then takes the intervals from the last one, each with its
 * states run again.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

/* to += factor from */
static void add(REAL *to, REAL factor, const REAL *from, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; i++) to[i] += factor * from[i];
}

static REAL dot(const REAL *x, const REAL *y, int64_t count) {
  enum { SUMS = 16 }; /* a compiler may not reorder one sum, but these are a vector */
  REAL sums[SUMS] = {0}, total = 0;
  int64_t i = 0;
  for (; i + SUMS <= count; i += SUMS)
    for (int j = 0; j < SUMS; j++) sums[j] += x[i + j] * y[i + j];
  for (int j = 0; i + j < count; j++) sums[j] += x[i + j] * y[i + j];
  for (int j = 0; j < SUMS; j++) total += sums[j];
  return total;
}

/* answer = S a */
static void ask(const Sizes *n, const REAL *state, const REAL *a, REAL *answer) {
  memset(answer, 0, (size_t)n->values * sizeof(REAL));
  for (int64_t i = 0; i < n->keys; i++) add(answer, a[i], state + i * n->values, n->values);
}

/* The state after a token; `after` may be `before`. */
static void step(const Sizes *n, Tensors x, const REAL *before, REAL *after, REAL *answer) {
  ask(n, before, x.a, answer);
  for (int64_t i = 0; i < n->keys; i++) {
    const REAL *from = before + i * n->values;
    REAL *to = after + i * n->values, w = x.w[i], b = x.b[i], k = x.k[i];
#pragma omp simd
    for (int64_t j = 0; j < n->values; j++) to[j] = w * from[j] + b * answer[j] + k * x.v[j];
  }
}

static void begin(const Sizes *n, const Tensors *x, int64_t task, REAL *state) {
  int64_t size = n->keys * n->values;
  if (x->initial)
    memcpy(state, x->initial + task * size, (size_t)size * sizeof(REAL));
  else
    memset(state, 0, (size_t)size * sizeof(REAL));
}

/* Returns 0, or 1 if memory ran out; y [tokens][heads][values], final [sequences][heads][keys][values]. */
int forward(const Sizes *n, const Tensors *x, REAL *y, REAL *final, int threads) {
  int failed = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < n->sequences * n->heads; task++) {
    int64_t sequence = task / n->heads, head = task % n->heads;
    REAL *state = final + task * n->keys * n->values;
    REAL *answer = malloc((size_t)(n->values + 1) * sizeof(REAL));
    if (!answer) {
#pragma omp atomic write
      failed = 1;
      continue;
    }
    begin(n, x, task, state);
    for (int64_t t = n->offsets[sequence]; t < n->offsets[sequence + 1]; t++) {
      Tensors now = token(n, x, t, head);
      step(n, now, state, state, answer);
      ask(n, state, now.r, y + (t * n->heads + head) * n->values);
    }
    free(answer);
  }
  return failed;
}

/* Gradients of a token and of the state before it, which replaces that of the state after it.
 * `answers` has room for S a and for its gradient. */
static void step_back(const Sizes *n, Tensors x, Tensors to, const REAL *y, const REAL *before,
                      const REAL *after, REAL *grad, REAL *answers) {
  int64_t values = n->values;
  REAL *answer = answers, *asked = answers + values;
  ask(n, before, x.a, answer);
  for (int64_t i = 0; i < n->keys; i++) {
    to.r[i] = y ? dot(y, after + i * values, values) : 0;
    if (y) add(grad + i * values, x.r[i], y, values);
  }
  ask(n, grad, x.b, asked);
  ask(n, grad, x.k, to.v);
  for (int64_t i = 0; i < n->keys; i++) {
    const REAL *was = before + i * values;
    REAL *row = grad + i * values, w = x.w[i], a = x.a[i];
    to.w[i] = dot(row, was, values);
    to.k[i] = dot(row, x.v, values);
    to.b[i] = dot(row, answer, values);
    to.a[i] = dot(asked, was, values);
#pragma omp simd
    for (int64_t j = 0; j < values; j++) row[j] = w * row[j] + a * asked[j];
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
      step(n, token(n, x, first + t, head), last, kept + (t / between + 1) * size, answers);
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
        step(n, token(n, x, first + t, head), before, before + size, answers);
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
