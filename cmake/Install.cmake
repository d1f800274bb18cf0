# make install: library, header, program, pkg-config and CMake package files
include(CMakePackageConfigHelpers)

install(TARGETS mneme EXPORT mnemeTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS mneme_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES include/mneme.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mneme)
install(EXPORT mnemeTargets NAMESPACE mneme:: DESTINATION ${package_dir})
configure_package_config_file(cmake/mnemeConfig.cmake.in mnemeConfig.cmake
    INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(mnemeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/mnemeConfig.cmake ${CMAKE_BINARY_DIR}/mnemeConfigVersion.cmake
    DESTINATION ${package_dir})

# The prefix is found from where the file lies, so that it follows cmake --install --prefix.
file(RELATIVE_PATH prefix_from_pc /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" prefix_from_pc "${prefix_from_pc}")
configure_file(cmake/mneme.pc.in mneme.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/mneme.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
