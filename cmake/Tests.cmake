# One program per file in tests/{unit,kernels,mixers}; tests/support is linked into each.
pkg_check_modules(CMOCKA REQUIRED IMPORTED_TARGET cmocka)
file(GLOB support_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/support/*.c)
file(GLOB test_sources CONFIGURE_DEPENDS tests/unit/test_*.c tests/kernels/test_*.c
    tests/mixers/test_*.c tests/model/test_*.c tests/ranks/test_*.c)

# A test says of itself what it is run under besides the plain build, near its top: "// labels: sanitize
# threads" (or "# labels:" in a script). `make sanitize` and `make tsan` go by these labels: the walks
# over all operators are too long under a sanitizer, the golden vectors visit every kernel.
# Programs under a label are built by the target tests_LABEL, so that a sanitizer compiles no others.
foreach(label sanitize threads)
    add_custom_target(tests_${label})
    add_dependencies(tests_${label} mneme_cli)
endforeach()
function(mneme_label name source)
    file(STRINGS ${source} labels LIMIT_COUNT 1 REGEX "^(//|#) labels: ")
    string(REGEX REPLACE "^(//|#) labels: " "" labels "${labels}")
    string(REPLACE " " ";" labels "${labels}")
    set_tests_properties(${name} PROPERTIES LABELS "${labels}")
    foreach(label sanitize threads)
        if(label IN_LIST labels AND TARGET ${name})
            add_dependencies(tests_${label} ${name})
        elseif(label IN_LIST labels)
            add_dependencies(tests_${label} make_model)
        endif()
    endforeach()
endfunction()

add_library(mneme_test_support STATIC ${support_sources})
target_include_directories(mneme_test_support PUBLIC src include tests)
target_link_libraries(mneme_test_support PUBLIC mneme_static PkgConfig::CMOCKA
    ${mneme_dependencies})

# Tests ask for more memory than there is; under a sanitizer too that is to be NULL, not the end.
set(sanitizer_options "ASAN_OPTIONS=allocator_may_return_null=1;TSAN_OPTIONS=allocator_may_return_null=1")
set_source_files_properties(tests/kernels/test_moebius.c tests/kernels/test_vec.c
    PROPERTIES COMPILE_DEFINITIONS "${mneme_target_definitions}")
if(MN_QUICK)    # has vector code of its own
    set_source_files_properties(tests/kernels/test_vec.c PROPERTIES COMPILE_OPTIONS "${MN_KERNEL_OPTIONS}")
endif()
# A device without arithmetic stands in for kernels in test_decode_plan: where they are built its names are taken.
if(mneme_cuda_built)
    list(FILTER test_sources EXCLUDE REGEX "/test_decode_plan\\.c$")
endif()
foreach(source ${test_sources})
    get_filename_component(name ${source} NAME_WE)
    add_executable(${name} ${source})
    target_link_libraries(${name} PRIVATE mneme_test_support)
    target_compile_definitions(${name} PRIVATE MN_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT 2400 ENVIRONMENT "${sanitizer_options}")
    mneme_label(${name} ${source})
endforeach()

# A device without arithmetic takes the place of kernels, and of the tape's calls of src/decode, which it passes on.
if(NOT mneme_cuda_built)
    file(GLOB shadow_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/support/decode/*.c)
    target_sources(test_decode_plan PRIVATE ${shadow_sources})
    foreach(call defer_elementwise defer_gemm defer_op defer_attention defer_hyper op_run elementwise_cuda cast_bf16_cuda gemm_create gemm_destroy gemm_run
            gemm_rows_supported decode_gemms_supported decode_run_chains decode_run_gemms decode_run_attention decode_run_hyper megakernel_blocks megakernel_takes_step
            megakernel_fill_job megakernel_start)
        target_link_options(test_decode_plan PRIVATE -Wl,--wrap=mn_${call})
    endforeach()
endif()

# What stands in for NCCL where there is none.
add_library(fake_nccl MODULE tests/support/programs/fake_nccl.c)
add_dependencies(test_gpus fake_nccl)
target_compile_definitions(test_gpus PRIVATE MN_FAKE_NCCL="$<TARGET_FILE:fake_nccl>")

# What stands in for the kernel's netem where there is none.
add_executable(network_link tests/support/programs/network_link.c)
target_compile_definitions(network_link PRIVATE _GNU_SOURCE)

set(golden ${CMAKE_SOURCE_DIR}/tests/golden)
add_test(NAME golden COMMAND sh -c "$<TARGET_FILE:mneme_cli> check ${golden}/*.safetensors ${golden}/programs/*.safetensors")
set_tests_properties(golden PROPERTIES LABELS "sanitize;threads")
add_test(NAME bench_quick COMMAND mneme_cli bench ops --quick --runs 1)
add_test(NAME layers COMMAND sh ${CMAKE_SOURCE_DIR}/tests/layers.sh ${CMAKE_SOURCE_DIR})
# Checks of the house; those that ask git what belongs to the project are skipped outside of a checkout.
foreach(check house cuda_headers docs)
    add_test(NAME ${check} COMMAND sh ${CMAKE_SOURCE_DIR}/tests/${check}.sh ${CMAKE_SOURCE_DIR} $<TARGET_FILE:mneme_cli>)
    set_tests_properties(${check} PROPERTIES SKIP_RETURN_CODE 77)
endforeach()
# The interpreter of PTX by itself, twice: asynchronous copies at once, and as late as they may come.
if(mneme_interpreter)
    add_executable(test_ptx tests/ptx/test_interpreter.cpp)
    target_link_libraries(test_ptx PRIVATE ptx_interpreter)
    target_include_directories(test_ptx PRIVATE ${CMAKE_SOURCE_DIR}/tests/ptx)
    set_target_properties(test_ptx PROPERTIES CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF)
    add_test(NAME ptx_interpreter COMMAND test_ptx)
    add_test(NAME ptx_interpreter_late COMMAND test_ptx)
    set_tests_properties(ptx_interpreter_late PROPERTIES ENVIRONMENT "PTX_LATE=1;PTX_SEED=1")
    foreach(name ptx_interpreter ptx_interpreter_late)
        set_tests_properties(${name} PROPERTIES LABELS sanitize)
    endforeach()
    add_dependencies(tests_sanitize test_ptx)
endif()
# What tests/interpreted.sh runs.
if(MN_CUDA_INTERPRETED)
    add_custom_target(tests_interpreted)
    add_dependencies(tests_interpreted mneme_cli test_cuda test_cuda_bits test_cuda_causal)
endif()
# The vector kernels of another kind of processor, under qemu where it and a compiler are.
add_test(NAME neon COMMAND sh ${CMAKE_SOURCE_DIR}/tests/neon.sh ${CMAKE_SOURCE_DIR} ${CMAKE_BINARY_DIR})
set_tests_properties(neon PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 2400)
add_test(NAME add_mixer COMMAND sh ${CMAKE_SOURCE_DIR}/tests/add_mixer.sh ${CMAKE_SOURCE_DIR} ${CMAKE_BINARY_DIR})
set_tests_properties(add_mixer PROPERTIES TIMEOUT 2400)
# Writes small model folders for the scripts, which get it as their third argument.
add_executable(make_model tests/support/programs/make_model.c)
target_link_libraries(make_model PRIVATE mneme_test_support)
add_executable(render_template tests/support/programs/render_template.c)
target_link_libraries(render_template PRIVATE mneme_test_support)
file(GLOB cli_tests CONFIGURE_DEPENDS tests/cli/*.sh)
foreach(script ${cli_tests})
    get_filename_component(name ${script} NAME_WE)
    add_test(NAME cli_${name} COMMAND sh ${script} $<TARGET_FILE:mneme_cli> ${CMAKE_SOURCE_DIR}
        $<TARGET_FILE:make_model>)
    set_tests_properties(cli_${name} PROPERTIES SKIP_RETURN_CODE 77)
    mneme_label(cli_${name} ${script})
endforeach()
add_test(NAME template_reference COMMAND sh ${CMAKE_SOURCE_DIR}/tests/template_reference.sh $<TARGET_FILE:render_template>)
set_tests_properties(template_reference PROPERTIES SKIP_RETURN_CODE 77)
# Ranks started by mneme itself and by launchers; network namespaces where the user may make them.
file(GLOB rank_tests CONFIGURE_DEPENDS tests/ranks/*.sh)
foreach(script ${rank_tests})
    get_filename_component(name ${script} NAME_WE)
    add_test(NAME ranks_${name} COMMAND sh ${script} $<TARGET_FILE:mneme_cli> ${CMAKE_SOURCE_DIR}
        $<TARGET_FILE:network_link>)
    set_tests_properties(ranks_${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 2400)
    mneme_label(ranks_${name} ${script})
endforeach()
# The Python package over the library just built; skipped where there is no numpy or pytest.
add_test(NAME python COMMAND sh ${CMAKE_SOURCE_DIR}/python/tests/run.sh ${CMAKE_SOURCE_DIR}
    $<TARGET_FILE:mneme> $<TARGET_FILE:mneme_cli>)
set_tests_properties(python PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 1200)
add_test(NAME install COMMAND sh ${CMAKE_SOURCE_DIR}/tests/install/install.sh
    ${CMAKE_SOURCE_DIR} ${CMAKE_BINARY_DIR})
add_test(NAME package COMMAND sh ${CMAKE_SOURCE_DIR}/tests/install/package.sh
    ${CMAKE_SOURCE_DIR} ${CMAKE_BINARY_DIR})
set_tests_properties(package PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 1800)

# The attack suite, in small: what `make attack` does at full length. A fuzz target without a fuzzer
# is a function that takes bytes, so each gets a program that mutates its corpus.
file(GLOB attack_targets CONFIGURE_DEPENDS tests/fuzz/fuzz_*.c)
set(MN_ATTACK_INPUTS 60 CACHE STRING "mutated inputs for each parser that ctest tries")
foreach(source ${attack_targets})
    string(REGEX REPLACE ".*/fuzz_(.*)\\.c" "\\1" parser ${source})
    add_executable(attack_${parser} tests/attack/attack_inputs.c tests/attack/batch.c ${source})
    target_link_libraries(attack_${parser} PRIVATE mneme_test_support)
    add_test(NAME attack_${parser} COMMAND attack_${parser} ${MN_ATTACK_INPUTS}
        ${CMAKE_SOURCE_DIR}/tests/fuzz/corpus/${parser})
    add_dependencies(tests_sanitize attack_${parser})
    set_tests_properties(attack_${parser} PROPERTIES LABELS "attack;sanitize"
        ENVIRONMENT "${sanitizer_options}")
endforeach()
# The calls of mneme.h, read from it.
find_program(awk NAMES awk mawk gawk REQUIRED)
add_custom_command(OUTPUT api_calls.inc
    COMMAND ${awk} -f ${CMAKE_SOURCE_DIR}/tests/attack/api_calls.awk
        ${CMAKE_SOURCE_DIR}/include/mneme.h >api_calls.inc
    DEPENDS tests/attack/api_calls.awk include/mneme.h)
foreach(name options calls api)
    add_executable(attack_${name} tests/attack/attack_${name}.c tests/attack/batch.c)
    target_link_libraries(attack_${name} PRIVATE mneme_test_support)
    add_dependencies(tests_sanitize attack_${name})
endforeach()
add_test(NAME attack_options COMMAND attack_options 300)
add_test(NAME attack_calls COMMAND attack_calls)
target_sources(attack_api PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/api_calls.inc)
target_include_directories(attack_api PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
add_test(NAME attack_api COMMAND attack_api)
add_test(NAME attack_kills COMMAND sh ${CMAKE_SOURCE_DIR}/tests/attack/kills.sh
    $<TARGET_FILE:mneme_cli> ${CMAKE_SOURCE_DIR} 1)
set_tests_properties(attack_options attack_calls attack_api attack_kills PROPERTIES LABELS "attack;sanitize"
    ENVIRONMENT "${sanitizer_options}")

# The longest begin first, so that none of them runs alone at the end; package first of all, which waits for a mirror.
set(cost 2000)
foreach(name package neon add_mixer test_ops_causal cli_documented ranks_killed test_ops_bits test_ops_stability test_ops_targets
        cli_demo cli_train ranks_namespaces ranks_data_parallel test_importance cli_serve bench_quick cli_golden ranks_sequence
        ranks_launchers cli_reproduce test_sweep attack_kills test_batch test_decode_plan python)
    if(TEST ${name})
        set_tests_properties(${name} PROPERTIES COST ${cost})
    endif()
    math(EXPR cost "${cost} - 50")
endforeach()
