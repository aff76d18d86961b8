/* The skeleton of chunked first-order recurrences on CPUs: everything but the transition.
 *
 *     S[t] = A[t] S[t-1] + b[t],   o[t] = (sum_n S[t,n] q[t,n] + skip u[t]) * silu(z[t])
 *
 * on a state [channel, n] whose A and b come from the token's u and dt (one per channel) and key k
 * (one per n), and from a learned param [D, N] where a family has one. A family defines, before it
 * includes this file, on vectors of channels:
 *
 *     ENERGY                     whether |k|^2 matters to it
 *     ABREAST                    how many steps NEON's registers hold at once, 1 or 2
 *     Token                      what a token means to a channel vector
 *     Param                      what the learned param means to it; may be empty
 *     Memo                       what a step leaves for its adjoint; may be empty
 *     Sums                       gradients of a Token, summed over n
 *     token(u, dt, energy)       Token of one token; energy = |k|^2
 *     spread(&token, lane)       Token with one channel's values in every lane
 *     learned(param)             Param of one n
 *     step(S, key, &param, &token, &memo)
 *                                S after the token
 *     adjoint(G, S, key, &param, &token, &memo, &sums, &grad_key, &grad_param)
 *                                gradient of S before the token from the one after it; adds to the
 *                                sums and to the gradients of key and param
 *     finish(&token, &sums, &grad_u, &grad_dt, &grad_energy)
 *
 * Tokens lie flat, cut into segments by `offsets`. A task is one segment and one block of channels;
 * tasks share nothing, so results do not depend on the number of threads. In a task, CHUNK tokens
 * at a time: a tile of VT channel vectors by NT states stays in registers while it marches through
 * the chunk. Training keeps the state before every `interval` of chunks, one if N <= CHUNK (numbering:
 * scan/__init__.py); the backward marches through an interval again for the states before its other
 * chunks, recomputes the states of a chunk into `history`, in the first cache, with what the steps
 * leave in `memos`, and marches back.
 * States are never rebuilt by division. Gradients of q and k sum over channels: every `parts`-th
 * block adds to the same partial sum, in order, and the parts are added up in theirs.
 *
 * Saved states are [slots, N, D]; initial and final ones [S, D, N]. Absent tensors are null.
 */
#include "vector.h"

#ifndef CHUNK
#error "CHUNK, the tokens whose states are recomputed at once, comes from the Python side"
#endif

/* VT * NT states fit the vector registers with room for the rest. */
#ifdef __AVX512F__
enum { VT = 1, NT = 16 };
#else
enum { VT = 1, NT = 8 };
#endif
_Static_assert(VT == 1, "a tile of few states is one vector of channels");
enum { VECTORS = 4 * VT, BLOCK = VECTORS * LANES };

/* How many channels a task has. */
const int scan_block = BLOCK;

typedef struct {
  const REAL *u, *q, *k, *dt, *bias, *skip, *z, *param, *initial;
  const int64_t *offsets;
  int64_t segments, width, states, interval;
  int64_t stride_u, stride_q, stride_k, stride_dt, stride_z; /* between tokens */
} Inputs;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

INLINE int64_t slot(const Inputs *in, int64_t segment, int64_t number) {
  return in->offsets[segment] / in->interval + segment + number;
}

/* Keys and queries of a chunk, padded with zeros to whole tiles. */
INLINE void read_rows(const Inputs *in, int64_t first, int64_t count, int64_t padded, REAL *keys,
                      REAL *queries, REAL *energy) {
  int64_t states = in->states;
  for (int64_t t = 0; t < count; t++) {
    const REAL *k = in->k + (first + t) * in->stride_k, *q = in->q + (first + t) * in->stride_q;
    REAL *key = keys + t * padded, *query = queries + t * padded, sum = 0;
    for (int64_t n = 0; n < states; n++) {
      key[n] = k[n];
      query[n] = q[n];
      sum += k[n] * k[n];
    }
    for (int64_t n = states; n < padded; n++) key[n] = query[n] = 0;
    energy[t] = sum;
  }
}

/* [channel, n] in memory to [vector][n] vectors of channels, and back. */
INLINE void read_states(const REAL *from, int64_t channels, int64_t states, int64_t padded,
                        vec *to) {
  memset(to, 0, sizeof(vec) * VECTORS * (size_t)padded);
  if (!from) return;
  REAL *flat = (REAL *)to;
  for (int64_t c = 0; c < channels; c++)
    for (int64_t n = 0; n < states; n++)
      flat[(c / LANES * padded + n) * LANES + c % LANES] = from[c * states + n];
}

