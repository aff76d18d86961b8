/* The linear recurrence h[t] = a[t] h[t-1] + b[t], forward and backward.
 *
 * Tokens lie flat, cut into segments by `offsets`. A task is a span of tokens of one segment by a
 * block of columns. Where that makes few tasks, blocks are narrower, down to a cache line; if tasks
 * still are few, long segments are cut: every span first finds what it adds to a zero state and by
 * what it multiplies another, then those are joined in order. Neither depends on the number of
 * threads. Products are m 2^e in double, and neither overflow nor underflow.
 *
 * Where PAIRS is 1, numbers are complex, and two adjacent columns are one of them. Plain loops, for the
 * compiler to vectorise. Absent tensors are null.
 */
#include "vector.h"

enum {
  BLOCK = 128,
  LINE = 64 / sizeof(REAL),
  SPAN = 1024,
  TASKS = 8,
  FACTORS = sizeof(REAL) == 4 ? 4 : 1 /* so many floats' product is a normal double, or 0 */
};

typedef struct {
  const REAL *a, *b; /* backward: b is the incoming gradient of the states */
  const REAL *start; /* the state before every segment; backward: the gradient of its last state */
  const int64_t *offsets;
  int64_t segments, width, stride_a, stride_b;
} Inputs;

typedef struct {
  const REAL *h, *initial; /* the forward's states, and the initial one */
  REAL *grad_a, *grad_b;
} Backward;

typedef struct {
  int64_t segment, first, last; /* tokens first .. last - 1 */
} Span;

static const REAL zeros[BLOCK];

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t clamp(int64_t x, int64_t most) { return x > most ? most : x < -most ? -most : x; }

/* to = a x + b */
INLINE void step(const REAL *restrict a, const REAL *restrict b, const REAL *restrict x,
                 REAL *restrict to, int64_t columns) {
#if PAIRS
  for (int64_t i = 0; i < columns; i += 2) {
    to[i] = a[i] * x[i] - a[i + 1] * x[i + 1] + b[i];
    to[i + 1] = a[i] * x[i + 1] + a[i + 1] * x[i] + b[i + 1];
  }
#else
  for (int64_t i = 0; i < columns; i++) to[i] = a[i] * x[i] + b[i];
#endif
}

/* carry = conj(a) (carry + g) */
INLINE void step_back(const REAL *restrict a, const REAL *restrict g, REAL *restrict carry,
                      int64_t columns) {
#if PAIRS
  for (int64_t i = 0; i < columns; i += 2) {
    REAL real = carry[i] + g[i], imaginary = carry[i + 1] + g[i + 1];
    carry[i] = a[i] * real + a[i + 1] * imaginary;
    carry[i + 1] = a[i] * imaginary - a[i + 1] * real;
  }
#else
  for (int64_t i = 0; i < columns; i++) carry[i] = a[i] * (carry[i] + g[i]);
#endif
}

/* The same, and the gradients of b, which is carry + g, and of a. */
INLINE void write_back(const REAL *restrict a, const REAL *restrict g, const REAL *restrict before,
                       REAL *restrict carry, REAL *restrict grad_a, REAL *restrict grad_b,
                       int64_t columns) {
#if PAIRS
  for (int64_t i = 0; i < columns; i += 2) {
    REAL real = carry[i] + g[i], imaginary = carry[i + 1] + g[i + 1];
    grad_b[i] = real;
    grad_b[i + 1] = imaginary;
    grad_a[i] = before[i] * real + before[i + 1] * imaginary;
    grad_a[i + 1] = before[i] * imaginary - before[i + 1] * real;
    carry[i] = a[i] * real + a[i + 1] * imaginary;
    carry[i + 1] = a[i] * imaginary - a[i + 1] * real;
  }
#else
  for (int64_t i = 0; i < columns; i++) {
    REAL grad = carry[i] + g[i];
    grad_b[i] = grad;
    grad_a[i] = before[i] * grad;
    carry[i] = a[i] * grad;
  }
#endif
}

