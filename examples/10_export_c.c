/* Trains the demo's model: forward, backward and one step of Adam, ten times, with nothing of Python.  10_export_c.py builds it.
 *
 *     train data steps batch vocabulary
 *
 * Reads data/NAME.bin and writes data/NAME.after.bin for each parameter. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "adam.h"
#include "frozen_codes.h"

#define PARAMETERS(X) X(scale) X(w1) X(b1) X(gamma) X(beta) X(w2) X(b2)
enum {
#define COUNT(name) at_##name,
  PARAMETERS(COUNT) parameters
};

static const char *folder;

static FILE *opened(const char *name, const char *mode) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s.bin", folder, name);
  FILE *const file = fopen(path, mode);
  if (!file) {
    perror(path);
    exit(2);
  }
  return file;
}

/* An array of so many bytes, filled from a file if it has a name. */
static void *array(const char *name, int64_t bytes) {
  void *const data = calloc((size_t)bytes + 64, 1);
  if (name) {
    FILE *const file = opened(name, "rb");
    if (!data || fread(data, 1, (size_t)bytes, file) != (size_t)bytes) {
      fprintf(stderr, "%s does not hold %lld bytes\n", name, (long long)bytes);
      exit(2);
    }
    fclose(file);
  }
  return data;
}

static void check(int code, const char *text) {
  if (code) {
    fprintf(stderr, "error %d: %s\n", code, text);
    exit(2);
  }
}

int main(int argc, char **argv) {
  if (argc != 5) return 2;
  folder = argv[1];
  const int64_t steps = atoll(argv[2]), batch = atoll(argv[3]), vocabulary = atoll(argv[4]);
  enum { context = 6, width = 64 };
  const frozen_codes_sizes sizes = { .B = batch };
  frozen_codes_module *model;
  adam_module *adam;
  check(frozen_codes_create(&model, &sizes), frozen_codes_error(NULL));
  check(adam_create(&adam), adam_error(NULL));

  const int64_t *const tokens = array("tokens", steps * batch * context * 8), *const targets = array("targets", steps * batch * 8);
  /* for each step: the rate of each parameter, and Adam's two corrections */
  const float *const schedule = array("schedule", steps * (parameters + 2) * 4);
  float loss = 0;
  const float one = 1;
  frozen_codes_inputs in = { .codes = array("codes", vocabulary * width) };
  frozen_codes_outputs out = { .loss = &loss };
  const frozen_codes_cotangents cotangents = { .loss = &one };
  frozen_codes_gradients gradients;
  adam_inputs before;
  adam_outputs after; /* parameters and means are donated: a step writes them where they lie */
  int64_t bytes[parameters];
#define PREPARE(name)                                                                  \
  bytes[at_##name] = frozen_codes_bytes(model, frozen_codes_input_##name);             \
  in.name = before.parameters_##name = after.parameters_##name = array(#name, bytes[at_##name]); \
  before.mean_##name = after.mean_##name = array(NULL, bytes[at_##name]);              \
  before.square_##name = after.square_##name = array(NULL, bytes[at_##name]);          \
  before.gradients_##name = gradients.name = array(NULL, bytes[at_##name]);
  PARAMETERS(PREPARE)

  for (int64_t step = 0; step < steps; step++) {
    in.tokens = tokens + step * batch * context;
    in.targets = targets + step * batch;
    check(frozen_codes_forward(model, &in, &out), frozen_codes_error(model));
    check(frozen_codes_backward(model, &cotangents, &gradients), frozen_codes_error(model));
    const float *const now = schedule + step * (parameters + 2);
#define RATE(name) before.rate_##name = now + at_##name;
    PARAMETERS(RATE)
    before.unbias_mean = now + parameters;
    before.unbias_square = now + parameters + 1;
    check(adam_forward(adam, &before, &after), adam_error(adam));
    printf("step %lld: loss %.6f\n", (long long)step + 1, loss);
  }

  FILE *file;
#define WRITE(name)                                            \
  file = opened(#name ".after", "wb");                         \
  fwrite(after.parameters_##name, 1, (size_t)bytes[at_##name], file); \
  fclose(file);
  PARAMETERS(WRITE)
  frozen_codes_destroy(model);
  adam_destroy(adam);
  return 0;
}
