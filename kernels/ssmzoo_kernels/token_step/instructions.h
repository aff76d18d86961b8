/* What token_step's instructions are, and those that every layer has. */
#ifndef SSMZOO_INSTRUCTIONS_H
#define SSMZOO_INSTRUCTIONS_H

#include <math.h>

#include "linear.h"

enum { BY_SILU, BY_SIGMOID, BY_ITSELF };
enum { ITSELF, GELU, GELU_BY_TANH, SIGMOID, TANH, EXP, SOFTPLUS, SQUARED_RELU, HEAVY_TAIL };
enum { NO_GATE, SILU_BEFORE, SILU_AFTER, SIGMOID_AFTER };

/* A value, or some columns of it: `offset` numbers a row before it, `stride` in its rows. */
typedef struct {
  int64_t offset, start, stride;
} Value;

typedef struct {
  int64_t kind, size[14];
  Value in[6], out;
  Numbers data[6];
  double number[2];
} Instruction;

typedef struct {
  int64_t rows;
  REAL *scratch;
  void *const *given; /* tensors of this call */
  int thread, threads;
  int *failed;
} Call;

typedef struct {
  int64_t first, last;
} Span;

INLINE REAL *at(const Call *call, Value value) {
  return call->scratch + value.offset * call->rows + value.start;
}

/* This thread's part of `count` things, cut at multiples of `grain`. */
INLINE Span share(const Call *call, int64_t count, int64_t grain) {
  int64_t grains = (count + grain - 1) / grain;
  int64_t first = grains * call->thread / call->threads * grain;
  int64_t last = grains * (call->thread + 1) / call->threads * grain;
  return (Span){first, last < count ? last : count};
}

INLINE REAL sum_of_products(const REAL *a, const REAL *b, int64_t count) {
  vec sum = {0};
  for (int64_t i = 0; i < count; i += LANES)
    sum = multiply_add(load_some(a + i, count - i), load_some(b + i, count - i), sum);
  return total(sum);
}

/* size: width, the tensor's number, its type */
static void input(const Call *call, const Instruction *x) {
  Span span = share(call, x->size[0], LANES);
  Numbers from = {call->given[x->size[1]], x->size[2]};
  for (int64_t m = 0; m < call->rows; m++)
    for (int64_t i = span.first; i < span.last; i += LANES)
      store_some(at(call, x->out) + m * x->out.stride + i,
                 read_numbers(from, m * x->size[0] + i, x->size[0] - i), span.last - i);
}

static void output(const Call *call, const Instruction *x) {
  Span span = share(call, x->size[0], LANES);
  for (int64_t m = 0; m < call->rows; m++)
    for (int64_t i = span.first; i < span.last; i++)
      write_number(call->given[x->size[1]], x->size[2], m * x->size[0] + i,
                   at(call, x->in[0])[m * x->in[0].stride + i]);
}

/* size: inputs, outputs; data: weight, bias, scale of each output */
static void linear(const Call *call, const Instruction *x) {
  Span span = share(call, x->size[1], x->data[0].type == INT4 ? INT4_OUTPUTS : 4);
  if (span.first >= span.last) return;
  product(x->data[0], x->data[2], x->data[1], call->rows, at(call, x->in[0]), x->in[0].stride,
          at(call, x->out), x->out.stride, x->size[0], span.first, span.last);
}

/* size: width, group, width of the weight, kind of gate, whether the mean is taken away; in: x, gate;
 * data: weight, bias; number: eps, added to w */
static void norm(const Call *call, const Instruction *x) {
  int64_t width = x->size[0], group = x->size[1], gating = x->size[3];
  int64_t groups = width / group;
  Span span = share(call, call->rows * groups, 1);
  for (int64_t k = span.first; k < span.last; k++) {
    int64_t m = k / groups, begin = k % groups * group;
    const REAL *from = at(call, x->in[0]) + m * x->in[0].stride + begin;
    const REAL *gate = at(call, x->in[1]) + m * x->in[1].stride + begin;
    REAL *to = at(call, x->out) + m * x->out.stride + begin;
    vec squares = {0}, mean = {0};
    if (x->size[4]) {
      for (int64_t i = 0; i < group; i += LANES) mean += load_some(from + i, group - i);
      mean = splat(total(mean) / (REAL)group);
    }
    for (int64_t i = 0; i < group; i += LANES) {
      vec value = load_some(from + i, group - i) - mean;
      if (gating == SILU_BEFORE) {
        vec z = load_some(gate + i, group - i);
        value *= z * sigmoid(z);
      }
      store_some(to + i, value, group - i);
      if (group - i < LANES) value = load_some(to + i, group - i); /* 0 beyond the end */
      squares += value * value;
    }
    REAL size = total(squares) / (REAL)group + (REAL)x->number[0];
    vec factor = splat((REAL)(1 / __builtin_sqrt((double)size)));
    for (int64_t i = 0; i < group; i += LANES) {
      vec value = load_some(to + i, group - i) * factor;
      int64_t column = (begin + i) % x->size[2];
      if (x->data[0].at)
        value *= read_numbers(x->data[0], column, x->size[2] - column) + splat((REAL)x->number[1]);
      if (x->data[1].at) value += read_numbers(x->data[1], column, x->size[2] - column);
      if (gating > SILU_BEFORE) {
        vec z = load_some(gate + i, group - i);
        value *= gating == SILU_AFTER ? z * sigmoid(z) : sigmoid(z);
      }
      store_some(to + i, value, group - i);
    }
  }
}