INLINE double two_to(int64_t e) { /* 2^e for normal numbers */
  int64_t bits = (e + 1023) << 52;
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* floor(log2 |x|), and 0 where that is no exponent of a normal number */
INLINE int64_t exponent(double x) {
  int64_t bits;
  memcpy(&bits, &x, sizeof bits);
  int64_t field = (bits >> 52) & 2047;
  return field == 0 || field == 2047 ? 0 : smaller(field - 1023, 1022);
}

/* m = a m */
INLINE void multiply(const REAL *restrict a, double *restrict m, int64_t columns) {
#if PAIRS
  for (int64_t i = 0; i < columns; i += 2) {
    double real = m[i] * a[i] - m[i + 1] * a[i + 1];
    m[i + 1] = m[i] * a[i + 1] + m[i + 1] * a[i];
    m[i] = real;
  }
#else
  for (int64_t i = 0; i < columns; i++) m[i] *= a[i];
#endif
}

/* Move m's size to e, which leaves 1 to 2; the larger part of a pair counts for both. */
INLINE void normalize(double *restrict m, int64_t *restrict e, int64_t columns) {
  for (int64_t i = 0; i < columns; i += 1 + PAIRS) {
    double size = __builtin_fabs(m[i]);
#if PAIRS
    double other = __builtin_fabs(m[i + 1]);
    size = size > other ? size : other;
#endif
    int64_t moved = exponent(size);
    e[i] += moved;
    m[i] *= two_to(-moved);
#if PAIRS
    m[i + 1] *= two_to(-moved);
#endif
  }
}

/* Multiply x by the rest of 2^e, after the part that one power can represent. */
INLINE double grow(double x, int64_t e) {
  e -= clamp(e, 1021);
  x *= two_to(clamp(e, 1021));
  e -= clamp(e, 1021);
  return x * two_to(clamp(e, 1021));
}

/* to = m 2^e x + added, with the conjugate of m in the backward */
static void join(const double *m, const int64_t *e, const REAL *x, const REAL *added, REAL *to,
                 int64_t width, int back) {
#if PAIRS
  for (int64_t i = 0; i < width; i += 2) {
    double size = two_to(clamp(e[i], 1021));
    double real = m[i] * size, imaginary = (back ? -m[i + 1] : m[i + 1]) * size;
    to[i] = (REAL)(grow(real * x[i] - imaginary * x[i + 1], e[i]) + added[i]);
    to[i + 1] = (REAL)(grow(real * x[i + 1] + imaginary * x[i], e[i]) + added[i + 1]);
  }
#else
  (void)back;
  for (int64_t i = 0; i < width; i++)
    to[i] = (REAL)(grow(m[i] * two_to(clamp(e[i], 1021)) * x[i], e[i]) + added[i]);
#endif
}

/* Cut segments into spans, an empty one into an empty span; null without memory. */
static Span *cut(const Inputs *in, int64_t blocks, int64_t *count) {
  int64_t tokens = in->offsets[in->segments], length = tokens * blocks / TASKS;
  if (length < SPAN) length = SPAN;
  Span *spans = malloc((size_t)(tokens / length + 2 * in->segments) * sizeof(Span));
  *count = 0;
  for (int64_t s = 0; spans && s < in->segments; s++) {
    int64_t first = in->offsets[s], end = in->offsets[s + 1];
    int64_t own = end - first > 2 * length ? length : end - first;
    do {
      int64_t last = smaller(first + own, end);
      spans[(*count)++] = (Span){s, first, last};
      first = last;
    } while (first < end);
  }
  return spans;
}

INLINE const REAL *addend(const Inputs *in, int64_t token, int64_t column) {
  return in->b ? in->b + token * in->stride_b + column : zeros;
}

/* The state after a span that starts from zero, and the product of its factors. */
static void summarize(const Inputs *in, Span span, int64_t column, int64_t columns, int back,
                      REAL *added, double *m, int64_t *e) {
  REAL states[2][BLOCK] = {{0}};
  int now = 0;
  for (int64_t i = 0; i < columns; i++) m[i] = PAIRS ? i % 2 == 0 : 1, e[i] = 0;
  for (int64_t i = 0; i < span.last - span.first; i++) {
    int64_t t = back ? span.last - 1 - i : span.first + i;
    const REAL *a = in->a + t * in->stride_a + column;
    multiply(a, m, columns);
    if ((i + 1) % FACTORS == 0) normalize(m, e, columns);
    if (back) {
      step_back(a, addend(in, t, column), states[0], columns);
    } else {
      step(a, addend(in, t, column), states[now], states[!now], columns);
      now = !now;
    }
  }
  normalize(m, e, columns);
  memcpy(added, states[now], (size_t)columns * sizeof(REAL));
}

/* March through a span from the state before it; returns the last one. */
static const REAL *march(const Inputs *in, Span span, int64_t column, int64_t columns,
                         const REAL *state, REAL *h) {
  for (int64_t t = span.first; t < span.last; t++) {
    REAL *to = h + t * in->width + column;
    step(in->a + t * in->stride_a + column, addend(in, t, column), state, to, columns);
    state = to;
  }
  return state;
}

/* March back through a span: the gradient at its end becomes the one at its start. */
static void march_back(const Inputs *in, const Backward *back, Span span, int64_t column,
                       int64_t columns, REAL *carry) {
  for (int64_t t = span.last - 1; t >= span.first; t--) {
    const REAL *before = back->h + (t - 1) * in->width + column;
    if (t == in->offsets[span.segment])
      before = back->initial ? back->initial + span.segment * in->width + column : zeros;
    int64_t at = t * in->width + column;
    write_back(in->a + t * in->stride_a + column, addend(in, t, column), before, carry,
               back->grad_a + at, back->grad_b + at, columns);
  }
}

/* Forward where `back` is null. `end` gets the last states, or the gradients of the initial ones.
 * Returns 0, or 1 if memory ran out. */
static int scan(const Inputs *in, const Backward *back, REAL *h, REAL *end, int threads) {
  int64_t width = in->width, block = BLOCK, count;
  while (block > LINE && in->segments * ((width + block - 1) / block) < TASKS) block /= 2;
  int64_t blocks = (width + block - 1) / block;
  Span *spans = cut(in, blocks, &count);
  int64_t size = spans ? count * width : 0;
  int cuts = spans && count > in->segments, failed = !spans;
  /* per span: the state before it; of cut ones also their end from zero, and their products */
  REAL *carry = malloc((size_t)(size + 1) * sizeof(REAL));
  REAL *added = malloc((size_t)(cuts * size + 1) * sizeof(REAL));
  double *m = malloc((size_t)(cuts * size + 1) * sizeof(double));
  int64_t *e = malloc((size_t)(cuts * size + 1) * sizeof(int64_t));
  failed |= !carry || !added || !m || !e;
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t i = 0; i < (failed || !cuts ? 0 : count * blocks); i++) {
    int64_t column = i % blocks * block, at = i / blocks * width + column;
    summarize(in, spans[i / blocks], column, smaller(block, width - column), !!back, added + at,
              m + at, e + at);
  }
  for (int64_t i = 0; !failed && i < count; i++) {
    int64_t j = back ? count - 1 - i : i, from = back ? j + 1 : j - 1;
    REAL *to = carry + j * width;
    if (i && spans[from].segment == spans[j].segment)
      join(m + from * width, e + from * width, carry + from * width, added + from * width, to,
           width, !!back);
    else if (in->start)
      memcpy(to, in->start + spans[j].segment * width, (size_t)width * sizeof(REAL));
    else
      memset(to, 0, (size_t)width * sizeof(REAL));
  }
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t i = 0; i < (failed ? 0 : count * blocks); i++) {
    int64_t column = i % blocks * block, columns = smaller(block, width - column);
    Span span = spans[i / blocks];
    REAL *state = carry + i / blocks * width + column;
    const REAL *left = state;
    if (back)
      march_back(in, back, span, column, columns, state);
    else
      left = march(in, span, column, columns, state, h);
    /* the last span's end is the result */
    if (back ? span.first == in->offsets[span.segment] : span.last == in->offsets[span.segment + 1])
      memcpy(end + span.segment * width + column, left, (size_t)columns * sizeof(REAL));
  }
  free(carry), free(added), free(m), free(e), free(spans);
  return failed;
}

int linear_scan_forward(const Inputs *in, REAL *h, REAL *final, int threads) {
  return scan(in, NULL, h, final, threads);
}

int linear_scan_backward(const Inputs *in, const Backward *back, REAL *grad_initial, int threads) {
  return scan(in, back, NULL, grad_initial, threads);
}
