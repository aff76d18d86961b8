/* The short depthwise causal convolution, forward and backward, vectors over channels.
 *
 *     y[t] = act(bias + sum_j weight[j] x[t - taps + 1 + j])
 *
 * Tokens lie flat, cut into segments by `offsets`. A task is up to SPAN tokens of one segment by
 * BLOCK channels; tasks do not depend on the number of threads. The inputs before a segment are its
 * initial state, [S, taps - 1, D], or zeros. The backward keeps the gradient before the activation
 * of its task's tokens, and of the taps - 1 tokens after them, in the second cache. Absent tensors
 * are null.
 */
#include "vector.h"

enum { SPAN = 128, PIECE = 16, VECTORS = 16, BLOCK = VECTORS * LANES };

typedef struct {
  const REAL *x, *weight, *bias, *initial;
  const int64_t *offsets;
  int64_t segments, width, taps, silu;
  int64_t stride; /* between tokens of x */
} Inputs;

typedef struct {
  const REAL *out, *final; /* incoming */
  int64_t stride_out;
  REAL *x, *weight, *bias, *initial;
} Gradients;

typedef struct {
  int64_t segment, first, last; /* tokens first .. last - 1 */
} Span;

static const REAL zeros[BLOCK];

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Cut all segments into spans, an empty segment into one empty span; null without memory. */
static Span *cut(const Inputs *in, int64_t *count) {
  int64_t most = in->offsets[in->segments] / SPAN + 2 * in->segments;
  Span *spans = malloc((size_t)most * sizeof(Span));
  *count = 0;
  for (int64_t s = 0; spans && s < in->segments; s++) {
    int64_t first = in->offsets[s], end = in->offsets[s + 1];
    do {
      int64_t last = smaller(first + SPAN, end);
      spans[(*count)++] = (Span){s, first, last};
      first = last;
    } while (first < end);
  }
  return spans;
}

/* The input at a token, or at one of the taps - 1 before its segment. */
INLINE const REAL *input(const Inputs *in, int64_t segment, int64_t token, int64_t channel) {
  int64_t before = in->offsets[segment] - token;
  if (before <= 0) return in->x + token * in->stride + channel;
  if (!in->initial) return zeros;
  return in->initial + ((segment + 1) * (in->taps - 1) - before) * in->width + channel;
}

/* The filters of a block, [D, taps] in memory, as [taps + 1][VECTORS] vectors; the bias comes last. */
INLINE void read_filters(const Inputs *in, int64_t taps, int64_t channel, vec *filters) {
  int64_t channels = smaller(BLOCK, in->width - channel);
  REAL *flat = (REAL *)filters;
  const REAL *weight = in->weight + channel * taps;
  for (int64_t c = 0; c < channels; c++) {
    for (int64_t j = 0; j < taps; j++) flat[j * BLOCK + c] = weight[c * taps + j];
    flat[taps * BLOCK + c] = in->bias ? in->bias[channel + c] : 0;
  }
}

INLINE vec convolve(const vec *filters, const REAL *const *rows, int64_t taps, int64_t c,
                    int64_t left) {
  vec sum = filters[taps * VECTORS];
  UNROLL for (int64_t j = 0; j < taps; j++)
    sum += filters[j * VECTORS] * load_some(rows[j] + c, left);
  return sum;
}

INLINE void forward_span(const Inputs *in, Span span, int64_t taps, int64_t channel, REAL *out,
                         vec *filters, const REAL **rows) {
  int64_t channels = smaller(BLOCK, in->width - channel);
  read_filters(in, taps, channel, filters);
  for (int64_t t = span.first; t < span.last; t++) {
    for (int64_t j = 0; j < taps; j++)
      rows[j] = input(in, span.segment, t - taps + 1 + j, channel);
    for (int64_t c = 0, v = 0; c < channels; c += LANES, v++) {
      vec y = convolve(filters + v, rows, taps, c, channels - c);
      if (in->silu) y *= sigmoid(y);
      store_some(out + t * in->width + channel + c, y, channels - c);
    }
  }
}

/* Returns 0, or 1 if memory ran out. */
int conv_forward(const Inputs *in, REAL *out, REAL *final, int threads) {
  int64_t blocks = (in->width + BLOCK - 1) / BLOCK, taps = in->taps, count;
  Span *spans = cut(in, &count);
  if (!spans) return 1;
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    vec *filters = scratch(VECTORS * (taps + 1) * sizeof(vec) + taps * sizeof(REAL *));
    const REAL **rows = (const REAL **)(filters + VECTORS * (taps + 1));
    if (!filters) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count * blocks; i++) {
      if (!filters) continue;
      Span span = spans[i / blocks];
      int64_t channel = i % blocks * BLOCK;
      if (taps == 4)
        forward_span(in, span, 4, channel, out, filters, rows);
      else
        forward_span(in, span, taps, channel, out, filters, rows);
      int64_t end = in->offsets[span.segment + 1];
      size_t bytes = (size_t)smaller(BLOCK, in->width - channel) * sizeof(REAL);
      if (span.last == end)
        for (int64_t j = 0; j < taps - 1; j++)
          memcpy(final + (span.segment * (taps - 1) + j) * in->width + channel,
                 input(in, span.segment, end - taps + 1 + j, channel), bytes);
    }
    free(filters);
  }
  free(spans);
  return failed;
}

