# SPDX-License-Identifier: Apache-2.0
cmake_minimum_required(VERSION 3.25)
# Writes the commit of SOURCE as a header to OUTPUT, touching it only where it changed.
set(commit "unknown")
find_program(GIT git)
if(GIT)
  execute_process(COMMAND ${GIT} -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=*
    OUTPUT_VARIABLE text OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE status)
  if(status EQUAL 0)
    set(commit "${text}")
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#define UNIEP_COMMIT \"@commit@\"\n" @ONLY)
