// What the machine can do at most, measured by loops that do nothing else: the yardstick of the benchmarks.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>

#include "linear.h"
#include "linear_task_int8.h"
#include "linear_task_segments.h"
#include "parallel.h"

#if defined(__AMX_BF16__)
#include "linear_amx.h"
#endif
#if defined(__AVX512BF16__)
#include "linear_dots.h"
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "linear_mmla.h"
#else
#include "linear_simd.h"
#endif

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

namespace rhizome {
namespace {

// A cache line that two threads write by turns.
struct Line {
  alignas(64) std::atomic<int64_t> value{0};

  void write_after(int64_t seen) {
    for (int spins = 0; value.load(std::memory_order_acquire) != seen;)
      if (++spins % 4096 == 0) sched_yield();  // where both have the same core
    value.store(seen + 1, std::memory_order_release);
  }
};

struct Partner {
  Line* line;
  int64_t rounds;

  static void* run(void* argument) {
    const Partner& partner = *static_cast<Partner*>(argument);
    for (int64_t round = 0; round < partner.rounds; ++round) partner.line->write_after(2 * round + 1);
    return nullptr;
  }
};

// Numbers in the L1 cache: not zeros, nor the same again and again, with which some processors draw less power and run
// faster than with any real matrix.
class Randoms {
 public:
  explicit Randoms(int thread) : state_(1 + static_cast<uint32_t>(thread)) {}

  void fill(bf16* numbers, int64_t count) {
    for (int64_t i = 0; i < count; ++i) numbers[i] = to_bf16(static_cast<float>(static_cast<int32_t>(next())) * 0x1p-31f);
  }
  void fill_bytes(bf16* pairs, int64_t count) {
    for (int64_t i = 0; i < count; ++i) pairs[i] = static_cast<bf16>(next() >> 16);
  }

 private:
  uint32_t next() { return state_ = state_ * 1664525u + 1013904223u; }

  uint32_t state_;
};

}  // namespace
}  // namespace rhizome

// Hands a line over from one thread to another and back, `rounds` times. Returns how often it was handed over, 0 where no
// second thread can be had.
RHIZOME_EXPORT int64_t rhizome_hand_over(int64_t rounds) {
  rhizome::Line line;
  rhizome::Partner partner{&line, rounds};
  pthread_t thread;
  if (pthread_create(&thread, nullptr, rhizome::Partner::run, &partner) != 0) return 0;
  for (int64_t round = 0; round < rounds; ++round) line.write_after(2 * round);
  pthread_join(thread, nullptr);
  return line.value.load();
}