INLINE void write_states(REAL *to, int64_t channels, int64_t states, int64_t padded,
                         const vec *from) {
  const REAL *flat = (const REAL *)from;
  for (int64_t c = 0; c < channels; c++)
    for (int64_t n = 0; n < states; n++)
      to[c * states + n] = flat[(c / LANES * padded + n) * LANES + c % LANES];
}

INLINE void read_params(const Inputs *in, int64_t channel, int64_t channels, int64_t padded,
                        vec *room, Param *to) {
  read_states(in->param ? in->param + channel * in->states : NULL, channels, in->states, padded,
              room);
  for (int64_t i = 0; i < VECTORS * padded; i++) to[i] = learned(room[i]);
}

INLINE Token read_token(const Inputs *in, int64_t t, int64_t channel, int64_t count, REAL energy) {
  vec u = load_some(in->u + t * in->stride_u + channel, count);
  vec dt = load_some(in->dt + t * in->stride_dt + channel, count);
  if (in->bias) dt += load_some(in->bias + channel, count);
  return token(u, dt, splat(energy));
}

INLINE void read_tokens(const Inputs *in, int64_t first, int64_t count, int64_t channel,
                        int64_t channels, const REAL *energy, Token *tokens) {
  for (int64_t t = 0; t < count; t++)
    for (int64_t c = 0, v = 0; c < channels; c += LANES, v++)
      tokens[t * VECTORS + v] = read_token(in, first + t, channel + c, channels - c, energy[t]);
}

/* A chunk's rows are too far apart for the hardware to foresee: ask for a vector of the next one. */
INLINE void fetch(const Inputs *in, int64_t t, int64_t channel) {
  __builtin_prefetch(in->u + t * in->stride_u + channel, 0, 2);
  __builtin_prefetch(in->dt + t * in->stride_dt + channel, 0, 2);
  if (in->z) __builtin_prefetch(in->z + t * in->stride_z + channel, 0, 2);
}

/* One token without a backward: each state is read once, so along n, as memory has them. */
static void step_rows(const Inputs *in, int64_t segment, int64_t channel, int64_t channels,
                      REAL *out, REAL *final) {
  int64_t t = in->offsets[segment], states = in->states;
  const REAL *k = in->k + t * in->stride_k, *q = in->q + t * in->stride_q;
  REAL energy = 0;
  for (int64_t n = 0; n < states; n++) energy += k[n] * k[n];
  for (int64_t c = 0; c < channels; c += LANES) {
    int64_t count = smaller(LANES, channels - c), at = channel + c;
    Token x = read_token(in, t, at, count, energy);
    vec o = {0};
    for (int64_t i = 0; i < count; i++) {
      int64_t row = (segment * in->width + at + i) * states;
      Token same = spread(&x, i);
      vec read = {0};
      for (int64_t n = 0; n < states; n += LANES) {
        int64_t some = smaller(LANES, states - n);
        vec S = in->initial ? load_some(in->initial + row + n, some) : (vec){0};
        vec param = {0};
        if (in->param) param = load_some(in->param + (at + i) * states + n, some);
        Param rule = learned(param);
        Memo none;
        S = step(S, load_some(k + n, some), &rule, &same, &none);
        read += S * load_some(q + n, some);
        store_some(final + row + n, S, some);
      }
      o[i] = total(read);
    }
    if (in->skip)
      o += load_some(in->skip + at, count) * load_some(in->u + t * in->stride_u + at, count);
    if (in->z) {
      vec z = load_some(in->z + t * in->stride_z + at, count);
      o *= z * sigmoid(z);
    }
    store_some(out + t * in->width + at, o, count);
  }
}

/* What `march` does, for a tile of fewer states: no others are computed beside them, which a token
 * that is not finite would make NaN. */
static void march_few(vec *states, const Param *params, int64_t few, int64_t padded, int64_t count,
                      const Token *tokens, const REAL *keys, const REAL *queries, vec *read) {
  for (int64_t t = 0; t < count; t++) {
    Token x = tokens[t * VECTORS];
    vec sum = {0};
    for (int64_t n = 0; n < few; n++) {
      Memo none;
      states[n] = step(states[n], splat(keys[t * padded + n]), params + n, &x, &none);
      if (read) sum += states[n] * splat(queries[t * padded + n]);
    }
    if (read) read[t * VECTORS] += sum;
  }
}

