#include "reduce.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace torchext::collectives {
namespace {

struct Half {
    std::uint16_t bits;
};
struct BFloat16 {
    std::uint16_t bits;
};
struct Bool {
    std::uint8_t value;
};

inline float bits_to_float(std::uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, sizeof(f));
    return f;
}
inline std::uint32_t float_to_bits(float f) {
    std::uint32_t bits;
    std::memcpy(&bits, &f, sizeof(bits));
    return bits;
}

inline float widen(Half h) {
    const std::uint32_t sign = static_cast<std::uint32_t>(h.bits & 0x8000U) << 16;
    const std::uint32_t rest = h.bits & 0x7fffU;
    if (rest >= 0x7c00U) return bits_to_float(sign | 0x7f800000U | (rest & 0x3ffU) << 13);  // infinite or NaN
    // The exponent is 112 too small after the shift; a product sets it right, subnormals included.
    return bits_to_float(sign | float_to_bits(bits_to_float(rest << 13) * 0x1p112F));
}
inline float widen(BFloat16 b) { return bits_to_float(static_cast<std::uint32_t>(b.bits) << 16); }

inline void narrow(float f, Half& out) {
    const std::uint32_t bits = float_to_bits(f);
    const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
    const std::uint32_t rest = bits & 0x7fffffffU;
    if (rest > 0x7f800000U) {
        out.bits = static_cast<std::uint16_t>(sign | 0x7e00U);
    } else if (rest >= 0x477ff000U) {  // rounds to 65536 or more
        out.bits = static_cast<std::uint16_t>(sign | 0x7c00U);
    } else if (rest < 0x38800000U) {  // subnormal: adding 0.5 makes the hardware round at the right bit
        out.bits = static_cast<std::uint16_t>(
            sign | (float_to_bits(bits_to_float(rest) + 0.5F) - float_to_bits(0.5F)));
    } else {  // to nearest, ties to even
        out.bits = static_cast<std::uint16_t>(sign | ((rest - 0x38000000U + 0xfffU + ((rest >> 13) & 1U)) >> 13));
    }
}
inline void narrow(float f, BFloat16& out) {
    const std::uint32_t bits = float_to_bits(f);
    const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    out.bits = static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? 0x7fc0U : rounded);
}

template <class T>
struct Wide {
    using type = T;
};
template <>
struct Wide<Half> {
    using type = float;
};
template <>
struct Wide<BFloat16> {
    using type = float;
};
template <>
struct Wide<Bool> {
    using type = std::uint8_t;
};

template <class T, class A>
void load(A* acc, const T* src, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        if constexpr (std::is_same_v<T, Bool>) {
            acc[i] = src[i].value != 0;
        } else if constexpr (std::is_same_v<A, T>) {
            acc[i] = src[i];
        } else {
            acc[i] = widen(src[i]);
        }
    }
}

template <class T, class A>
void store(T* dst, const A* acc, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        if constexpr (std::is_same_v<T, Bool>) {
            dst[i].value = acc[i];
        } else if constexpr (std::is_same_v<A, T>) {
            dst[i] = acc[i];
        } else {
            narrow(acc[i], dst[i]);
        }
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
// float16 in hardware where the processor has it (since 2012), chosen at run time. Same bits as above but for NaNs.
__attribute__((target("avx,f16c"))) inline void load_f16c(float* acc, const Half* src, std::size_t n) {
    std::size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(acc + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
    }
    for (; i < n; ++i) acc[i] = widen(src[i]);
}
__attribute__((target("avx,f16c"))) inline void store_f16c(Half* dst, const float* acc, std::size_t n) {
    std::size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(acc + i), _MM_FROUND_TO_NEAREST_INT));
    }
    for (; i < n; ++i) narrow(acc[i], dst[i]);
}
const bool has_f16c = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");

// bfloat16 eight at a time: SSE2 cannot pack 32 bits to 16. The compiler vectorises the same code.
__attribute__((target("avx2"))) inline void load_avx2(float* acc, const BFloat16* src, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) acc[i] = widen(src[i]);
}
__attribute__((target("avx2"))) inline void store_avx2(BFloat16* dst, const float* acc, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) narrow(acc[i], dst[i]);
}
const bool has_avx2 = __builtin_cpu_supports("avx2");

template <>
inline void load<BFloat16, float>(float* acc, const BFloat16* src, std::size_t n) {
    if (has_avx2) {
        load_avx2(acc, src, n);
    } else {
        for (std::size_t i = 0; i < n; ++i) acc[i] = widen(src[i]);
    }
}
template <>
inline void store<BFloat16, float>(BFloat16* dst, const float* acc, std::size_t n) {
    if (has_avx2) {
        store_avx2(dst, acc, n);
    } else {
        for (std::size_t i = 0; i < n; ++i) narrow(acc[i], dst[i]);
    }
}
template <>
inline void load<Half, float>(float* acc, const Half* src, std::size_t n) {
    if (has_f16c) {
        load_f16c(acc, src, n);
    } else {
        for (std::size_t i = 0; i < n; ++i) acc[i] = widen(src[i]);
    }
}
template <>
inline void store<Half, float>(Half* dst, const float* acc, std::size_t n) {
    if (has_f16c) {
        store_f16c(dst, acc, n);
    } else {
        for (std::size_t i = 0; i < n; ++i) narrow(acc[i], dst[i]);
    }
}
#endif

template <class A>
inline bool is_nan(A a) {
    if constexpr (std::is_floating_point_v<A>) return a != a;
    return false;
}

