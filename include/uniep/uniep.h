/* SPDX-License-Identifier: Apache-2.0 */
/* The C interface: the expert layer on a CPU, for bindings. It mirrors uniep/layer.hpp, where the
 * meaning of every field is written out.
 *
 * Functions that can fail return a uniep_status; the sentence is then in uniep_last_error() of the
 * same thread. Structs begin with their size as the caller knows it, set by their *_init function,
 * so that a program built with older headers goes on working: fields it does not know have their
 * defaults. Handles are opaque and destroyed by the function of their name; NULL is allowed there.
 *
 * A rank is a thread, or a process of a job: it makes its layer on the shared group, and all ranks
 * call the same operations in the same order. T is this rank's number of tokens, E_l that of its experts. */
#ifndef UNIEP_UNIEP_H
#define UNIEP_UNIEP_H

#include <stddef.h>
#include <stdint.h>

#include "uniep/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The program's exit codes. */
typedef enum uniep_status {
  UNIEP_OK = 0,
  UNIEP_INVALID_ARGUMENT = 2, /* the caller's mistake; the sentence says what would be valid */
  UNIEP_WORLD = 3             /* memory, a peer, or a wait that expired */
} uniep_status;

typedef enum uniep_dtype { UNIEP_BF16 = 0, UNIEP_F32 = 1 } uniep_dtype;

typedef struct uniep_group uniep_group;
typedef struct uniep_layer uniep_layer;
typedef struct uniep_saved uniep_saved;

typedef struct uniep_group_options {
  size_t size; /* sizeof(uniep_group_options), set by uniep_group_options_init */
  int32_t num_ranks;
  int32_t num_experts; /* E, over all ranks */
  int32_t topk;        /* k */
  int32_t dtype;       /* a uniep_dtype: of x, w1, w2, out, d_out and d_x */
  int64_t hidden;      /* H */
  int64_t ffn;         /* F */
  int64_t max_tokens_per_rank;
  const char* schedule;          /* "key=value,…", NULL = the default */
  const int32_t* rank_of_expert; /* [E], NULL = contiguous */
  int64_t wait_bound_ms;         /* of every wait, without progress of any rank */
  /* NULL: ranks are threads of this process. Otherwise this process is rank job_rank of num_ranks
   * processes on this machine that make the group together, all with this name. */
  const char* job_name;
  int32_t job_rank;
} uniep_group_options;

typedef struct uniep_forward_args {
  size_t size;
  int64_t num_tokens;        /* T */
  const void* x;             /* [T, H] */
  const int32_t* topk_ids;   /* [T, k], -1 = masked */
  const float* topk_weights; /* [T, k] */
  const void* w1;            /* [E_l, 2F, H], gate rows first */
  const void* w2;            /* [E_l, H, F] */
  void* out;                 /* [T, H], written */
} uniep_forward_args;

typedef struct uniep_backward_args {
  size_t size;
  const void* d_out;     /* [T, H], T as in the forward */
  const void* w1;        /* as in the forward */
  const void* w2;        /* as in the forward */
  void* d_x;             /* [T, H], written */
  float* d_topk_weights; /* [T, k], written; 0 where masked */
  float* d_w1;           /* [E_l, 2F, H] */
  float* d_w2;           /* [E_l, H, F] */
  int32_t accumulate;    /* 1: add the finished gradients to d_w1 and d_w2 (main_grad); 0: write */
} uniep_backward_args;

UNIEP_API void uniep_group_options_init(uniep_group_options* options);
UNIEP_API void uniep_forward_args_init(uniep_forward_args* args);
UNIEP_API void uniep_backward_args_init(uniep_backward_args* args);

/* What torchrun or mpirun says in the environment, see uniep/job.hpp: this process's rank, the number
 * of ranks, 0 without a launcher, and the job's name, which is cut to name_bytes with its end. */
UNIEP_API uniep_status uniep_job_from_environment(int32_t* rank, int32_t* num_ranks, char* name,
                                                  size_t name_bytes);

/* The group must outlive its layers. Collective in a job. */
UNIEP_API uniep_status uniep_group_create(const uniep_group_options* options, uniep_group** group);
UNIEP_API void uniep_group_destroy(uniep_group* group);
/* E_l of a rank, and its experts' global ids, ascending, into ids [E_l] unless that is NULL. */
UNIEP_API uniep_status uniep_group_local_experts(const uniep_group* group, int32_t rank,
                                                 int32_t* num_local_experts, int32_t* ids);

UNIEP_API uniep_status uniep_layer_create(uniep_group* group, int32_t rank, uniep_layer** layer);
UNIEP_API void uniep_layer_destroy(uniep_layer* layer);

/* Collective. What backward needs comes back in *saved, unless saved is NULL. */
UNIEP_API uniep_status uniep_layer_forward(uniep_layer* layer, const uniep_forward_args* args,
                                           uniep_saved** saved);
UNIEP_API uniep_status uniep_layer_backward(uniep_layer* layer, const uniep_saved* saved,
                                            const uniep_backward_args* args);
UNIEP_API void uniep_saved_destroy(uniep_saved* saved);
/* Collective, after an error on any rank. */
UNIEP_API uniep_status uniep_layer_recover(uniep_layer* layer);

/* Why the last function that failed in this thread did; "" if none has. Valid until the next one
 * fails in this thread. */
UNIEP_API const char* uniep_last_error(void);
/* "major.minor.patch" of the library. */
UNIEP_API const char* uniep_version(void);

#ifdef __cplusplus
}
#endif
#endif
