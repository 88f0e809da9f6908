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
  }
  return "unknown";
}

}  // namespace uniep
