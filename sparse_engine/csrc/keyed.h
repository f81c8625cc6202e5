// Counter-based randomness: splitmix64 as `keyed.py` has it, so that a key draws alike here and there.

#pragma once

#include <cstdint>

namespace {

inline uint64_t finalise(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}
inline uint64_t subkey(uint64_t key, uint64_t index) { return finalise(key + (index + 1) * 0x9E3779B97F4A7C15u); }
inline double uniform(uint64_t key) { return double(key >> 11) * 0x1p-53; }

}  // namespace