/* Let the next step begin after these states, `last` the newest one, are computed. */
#define STEP_AFTER(last, first) \
  do {                          \
    LOAD_AFTER(last, params);   \
    LOAD_AFTER(first, keys);    \
  } while (0)

/* March a tile of states through a chunk, adding what it reads to `read` unless that is null; fetch
 * `ahead` tokens of the next chunk meanwhile. */
INLINE void march(const Inputs *in, vec *states, const Param *params, int64_t padded,
                  int64_t count, const Token *tokens, const REAL *keys, const REAL *queries,
                  vec *read, int64_t next, int64_t ahead, int64_t channel, int64_t left) {
  if (left < NT) {
    for (int64_t t = 0; t < smaller(count, ahead); t++) fetch(in, next + t, channel);
    march_few(states, params, left, padded, count, tokens, keys, queries, read);
    return;
  }
  vec S[VT][NT];
  UNROLL for (int v = 0; v < VT; v++)
    UNROLL for (int n = 0; n < NT; n++) S[v][n] = states[v * padded + n];
  for (int64_t t = 0; t < count; t++) {
    UNROLL for (int v = 0; v < VT; v++) {
      if (t < ahead) fetch(in, next + t, channel + v * LANES);
      Token x = tokens[t * VECTORS + v];
      vec even = {0}, odd = {0};
      if (read) even = read[t * VECTORS + v];
      UNROLL for (int n = 0; n < NT; n += 2) {
        const Param *p = params + v * padded + n;
        Memo none;
        S[v][n] = step(S[v][n], splat(keys[t * padded + n]), p, &x, &none);
        if (read) even += S[v][n] * splat(queries[t * padded + n]);
        if (ABREAST == 1) STEP_AFTER(S[v][n], S[v][n]);
        S[v][n + 1] = step(S[v][n + 1], splat(keys[t * padded + n + 1]), p + 1, &x, &none);
        if (read) odd += S[v][n + 1] * splat(queries[t * padded + n + 1]);
        STEP_AFTER(S[v][n + 1], S[v][n + 2 - ABREAST]);
      }
      if (read) read[t * VECTORS + v] = even + odd;
    }
  }
  UNROLL for (int v = 0; v < VT; v++)
    UNROLL for (int n = 0; n < NT; n++) states[v * padded + n] = S[v][n];
}

static void forward_task(const Inputs *in, int64_t segment, int64_t channel, REAL *out, REAL *final,
                         REAL *saved, void *memory) {
  int64_t begin = in->offsets[segment], end = in->offsets[segment + 1];
  int64_t width = in->width, padded = round_up(in->states, NT);
  int64_t channels = smaller(BLOCK, width - channel);
  if (end - begin == 1 && !saved) {
    step_rows(in, segment, channel, channels, out, final);
    return;
  }
  vec *states = memory;
  Param *params = (Param *)(states + VECTORS * padded);
  REAL *keys = (REAL *)(params + VECTORS * padded), *queries = keys + CHUNK * padded;
  REAL energy[CHUNK];
  Token tokens[CHUNK * VECTORS];
  vec read[CHUNK * VECTORS];
  memset(tokens, 0, sizeof tokens);
  int64_t edge = (segment * width + channel) * in->states;
  read_params(in, channel, channels, padded, states, params);
  read_states(in->initial ? in->initial + edge : NULL, channels, in->states, padded, states);
  for (int64_t first = begin; first < end; first += CHUNK) {
    int64_t count = smaller(CHUNK, end - first);
    read_rows(in, first, count, padded, keys, queries, energy);
    read_tokens(in, first, count, channel, channels, energy, tokens);
    if (saved && (first - begin) % in->interval == 0) {
      REAL *to = saved + slot(in, segment, (first - begin) / in->interval) * in->states * width;
      for (int64_t n = 0; n < in->states; n++)
        for (int64_t c = 0, v = 0; c < channels; c += LANES, v++)
          store_some(to + n * width + channel + c, states[v * padded + n], channels - c);
    }
    memset(read, 0, sizeof read);
    for (int64_t v = 0; v * LANES < channels; v += VT)
      for (int64_t n = 0; n < padded; n += NT)
        march(in, states + v * padded + n, params + v * padded + n, padded, count, tokens + v,
              keys + n, queries + n, read + v, first + CHUNK, n ? 0 : end - first - CHUNK,
              channel + v * LANES, in->states - n);
    for (int64_t t = 0; t < count; t++)
      for (int64_t c = 0, v = 0; c < channels; c += LANES, v++) {
        int64_t left = channels - c, at = channel + c;
        vec o = read[t * VECTORS + v];
        if (in->skip)
          o += load_some(in->skip + at, left) *
               load_some(in->u + (first + t) * in->stride_u + at, left);
        if (in->z) {
          vec z = load_some(in->z + (first + t) * in->stride_z + at, left);
          o *= z * sigmoid(z);
        }
        store_some(out + (first + t) * width + at, o, left);
      }
  }
  write_states(final + edge, channels, in->states, padded, states);
  if (!saved) return;
  /* slots between this segment's last interval and the next segment are nobody's */
  int64_t used = (end - begin + in->interval - 1) / in->interval;
  for (int64_t i = slot(in, segment, used); i < slot(in, segment + 1, 0); i++)
    for (int64_t n = 0; n < in->states; n++)
      memset(saved + (i * in->states + n) * width + channel, 0, (size_t)channels * sizeof(REAL));
}

