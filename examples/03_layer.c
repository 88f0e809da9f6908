/* SPDX-License-Identifier: Apache-2.0 */
/* The expert layer from C: one rank, one forward and backward. With more ranks each would make its
 * layer in a thread of its own. Prints a few values and how a mistake is answered. */
#include <stdio.h>
#include <stdlib.h>
#include <uniep/uniep.h>

enum { TOKENS = 8, HIDDEN = 16, FFN = 12, EXPERTS = 4, TOPK = 2 };

static float x[TOKENS * HIDDEN], d_out[TOKENS * HIDDEN], out[TOKENS * HIDDEN], d_x[TOKENS * HIDDEN];
static float w1[EXPERTS * 2 * FFN * HIDDEN], w2[EXPERTS * HIDDEN * FFN];
static float d_w1[EXPERTS * 2 * FFN * HIDDEN], d_w2[EXPERTS * HIDDEN * FFN];
static float topk_weights[TOKENS * TOPK], d_topk_weights[TOKENS * TOPK];
static int32_t topk_ids[TOKENS * TOPK];

static void fill(float* to, int count, unsigned seed) {
  for (int i = 0; i < count; ++i) {
    seed = seed * 1664525u + 1013904223u;
    to[i] = (float)(seed >> 8) / 16777216.0f - 0.5f;
  }
}

static int check(uniep_status status, const char* what) {
  if (status == UNIEP_OK) return 1;
  fprintf(stderr, "%s: %s\n", what, uniep_last_error());
  return 0;
}

int main(void) {
  fill(x, TOKENS * HIDDEN, 1);
  fill(d_out, TOKENS * HIDDEN, 2);
  fill(w1, EXPERTS * 2 * FFN * HIDDEN, 3);
  fill(w2, EXPERTS * HIDDEN * FFN, 4);
  for (int i = 0; i < TOKENS * TOPK; ++i) {
    topk_ids[i] = (i * 3) % EXPERTS;
    topk_weights[i] = 0.5f;
  }

  uniep_group_options options;
  uniep_group_options_init(&options);
  options.num_experts = EXPERTS;
  options.topk = TOPK;
  options.hidden = HIDDEN;
  options.ffn = FFN;
  options.max_tokens_per_rank = TOKENS;
  options.dtype = UNIEP_F32;
  options.schedule = "workers=2,tile_m=32";

  uniep_group* group = NULL;
  uniep_layer* layer = NULL;
  uniep_saved* saved = NULL;
  int good = check(uniep_group_create(&options, &group), "uniep_group_create") &&
             check(uniep_layer_create(group, 0, &layer), "uniep_layer_create");
  if (good) {
    uniep_forward_args forward;
    uniep_forward_args_init(&forward);
    forward.num_tokens = TOKENS;
    forward.x = x;
    forward.topk_ids = topk_ids;
    forward.topk_weights = topk_weights;
    forward.w1 = w1;
    forward.w2 = w2;
    forward.out = out;
    good = check(uniep_layer_forward(layer, &forward, &saved), "uniep_layer_forward");

    uniep_backward_args backward;
    uniep_backward_args_init(&backward);
    backward.d_out = d_out;
    backward.w1 = w1;
    backward.w2 = w2;
    backward.d_x = d_x;
    backward.d_topk_weights = d_topk_weights;
    backward.d_w1 = d_w1;
    backward.d_w2 = d_w2;
    backward.accumulate = 1;
    good = good && check(uniep_layer_backward(layer, saved, &backward), "uniep_layer_backward");

    /* An expert that is not there: refused with a sentence, and usable again after recover. */
    topk_ids[3] = EXPERTS;
    const uniep_status refused = uniep_layer_forward(layer, &forward, NULL);
    printf("a bad id: status %d, %s\n", (int)refused, uniep_last_error());
    good = good && refused == UNIEP_INVALID_ARGUMENT;
    topk_ids[3] = 1;
    good = good && check(uniep_layer_recover(layer), "uniep_layer_recover") &&
           check(uniep_layer_forward(layer, &forward, NULL), "uniep_layer_forward");
  }
  if (good) {
    printf("uniep %s from C: out[0] = %g, d_x[0] = %g, d_w1[0] = %g\n", uniep_version(), out[0],
           d_x[0], d_w1[0]);
  }
  uniep_saved_destroy(saved);
  uniep_layer_destroy(layer);
  uniep_group_destroy(group);
  return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
