// SPDX-License-Identifier: Apache-2.0
// Marks what libuniep.so exports; everything else in it is hidden.
#pragma once

#define UNIEP_API __attribute__((visibility("default")))
