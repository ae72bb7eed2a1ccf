// What follows a record of fixed size: text, then numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace torchext::collectives {

inline std::string tail(const std::string& text, const std::vector<int>& numbers) {
    std::string bytes = text;
    for (const int n : numbers) {
        const auto number = static_cast<std::int32_t>(n);
        bytes.append(reinterpret_cast<const char*>(&number), sizeof(number));
    }
    return bytes;
}

template <class Record>
std::string text_after(const Record& record, std::size_t text_bytes) {
    return {reinterpret_cast<const char*>(&record + 1), text_bytes};
}

template <class Record>
std::vector<int> numbers_after(const Record& record, std::size_t text_bytes, std::size_t count) {
    const char* bytes = reinterpret_cast<const char*>(&record + 1) + text_bytes;
    std::vector<int> numbers;
    for (std::size_t i = 0; i < count; ++i) {
        std::int32_t number = 0;
        std::memcpy(&number, bytes + i * sizeof(number), sizeof(number));
        numbers.push_back(number);
    }
    return numbers;
}

}  // namespace torchext::collectives
