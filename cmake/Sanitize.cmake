# MN_SANITIZE=address,undefined or thread
set(MN_SANITIZE "" CACHE STRING "sanitizers to build with, as -fsanitize takes them")
if(MN_SANITIZE)
    add_compile_options(-fsanitize=${MN_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    add_link_options(-fsanitize=${MN_SANITIZE})
endif()
