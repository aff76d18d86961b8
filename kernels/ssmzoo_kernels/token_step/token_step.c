/* One token of a layer: a list of instructions, each shared among the threads.
 *
 * Values are [rows, width] of REAL in one scratch memory; states, and what goes in and out, lie
 * where the caller says. README.md has the equation of each instruction.
 */
#include "attention.h"
#include "recurrences.h"
#ifdef _OPENMP /* clang without libomp's package has no omp.h */
int omp_get_thread_num(void), omp_get_num_threads(void);
#endif

/* in the order of `Code` in writer.py */
static void (*const kinds[])(const Call *, const Instruction *) = {
    input,     output, linear, norm,     conv,      gate,     add,      map,       blend,
    dots,      delay,  count,  selective, ssd,      delta,    attention, longhorn, feedback,
    diagonal,  products, poles, angles,  turn,      companion, rotate,  keep,      attend,
    innovate};

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
