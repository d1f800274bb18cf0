# Kernel functions are declared by the tables that name them, hence no missing prototypes.
# The library's objects: plain C, the references twice (float and double storage), and the vector
# kernels once per target.
include(cmake/Targets.cmake)
file(GLOB_RECURSE library_sources CONFIGURE_DEPENDS src/*.c)
list(FILTER library_sources EXCLUDE REGEX "/src/(cli|kernels/(ref|cpu|cuda))/")
file(GLOB_RECURSE cli_sources CONFIGURE_DEPENDS src/cli/*.c)
file(GLOB ref_sources CONFIGURE_DEPENDS src/kernels/ref/*.c)
file(GLOB_RECURSE cpu_sources CONFIGURE_DEPENDS src/kernels/cpu/*.c)

# OpenBLAS is a ceiling of `mneme bench`, not part of the library.
set(mneme_dependencies PkgConfig::JANSSON PkgConfig::PCRE2 Threads::Threads ${CMAKE_DL_LIBS} m)

function(mneme_object_library name)
    add_library(${name} OBJECT ${ARGN})
    target_include_directories(${name} PRIVATE include src)
    target_link_libraries(${name} PRIVATE ${mneme_dependencies})
endfunction()

# A device is reached through CUDA or, without it, refused with a sentence.
if(mneme_cuda_built)
    list(FILTER library_sources EXCLUDE REGEX "/(device_none|device_none_pages|cuda_none)\\.c$")
    list(APPEND library_sources ${CMAKE_SOURCE_DIR}/src/kernels/cuda/overlay.c
        ${CMAKE_SOURCE_DIR}/src/kernels/cuda/gemm/gemm_cublaslt.c)
    list(APPEND mneme_dependencies ${mneme_cuda_runtime} ${CMAKE_DL_LIBS})
else()
    list(FILTER library_sources EXCLUDE REGEX "/device_cuda\\.c$")
endif()

# So is HTTP through libmicrohttpd. The page is a part of the library: bytes of a file as C.
option(MN_HTTP "mneme serve, where libmicrohttpd is" ON)
if(MN_HTTP)
    pkg_check_modules(MICROHTTPD IMPORTED_TARGET libmicrohttpd)
endif()
if(MN_HTTP AND MICROHTTPD_FOUND)
    list(FILTER library_sources EXCLUDE REGEX "/http_none\\.c$")
    list(APPEND mneme_dependencies PkgConfig::MICROHTTPD)
else()
    message(STATUS "libmicrohttpd is not here: mneme serve will say so")
    list(FILTER library_sources EXCLUDE REGEX "/http\\.c$")
endif()
set(page ${CMAKE_BINARY_DIR}/generated/page.c)
add_custom_command(OUTPUT ${page}
    COMMAND ${CMAKE_COMMAND} -DIN=${CMAKE_SOURCE_DIR}/src/server/page.html -DOUT=${page}
        -DNAME=mn_page_html -P ${CMAKE_SOURCE_DIR}/cmake/Embed.cmake
    DEPENDS ${CMAKE_SOURCE_DIR}/src/server/page.html ${CMAKE_SOURCE_DIR}/cmake/Embed.cmake)
list(APPEND library_sources ${page})
# the file that goes along with models that no other software has a class for
set(modeling ${CMAKE_BINARY_DIR}/generated/modeling.c)
add_custom_command(OUTPUT ${modeling}
    COMMAND ${CMAKE_COMMAND} -DIN=${CMAKE_SOURCE_DIR}/src/model/folder/modeling_mneme.py
        -DOUT=${modeling} -DNAME=mn_modeling_py -P ${CMAKE_SOURCE_DIR}/cmake/Embed.cmake
    DEPENDS ${CMAKE_SOURCE_DIR}/src/model/folder/modeling_mneme.py
        ${CMAKE_SOURCE_DIR}/cmake/Embed.cmake)
list(APPEND library_sources ${modeling})

mneme_object_library(mneme_objects ${library_sources})
# Arithmetic is -O3, and so are kernels; references and the rest of the library -O2, or -O1.
set(arithmetic "/src/(kernels|optim|ops/(elementwise|compose|matmul|linear|grouped|quantize)|tape/(sum|row|move|gates|pair))")
set(slight "/src/(template|server|experiments|cli|model/(folder|families|gguf))/")
set(planning ${library_sources})
list(FILTER planning EXCLUDE REGEX "${arithmetic}")
set(slight_sources ${planning})
list(FILTER slight_sources INCLUDE REGEX "${slight}")
list(FILTER planning EXCLUDE REGEX "${slight}")
set_source_files_properties(${planning} PROPERTIES COMPILE_OPTIONS "${MN_PLAIN_OPTIONS}")
set_source_files_properties(${slight_sources} PROPERTIES COMPILE_OPTIONS "${MN_SLIGHT_OPTIONS}")
# Definitions go to the files that ask for them, so that a build with other targets compiles no others.
set_source_files_properties(src/kernels/dispatch.c src/ops/matmul.c src/ops/elementwise/loss.c
    src/ops/elementwise/fused.c src/ops/elementwise/unary.c src/optim/optimizer.c src/cli/bench/ceiling.c
    PROPERTIES COMPILE_DEFINITIONS "${mneme_target_definitions}")
set_property(SOURCE src/kernels/dispatch.c APPEND PROPERTY
    COMPILE_DEFINITIONS MN_HAVE_CUDA=$<BOOL:${mneme_cuda_built}>)
set_source_files_properties(src/kernels/cuda/gemm/gemm_cublaslt.c PROPERTIES
    COMPILE_DEFINITIONS MN_HAVE_CUBLASLT_H=$<BOOL:${mneme_cublaslt_header}>)
add_custom_target(mneme_commit
    COMMAND ${CMAKE_COMMAND} -DSOURCE=${CMAKE_SOURCE_DIR}
        -DOUT=${CMAKE_BINARY_DIR}/generated/mneme_commit.h
        -P ${CMAKE_SOURCE_DIR}/cmake/Commit.cmake
    BYPRODUCTS ${CMAKE_BINARY_DIR}/generated/mneme_commit.h)
add_dependencies(mneme_objects mneme_commit)
target_include_directories(mneme_objects PRIVATE ${CMAKE_BINARY_DIR}/generated)
set(mneme_kernel_objects)
if(mneme_cuda_built)
    mneme_cuda_objects(cuda_objects)
    list(APPEND mneme_kernel_objects ${cuda_objects})
endif()
foreach(bits 32 64)
    mneme_object_library(mneme_ref${bits} ${ref_sources})
    target_compile_definitions(mneme_ref${bits} PRIVATE MN_REF_BITS=${bits})
    target_compile_options(mneme_ref${bits} PRIVATE ${MN_PLAIN_OPTIONS} -Wno-missing-prototypes)
    list(APPEND mneme_kernel_objects $<TARGET_OBJECTS:mneme_ref${bits}>)
endforeach()
# Tests wait for this reference more than for all others.
set_source_files_properties(src/kernels/ref/bayes.c PROPERTIES COMPILE_OPTIONS "$<$<AND:$<CONFIG:Release>,$<NOT:$<BOOL:${MN_QUICK}>>>:-O3>")

# Reading the compiler's header of vectors takes longer than compiling most kernels. A compiler cache would have to be told to
# trust precompiled headers, and has no need of them.
set(precompile ON)
if(CMAKE_C_COMPILER_LAUNCHER MATCHES "cache")
    set(precompile OFF)
endif()
option(MN_PRECOMPILE "read the headers of vector kernels once" ${precompile})
foreach(target ${mneme_vector_targets})
    mneme_object_library(mneme_${target} ${cpu_sources})
    target_compile_options(mneme_${target} PRIVATE ${${target}_flags} -Wno-missing-prototypes)
    target_compile_definitions(mneme_${target} PRIVATE MN_TARGET=${target})
    if(MN_QUICK)
        target_compile_options(mneme_${target} PRIVATE ${MN_KERNEL_OPTIONS})
    endif()
    if(MN_PRECOMPILE AND target STREQUAL "neon")
        target_precompile_headers(mneme_${target} PRIVATE <arm_neon.h>)
    elseif(MN_PRECOMPILE)
        target_precompile_headers(mneme_${target} PRIVATE <immintrin.h>)
    endif()
    list(APPEND mneme_kernel_objects $<TARGET_OBJECTS:mneme_${target}>)
endforeach()
