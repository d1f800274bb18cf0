# The interpreter of PTX (tests/ptx) runs CUDA kernels on the CPU, for tests. It is C++, which nothing else of the
# project is: without a compiler for it, and where programs are made for another machine, it is left out.
include(CheckLanguage)
set(mneme_interpreter FALSE)
if(MN_TESTS AND NOT CMAKE_CROSSCOMPILING)
    check_language(CXX)
    if(CMAKE_CXX_COMPILER)
        enable_language(CXX)
        set(mneme_interpreter TRUE)
    endif()
endif()
if(MN_CUDA_INTERPRETED AND NOT (mneme_interpreter AND mneme_cuda_built))
    message(FATAL_ERROR "MN_CUDA_INTERPRETED=ON needs MN_CUDA=ON, MN_TESTS=ON and a C++ compiler")
endif()

# What is built here runs here: vectors and fused products of this machine halve the time. -frounding-math: a
# handler sets the rounding mode of its instruction.
function(mneme_interpreter_library name folder)
    file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/ptx/${folder}*.cpp ${ARGN})
    list(FILTER sources EXCLUDE REGEX "/test_[a-z_]*\\.cpp$")
    add_library(${name} STATIC EXCLUDE_FROM_ALL ${sources})
    set_target_properties(${name} PROPERTIES CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF
        CXX_VISIBILITY_PRESET hidden)
    target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests/ptx)    # or all of C would be compiled again with them
    target_compile_options(${name} PRIVATE -frounding-math ${MN_NATIVE_CXX})
endfunction()

if(mneme_interpreter)
    include(CheckCXXCompilerFlag)
    set(MN_NATIVE_CXX)
    check_cxx_compiler_flag(-march=native MN_HAS_MARCH_NATIVE)
    if(MN_HAS_MARCH_NATIVE)
        set(MN_NATIVE_CXX -march=native)
    endif()
    mneme_interpreter_library(ptx_interpreter "" ${CMAKE_SOURCE_DIR}/tests/ptx/read/*.cpp ${CMAKE_SOURCE_DIR}/tests/ptx/run/*.cpp)
endif()

# In place of libcudart_static: the same functions, of which kernels are run by the interpreter. What is linked
# with it is linked by the C++ compiler.
if(MN_CUDA_INTERPRETED)
    mneme_interpreter_library(ptx_cudart cudart/)
    target_link_libraries(ptx_cudart PUBLIC ptx_interpreter CUDA::toolkit)
    set(mneme_cuda_runtime ptx_cudart)
else()
    set(mneme_cuda_runtime CUDA::cudart_static)
endif()
