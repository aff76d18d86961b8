/* Appended to feedback_scan.c: nothing but its gates, eight vectors of them at a time in registers. */
void gates_alone(int64_t count, REAL *out, int threads) {
  int64_t rounds = count / (TILE * LANES);
#pragma omp parallel num_threads(threads)
  {
    vec x[TILE];
    UNROLL for (int k = 0; k < TILE; k++) x[k] = splat((REAL)k);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rounds; i++)
      UNROLL for (int k = 0; k < TILE; k++) x[k] = gate(x[k]);
#pragma omp critical
    UNROLL for (int k = 0; k < TILE; k++) out[k] = x[k][0];
  }
}