/* Returns 0, or 1 if memory ran out. */
int scan_forward(const Inputs *in, REAL *out, REAL *final, REAL *saved, int threads) {
  int64_t blocks = (in->width + BLOCK - 1) / BLOCK, padded = round_up(in->states, NT);
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    void *memory = scratch(VECTORS * padded * (sizeof(vec) + sizeof(Param)) +
                           2 * CHUNK * padded * sizeof(REAL));
    if (!memory) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < in->segments * blocks; i++)
      if (memory)
        forward_task(in, i / blocks, i % blocks * BLOCK, out, final, saved, memory);
    free(memory);
  }
  return failed;
}

typedef struct {
  const REAL *out, *final; /* incoming */
  int64_t stride_out, parts;
  /* partial sums of q and k are [parts, T, N], of bias and skip [S, D], of param [S, D, N] */
  REAL *u, *q, *k, *dt, *bias, *skip, *z, *param, *initial;
} Gradients;

static void march_back_few(const vec *states, vec *carry, const Param *params, vec *grad_params,
                           int64_t few, int64_t padded, int64_t count, const Token *tokens,
                           const REAL *keys, const REAL *queries, const vec *grads, Sums *sums,
                           vec *read, vec *grad_keys, vec *grad_queries) {
  vec history[(CHUNK + 1) * NT];
  Memo memos[CHUNK * NT];
  for (int64_t n = 0; n < few; n++) history[n] = states[n];
  for (int64_t t = 0; t < count; t++) {
    Token x = tokens[t * VECTORS];
    for (int64_t n = 0; n < few; n++)
      history[(t + 1) * NT + n] = step(history[t * NT + n], splat(keys[t * padded + n]), params + n,
                                       &x, memos + t * NT + n);
  }
  for (int64_t t = count - 1; t >= 0; t--) {
    Token x = tokens[t * VECTORS];
    vec g = grads[t * VECTORS];
    for (int64_t n = 0; n < few; n++) {
      vec key = splat(keys[t * padded + n]), query = splat(queries[t * padded + n]);
      vec from = history[t * NT + n], to = history[(t + 1) * NT + n];
      grad_queries[t * padded + n] += g * to;
      read[t * VECTORS] += query * to;
      carry[n] = adjoint(carry[n] + g * query, from, key, params + n, &x, memos + t * NT + n,
                         &sums[t * VECTORS], &grad_keys[t * padded + n], &grad_params[n]);
    }
  }
}

/* Recompute a tile's states in a chunk, then carry its gradient back through it; fetch the tokens of
 * the chunk before, which starts at `before` unless that is negative. */
