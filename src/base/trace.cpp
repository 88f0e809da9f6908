// SPDX-License-Identifier: Apache-2.0
#include "uniep/trace.hpp"

namespace uniep {

const char* to_string(Role role) {
  switch (role) {
    case Role::send:
      return "send";
    case Role::pull:
      return "pull";
    case Role::fanout:
      return "fanout";
    case Role::gemm1:
      return "gemm1";
    case Role::activation:
      return "activation";
    case Role::gemm2:
      return "gemm2";
    case Role::dgrad2:
      return "dgrad2";
    case Role::d_activation:
      return "d_activation";
    case Role::dgrad1:
      return "dgrad1";
    case Role::wgrad2:
      return "wgrad2";
    case Role::wgrad1:
      return "wgrad1";
    case Role::reduce:
      return "reduce";
    case Role::none:
      return "none";
  }
  return "unknown";
}

const char* to_string(Signal signal) {
  switch (signal) {
    case Signal::none:
      return "none";
    case Signal::consumed:
      return "consumed";
    case Signal::published:
      return "published";
    case Signal::send_ready:
      return "send_ready";
    case Signal::row_ready:
      return "row_ready";
    case Signal::tile_ready:
      return "tile_ready";
    case Signal::gemm1_done:
      return "gemm1_done";
    case Signal::activated:
      return "activated";
    case Signal::dgrad2_done:
      return "dgrad2_done";
    case Signal::d_activated:
      return "d_activated";
    case Signal::return_ready:
      return "return_ready";
    case Signal::phase_done:
      return "phase_done";
  }
  return "unknown";
}

const char* to_string(TraceKind kind) {
  switch (kind) {
    case TraceKind::task:
      return "task";
    case TraceKind::wait:
      return "wait";
    case TraceKind::plan:
      return "plan";
    case TraceKind::operation:
      return "operation";
  }
  return "unknown";
}

const char* to_string(Pass pass) {
  switch (pass) {
    case Pass::forward:
      return "forward";
    case Pass::backward:
      return "backward";
  }
  return "unknown";
}

}  // namespace uniep
