// What this core was built with, as text for `torchext doctor` and for bug reports.
#pragma once

#include <map>
#include <string>

namespace torchext {

// TORCHEXT_FLAGS is given by setup.py: the flags that torchext adds to those of the Python that builds it.
#ifndef TORCHEXT_FLAGS
#define TORCHEXT_FLAGS "unknown"
#endif

inline std::string compiler() {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#elif defined(_MSC_VER)
    return "msvc " + std::to_string(_MSC_FULL_VER);
#else
    return "unknown";
#endif
}

inline std::string standard() {
#if defined(_MSVC_LANG)  // MSVC keeps __cplusplus at 199711 unless told otherwise
    return std::to_string(_MSVC_LANG);
#else
    return std::to_string(__cplusplus);
#endif
}

inline std::string assertions() {
#if defined(NDEBUG)
    return "off";
#else
    return "on";
#endif
}

inline std::map<std::string, std::string> build_info() {
    return {
        {"compiler", compiler()},
        {"standard", standard()},
        {"flags", TORCHEXT_FLAGS},
        {"assertions", assertions()},
    };
}

}  // namespace torchext
