# make install: library, header, program, pkg-config and CMake package files
include(CMakePackageConfigHelpers)

# Libraries are looked for beside the program: an unpacked folder may bring its own in lib/mneme. The
# older kind of run path serves what those libraries need in turn as well.
if(CMAKE_SYSTEM_NAME STREQUAL "Linux" AND NOT IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
    # Also in the build folder, from where wheels take it: CMake's placeholder is empty entries, which
    # would mean the current folder.
    set_target_properties(mneme PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/mneme"
        BUILD_WITH_INSTALL_RPATH ON)
    file(RELATIVE_PATH to_lib "/${CMAKE_INSTALL_BINDIR}" "/${CMAKE_INSTALL_LIBDIR}")
    set_target_properties(mneme_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${to_lib};$ORIGIN/${to_lib}/mneme")
    target_link_options(mneme PRIVATE -Wl,--disable-new-dtags)
    target_link_options(mneme_cli PRIVATE -Wl,--disable-new-dtags)
endif()

# Symbols carry the version of the interface that they came with.
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    configure_file(cmake/mneme.map.in mneme.map @ONLY)
    target_link_options(mneme PRIVATE -Wl,--version-script=${CMAKE_BINARY_DIR}/mneme.map)
    set_target_properties(mneme PROPERTIES LINK_DEPENDS ${CMAKE_BINARY_DIR}/mneme.map)
endif()

install(TARGETS mneme EXPORT mnemeTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES $<TARGET_FILE:mneme_static> RENAME libmneme.a DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS mneme_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES include/mneme.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mneme)
install(EXPORT mnemeTargets NAMESPACE mneme:: DESTINATION ${package_dir})
configure_package_config_file(cmake/mnemeConfig.cmake.in mnemeConfig.cmake
    INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(mnemeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/mnemeConfig.cmake ${CMAKE_BINARY_DIR}/mnemeConfigVersion.cmake
    DESTINATION ${package_dir})

# What the static library needs beside, for pkg-config --static.
set(mneme_pc_requires "jansson libpcre2-8")
if(MICROHTTPD_FOUND)
    string(APPEND mneme_pc_requires " libmicrohttpd")
endif()

# mneme.pc finds the prefix from its own place, so that an installed tree may be moved. Only the shared
# library is installed; what it needs it brings along, so its users are told of nothing else.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
    set(mneme_pc_prefix "${CMAKE_INSTALL_PREFIX}")
    set(mneme_pc_libdir "${CMAKE_INSTALL_FULL_LIBDIR}")
    set(mneme_pc_includedir "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
else()
    file(RELATIVE_PATH up "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
    string(REGEX REPLACE "/$" "" mneme_pc_prefix "\${pcfiledir}/${up}")
    set(mneme_pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
    set(mneme_pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
configure_file(cmake/mneme.pc.in mneme.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/mneme.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# Manual pages and completion, written by the program from its tables of options.
if(NOT CMAKE_CROSSCOMPILING)
    set(help_dir ${CMAKE_BINARY_DIR}/help)
    add_custom_command(OUTPUT ${help_dir}/done
        COMMAND ${CMAKE_COMMAND} -DMNEME=$<TARGET_FILE:mneme_cli> -DOUT=${help_dir}
            -P ${CMAKE_SOURCE_DIR}/cmake/Help.cmake
        DEPENDS mneme_cli ${CMAKE_SOURCE_DIR}/cmake/Help.cmake VERBATIM)
    add_custom_target(mneme_help ALL DEPENDS ${help_dir}/done)
    install(DIRECTORY ${help_dir}/man1 DESTINATION ${CMAKE_INSTALL_MANDIR})
    install(FILES ${help_dir}/mneme.bash RENAME mneme
        DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
    install(FILES ${help_dir}/_mneme DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
    install(FILES ${help_dir}/mneme.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
endif()

# The library alone, without the links that a wheel cannot hold: python/pyproject.toml asks for it.
install(FILES $<TARGET_FILE:mneme> DESTINATION . RENAME libmneme.so COMPONENT python
    EXCLUDE_FROM_ALL)
add_custom_target(mneme_python)    # ninja takes `mneme` for the program of that name
add_dependencies(mneme_python mneme)
if(TARGET mneme_fastcall)
    install(TARGETS mneme_fastcall LIBRARY DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
    add_dependencies(mneme_python mneme_fastcall)
endif()
