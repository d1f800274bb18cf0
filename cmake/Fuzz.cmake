# One libFuzzer program per parser: cmake --preset fuzz (clang). What it steers by is counted in the
# library too; kernels read no bytes from outside, the plain ones do for it.
target_compile_options(mneme_objects PRIVATE -fsanitize=fuzzer-no-link)
add_custom_target(fuzz_targets)
file(GLOB fuzz_sources CONFIGURE_DEPENDS tests/fuzz/fuzz_*.c)
foreach(source ${fuzz_sources})
    get_filename_component(name ${source} NAME_WE)
    add_executable(${name} ${source})
    target_include_directories(${name} PRIVATE src include)
    target_compile_options(${name} PRIVATE -fsanitize=fuzzer)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    target_link_libraries(${name} PRIVATE mneme_static ${mneme_dependencies})
    add_dependencies(fuzz_targets ${name})
endforeach()
