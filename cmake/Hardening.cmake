# Release builds: checked string and memory functions, stack protector, addresses of the program and of
# what it links that an attacker can neither guess nor overwrite. Sanitizers bring their own.
if(CMAKE_BUILD_TYPE STREQUAL "Release" AND NOT MN_SANITIZE)
    include(CheckCCompilerFlag)
    set(MN_KERNEL_OPTIONS -O3 -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3)
    if(NOT MN_QUICK)    # needs an optimising compiler
        add_compile_options(-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3)
    endif()
    check_c_compiler_flag(-fstack-protector-strong MN_HAS_STACK_PROTECTOR)
    if(MN_HAS_STACK_PROTECTOR)
        add_compile_options(-fstack-protector-strong)
    endif()
    add_link_options(-Wl,-z,relro,-z,now,-z,noexecstack)
    include(CheckPIESupported)
    check_pie_supported()
endif()