/* Move the sums of a piece to those of the span; one long sum would err more than the reference's. */
INLINE void move_sums(vec *piece, vec *sums, int64_t count) {
  for (int64_t i = 0; i < count; i++) sums[i] += piece[i], piece[i] = (vec){0};
}

/* `before` holds vectors [token][VECTORS] from the token span.first - taps + 1 on; sums are those of the
 * span, [taps + 1][VECTORS], and those of its last PIECE tokens. */
INLINE void backward_span(const Inputs *in, const Gradients *grad, Span span, int64_t taps,
                          int64_t channel, REAL *parts, vec *before, vec *sums, vec *filters,
                          const REAL **rows) {
  int64_t channels = smaller(BLOCK, in->width - channel), width = in->width, s = span.segment;
  int64_t begin = in->offsets[s], end = in->offsets[s + 1], reach = taps - 1;
  read_filters(in, taps, channel, filters);
  memset(before, 0, sizeof(vec) * VECTORS * (size_t)(SPAN + 2 * reach));
  int64_t count = VECTORS * (taps + 1);
  vec *piece = sums + count;
  memset(sums, 0, sizeof(vec) * 2 * (size_t)count);
  if (grad->out)
    for (int64_t t = span.first; t < smaller(span.last + reach, end); t++) {
      if ((t - span.first) % PIECE == 0) move_sums(piece, sums, count);
      for (int64_t j = 0; j < taps; j++) rows[j] = input(in, s, t - reach + j, channel);
      const REAL *from = grad->out + t * grad->stride_out + channel;
      vec *to = before + (t - span.first + reach) * VECTORS;
      for (int64_t c = 0, v = 0; c < channels; c += LANES, v++) {
        int64_t left = channels - c;
        vec g = load_some(from + c, left);
        if (in->silu) {
          vec y = convolve(filters + v, rows, taps, c, left), open = sigmoid(y);
          g *= open * (splat(1) + y * (splat(1) - open));
        }
        to[v] = g;
        if (t >= span.last) continue;
        UNROLL for (int64_t j = 0; j < taps; j++)
          piece[j * VECTORS + v] += g * load_some(rows[j] + c, left);
        piece[taps * VECTORS + v] += g;
      }
    }
  move_sums(piece, sums, count);
  /* the first span of a segment also answers for the inputs before it */
  for (int64_t t = span.first - (span.first == begin ? reach : 0); t < span.last; t++) {
    REAL *to = NULL;
    if (t >= begin)
      to = grad->x + t * width + channel;
    else if (grad->initial)
      to = grad->initial + ((s + 1) * reach + t - begin) * width + channel;
    if (!to) continue;
    const REAL *kept = NULL;
    if (grad->final && t >= end - reach)
      kept = grad->final + (s * reach + t - end + reach) * width + channel;
    const vec *from = before + (t - span.first + reach) * VECTORS;
    for (int64_t c = 0, v = 0; c < channels; c += LANES, v++) {
      int64_t left = channels - c;
      vec g = kept ? load_some(kept + c, left) : (vec){0};
      UNROLL for (int64_t j = 0; j < taps; j++)
        g += filters[j * VECTORS + v] * from[(reach - j) * VECTORS + v];
      store_some(to + c, g, left);
    }
  }
  for (int64_t j = 0; j <= taps; j++)
    for (int64_t c = 0, v = 0; c < channels; c += LANES, v++)
      store_some(parts + j * width + channel + c, sums[j * VECTORS + v], channels - c);
}

/* Returns 0, or 1 if memory ran out. */
int conv_backward(const Inputs *in, const Gradients *grad, int threads) {
  int64_t blocks = (in->width + BLOCK - 1) / BLOCK, taps = in->taps, count;
  int64_t row = (taps + 1) * in->width;
  Span *spans = cut(in, &count);
  REAL *parts = spans ? malloc((size_t)(count * row + 1) * sizeof(REAL)) : NULL;
  int failed = !parts;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    int64_t size = VECTORS * (SPAN + 2 * taps + 3 * (taps + 1));
    vec *memory = parts ? scratch(size * sizeof(vec) + taps * sizeof(REAL *)) : NULL;
    vec *before = memory, *sums = before + VECTORS * (SPAN + 2 * taps);
    vec *filters = sums + 2 * VECTORS * (taps + 1);
    const REAL **rows = (const REAL **)(memory + size);
    if (!memory) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count * blocks; i++) {
      if (!memory) continue;
      REAL *part = parts + i / blocks * row;
      int64_t channel = i % blocks * BLOCK;
      Span span = spans[i / blocks];
      if (taps == 4)
        backward_span(in, grad, span, 4, channel, part, before, sums, filters, rows);
      else
        backward_span(in, grad, span, taps, channel, part, before, sums, filters, rows);
    }
    free(memory);
  }
  /* in double, in the order of the spans */
  for (int64_t j = 0; !failed && j <= taps; j++)
    for (int64_t c = 0; c < in->width; c++) {
      double sum = 0;
      for (int64_t i = 0; i < count; i++) sum += parts[i * row + j * in->width + c];
      if (j < taps)
        grad->weight[c * taps + j] = (REAL)sum;
      else if (grad->bias)
        grad->bias[c] = (REAL)sum;
    }
  free(parts);
  free(spans);
  return failed;
}
