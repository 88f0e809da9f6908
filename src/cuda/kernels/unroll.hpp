// SPDX-License-Identifier: Apache-2.0
// Loops that must be unrolled because they index registers.
#pragma once

#define UNIEP_UNROLL _Pragma("unroll")
#define UNIEP_NO_UNROLL _Pragma("unroll 1")
