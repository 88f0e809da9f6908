/* SPDX-License-Identifier: Apache-2.0 */
/* Marks what libuniep.so exports; everything else in it is hidden. */
#ifndef UNIEP_EXPORT_H
#define UNIEP_EXPORT_H

#define UNIEP_API __attribute__((visibility("default")))

#endif
