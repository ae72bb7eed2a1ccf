// dst = src[0] op src[1] op ... element by element, always in this order, so that runs repeat bit by bit.
//
// Half types are widened to float32, accumulated over all sources and rounded once. Booleans are logical values: sum
// and max mean "or", product and min mean "and". `dst` may be one of the sources.
#pragma once

#include <cstddef>
#include <cstdint>

#include "signature.hpp"

namespace torchext::collectives {

// (destination, sources, how many, elements, members to average over)
using ReduceKernel = void (*)(void*, const void* const*, int, std::size_t, int);

// nullptr where the operation has no meaning for the type.
ReduceKernel reduce_kernel(std::uint8_t dtype, ReduceOp op);

}  // namespace torchext::collectives
