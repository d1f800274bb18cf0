# Writes OUT, a header with the commit of the checkout at SOURCE, when that changed. Outside of one:
# "unknown". Run at each build, so that results name the code that made them.
set(commit "unknown")
find_program(git git)
if(git AND EXISTS "${SOURCE}/.git")
    execute_process(COMMAND ${git} -C "${SOURCE}" rev-parse --short=12 HEAD
        OUTPUT_VARIABLE head OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
    execute_process(COMMAND ${git} -C "${SOURCE}" diff-index --quiet HEAD --
        RESULT_VARIABLE changed ERROR_QUIET OUTPUT_QUIET)
    if(NOT failed)
        set(commit "${head}")
        if(changed)
            string(APPEND commit "-changed")
        endif()
    endif()
endif()
set(text "#define MN_COMMIT \"${commit}\"\n")
set(before "")
if(EXISTS "${OUT}")
    file(READ "${OUT}" before)
endif()
if(NOT before STREQUAL text)
    file(WRITE "${OUT}" "${text}")
endif()