/* One row's channels; `plain`: weight and state are REAL. A channel's last inputs are `step` apart
 * in the state, channels `next`. */
INLINE void conv_row(const Instruction *x, int plain, Numbers history, const REAL *from, REAL *to,
                     int64_t row, Span span) {
  int64_t taps = x->size[1], kept = x->size[2];
  int64_t step = x->size[6] ? x->size[0] : 1, next = x->size[6] ? 1 : kept;
  Numbers weight = {x->data[0].at, plain ? AS_REAL : x->data[0].type};
  Numbers bias = {x->data[1].at, plain ? AS_REAL : x->data[1].type};
  int64_t type = history.type = plain ? AS_REAL : history.type;
  for (int64_t c = span.first; c < span.last; c++) {
    int64_t place = row + c * next;
    REAL sum = from[c] * number(weight, c * taps + taps - 1);
    for (int64_t k = 0; k + 1 < taps; k++)
      sum += number(weight, c * taps + k) * number(history, place + (kept - taps + 1 + k) * step);
    to[c] = bias.at ? sum + number(bias, c) : sum;
    for (int64_t k = 0; k + 1 < kept; k++)
      write_number((void *)history.at, type, place + k * step,
                   number(history, place + (k + 1) * step));
    if (kept) write_number((void *)history.at, type, place + (kept - 1) * step, from[c]);
  }
}

/* size: width, taps, inputs kept, the state's number and type, silu, its layout; data: weight, bias.
 * The state holds the last inputs, oldest first: [rows, width, kept], or [rows, kept, width]. */
static void conv(const Call *call, const Instruction *x) {
  Span span = share(call, x->size[0], LANES);
  Numbers history = {call->given[x->size[3]], x->size[4]};
  int plain = x->data[0].type == AS_REAL && x->data[1].type == AS_REAL && x->size[4] == AS_REAL;
  for (int64_t m = 0; m < call->rows; m++) {
    const REAL *from = at(call, x->in[0]) + m * x->in[0].stride;
    REAL *to = at(call, x->out) + m * x->out.stride;
    int64_t row = m * x->size[0] * x->size[2];
    if (plain)
      conv_row(x, 1, history, from, to, row, span);
    else
      conv_row(x, 0, history, from, to, row, span);
    if (x->size[5]) for (int64_t c = span.first; c < span.last; c += LANES) {
      vec y = load_some(to + c, span.last - c);
      store_some(to + c, y * sigmoid(y), span.last - c);
    }
  }
}

/* Numbers i and on of a row in which each stands for `each` columns. */
INLINE vec spread(const REAL *from, int64_t i, int64_t count, int64_t each) {
  if (each == 1) return load_some(from + i, count);
  if (each % LANES == 0) return splat(from[i / each]);
  vec x = {0};
  for (int64_t c = 0; c < LANES && c < count; c++) x[c] = from[(i + c) / each];
  return x;
}

/* y = g(a) b; size: width, which g, columns of b for one of a */
static void gate(const Call *call, const Instruction *x) {
  Span span = share(call, x->size[0], LANES);
  for (int64_t m = 0; m < call->rows; m++)
    for (int64_t i = span.first; i < span.last; i += LANES) {
      const REAL *gates = at(call, x->in[0]) + m * x->in[0].stride;
      vec a = spread(gates, i, span.last - i, x->size[2]);
      vec b = load_some(at(call, x->in[1]) + m * x->in[1].stride + i, span.last - i);
      if (x->size[1] != BY_ITSELF) b *= sigmoid(a);
      if (x->size[1] != BY_SIGMOID) b *= a;
      store_some(at(call, x->out) + m * x->out.stride + i, b, span.last - i);
    }
}

/* y = a + b; size: width */
static void add(const Call *call, const Instruction *x) {
  Span span = share(call, x->size[0], LANES);
  for (int64_t m = 0; m < call->rows; m++)
    for (int64_t i = span.first; i < span.last; i += LANES) {
      vec a = load_some(at(call, x->in[0]) + m * x->in[0].stride + i, span.last - i);
      vec b = load_some(at(call, x->in[1]) + m * x->in[1].stride + i, span.last - i);
      store_some(at(call, x->out) + m * x->out.stride + i, a + b, span.last - i);
    }
}