// Multiplies and adds random numbers on all threads; returns how many floating-point operations that were.
RHIZOME_EXPORT double rhizome_multiply(int64_t rounds) {
  using namespace rhizome;
  const int threads = num_threads();
  constexpr int64_t kSteps = 8;
  parallel_for(threads, [&](int64_t, int thread) {
    alignas(64) static thread_local bf16 x[kBlockRows * kSteps * 32], weights[kSteps * 2 * kTileElements];
    alignas(64) static thread_local float sums[kBlockRows * kPanel];
    Randoms randoms(thread);
    randoms.fill(x, kBlockRows * kSteps * 32);
    randoms.fill(weights, kSteps * 2 * kTileElements);
#if defined(__AMX_BF16__)
    configure_tiles(kBlockRows);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t round = 0; round < rounds; ++round)
      for (int64_t step = 0; step < kSteps; ++step) {
        const bf16* const upper = x + step * 32;
        _tile_loadd(6, weights + step * 2 * kTileElements, 64);
        _tile_loadd(4, upper, kSteps * 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + (step * 2 + 1) * kTileElements, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, upper + kTile * kSteps * 32, kSteps * 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    _tile_stored(0, sums, kPanel * sizeof(float));
#elif defined(__AVX512BF16__)
    // the same of the rows of a block four times, with sums in registers all the time
    DotSums<kDotRows> all;
    LinesAhead nothing;
    for (int64_t round = 0; round < rounds * (kBlockRows / kDotRows); ++round)
      for (int64_t step = 0; step < kSteps; ++step)
        dot_step(all, x + step * 32, kSteps * 32, weights + step * 2 * kTileElements, nothing);
    all.store(sums, kPanel);
    asm volatile("" : : "r"(sums) : "memory");
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    // the rows of a pass and weights that are turned over, as often as both tiles of a block of rows have them
    constexpr int64_t kRows = 2 * kMmlaPairs;
    const PairedRows paired(x, kSteps * 32, kRows, kSteps * 32);
    LinesAhead nothing;
    for (int64_t round = 0; round < rounds * kBlockRows / kRows; ++round)
      mmla_pass<true>(kRows, {paired.data(), paired.stride(), sums, round > 0}, weights, kSteps, nothing);
    asm volatile("" : : "r"(sums) : "memory");
#else
    // in float32, a few rows and a tile of weights again and again, with sums in registers all the time
    constexpr int kVectors = kTile / kLanes;
    constexpr int64_t kInputs = kSteps * 32;
    alignas(64) static thread_local float few[kSimdRows * kInputs], wide[kInputs * kTile];
    std::transform(x, x + kSimdRows * kInputs, few, to_float);
    std::transform(weights, weights + kInputs * kTile, wide, to_float);
    floats total[kSimdRows][kVectors] = {};
    for (int64_t round = 0; round < rounds * (kBlockRows * kPanel) / (kSimdRows * kTile); ++round)
      for (int64_t input = 0; input < kInputs; ++input) {
#pragma GCC unroll 8
        for (int row = 0; row < kSimdRows; ++row)
          for (int v = 0; v < kVectors; ++v)
            total[row][v] += load(wide + input * kTile + v * kLanes) * few[row * kInputs + input];
      }
    for (int row = 0; row < kSimdRows; ++row)
      for (int v = 0; v < kVectors; ++v) store(sums + row * kPanel + v * kLanes, total[row][v]);
    asm volatile("" : : "r"(sums) : "memory");
#endif
  });
  return 2.0 * threads * static_cast<double>(rounds) * kBlockRows * kPanel * kSteps * 32;
}

// The same with bytes (or with codes of 4 bits, where only those are multiplied as such); 0 where there are no such products.
RHIZOME_EXPORT double rhizome_multiply_bytes([[maybe_unused]] int64_t rounds) {
#if defined(__AMX_INT8__) || defined(RHIZOME_SEGMENTS)
  using namespace rhizome;
  const int threads = num_threads();
  constexpr int64_t kSteps = 8, kStride = kSteps * 32;
  parallel_for(threads, [&](int64_t, int thread) {
    alignas(64) static thread_local bf16 x[kBlockRows * kStride], weights[kSteps * 2 * kTileElements];
    alignas(64) static thread_local float sums[kBlockRows * kPanel];
    Randoms randoms(thread);
    randoms.fill_bytes(x, kBlockRows * kStride);
    randoms.fill_bytes(weights, kSteps * 2 * kTileElements);
#if defined(__AMX_INT8__)
    configure_tiles(kBlockRows);
    for (int64_t round = 0; round < rounds; ++round) {
      PlainBlocks blocks(weights, {});
      amx_block<TileNumbers::kInt8, true>(x, kStride, blocks, kSteps, nullptr, round > 0 ? sums : nullptr, [] {});
      store_sums<true>(sums);
    }
#elif defined(RHIZOME_BYTE_PAIRS)
    // codes of 4 bits, a byte each, of as many vectors of outputs as are multiplied together
    LinesAhead nothing;
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(weights);
    std::transform(bytes, bytes + sizeof weights, bytes, [](uint8_t byte) { return byte & 15; });
    Bytes total[kByteRows][2] = {};
    for (int64_t round = 0; round < rounds * kByteRuns * 2 * kBlockRows / kByteRows; ++round) {
      WideNibbles<Format::kInt4Segments> codes(bytes + round % kByteRuns * sizeof weights / kByteRuns);
      const auto first_of = [&](int row) { return total[row][0]; };
      sum_segment<false>(total, first_of, kSteps, reinterpret_cast<const int8_t*>(x), 2 * kStride, codes, nothing);
    }
    for (int row = 0; row < kByteRows; ++row)
      for (int v = 0; v < 2; ++v) store_bytes(sums + row * kPanel + v * kLanes, total[row][v]);
#else
    LinesAhead nothing;
    const uint8_t* const codes = reinterpret_cast<const uint8_t*>(weights);
    for (int64_t round = 0; round < rounds * kByteRuns * kBlockRows / kByteRows; ++round)
      byte_pass<kByteRows>(codes + round % kByteRuns * kTileBytes, sums, {x, kStride, sums, round > 0}, kSteps, nothing);
#endif
    asm volatile("" : : "r"(sums) : "memory");
  });
  return 2.0 * threads * static_cast<double>(rounds) * kBlockRows * kPanel * kSteps * 64;
#else
  return 0;
#endif
}