template <ReduceOp op, class A>
inline A combine(A a, A b) {
    if constexpr (op == ReduceOp::sum || op == ReduceOp::avg) {
        if constexpr (std::is_integral_v<A>) {  // wraps around as in torch; in unsigned, where that is defined
            using U = std::make_unsigned_t<A>;
            return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
        } else {
            return a + b;
        }
    } else if constexpr (op == ReduceOp::product) {
        if constexpr (std::is_integral_v<A>) {  // std::uint64_t: narrower factors would be promoted to int
            return static_cast<A>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
        } else {
            return a * b;
        }
    } else if constexpr (op == ReduceOp::min) {
        return b < a || is_nan(b) ? b : a;  // a NaN stays, as in torch.minimum
    } else if constexpr (op == ReduceOp::max) {
        return b > a || is_nan(b) ? b : a;
    } else if constexpr (op == ReduceOp::band) {
        return static_cast<A>(a & b);
    } else if constexpr (op == ReduceOp::bor) {
        return static_cast<A>(a | b);
    } else {
        return static_cast<A>(a ^ b);
    }
}

template <class T, ReduceOp op>
void reduce(void* dst_, const void* const* src, int num_src, std::size_t n, int world) {
    using A = typename Wide<T>::type;
    auto* dst = static_cast<T*>(dst_);
    if constexpr (std::is_same_v<T, A> && op != ReduceOp::avg) {
        if (num_src == 2) {  // one pass, nothing in between
            const auto* a = static_cast<const T*>(src[0]);
            const auto* b = static_cast<const T*>(src[1]);
            for (std::size_t i = 0; i < n; ++i) dst[i] = combine<op, T>(a[i], b[i]);
            return;
        }
    }
    constexpr std::size_t kBlock = 1024;  // of accumulators, so that they stay in the first-level cache
    A acc[kBlock];
    A wide[kBlock];
    for (std::size_t begin = 0; begin < n; begin += kBlock) {
        const std::size_t m = std::min(kBlock, n - begin);
        load<T, A>(acc, static_cast<const T*>(src[0]) + begin, m);
        for (int s = 1; s < num_src; ++s) {
            const auto* from = static_cast<const T*>(src[s]) + begin;
            if constexpr (std::is_same_v<T, A>) {
                for (std::size_t i = 0; i < m; ++i) acc[i] = combine<op, A>(acc[i], from[i]);
            } else {
                load<T, A>(wide, from, m);
                for (std::size_t i = 0; i < m; ++i) acc[i] = combine<op, A>(acc[i], wide[i]);
            }
        }
        if constexpr (op == ReduceOp::avg && std::is_floating_point_v<A>) {
            for (std::size_t i = 0; i < m; ++i) acc[i] = acc[i] / static_cast<A>(world);
        } else if constexpr (op == ReduceOp::avg) {  // towards zero, as over NCCL; the size may not fit into A
            for (std::size_t i = 0; i < m; ++i) {
                acc[i] = static_cast<A>(static_cast<std::int64_t>(acc[i]) / static_cast<std::int64_t>(world));
            }
        }
        store<T, A>(dst + begin, acc, m);
    }
}

template <class T>
ReduceKernel kernel_for(ReduceOp op) {
    constexpr bool integral = std::is_integral_v<T>;
    if constexpr (std::is_same_v<T, Bool>) {
        switch (op) {
            case ReduceOp::sum:
            case ReduceOp::max:
            case ReduceOp::bor:
                return &reduce<T, ReduceOp::bor>;
            case ReduceOp::product:
            case ReduceOp::min:
            case ReduceOp::band:
                return &reduce<T, ReduceOp::band>;
            case ReduceOp::bxor:
                return &reduce<T, ReduceOp::bxor>;
            default:
                return nullptr;
        }
    } else {
        switch (op) {
            case ReduceOp::sum:
                return &reduce<T, ReduceOp::sum>;
            case ReduceOp::product:
                return &reduce<T, ReduceOp::product>;
            case ReduceOp::min:
                return &reduce<T, ReduceOp::min>;
            case ReduceOp::max:
                return &reduce<T, ReduceOp::max>;
            case ReduceOp::avg:
                return &reduce<T, ReduceOp::avg>;
            case ReduceOp::band:
                if constexpr (integral) return &reduce<T, ReduceOp::band>;
                return nullptr;
            case ReduceOp::bor:
                if constexpr (integral) return &reduce<T, ReduceOp::bor>;
                return nullptr;
            case ReduceOp::bxor:
                if constexpr (integral) return &reduce<T, ReduceOp::bxor>;
                return nullptr;
            default:
                return nullptr;
        }
    }
}

}  // namespace

ReduceKernel reduce_kernel(std::uint8_t dtype, ReduceOp op) {
    switch (static_cast<DType>(dtype)) {
        case DType::f64:
            return kernel_for<double>(op);
        case DType::f32:
            return kernel_for<float>(op);
        case DType::f16:
            return kernel_for<Half>(op);
        case DType::bf16:
            return kernel_for<BFloat16>(op);
        case DType::i64:
            return kernel_for<std::int64_t>(op);
        case DType::i32:
            return kernel_for<std::int32_t>(op);
        case DType::i16:
            return kernel_for<std::int16_t>(op);
        case DType::i8:
            return kernel_for<std::int8_t>(op);
        case DType::u8:
            return kernel_for<std::uint8_t>(op);
        case DType::boolean:
            return kernel_for<Bool>(op);
        default:
            return nullptr;
    }
}

}  // namespace torchext::collectives