INLINE vec function_of(int64_t which, vec x) {
  const vec slope = splat((REAL)1.5957691216057308), cubic = splat((REAL)0.044715), zero = {0};
  switch (which) {
    case GELU:
      UNROLL for (int i = 0; i < LANES; i++)
        x[i] = (REAL)(0.5 * x[i] * (1 + erf(0.70710678118654752 * x[i])));
      return x;
    case GELU_BY_TANH: return x * sigmoid(slope * (x + cubic * x * x * x));
    case SIGMOID: return sigmoid(x);
    case TANH:
      UNROLL for (int i = 0; i < LANES; i++) x[i] = (REAL)tanh(x[i]);
      return x;
    case EXP: return raised(x * splat((REAL)1.4426950408889634));
    case SOFTPLUS: return softplus(x);
    case SQUARED_RELU: return pick(x < zero, zero, x * x);
    case HEAVY_TAIL: return pick(x < zero, zero, x) + splat(1) / (splat(1) - at_most(x, 0));
    default: return x;
  }
}

/* y_i = f(c w_i x_(i step) + b_i), or the least; size: width, step, which f; data: w, b; number: c,
 * the least */
static void map(const Call *call, const Instruction *x) {
  int64_t width = x->size[0], step = x->size[1];
  Span span = share(call, width, LANES);
  for (int64_t m = 0; m < call->rows; m++)
    for (int64_t i = span.first; i < span.last; i += LANES) {
      const REAL *from = at(call, x->in[0]) + m * x->in[0].stride + i * step;
      vec y = {0};
      if (step == 1)
        y = load_some(from, width - i);
      else
        for (int64_t c = 0; c < LANES && i + c < width; c++) y[c] = from[c * step];
      y *= splat((REAL)x->number[0]);
      if (x->data[0].at) y *= read_numbers(x->data[0], i, width - i);
      if (x->data[1].at) y += read_numbers(x->data[1], i, width - i);
      y = at_least(function_of(x->size[2], y), (REAL)x->number[1]);
      store_some(at(call, x->out) + m * x->out.stride + i, y, width - i);
    }
}

/* y_j = x + w_j (b - x); size: width, how many; in: x, b, w if it is no weight; data: w */
static void blend(const Call *call, const Instruction *x) {
  int64_t width = x->size[0];
  Span span = share(call, width, LANES);
  for (int64_t m = 0; m < call->rows; m++)
    for (int64_t i = span.first; i < span.last; i += LANES) {
      vec from = load_some(at(call, x->in[0]) + m * x->in[0].stride + i, width - i);
      vec way = load_some(at(call, x->in[1]) + m * x->in[1].stride + i, width - i) - from;
      for (int64_t j = 0; j < x->size[1]; j++) {
        vec part = x->data[0].at
                       ? read_numbers(x->data[0], j * width + i, width - i)
                       : load_some(at(call, x->in[2]) + m * x->in[2].stride + i, width - i);
        store_some(at(call, x->out) + m * x->out.stride + j * width + i, from + part * way,
                   width - i);
      }
    }
}

/* y = a b summed over each head; size: heads, columns of a head */
static void dots(const Call *call, const Instruction *x) {
  int64_t heads = x->size[0], width = x->size[1];
  Span span = share(call, call->rows * heads, 1);
  for (int64_t k = span.first; k < span.last; k++) {
    int64_t m = k / heads, head = k % heads;
    at(call, x->out)[m * x->out.stride + head] =
        sum_of_products(at(call, x->in[0]) + m * x->in[0].stride + head * width,
                        at(call, x->in[1]) + m * x->in[1].stride + head * width, width);
  }
}

/* y = the state's columns, which x takes the place of; size: width, the state's number, its columns,
 * the first of these */
static void delay(const Call *call, const Instruction *x) {
  REAL *state = call->given[x->size[1]];
  Span span = share(call, x->size[0], LANES);
  for (int64_t m = 0; m < call->rows; m++)
    for (int64_t i = span.first; i < span.last; i++) {
      REAL *place = state + m * x->size[2] + x->size[3] + i;
      at(call, x->out)[m * x->out.stride + i] = *place;
      *place = at(call, x->in[0])[m * x->in[0].stride + i];
    }
}

/* Add to whole numbers, one a row; size: the state's number, what is added. */
static void count(const Call *call, const Instruction *x) {
  int64_t *seen = call->given[x->size[0]];
  if (call->thread == 0)
    for (int64_t m = 0; m < call->rows; m++) seen[m] += x->size[1];
}

#endif
