# CUDA kernels, compiled ahead of time. nvcc makes the objects; everything else, linking too, stays with
# the C compiler. The CUDA runtime is linked statically, so the program starts on machines without a
# driver. Kernels take minutes to compile: AUTO leaves them out where there is no GPU to run them, and
# compiles for the GPUs that are there; ON (make cuda) compiles for all machines: sm_80, sm_90a, and PTX
# for what comes between and after.
set(MN_CUDA AUTO CACHE STRING "CUDA kernels: AUTO (where toolkit and GPU are found), ON or OFF")
set_property(CACHE MN_CUDA PROPERTY STRINGS AUTO ON OFF)
set(mneme_cuda_built FALSE)

# Compute capabilities of the GPUs that the driver shows: "8.6;9.0"; empty without a GPU.
set(mneme_gpus "")
find_program(MN_NVIDIA_SMI nvidia-smi)
if(MN_NVIDIA_SMI AND MN_CUDA STREQUAL "AUTO")
    execute_process(COMMAND ${MN_NVIDIA_SMI} --query-gpu=compute_cap --format=csv,noheader
        OUTPUT_VARIABLE mneme_gpus RESULT_VARIABLE code OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" mneme_gpus "${mneme_gpus}")
    list(REMOVE_DUPLICATES mneme_gpus)
    if(NOT code EQUAL 0)
        set(mneme_gpus "")
    endif()
endif()

if(MN_CUDA STREQUAL "AUTO")
    if(mneme_gpus)
        find_package(CUDAToolkit 12.4 QUIET)
    endif()
elseif(MN_CUDA)
    find_package(CUDAToolkit 12.4 REQUIRED)
endif()
if(MN_CUDA AND TARGET CUDA::cudart_static AND CUDAToolkit_NVCC_EXECUTABLE)
    set(mneme_cuda_built TRUE)
elseif(MN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MN_CUDA=ON needs nvcc and libcudart_static.a; set CUDAToolkit_ROOT to the toolkit")
endif()

# wgmma and TMA descriptors of 9.0 are instructions of sm_90a; what has no code path of its own runs 8.0's.
set(mneme_machines_default "80;80-virtual;90a")
if(mneme_gpus)
    set(mneme_machines_default "")
    foreach(gpu ${mneme_gpus})
        string(REPLACE "." "" number ${gpu})
        if(number EQUAL 90)
            set(number 90a)
        endif()
        list(APPEND mneme_machines_default ${number})
    endforeach()
endif()
set(MN_CUDA_MACHINES "${mneme_machines_default}" CACHE STRING
    "Machines CUDA kernels are compiled for, as N (machine code) or N-virtual (PTX)")
set(mneme_cuda_machines)
foreach(machine ${MN_CUDA_MACHINES})
    string(REPLACE "-virtual" "" number ${machine})
    string(REGEX REPLACE "^[0-9]+a?$" "sm_${number}" code ${machine})
    string(REGEX REPLACE "^.*-virtual$" "compute_${number}" code ${code})
    list(APPEND mneme_cuda_machines -gencode=arch=compute_${number},code=${code})
endforeach()

# A toolkit that does not know the host's compiler or these machines is none.
if(mneme_cuda_built AND NOT DEFINED MN_NVCC_WORKS)
    set(trial ${CMAKE_BINARY_DIR}/CMakeFiles/mneme_cuda)
    file(WRITE ${trial}.cu "#include <cuda_bf16.h>\n__global__ void trial(float *x) { *x = 1; }\n")
    execute_process(COMMAND ${CUDAToolkit_NVCC_EXECUTABLE} -std=c++17 ${mneme_cuda_machines}
        -c ${trial}.cu -o ${trial}.o RESULT_VARIABLE code OUTPUT_VARIABLE why ERROR_VARIABLE why)
    if(code EQUAL 0)
        set(MN_NVCC_WORKS TRUE CACHE INTERNAL "nvcc compiles for the machines of mneme")
    elseif(MN_CUDA STREQUAL "AUTO")
        message(STATUS "CUDA is left out: ${CUDAToolkit_NVCC_EXECUTABLE} fails: ${why}")
        set(mneme_cuda_built FALSE)
    else()
        message(FATAL_ERROR "${CUDAToolkit_NVCC_EXECUTABLE} fails:\n${why}")
    endif()
endif()

# Kernels run on the CPU by an interpreter of PTX (tests/ptx), which stands in for the CUDA runtime: for tests
# without a GPU. MN_CUDA_MACHINES must name a virtual machine then; the interpreter reads no packed text.
option(MN_CUDA_INTERPRETED "run CUDA kernels on the CPU, by an interpreter of their PTX: for tests" OFF)
if(MN_CUDA_INTERPRETED)
    set(MN_NVCC_PACKS --no-compress CACHE INTERNAL "nvcc's option for PTX that can be read")
endif()

# Machine code packed tightly where nvcc can (12.8 and later): a third of the size or less.
if(mneme_cuda_built AND NOT DEFINED MN_NVCC_PACKS)
    set(trial ${CMAKE_BINARY_DIR}/CMakeFiles/mneme_cuda_packed)
    file(WRITE ${trial}.cu "__global__ void trial(float *x) { *x = 1; }\n")
    execute_process(COMMAND ${CUDAToolkit_NVCC_EXECUTABLE} --compress-mode=size -c ${trial}.cu -o ${trial}.o
        RESULT_VARIABLE code OUTPUT_QUIET ERROR_QUIET)
    set(MN_NVCC_PACKS "" CACHE INTERNAL "nvcc's option for small machine code")
    if(code EQUAL 0)
        set(MN_NVCC_PACKS --compress-mode=size CACHE INTERNAL "nvcc's option for small machine code")
    endif()
endif()

# cuBLASLt is found when a matrix product first runs; building needs its header only.
set(mneme_cublaslt_header FALSE)
if(mneme_cuda_built)
    find_file(MN_CUBLASLT_HEADER cublasLt.h PATHS ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH)
    if(MN_CUBLASLT_HEADER)
        set(mneme_cublaslt_header TRUE)
    endif()
endif()

# The object files of src/kernels/cuda/**.cu in `result`; targets that link them depend on mneme_cuda, or
# several would make them at the same time.
# -fmad=false: products and sums are fused only where the code says so, as in the C kernels.
function(mneme_cuda_objects result)
    set(flags -std=c++17 -O3 -fmad=false -I${CMAKE_SOURCE_DIR}/src
        -I${CMAKE_SOURCE_DIR}/include
        ${mneme_cuda_machines} ${MN_NVCC_PACKS}
        -Xcompiler=-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-Wall,-Wextra)
    if(MN_WERROR)    # of nvcc, ptxas and the host's compiler
        list(APPEND flags -Werror=all-warnings -Xcompiler=-Werror)
    endif()
    if(CMAKE_BUILD_TYPE STREQUAL "RelWithDebInfo")    # for profilers; three times the size
        list(APPEND flags -lineinfo)
    endif()
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS src/kernels/cuda/*.cu)
    set(objects)
    set(commands "")
    foreach(source ${sources})
        file(RELATIVE_PATH name ${CMAKE_SOURCE_DIR}/src/kernels/cuda ${source})
        get_filename_component(folder ${CMAKE_BINARY_DIR}/cuda/${name} DIRECTORY)
        string(REGEX REPLACE "\\.cu$" ".o" object ${CMAKE_BINARY_DIR}/cuda/${name})
        add_custom_command(OUTPUT ${object}
            COMMAND ${CMAKE_COMMAND} -E make_directory ${folder}
            COMMAND ${CMAKE_C_COMPILER_LAUNCHER} ${CUDAToolkit_NVCC_EXECUTABLE} ${flags} -MD -MF ${object}.d -c ${source} -o ${object}
            DEPENDS ${source} DEPFILE ${object}.d VERBATIM COMMENT "Building CUDA object ${name}")
        list(APPEND objects ${object})
        string(JOIN " " command ${CUDAToolkit_NVCC_EXECUTABLE} ${flags} -c ${source} -o ${object})
        string(APPEND commands "{\n  \"directory\": \"${CMAKE_BINARY_DIR}\",\n  \"command\": \"${command}\","
            "\n  \"file\": \"${source}\"\n},\n")
    endforeach()
    string(REGEX REPLACE ",\n$" "\n" commands "${commands}")
    file(WRITE ${CMAKE_BINARY_DIR}/cuda_commands.json "${commands}")    # for tools/compile_commands.sh
    add_custom_target(mneme_cuda DEPENDS ${objects})
    set(${result} ${objects} PARENT_SCOPE)
endfunction()
