// What the machine can do at most, measured by loops that do nothing else: the yardstick of the benchmarks.
#include "linear.h"
#include "parallel.h"

#if defined(__AMX_BF16__)
#include "linear_amx.h"
#endif
#include "linear_simd.h"

// Reads `bytes` at `memory` (a multiple of 256) once, with all threads. Returns a checksum so that it is not left out.
RHIZOME_EXPORT uint32_t rhizome_read(const uint32_t* memory, int64_t bytes) {
  using namespace rhizome;
  constexpr int64_t kTaskBytes = 1 << 18;
  const int64_t tasks = (bytes + kTaskBytes - 1) / kTaskBytes;
  uint32_t checksum = 0;
  parallel_for(tasks, [&](int64_t task, int) {
    words sums[4] = {};
    const int64_t begin = task * kTaskBytes, end = begin + kTaskBytes < bytes ? begin + kTaskBytes : bytes;
    const uint32_t* from = memory + begin / 4;
    for (const uint32_t* const stop = memory + end / 4; from + 4 * kLanes <= stop; from += 4 * kLanes)
      for (int i = 0; i < 4; ++i) sums[i] ^= *reinterpret_cast<const words*>(from + i * kLanes);
    const words all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
    uint32_t one = 0;
    for (int i = 0; i < kLanes; ++i) one ^= all[i];
    __atomic_fetch_xor(&checksum, one, __ATOMIC_RELAXED);
  });
  return checksum;
}

// Multiplies and adds with operands in registers or in the L1 cache, on all threads; returns how many floating-point
// operations that were.
RHIZOME_EXPORT double rhizome_multiply(int64_t rounds) {
  using namespace rhizome;
  const int threads = num_threads();
  constexpr int64_t kSteps = 8;
  parallel_for(threads, [&](int64_t, int) {
    alignas(64) static thread_local bf16 x[kBlockRows * kSteps * 32], weights[kSteps * 2 * kTileElements];
    alignas(64) static thread_local float sums[kBlockRows * kPanel];
    for (int64_t round = 0; round < rounds; ++round) {
#if defined(__AMX_BF16__)
      if (round == 0) {
        configure_tiles(kBlockRows);
        for (int tile = 0; tile < 4; ++tile) amx_block<true>(x, kSteps * 32, weights, 1, sums, false, {nullptr, 0});
      }
      for (int64_t step = 0; step < kSteps; ++step) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
#else
      simd_block(x, kSteps * 32, kBlockRows, weights, kSteps, sums, round > 0);
#endif
    }
  });
  return 2.0 * threads * static_cast<double>(rounds) * kBlockRows * kPanel * kSteps * 32;
}
