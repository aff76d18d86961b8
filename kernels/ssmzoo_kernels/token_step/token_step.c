/* One token of a layer: a list of instructions, each shared among the threads.
 *
 * Values are [rows, width] of REAL in one scratch memory; states, and what goes in and out, lie
 * where the caller says. README.md has the equation of each instruction.
 */
#include <math.h>

#include "companion.h"
#include "diagonal.h"
#include "linear.h"
#ifdef _OPENMP /* clang without libomp's package has no omp.h */
int omp_get_thread_num(void), omp_get_num_threads(void);
#endif

enum { AHEAD = 32 }; /* rows of keys and values that are fetched early */
enum { BY_SILU, BY_SIGMOID, BY_ITSELF };
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
  Span span = share(call, x->size[1], 4);
  if (span.first >= span.last) return;
  product(x->data[0], x->data[2], x->data[1], call->rows, at(call, x->in[0]), x->in[0].stride,
          at(call, x->out), x->out.stride, x->size[0], span.first, span.last);
}

/* size: width, group, width of the weight, kind of gate; in: x, gate; number: eps, added to w */
static void norm(const Call *call, const Instruction *x) {
  int64_t width = x->size[0], group = x->size[1], gating = x->size[3];
  int64_t groups = width / group;
  Span span = share(call, call->rows * groups, 1);
  for (int64_t k = span.first; k < span.last; k++) {
    int64_t m = k / groups, begin = k % groups * group;
    const REAL *from = at(call, x->in[0]) + m * x->in[0].stride + begin;
    const REAL *gate = at(call, x->in[1]) + m * x->in[1].stride + begin;
    REAL *to = at(call, x->out) + m * x->out.stride + begin;
    vec squares = {0};
    for (int64_t i = 0; i < group; i += LANES) {
      vec value = load_some(from + i, group - i);
      if (gating == SILU_BEFORE) {
        vec z = load_some(gate + i, group - i);
        value *= z * sigmoid(z);
      }
      store_some(to + i, value, group - i);
      squares += value * value;
    }
    REAL size = total(squares) / (REAL)group + (REAL)x->number[0];
    vec factor = splat((REAL)(1 / __builtin_sqrt((double)size)));
    for (int64_t i = 0; i < group; i += LANES) {
      vec value = load_some(to + i, group - i) * factor;
      if (x->data[0].at) {
        int64_t column = (begin + i) % x->size[2];
        value *= read_numbers(x->data[0], column, x->size[2] - column) + splat((REAL)x->number[1]);
      }
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

/* y = g(a) b; size: width, which g */
static void gate(const Call *call, const Instruction *x) {
  Span span = share(call, x->size[0], LANES);
  for (int64_t m = 0; m < call->rows; m++)
    for (int64_t i = span.first; i < span.last; i += LANES) {
      vec a = load_some(at(call, x->in[0]) + m * x->in[0].stride + i, span.last - i);
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

/* y_i = number w_i x_(i step); size: width, step; data: w */
static void scale(const Call *call, const Instruction *x) {
  Span span = share(call, x->size[0], LANES);
  for (int64_t m = 0; m < call->rows; m++)
    for (int64_t i = span.first; i < span.last; i++) {
      REAL y = (REAL)x->number[0] * at(call, x->in[0])[m * x->in[0].stride + i * x->size[1]];
      if (x->data[0].at) y *= number(x->data[0], i);
      at(call, x->out)[m * x->out.stride + i] = y;
    }
}

/* GELU, x/2 (1 + erf(x / sqrt(2))), or by tanh, 1 + tanh(x) = 2 sigmoid(2 x); size: width, by tanh */
static void gelu(const Call *call, const Instruction *x) {
  Span span = share(call, x->size[0], LANES);
  const vec slope = splat((REAL)1.5957691216057308), cubic = splat((REAL)0.044715);
  for (int64_t m = 0; m < call->rows; m++) {
    const REAL *from = at(call, x->in[0]) + m * x->in[0].stride;
    REAL *to = at(call, x->out) + m * x->out.stride;
    if (x->size[1]) {
      for (int64_t i = span.first; i < span.last; i += LANES) {
        vec a = load_some(from + i, span.last - i);
        store_some(to + i, a * sigmoid(slope * (a + cubic * a * a * a)), span.last - i);
      }
    } else {
      for (int64_t i = span.first; i < span.last; i++)
        to[i] = (REAL)(0.5 * from[i] * (1 + erf(0.70710678118654752 * from[i])));
    }
  }
}

/* Add to whole numbers, one a row; size: the state's number, what is added. */
static void count(const Call *call, const Instruction *x) {
  int64_t *seen = call->given[x->size[0]];
  if (call->thread == 0)
    for (int64_t m = 0; m < call->rows; m++) seen[m] += x->size[1];
}

/* (1 - e^-x) / rate with x = step rate; and e^-x */
INLINE vec held(vec step, vec rate, vec *decay) {
  Power found = power(step * rate * splat((REAL)-1.4426950408889634));
  *decay = scaled(splat(1) + found.rest, found.n);
  return -pick(found.n == splat(0), found.rest, *decay - splat(1)) / rate;
}

/* Mamba: size: channels, states a channel, the state's number, its channels and the first of these,
 * whether steps are held exactly, whether y is gated; in: u, dt, B, C, z; data: A_log, D, the bias
 * of dt. The state is [rows, its channels, states]. */
static void selective(const Call *call, const Instruction *x) {
  int64_t channels = x->size[0], states = x->size[1];
  REAL *S = call->given[x->size[2]];
  Span span = share(call, channels, LANES);
  for (int64_t m = 0; m < call->rows; m++)
    for (int64_t first = span.first; first < span.last; first += LANES) {
      int64_t some = span.last - first < LANES ? span.last - first : LANES;
      vec u = load_some(at(call, x->in[0]) + m * x->in[0].stride + first, some);
      vec dt = load_some(at(call, x->in[1]) + m * x->in[1].stride + first, some);
      if (x->data[2].at) dt += read_numbers(x->data[2], first, some);
      dt = softplus(dt);
      const REAL *B = at(call, x->in[2]) + m * x->in[2].stride;
      const REAL *C = at(call, x->in[3]) + m * x->in[3].stride;
      vec y = {0};
      for (int64_t c = 0; c < some; c++) {
        REAL *state = S + (m * x->size[3] + x->size[4] + first + c) * states;
        vec sum = {0}, step = splat(-dt[c]), written = splat(dt[c] * u[c]);
        const int exact = (int)x->size[5];
        for (int64_t n = 0; n < states; n += LANES) {
          vec rate = exponential(read_numbers(x->data[0], (first + c) * states + n, states - n));
          vec decay, drive = load_some(B + n, states - n);
          if (exact)
            drive *= held(-step, rate, &decay) * splat(u[c]);
          else
            decay = exponential(step * rate), drive *= written;
          vec new = decay * load_some(state + n, states - n) + drive;
          store_some(state + n, new, states - n);
          sum += new * load_some(C + n, states - n);
        }
        y[c] = total(sum);
      }
      if (x->data[1].at) y += read_numbers(x->data[1], first, some) * u;
      if (x->size[6]) {
        vec z = load_some(at(call, x->in[4]) + m * x->in[4].stride + first, some);
        y *= z * sigmoid(z);
      }
      store_some(at(call, x->out) + m * x->out.stride + first, y, some);
    }
}

INLINE REAL soft(REAL x) { return softplus(splat(x))[0]; }

/* Mamba2: size: heads, groups, channels a head, states, the state's number; in: x, dt, B, C;
 * data: A_log, D, the bias of dt; number: least and greatest step.
 * The state is [rows, heads, channels, states]. */
static void ssd(const Call *call, const Instruction *x) {
  int64_t heads = x->size[0], groups = x->size[1], width = x->size[2], states = x->size[3];
  REAL *S = call->given[x->size[4]];
  Span span = share(call, heads * width, 1);
  for (int64_t m = 0; m < call->rows; m++) {
    const REAL *u = at(call, x->in[0]) + m * x->in[0].stride;
    REAL decay = 0, step = 0, skip = 0;
    for (int64_t c = span.first; c < span.last; c++) {
      int64_t head = c / width, group = head / (heads / groups);
      if (c == span.first || c % width == 0) {
        step = at(call, x->in[1])[m * x->in[1].stride + head];
        step = soft(step + (x->data[2].at ? number(x->data[2], head) : 0));
        step = step < (REAL)x->number[0] ? (REAL)x->number[0] : step;
        step = step > (REAL)x->number[1] ? (REAL)x->number[1] : step;
        decay = exponential(-splat(step) * exponential(splat(number(x->data[0], head))))[0];
        skip = x->data[1].at ? number(x->data[1], head) : 0;
      }
      const REAL *B = at(call, x->in[2]) + m * x->in[2].stride + group * states;
      const REAL *C = at(call, x->in[3]) + m * x->in[3].stride + group * states;
      REAL *state = S + (m * heads * width + c) * states;
      vec sum = {0}, kept = splat(decay), written = splat(step * u[c]);
      for (int64_t n = 0; n < states; n += LANES) {
        vec new = kept * load_some(state + n, states - n) + written * load_some(B + n, states - n);
        store_some(state + n, new, states - n);
        sum += new * load_some(C + n, states - n);
      }
      at(call, x->out)[m * x->out.stride + c] = total(sum) + skip * u[c];
    }
  }
}

enum { PIECE = 4 }; /* vectors of a head's value */

/* The columns of one head's state from `column` on; `full`: all the piece's vectors are whole. */
INLINE void delta_piece(const Call *call, const Instruction *x, int full, int64_t m, int64_t head,
                        int64_t column) {
  int64_t heads = x->size[0], keys = x->size[2], width = x->size[3], own = x->size[5];
  int64_t shared = head / (heads / x->size[1]) * keys; /* its group's query and key */
  const REAL *q = at(call, x->in[0]) + m * x->in[0].stride + shared;
  const REAL *k = at(call, x->in[1]) + m * x->in[1].stride + shared;
  const REAL *v = at(call, x->in[2]) + m * x->in[2].stride + head * width + column;
  const REAL *step = at(call, x->in[3]) + m * x->in[3].stride + (own ? head * keys : head);
  REAL *y = at(call, x->out) + m * x->out.stride + head * width + column;
  REAL *state = (REAL *)call->given[x->size[4]] + (m * heads + head) * keys * width + column;
  REAL beta = at(call, x->in[4])[m * x->in[4].stride + head], eps = (REAL)x->number[0];
  beta = sigmoid(splat(beta))[0] * (REAL)x->number[1];
  double k_size = sum_of_products(k, k, keys) + eps, q_size = sum_of_products(q, q, keys) + eps;
  REAL k_unit = (REAL)(1 / __builtin_sqrt(k_size));
  REAL q_unit = (REAL)(1 / __builtin_sqrt(q_size * (double)keys));
  vec rate = -exponential(splat(number(x->data[0], head))), decays = {0};
  vec recalled[PIECE] = {{0}}, read[PIECE] = {{0}}, written[PIECE];
  int64_t some[PIECE];
  UNROLL for (int p = 0; p < PIECE; p++) {
    int64_t left = width - column - p * LANES;
    some[p] = full || left >= LANES ? LANES : left < 0 ? 0 : left;
  }
  if (!own) {
    REAL bias = x->data[1].at ? number(x->data[1], head) : 0;
    decays = exponential(rate * softplus(splat(step[0] + bias)));
  }
  for (int64_t i = 0; i < keys; i++) {
    if (own && i % LANES == 0) {
      vec raw = load_some(step + i, keys - i);
      if (x->data[1].at) raw += read_numbers(x->data[1], head * keys + i, keys - i);
      decays = exponential(rate * softplus(raw));
    }
    vec decay = splat(decays[own ? i % LANES : 0]), key = splat(k[i]);
    UNROLL for (int p = 0; p < PIECE; p++) {
      REAL *place = state + i * width + p * LANES;
      vec row = load_some(place, some[p]) * decay;
      store_some(place, row, some[p]);
      recalled[p] += key * row;
    }
  }
  UNROLL for (int p = 0; p < PIECE; p++) {
    vec value = load_some(v + p * LANES, some[p]);
    written[p] = (value - recalled[p] * splat(k_unit)) * splat(beta * k_unit);
  }
  for (int64_t i = 0; i < keys; i++) {
    vec key = splat(k[i]), query = splat(q[i]);
    UNROLL for (int p = 0; p < PIECE; p++) {
      REAL *place = state + i * width + p * LANES;
      vec row = load_some(place, some[p]) + key * written[p];
      store_some(place, row, some[p]);
      read[p] += query * row;
    }
  }
  UNROLL for (int p = 0; p < PIECE; p++)
    store_some(y + p * LANES, read[p] * splat(q_unit), some[p]);
}

/* The delta rule: size: heads, heads of keys, key size, value size, the state's number, whether
 * each row of the state has its own decay; in: q, k, v, the decay's step, beta before its sigmoid;
 * data: A_log, the step's bias; number: what is added to the squared lengths of q and k, beta's
 * factor. The state is [rows, heads, key, value]. */
static void delta(const Call *call, const Instruction *x) {
  int64_t heads = x->size[0], width = x->size[3];
  int64_t pieces = (width + PIECE * LANES - 1) / (PIECE * LANES);
  Span span = share(call, heads * pieces, 1);
  for (int64_t m = 0; m < call->rows; m++)
    for (int64_t i = span.first; i < span.last; i++) {
      int64_t column = i % pieces * PIECE * LANES;
      if (column + PIECE * LANES <= width)
        delta_piece(call, x, 1, m, i / pieces, column);
      else
        delta_piece(call, x, 0, m, i / pieces, column);
    }
}

/* Longhorn: size: channels, states a channel, the state's number, whether the transition is exact,
 * whether there is a gate; in: u, dt, k, q, z; data: the bias of dt, D.
 * The state is [rows, channels, states]. */
static void longhorn(const Call *call, const Instruction *x) {
  int64_t channels = x->size[0], states = x->size[1];
  REAL *S = call->given[x->size[2]];
  Span span = share(call, channels, LANES);
  for (int64_t m = 0; m < call->rows; m++) {
    const REAL *k = at(call, x->in[2]) + m * x->in[2].stride;
    const REAL *q = at(call, x->in[3]) + m * x->in[3].stride;
    vec energy = splat(sum_of_products(k, k, states));
    for (int64_t first = span.first; first < span.last; first += LANES) {
      int64_t some = span.last - first < LANES ? span.last - first : LANES;
      vec u = load_some(at(call, x->in[0]) + m * x->in[0].stride + first, some);
      vec dt = load_some(at(call, x->in[1]) + m * x->in[1].stride + first, some);
      if (x->data[0].at) dt += read_numbers(x->data[0], first, some);
      vec eps = splat(1) / (splat(1) + exponential(-dt) + energy), y = {0};
      for (int64_t c = 0; c < some; c++) {
        REAL *state = S + (m * channels + first + c) * states;
        vec sum = {0}, strength = splat(eps[c]), wanted = splat(u[c]);
        if (x->size[3]) wanted -= splat(sum_of_products(k, state, states));
        for (int64_t n = 0; n < states; n += LANES) {
          vec key = load_some(k + n, states - n), old = load_some(state + n, states - n);
          vec error = x->size[3] ? wanted : wanted - key * old;
          vec new = old + strength * key * error;
          store_some(state + n, new, states - n);
          if (states - n < LANES) new = load_some(state + n, states - n); /* 0 beyond the end */
          sum += new * load_some(q + n, states - n);
        }
        y[c] = total(sum);
      }
      if (x->data[1].at) y += read_numbers(x->data[1], first, some) * u;
      if (x->size[4]) {
        vec z = load_some(at(call, x->in[4]) + m * x->in[4].stride + first, some);
        y *= z * sigmoid(z);
      }
      store_some(at(call, x->out) + m * x->out.stride + first, y, some);
    }
  }
}

/* COFFEE: size: channels, states a channel, the state's number, whether the gates are linear,
 * whether something else than the state drives them; in: u, the drive; data: lambda, w, B, C,
 * w_gamma, D; number: 0, or what sigmoid(lambda) is multiplied with to be -lambda.
 * The state is [rows, channels, states]. */
static void feedback(const Call *call, const Instruction *x) {
  int64_t channels = x->size[0], states = x->size[1];
  REAL *S = call->given[x->size[2]];
  Numbers D = x->data[5];
  Span span = share(call, channels, 1);
  for (int64_t c = span.first; c < span.last; c++)
    for (int64_t m = 0; m < call->rows; m++) {
      vec u = splat(at(call, x->in[0])[m * x->in[0].stride + c]);
      vec drive = splat(at(call, x->in[1])[m * x->in[1].stride + c]);
      vec sum = {0}, shut = {0};
      REAL *state = S + (m * channels + c) * states;
      for (int64_t n = 0; n < states; n += LANES) {
        int64_t place = c * states + n, some = states - n;
        vec rate = read_numbers(x->data[0], place, some), old = load_some(state + n, some);
        if (x->number[0] != 0) rate = splat((REAL)-x->number[0]) * sigmoid(rate);
        vec w = x->data[1].at ? read_numbers(x->data[1], place, some) : splat(1);
        vec factor = x->data[2].at ? read_numbers(x->data[2], place, some) : splat(1);
        if (x->data[1].at) w *= factor;
        vec open = w * (x->size[4] ? drive : old);
        if (!x->size[3]) open = sigmoid(open);
        vec new = old + open * (rate * old + u);
        store_some(state + n, new, some);
        if (some < LANES) new = load_some(state + n, some); /* 0 beyond the end */
        sum += factor * read_numbers(x->data[3], place, some) * new;
        if (x->data[4].at) shut += factor * read_numbers(x->data[4], place, some) * new;
      }
      REAL y = total(sum);
      if (x->data[4].at) y *= sigmoid(splat(total(shut)))[0];
      if (D.at) y += number(D, c) * u[0];
      at(call, x->out)[m * x->out.stride + c] = y;
    }
}

/* Complex modes: size: channels, modes, read-outs, the state's number; in: u; data: decay, read-out,
 * D. The state is [rows, channels, modes, 2]; outputs are [read-outs, channels]. */
static void diagonal(const Call *call, const Instruction *x) {
  int64_t channels = x->size[0], width = 2 * x->size[1];
  REAL *S = call->given[x->size[3]];
  const REAL *decay = x->data[0].at, *readout = x->data[1].at;
  Span span = share(call, channels, 1);
  for (int64_t c = span.first; c < span.last; c++)
    for (int64_t m = 0; m < call->rows; m++) {
      REAL u = at(call, x->in[0])[m * x->in[0].stride + c];
      REAL *state = S + (m * channels + c) * width;
      advance(state, decay + c * width, 0, u, state, x->size[1]);
      for (int64_t k = 0; k < x->size[2]; k++) {
        int64_t place = k * channels + c;
        REAL y = read_out(readout + place * width, state, x->size[1]);
        at(call, x->out)[m * x->out.stride + place] = y + number(x->data[2], place) * u;
      }
    }
}

/* A rational filter: size: width, order, the numbers of the ring and of the positions; in: u;
 * data: a, b [order, width], d. */
static void companion(const Call *call, const Instruction *x) {
  int64_t width = x->size[0];
  Span span = share(call, width, BLOCK);
  const CompanionStep step = {at(call, x->in[0]),
                              x->data[0].at,
                              x->data[1].at,
                              x->data[2].at,
                              call->given[x->size[3]],
                              call->given[x->size[2]],
                              at(call, x->out),
                              call->rows,
                              width,
                              x->size[1],
                              x->in[0].stride,
                              x->out.stride};
  for (int64_t channel = span.first; channel < span.last; channel += BLOCK)
    for (int64_t m = 0; m < call->rows; m++) step_some(&step, m, channel, span.last - channel);
}

/* Rotary positions, which turn the halves of heads against each other: size: width, columns of a
 * head, the number of the positions; number: their base. */
static void rotate(const Call *call, const Instruction *x) {
  int64_t size = x->size[1], half = size / 2;
  const int64_t *seen = call->given[x->size[2]];
  Span span = share(call, call->rows * half, 1);
  for (int64_t k = span.first; k < span.last; k++) {
    int64_t m = k / half, i = k % half;
    double angle = (double)seen[m] * pow(x->number[0], -2.0 * (double)i / (double)size);
    REAL along = (REAL)cos(angle), across = (REAL)sin(angle);
    const REAL *from = at(call, x->in[0]) + m * x->in[0].stride;
    REAL *to = at(call, x->out) + m * x->out.stride;
    for (int64_t c = i; c < x->size[0]; c += size) {
      REAL one = from[c], two = from[c + half];
      to[c] = one * along - two * across;
      to[c + half] = two * along + one * across;
    }
  }
}

/* Where a position lies in a ring, whatever a state may say: it is data. */
INLINE int64_t ring_place(int64_t position, int64_t rows) {
  int64_t place = position % rows;
  return place < 0 ? place + rows : place;
}

/* Write a row of a ring: size: width, the ring's number, its rows, the number of the positions. */
static void keep(const Call *call, const Instruction *x) {
  int64_t width = x->size[0], rows = x->size[2];
  REAL *ring = call->given[x->size[1]];
  const int64_t *seen = call->given[x->size[3]];
  Span span = share(call, width, LANES);
  if (span.first < span.last) for (int64_t m = 0; m < call->rows; m++)
    memcpy(ring + (m * rows + ring_place(seen[m], rows)) * width + span.first,
           at(call, x->in[0]) + m * x->in[0].stride + span.first,
           (size_t)(span.last - span.first) * sizeof(REAL));
}

/* Keys and values of a head: the rows that hold something. */
typedef struct {
  const REAL *k, *v;
  int64_t count;
} Rows;

/* to[n] = sum_j w[j] v[j, n] of some vectors of columns; `left`: columns from the first one on */
INLINE void sum_rows(REAL *to, const Rows *tables, const REAL *w, int64_t stride, int64_t n,
                     const int vectors, int64_t left, REAL share) {
  vec sum[4] = {{0}};
  for (int t = 0; t < 3; t++)
    for (int64_t j = 0; j < tables[t].count; j++, w++) {
      const REAL *v = tables[t].v + j * stride + n;
      UNROLL for (int c = 0; c < vectors; c++) __builtin_prefetch(v + AHEAD * stride + c * LANES);
      UNROLL for (int c = 0; c < vectors; c++)
        sum[c] += splat(*w) * load_some(v + c * LANES, vectors > 1 ? LANES : left);
    }
  UNROLL for (int c = 0; c < vectors; c++)
    store_some(to + n + c * LANES, sum[c] * splat(share), vectors > 1 ? LANES : left);
}

/* One softmax over a ring and two memories: size: heads, groups, columns of a head, rows of the ring,
 * of the first and of the second memory; the numbers of the positions, of keys and values of each,
 * of the first memory's own positions, and whether those in the ring are hidden there; in: q, room
 * for weights; number: scale. */
static void attend(const Call *call, const Instruction *x) {
  int64_t heads = x->size[0], groups = x->size[1], size = x->size[2], window = x->size[3];
  int64_t stride = groups * size, most_rows = window + x->size[4] + x->size[5];
  const int64_t *seen = call->given[x->size[6]];
  Span span = share(call, call->rows * heads, 1);
  for (int64_t k = span.first; k < span.last; k++) {
    int64_t m = k / heads, head = k % heads, column = head / (heads / groups) * size;
    int64_t position = seen[m], before = position / window * window, number = 0;
    const REAL *q = at(call, x->in[0]) + m * x->in[0].stride + head * size;
    REAL *w = at(call, x->in[1]) + m * x->in[1].stride + head * most_rows;
    REAL *to = at(call, x->out) + m * x->out.stride + head * size;
    Rows tables[3] = {{0}};
    for (int t = 0; t < 3; t++) {
      int64_t rows = x->size[3 + t], known = t ? before : position + 1;
      if (!rows) continue;
      int64_t first = m * rows * stride + column;
      tables[t] = (Rows){(const REAL *)call->given[x->size[7 + 2 * t]] + first,
                         (const REAL *)call->given[x->size[8 + 2 * t]] + first,
                         known < rows ? known : rows};
      const int64_t *hidden = t == 1 && x->size[13] ? call->given[x->size[13]] : 0;
      for (int64_t j = 0; j < tables[t].count; j++, number++) {
        const REAL *key = tables[t].k + j * stride;
        for (int64_t i = 0; i < size; i += 64 / (int64_t)sizeof(REAL))
          __builtin_prefetch(key + AHEAD * stride + i);
        REAL score = sum_of_products(q, key, size);
        if (hidden && hidden[m * rows + j] > position - window)
          w[number] = -(REAL)INFINITY;
        else
          w[number] = score * (REAL)x->number[0];
      }
    }
    vec most = splat(-(REAL)INFINITY), sum = {0};
    for (int64_t i = 0; i + LANES <= number; i += LANES) {
      vec score = load(w + i);
      most = pick(score > most, score, most);
    }
    REAL top = most[0];
    for (int i = 1; i < LANES; i++) top = most[i] > top ? most[i] : top;
    for (int64_t i = number / LANES * LANES; i < number; i++) top = w[i] > top ? w[i] : top;
    for (int64_t i = 0; i < number; i += LANES) {
      vec weight = raised((load_some(w + i, number - i) - splat(top)) *
                          splat((REAL)1.4426950408889634));
      store_some(w + i, weight, number - i);
      sum += load_some(w + i, number - i); /* nothing behind the last one */
    }
    REAL share = 1 / total(sum);
    int64_t n = 0;
    for (; n + 4 * LANES <= size; n += 4 * LANES) sum_rows(to, tables, w, stride, n, 4, 0, share);
    for (; n < size; n += LANES) sum_rows(to, tables, w, stride, n, 1, size - n, share);
  }
}

/* B'MOJO's outputs: size: width, rows kept, outputs that predict, the numbers of what is kept, of the
 * scores and of the positions, rows of the scores, whether errors are relative; data: the predictor.
 * A score that is not finite fails the call. */
static void innovate(const Call *call, const Instruction *x) {
  int64_t width = x->size[0], kept = x->size[1], span = x->size[2];
  Span part = share(call, call->rows, 1);
  for (int64_t m = part.first; m < part.last; m++) {
    const REAL *y = at(call, x->in[0]) + m * x->in[0].stride, *by = x->data[0].at;
    REAL *rows = (REAL *)call->given[x->size[3]] + m * kept * width;
    if (span) {
      vec errors = {0}, sizes = {0};
      for (int64_t c = 0; c < width; c += LANES) {
        vec now = load_some(y + c, width - c), error = now;
        for (int64_t i = 0; i < span; i++)
          error -= splat(by[i]) * load_some(rows + (kept - 1 - i) * width + c, width - c);
        errors += error * error;
        sizes += now * now;
      }
      REAL over = x->size[7] ? total(sizes) + (REAL)1e-6 : (REAL)width;
      REAL score = total(errors) / over;
      if (!isfinite(score)) {
#pragma omp atomic write
        *call->failed = 2;
      }
      int64_t window = x->size[6], position = ((const int64_t *)call->given[x->size[5]])[m];
      ((REAL *)call->given[x->size[4]])[m * window + ring_place(position, window)] = score;
    }
    memmove(rows, rows + width, (size_t)((kept - 1) * width) * sizeof(REAL));
    memcpy(rows + (kept - 1) * width, y, (size_t)width * sizeof(REAL));
  }
}

/* in the order of `Code` in writer.py */
static void (*const kinds[])(const Call *, const Instruction *) = {
    input, output,    linear, norm,  conv,     gate,     add,       scale,  gelu, count,
    selective, ssd, delta, longhorn, feedback, diagonal, companion, rotate, keep, attend, innovate};

/* A list, how many instructions it has, how many numbers a row takes in the scratch memory, and the
 * tensors that it is given. */
typedef struct {
  const Instruction *list;
  int64_t count, width;
  void *const *given;
} Program;

static void run(Call call, const Program *programs, int64_t count) {
  for (int64_t p = 0; p < count; p++) {
    call.given = programs[p].given;
    for (int64_t i = 0; i < programs[p].count; i++) {
      const Instruction *x = programs[p].list + i;
      kinds[x->kind](&call, x);
      int last = p + 1 == count && i + 1 == programs[p].count;
      if (call.threads > 1 && !last) {
#pragma omp barrier
      }
    }
  }
}

/* Run programs one after another on some rows.
 * Returns 1 if there is no memory for that, before anything has changed; 2 if a score is not finite. */
int token_step(const Program *programs, int64_t count, int64_t rows, int threads) {
  int64_t width = 0;
  for (int64_t p = 0; p < count; p++)
    if (programs[p].width > width) width = programs[p].width;
  REAL *memory = scratch(rows * width * (int64_t)sizeof(REAL) + 64);
  if (!memory) return 1;
  int failed = 0;
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    run((Call){rows, memory, 0, omp_get_thread_num(), omp_get_num_threads(), &failed}, programs,
        count);
  } else
#endif
    run((Call){rows, memory, 0, 0, 1, &failed}, programs, count);
  (void)threads;
  free(memory);
  return failed;
}