INLINE void march_back(const Inputs *in, const Gradients *grad, const vec *states, vec *carry,
                       const Param *params, vec *grad_params, int64_t padded, int64_t count,
                       const Token *tokens, const REAL *keys, const REAL *queries,
                       const vec *grads, Sums *sums, vec *read, vec *grad_keys, vec *grad_queries,
                       int64_t before, int64_t channel, int64_t left) {
  if (left < NT) {
    march_back_few(states, carry, params, grad_params, left, padded, count, tokens, keys, queries,
                   grads, sums, read, grad_keys, grad_queries);
    return;
  }
  vec history[(CHUNK + 1) * VT * NT], S[VT][NT];
  Memo memos[CHUNK * VT * NT];
  UNROLL for (int v = 0; v < VT; v++) UNROLL for (int n = 0; n < NT; n++) {
    history[v * NT + n] = S[v][n] = states[v * padded + n];
  }
  for (int64_t t = 0; t < count; t++)
    UNROLL for (int v = 0; v < VT; v++) {
      Token x = tokens[t * VECTORS + v];
      UNROLL for (int n = 0; n < NT; n++) {
        S[v][n] = step(S[v][n], splat(keys[t * padded + n]), params + v * padded + n, &x,
                       memos + (t * VT + v) * NT + n);
        history[((t + 1) * VT + v) * NT + n] = S[v][n];
        if (n % ABREAST == ABREAST - 1) STEP_AFTER(S[v][n], S[v][n + 1 - ABREAST]);
      }
    }
  vec G[VT][NT];
  UNROLL for (int v = 0; v < VT; v++)
    UNROLL for (int n = 0; n < NT; n++) G[v][n] = carry[v * padded + n];
  for (int64_t t = count - 1; t >= 0; t--) {
    if (before >= 0)
      for (int v = 0; v < VT; v++) {
        int64_t at = channel + v * LANES;
        fetch(in, before + t, at);
        if (grad->out)
          __builtin_prefetch(grad->out + (before + t) * grad->stride_out + at, 0, 2);
        int64_t here = (before + CHUNK + t) * in->width + at;
        __builtin_prefetch(grad->u + here, 1, 2);
        __builtin_prefetch(grad->dt + here, 1, 2);
        if (in->z) __builtin_prefetch(grad->z + here, 1, 2);
      }
    vec *grad_key = grad_keys + t * padded, *grad_query = grad_queries + t * padded;
    UNROLL for (int v = 0; v < VT; v++) {
      Token x = tokens[t * VECTORS + v];
      Sums sum = sums[t * VECTORS + v];
      vec g = grads[t * VECTORS + v], o = read[t * VECTORS + v];
      UNROLL for (int n = 0; n < NT; n++) {
        vec key = splat(keys[t * padded + n]), query = splat(queries[t * padded + n]);
        vec from = history[(t * VT + v) * NT + n], to = history[((t + 1) * VT + v) * NT + n];
        grad_query[n] += g * to;
        o += query * to;
        G[v][n] = adjoint(G[v][n] + g * query, from, key, params + v * padded + n, &x,
                          memos + (t * VT + v) * NT + n, &sum, &grad_key[n],
                          &grad_params[v * padded + n]);
        if (n % ABREAST < ABREAST - 1) continue;
        if (ABREAST == 1) LOAD_AFTER(grad_params[v * padded + n], params);
        LOAD_AFTER(o, grad_query);
        LOAD_AFTER(G[v][n], grad_key);
        UNROLL for (int i = 0; i < (int)(sizeof sum / sizeof o); i++)
          LOAD_AFTER(((const vec *)&sum)[i], keys);
      }
      sums[t * VECTORS + v] = sum;
      read[t * VECTORS + v] = o;
    }
  }
  UNROLL for (int v = 0; v < VT; v++)
    UNROLL for (int n = 0; n < NT; n++) carry[v * padded + n] = G[v][n];
}

/* The states before so many chunks: the one saved before the first, at token `first`, then what a
 * march through them leaves. */
static void find_starts(const Inputs *in, const REAL *from, int64_t first, int64_t chunks,
                        int64_t channel, int64_t channels, int64_t padded, const Param *params,
                        REAL *keys, REAL *queries, REAL *energy, Token *tokens, vec *starts) {
  for (int64_t n = 0; n < in->states; n++)
    for (int64_t c = 0, v = 0; c < channels; c += LANES, v++)
      starts[v * padded + n] = load_some(from + n * in->width + channel + c, channels - c);
  for (int64_t i = 1; i < chunks; i++, first += CHUNK) {
    vec *states = starts + i * VECTORS * padded;
    memcpy(states, states - VECTORS * padded, sizeof(vec) * VECTORS * (size_t)padded);
    read_rows(in, first, CHUNK, padded, keys, queries, energy);
    read_tokens(in, first, CHUNK, channel, channels, energy, tokens);
    for (int64_t v = 0; v * LANES < channels; v += VT)
      for (int64_t n = 0; n < padded; n += NT)
        march(in, states + v * padded + n, params + v * padded + n, padded, CHUNK, tokens + v,
              keys + n, NULL, NULL, first + CHUNK, n || i + 1 == chunks ? 0 : CHUNK,
              channel + v * LANES, in->states - n);
  }
}

