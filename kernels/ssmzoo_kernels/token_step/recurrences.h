/* token_step's recurrences: each moves a state on by a token. */
#ifndef SSMZOO_RECURRENCES_H
#define SSMZOO_RECURRENCES_H

#include "companion.h"
#include "diagonal.h"
#include "instructions.h"

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

/* Share the columns of all heads' states, some vectors at a time; size: heads first, their values'
 * size fourth. */
#define PIECES(of)                                                  \
  int64_t width = x->size[3], full = PIECE * LANES;                 \
  int64_t pieces = (width + full - 1) / full;                       \
  Span span = share(call, x->size[0] * pieces, 1);                  \
  for (int64_t m = 0; m < call->rows; m++)                          \
    for (int64_t i = span.first; i < span.last; i++) {              \
      int64_t column = i % pieces * full;                           \
      if (column + full <= width)                                   \
        of(call, x, 1, m, i / pieces, column);                      \
      else                                                          \
        of(call, x, 0, m, i / pieces, column);                      \
    }

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
  PIECES(delta_piece)
}

/* Columns of one head's state from `column` on: S' = w S + b a^T S + k v^T, y = number q^T S'. */
INLINE void attention_piece(const Call *call, const Instruction *x, int full, int64_t m,
                            int64_t head, int64_t column) {
  int64_t heads = x->size[0], keys = x->size[2], width = x->size[3], decays = x->size[5];
  int64_t shared = head / (heads / x->size[1]) * keys;
  const REAL *q = at(call, x->in[0]) + m * x->in[0].stride + shared;
  const REAL *k = at(call, x->in[1]) + m * x->in[1].stride + shared;
  const REAL *v = at(call, x->in[2]) + m * x->in[2].stride + head * width + column;
  const REAL *w = x->data[0].at ? x->data[0].at : at(call, x->in[3]) + m * x->in[3].stride;
  const REAL *a = at(call, x->in[4]) + m * x->in[4].stride + head * keys;
  const REAL *b = at(call, x->in[5]) + m * x->in[5].stride + head * keys;
  REAL *y = at(call, x->out) + m * x->out.stride + head * width + column;
  REAL *state = (REAL *)call->given[x->size[4]] + (m * heads + head) * keys * width + column;
  vec answer[PIECE] = {{0}}, read[PIECE] = {{0}}, value[PIECE];
  int64_t some[PIECE];
  UNROLL for (int p = 0; p < PIECE; p++) {
    int64_t left = width - column - p * LANES;
    some[p] = full || left >= LANES ? LANES : left < 0 ? 0 : left;
    value[p] = load_some(v + p * LANES, some[p]);
  }
  if (x->size[6]) for (int64_t i = 0; i < keys; i++)
    UNROLL for (int p = 0; p < PIECE; p++)
      answer[p] += splat(a[i]) * load_some(state + i * width + p * LANES, some[p]);
  for (int64_t i = 0; i < keys; i++) {
    vec decay = splat(!decays ? 1 : w[head * decays + (decays == 1 ? 0 : i)]);
    vec key = splat(k[i]), query = splat(q[i]);
    vec again = x->size[6] ? splat(b[i]) : (vec){0};
    UNROLL for (int p = 0; p < PIECE; p++) {
      REAL *place = state + i * width + p * LANES;
      vec row = decay * load_some(place, some[p]) + key * value[p];
      if (x->size[6]) row += again * answer[p];
      store_some(place, row, some[p]);
      read[p] += query * row;
    }
  }
  UNROLL for (int p = 0; p < PIECE; p++)
    store_some(y + p * LANES, read[p] * splat((REAL)x->number[0]), some[p]);
}

/* Linear attention and the generalised delta rule: size: heads, heads of queries and keys, key size,
 * value size, the state's number, decays a head, whether there are a and b; in: q, k, v, w, a, b;
 * data: w, if it is a weight; number: of y. The state is [rows, heads, key, value]. */
