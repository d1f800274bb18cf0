# One program per file in tests/{unit,kernels,mixers}; tests/support is linked into each.
pkg_check_modules(CMOCKA REQUIRED IMPORTED_TARGET cmocka)
file(GLOB support_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/support/*.c)
file(GLOB test_sources CONFIGURE_DEPENDS tests/unit/test_*.c tests/kernels/test_*.c
    tests/mixers/test_*.c tests/model/test_*.c)

add_library(mneme_test_support STATIC ${support_sources})
target_include_directories(mneme_test_support PUBLIC src include tests)
target_link_libraries(mneme_test_support PUBLIC mneme_static PkgConfig::CMOCKA
    ${mneme_dependencies})

# Tests ask for more memory than there is; under a sanitizer too that is to be NULL, not the end.
set(sanitizer_options "ASAN_OPTIONS=allocator_may_return_null=1;TSAN_OPTIONS=allocator_may_return_null=1")
foreach(source ${test_sources})
    get_filename_component(name ${source} NAME_WE)
    add_executable(${name} ${source})
    target_link_libraries(${name} PRIVATE mneme_test_support)
    target_compile_definitions(${name} PRIVATE MN_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
    if(mneme_avx2_built)
        target_compile_definitions(${name} PRIVATE MN_HAVE_X86_TARGETS=1)
    endif()
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT 1200 ENVIRONMENT "${sanitizer_options}")
endforeach()

set(golden ${CMAKE_SOURCE_DIR}/tests/golden)
add_test(NAME golden COMMAND sh -c "$<TARGET_FILE:mneme_cli> check ${golden}/*.safetensors")
add_test(NAME bench_quick COMMAND mneme_cli bench ops --quick --runs 1)
add_test(NAME layers COMMAND sh ${CMAKE_SOURCE_DIR}/tests/layers.sh ${CMAKE_SOURCE_DIR})
# Writes small model folders for the scripts, which get it as their third argument.
add_executable(make_model tests/support/programs/make_model.c)
target_link_libraries(make_model PRIVATE mneme_test_support)
file(GLOB cli_tests CONFIGURE_DEPENDS tests/cli/*.sh)
foreach(script ${cli_tests})
    get_filename_component(name ${script} NAME_WE)
    add_test(NAME cli_${name} COMMAND sh ${script} $<TARGET_FILE:mneme_cli> ${CMAKE_SOURCE_DIR}
        $<TARGET_FILE:make_model>)
    set_tests_properties(cli_${name} PROPERTIES SKIP_RETURN_CODE 77)
endforeach()
# The Python package over the library just built; skipped where there is no numpy or pytest.
add_test(NAME python COMMAND sh ${CMAKE_SOURCE_DIR}/python/tests/run.sh ${CMAKE_SOURCE_DIR}
    $<TARGET_FILE:mneme> $<TARGET_FILE:mneme_cli>)
set_tests_properties(python PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 1200)
add_test(NAME install COMMAND sh ${CMAKE_SOURCE_DIR}/tests/install/install.sh
    ${CMAKE_SOURCE_DIR} ${CMAKE_BINARY_DIR})

# What make sanitize and make tsan run: the walks over all operators are too long under a sanitizer,
# the golden vectors visit every kernel.
set(sanitized
    cli_eval
    cli_generate
    golden
    test_base
    test_collision
    test_eval
    test_io
    test_linear
    test_loader
    test_matmul
    test_metric
    test_ops_refusal
    test_prepare
    test_run_log
    test_safetensors
    test_sample
    test_session
    test_stories
    test_tasks
    test_tasks_mad
    test_tasks_mqar
    test_tasks_niah
    test_tasks_vectors
    test_tokenizer
    test_tokenizer_refusal
    test_trainer
    test_unicode
    test_vec)
set(threaded
    golden
    test_base
    test_matmul
    test_tokenizer)
foreach(name ${sanitized})
    if(TEST ${name})
        set_property(TEST ${name} APPEND PROPERTY LABELS sanitize)
    endif()
endforeach()
foreach(name ${threaded})
    if(TEST ${name})
        set_property(TEST ${name} APPEND PROPERTY LABELS threads)
    endif()
endforeach()