/* Sums over channels start anew in a part's first block. */
static void backward_task(const Inputs *in, const Gradients *grad, const REAL *saved,
                          int64_t segment, int64_t block, void *memory) {
  int64_t begin = in->offsets[segment], end = in->offsets[segment + 1];
  int64_t width = in->width, states = in->states, padded = round_up(states, NT);
  int64_t channel = block * BLOCK, channels = smaller(BLOCK, width - channel);
  int64_t tokens_in_all = in->offsets[in->segments];
  int64_t per_interval = in->interval / CHUNK, part = block % grad->parts;
  vec *carry = memory, *starts = carry + VECTORS * padded;
  vec *grad_params = starts + per_interval * VECTORS * padded;
  vec *grad_keys = grad_params + VECTORS * padded, *grad_queries = grad_keys + CHUNK * padded;
  Param *params = (Param *)(grad_queries + CHUNK * padded);
  REAL *keys = (REAL *)(params + VECTORS * padded), *queries = keys + CHUNK * padded;
  REAL energy[CHUNK];
  Token tokens[CHUNK * VECTORS];
  Sums sums[CHUNK * VECTORS];
  vec read[CHUNK * VECTORS], grads[CHUNK * VECTORS];
  double bias[BLOCK] = {0}, skip[BLOCK] = {0}; /* double: they sum over all tokens */
  memset(tokens, 0, sizeof tokens);
  memset(grads, 0, sizeof grads);
  memset(starts, 0, sizeof(vec) * VECTORS * (size_t)padded);
  int64_t edge = (segment * width + channel) * states;
  read_states(grad->final ? grad->final + edge : NULL, channels, states, padded, carry);
  read_params(in, channel, channels, padded, grad_params, params);
  memset(grad_params, 0, sizeof(vec) * VECTORS * (size_t)padded);
  int64_t last = (end - begin + CHUNK - 1) / CHUNK;
  for (int64_t chunk = last - 1; chunk >= 0; chunk--) {
    int64_t first = begin + chunk * CHUNK, count = smaller(CHUNK, end - first);
    int64_t place = chunk % per_interval;
    vec *start = starts + place * VECTORS * padded;
    if (chunk == last - 1 || place == per_interval - 1)
      find_starts(in, saved + slot(in, segment, chunk / per_interval) * states * width,
                  first - place * CHUNK, place + 1, channel, channels, padded, params, keys,
                  queries, energy, tokens, starts);
    read_rows(in, first, count, padded, keys, queries, energy);
    read_tokens(in, first, count, channel, channels, energy, tokens);
    for (int64_t t = 0; grad->out && t < count; t++)
      for (int64_t c = 0, v = 0; c < channels; c += LANES, v++) {
        int64_t left = channels - c, at = channel + c;
        vec g = load_some(grad->out + (first + t) * grad->stride_out + at, left);
        if (in->z) {
          vec z = load_some(in->z + (first + t) * in->stride_z + at, left);
          g *= z * sigmoid(z);
        }
        grads[t * VECTORS + v] = g;
      }
    memset(sums, 0, sizeof sums);
    memset(read, 0, sizeof read);
    memset(grad_keys, 0, sizeof(vec) * CHUNK * (size_t)padded);
    memset(grad_queries, 0, sizeof(vec) * CHUNK * (size_t)padded);
    for (int64_t v = 0; v * LANES < channels; v += VT)
      for (int64_t n = 0; n < padded; n += NT)
        march_back(in, grad, start + v * padded + n, carry + v * padded + n,
                   params + v * padded + n, grad_params + v * padded + n, padded, count,
                   tokens + v, keys + n, queries + n, grads + v, sums + v, read + v, grad_keys + n,
                   grad_queries + n, n || !chunk ? -1 : first - CHUNK, channel + v * LANES,
                   states - n);
    vec bias_sum[VECTORS] = {{0}}, skip_sum[VECTORS] = {{0}};
    for (int64_t t = 0; t < count; t++) {
      vec energy_sum = {0};
      for (int64_t c = 0, v = 0; c < channels; c += LANES, v++) {
        int64_t left = channels - c, at = channel + c, here = (first + t) * width + at;
        vec grad_u, grad_dt, grad_energy, g = grads[t * VECTORS + v];
        finish(&tokens[t * VECTORS + v], &sums[t * VECTORS + v], &grad_u, &grad_dt, &grad_energy);
        vec u = load_some(in->u + (first + t) * in->stride_u + at, left);
        vec o = read[t * VECTORS + v];
        if (in->skip) {
          vec skip_weight = load_some(in->skip + at, left);
          o += skip_weight * u;
          grad_u += skip_weight * g;
          skip_sum[v] += g * u;
        }
        if (in->z) {
          vec z = load_some(in->z + (first + t) * in->stride_z + at, left), grad_z = {0};
          if (grad->out) {
            vec open = sigmoid(z);
            grad_z = load_some(grad->out + (first + t) * grad->stride_out + at, left) * o * open *
                     (splat(1) + z * (splat(1) - open));
          }
          store_some(grad->z + here, grad_z, left);
        }
        bias_sum[v] += grad_dt;
        energy_sum += grad_energy;
        store_some(grad->u + here, grad_u, left);
        store_some(grad->dt + here, grad_dt, left);
      }
      REAL grad_energy = total(energy_sum);
      int64_t row = (part * tokens_in_all + first + t) * states;
      for (int64_t n = 0; n < states; n++) {
        REAL grad_q = total(grad_queries[t * padded + n]);
        REAL grad_k = total(grad_keys[t * padded + n]);
        if (ENERGY) grad_k += 2 * keys[t * padded + n] * grad_energy;
        grad->q[row + n] = grad_q + (block == part ? 0 : grad->q[row + n]);
        grad->k[row + n] = grad_k + (block == part ? 0 : grad->k[row + n]);
      }
    }
    for (int64_t c = 0; c < channels; c++) {
      bias[c] += bias_sum[c / LANES][c % LANES];
      skip[c] += skip_sum[c / LANES][c % LANES];
    }
  }
  for (int64_t c = 0; c < channels; c++) {
    if (grad->bias) grad->bias[segment * width + channel + c] = (REAL)bias[c];
    if (grad->skip) grad->skip[segment * width + channel + c] = (REAL)skip[c];
  }
  if (grad->param) write_states(grad->param + edge, channels, states, padded, grad_params);
  if (grad->initial) write_states(grad->initial + edge, channels, states, padded, carry);
}

