/* failure.h - what ends a launch or the reading of a module: a sentence. Who catches it adds
 * where it happened. */
#ifndef PTX_FAILURE_H
#define PTX_FAILURE_H

#include <string>

namespace ptx {

struct failure {
    std::string what;
    std::string where;    // block, warp, line and instruction, if one was running
};

#define PTX_FORMAT(n) __attribute__((format(printf, n, n + 1)))

[[noreturn]] void fail(const char *format, ...) PTX_FORMAT(1);
std::string sentence(const char *format, ...) PTX_FORMAT(1);

}    // namespace ptx
#endif