static void attention(const Call *call, const Instruction *x) {
  PIECES(attention_piece)
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
 * D, and what u is multiplied with, what w = Re sum p z reads and what it is multiplied with.
 * The state is [rows, channels, modes, 2]; outputs are [read-outs, channels]. */
static void diagonal(const Call *call, const Instruction *x) {
  int64_t channels = x->size[0], width = 2 * x->size[1];
  REAL *S = call->given[x->size[3]];
  const REAL *decay = x->data[0].at, *readout = x->data[1].at, *drive = x->data[3].at;
  const REAL *probe = x->data[4].at, *fed = x->data[5].at;
  Span span = share(call, channels, 1);
  for (int64_t c = span.first; c < span.last; c++)
    for (int64_t m = 0; m < call->rows; m++) {
      REAL u = at(call, x->in[0])[m * x->in[0].stride + c];
      REAL *state = S + (m * channels + c) * width;
      REAL w = probe ? read_out(probe + c * width, state, x->size[1]) : 0;
      advance(state, decay + c * width, drive ? drive + c * width : 0, u, state, x->size[1]);
      if (probe) for (int64_t n = 0; n < width; n += LANES)
        store_some(state + n,
                   load_some(state + n, width - n) -
                       load_some(fed + c * width + n, width - n) * splat(w),
                   width - n);
      for (int64_t k = 0; k < x->size[2]; k++) {
        int64_t place = k * channels + c;
        REAL y = read_out(readout + place * width, state, x->size[1]);
        at(call, x->out)[m * x->out.stride + place] = y + number(x->data[2], place) * u;
      }
    }
}

/* The same for every product of a head's keys and values, read by its queries: size: heads, columns
 * of a head, modes, the state's number; in: q, k, v; data: decay, read-out, D of each head. The state
 * is [rows, columns of k, of v, heads, modes, 2]; outputs are [columns of v, heads]. */
static void products(const Call *call, const Instruction *x) {
  int64_t heads = x->size[0], size = x->size[1], width = 2 * x->size[2];
  REAL *S = call->given[x->size[3]];
  const REAL *decay = x->data[0].at, *readout = x->data[1].at;
  Span span = share(call, call->rows * heads, 1);
  for (int64_t i = span.first; i < span.last; i++) {
    int64_t m = i / heads, head = i % heads;
    const REAL *q = at(call, x->in[0]) + m * x->in[0].stride + head * size;
    const REAL *k = at(call, x->in[1]) + m * x->in[1].stride + head * size;
    const REAL *v = at(call, x->in[2]) + m * x->in[2].stride + head * size;
    REAL *to = at(call, x->out) + m * x->out.stride + head, D = number(x->data[2], head);
    for (int64_t b = 0; b < size; b++) {
      REAL y = 0;
      for (int64_t a = 0; a < size; a++) {
        REAL *state = S + (((m * size + a) * size + b) * heads + head) * width, u = k[a] * v[b];
        advance(state, decay + head * width, 0, u, state, x->size[2]);
        y += q[a] * (read_out(readout + head * width, state, x->size[2]) + D * u);
      }
      to[b * heads] = y;
    }
  }
}

/* z' = a z + x, complex; size: modes, the state's number; data: a. The state is [rows, modes, 2]. */
static void poles(const Call *call, const Instruction *x) {
  int64_t width = 2 * x->size[0];
  const REAL *pole = x->data[0].at;
  Span span = share(call, width, LANES);
  for (int64_t m = 0; m < call->rows; m++)
    for (int64_t i = span.first; i < span.last; i += 2) {
      REAL *z = (REAL *)call->given[x->size[1]] + m * width + i;
      const REAL *from = at(call, x->in[0]) + m * x->in[0].stride + i;
      REAL real = pole[i] * z[0] - pole[i + 1] * z[1], other = pole[i] * z[1] + pole[i + 1] * z[0];
      z[0] = real + from[0], z[1] = other + from[1];
      memcpy(at(call, x->out) + m * x->out.stride + i, z, 2 * sizeof(REAL));
    }
}

/* Mamba-3's angles, which grow by pi tanh(x) dt: size: heads, angles, the state's number; in: x, dt.
 * The state is [rows, heads, angles], less than a turn; y has the cosines, then the sines. */
static void angles(const Call *call, const Instruction *x) {
  int64_t count = x->size[1], width = x->size[0] * count;
  REAL *state = call->given[x->size[2]];
  Span span = share(call, width, LANES);
  for (int64_t m = 0; m < call->rows; m++)
    for (int64_t i = span.first; i < span.last; i++) {
      const double pi = 3.14159265358979324;
      double step = at(call, x->in[1])[m * x->in[1].stride + i / count];
      double speed = tanh((double)at(call, x->in[0])[m * x->in[0].stride + i % count]);
      double angle = (double)state[m * width + i] + pi * speed * step;
      REAL *to = at(call, x->out) + m * x->out.stride + i;
      to[0] = (REAL)cos(angle), to[width] = (REAL)sin(angle);
      state[m * width + i] = (REAL)(angle - 2 * pi * floor(angle / (2 * pi)));
    }
}

/* Give heads their biases, and turn pairs of neighbours: size: heads, groups, columns of a head,
 * angles; in: x of the groups, what `angles` gives; data: the biases. */
static void turn(const Call *call, const Instruction *x) {
  int64_t heads = x->size[0], size = x->size[2], count = x->size[3];
  Span span = share(call, call->rows * heads, 1);
  for (int64_t k = span.first; k < span.last; k++) {
    int64_t m = k / heads, head = k % heads, group = head / (heads / x->size[1]);
    const REAL *from = at(call, x->in[0]) + m * x->in[0].stride + group * size;
    const REAL *along = at(call, x->in[1]) + m * x->in[1].stride + head * count;
    const REAL *across = along + heads * count;
    REAL *to = at(call, x->out) + m * x->out.stride + head * size;
    for (int64_t i = 0; i < size; i += LANES)
      store_some(to + i, load_some(from + i, size - i) +
                             read_numbers(x->data[0], head * size + i, size - i), size - i);
    for (int64_t i = 0; i < count; i++) {
      REAL one = to[2 * i], two = to[2 * i + 1];
      to[2 * i] = one * along[i] - two * across[i];
      to[2 * i + 1] = one * across[i] + two * along[i];
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

#endif