/* to[i] = sum of parts[j, i], in the order of j. */
INLINE void add_up(const REAL *parts, int64_t count, int64_t size, REAL *to, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t i = 0; i < size; i++) {
    double sum = 0;
    for (int64_t j = 0; j < count; j++) sum += parts[j * size + i];
    to[i] = (REAL)sum;
  }
}

/* Returns 0, or 1 if memory ran out. */
int scan_backward(const Inputs *in, const Gradients *grad, const REAL *saved, REAL *grad_q,
                  REAL *grad_k, REAL *grad_bias, REAL *grad_skip, REAL *grad_param, int threads) {
  int64_t blocks = (in->width + BLOCK - 1) / BLOCK, padded = round_up(in->states, NT);
  int64_t parts = grad->parts, vectors = (2 + in->interval / CHUNK) * VECTORS + 2 * CHUNK;
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    void *memory = scratch(padded * (vectors * sizeof(vec) + VECTORS * sizeof(Param) +
                                     2 * CHUNK * sizeof(REAL)));
    if (!memory) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < in->segments * parts; i++)
      for (int64_t block = i % parts; memory && block < blocks; block += parts)
        backward_task(in, grad, saved, i / parts, block, memory);
    free(memory);
  }
  if (failed) return 1;
  int64_t size = in->offsets[in->segments] * in->states;
  add_up(grad->q, parts, size, grad_q, threads);
  add_up(grad->k, parts, size, grad_k, threads);
  if (grad_bias) add_up(grad->bias, in->segments, in->width, grad_bias, threads);
  if (grad_skip) add_up(grad->skip, in->segments, in->width, grad_skip, threads);
  size = in->width * in->states;
  if (grad_param) add_up(grad->param, in->segments, size, grad_param, threads);
  return 0;
}
