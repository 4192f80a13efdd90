#include "linear_compressed.h"

#include <algorithm>
#include <atomic>

#include "abi.h"
#include "linear_pack.h"

namespace rhizome {
namespace {

// Collects weights without a code, on all threads.
class Exceptions {
 public:
  Exceptions(uint64_t* entries, int64_t capacity) : entries_(entries), capacity_(capacity) {}

  void add(int64_t block, int64_t place, bf16 weight) {
    const int64_t at = count_.fetch_add(1, std::memory_order_relaxed);
    if (at < capacity_) entries_[at] = static_cast<uint64_t>(block) << 32 | static_cast<uint64_t>(place) << 16 | weight;
  }

  int64_t count() const { return count_.load(); }

 private:
  uint64_t* const entries_;
  const int64_t capacity_;
  std::atomic<int64_t> count_{0};
};

class Deflater {
 public:
  Deflater(const PackedMatrix& weights, Exceptions& exceptions) : weights_(weights), exceptions_(exceptions) {
    std::fill_n(code_of_, 256, int8_t{-1});
    for (int code = 15; code >= 0; --code) code_of_[weights.high_bytes[code]] = static_cast<int8_t>(code);
  }

  // One weight; `place` is its number in the block.
  void put(int64_t block, int place, bf16 weight) const {
    uint8_t* const pack = data(block) + place / kPackWeights * kPackBytes;
    const PackPlace at(place % kPackWeights / 32, place % 32);
    const int code = code_of_[weight >> 8];
    if (code < 0) exceptions_.add(block, place, weight);
    const int other = pack[at.code_byte] & ~(15 << at.code_shift);
    pack[at.code_byte] = static_cast<uint8_t>(other | std::max(code, 0) << at.code_shift);
    pack[at.low_byte] = static_cast<uint8_t>(weight);
  }

#if defined(__AVX512BW__)
  // A whole tile [16][32] of a block.
  void put_tile(int64_t block, int tile, const bf16* weights) const {
    uint8_t* pack = data(block) + tile * (kBlockPacks / 2) * kPackBytes;
    for (int place = tile * kTileElements, end = place + kTileElements; place < end; pack += kPackBytes) {
      __m512i both = _mm512_setzero_si512();
      for (int half = 0; half < 2; ++half, place += 64, weights += 64) {
        const __m512i first = _mm512_loadu_si512(weights), second = _mm512_loadu_si512(weights + 32);
        const __m512i byte = _mm512_set1_epi16(255);
        const __m512i low = _mm512_ternarylogic_epi64(byte, first, _mm512_slli_epi16(second, 8), 0xca);
        const __m512i high = _mm512_ternarylogic_epi64(byte, _mm512_srli_epi16(second, 8), first, 0xca);
        __m512i codes = _mm512_setzero_si512();
        __mmask64 known = 0;
        for (int code = 0; code < 16; ++code) {
          const __m512i coded = _mm512_set1_epi8(static_cast<char>(weights_.high_bytes[code]));
          const __mmask64 same = _mm512_cmpeq_epi8_mask(high, coded);
          codes = _mm512_mask_mov_epi8(codes, same & ~known, _mm512_set1_epi8(static_cast<char>(code)));
          known |= same;
        }
        both = _mm512_or_si512(both, _mm512_slli_epi16(codes, 4 * half));
        _mm512_storeu_si512(pack + 64 + 64 * half, low);
        add_exceptions(block, place, weights, ~known);
      }
      _mm512_storeu_si512(pack, both);
    }
  }
#elif defined(__AVX2__)
  // A whole tile [16][32] of a block.
  void put_tile(int64_t block, int tile, const bf16* weights) const {
    uint8_t* pack = data(block) + tile * (kBlockPacks / 2) * kPackBytes;
    for (int place = tile * kTileElements, end = place + kTileElements; place < end; pack += kPackBytes) {
      __m256i both[2] = {};
      for (int half = 0; half < 2; ++half, place += 64, weights += 64) {
        uint64_t missing = 0;
        for (int part = 0; part < 2; ++part) {  // half of a row
          const auto at = [](const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); };
          const __m256i first = at(weights + 16 * part), second = at(weights + 32 + 16 * part);
          const __m256i last_byte = _mm256_set1_epi16(255);
          const __m256i low = _mm256_packus_epi16(_mm256_and_si256(first, last_byte), _mm256_and_si256(second, last_byte));
          const __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8));
          __m256i codes = _mm256_setzero_si256(), known = codes;
          for (int code = 0; code < 16; ++code) {
            const __m256i coded = _mm256_set1_epi8(static_cast<char>(weights_.high_bytes[code]));
            const __m256i found = _mm256_andnot_si256(known, _mm256_cmpeq_epi8(high, coded));
            codes = _mm256_or_si256(codes, _mm256_and_si256(found, _mm256_set1_epi8(static_cast<char>(code))));
            known = _mm256_or_si256(known, found);
          }
          both[part] = _mm256_or_si256(both[part], _mm256_slli_epi16(codes, 4 * half));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(pack + 64 + 64 * half + 32 * part), low);
          missing |= uint64_t{~static_cast<uint32_t>(_mm256_movemask_epi8(known))} << (32 * part);
        }
        add_exceptions(block, place, weights, missing);
      }
      memcpy(pack, both, sizeof both);
    }
  }
#elif defined(__ARM_NEON)
  // A whole tile [16][32] of a block.
  void put_tile(int64_t block, int tile, const bf16* weights) const {
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    uint8_t* pack = data(block) + tile * (kBlockPacks / 2) * kPackBytes;
    for (int place = tile * kTileElements, end = place + kTileElements; place < end; pack += kPackBytes) {
      EightHalves both[4] = {};
      for (int half = 0; half < 2; ++half, place += 64, weights += 64) {
        uint64_t missing = 0;
        for (int part = 0; part < 4; ++part) {  // a quarter of a row
          const EightHalves first = load_halves(weights + 8 * part), second = load_halves(weights + 32 + 8 * part);
          const Bytes high = (Bytes)((first & 0xff00) | second >> 8);
          Bytes codes = {}, known = {};
          for (uint8_t code = 0; code < 16; ++code) {
            const Bytes found = (Bytes)(high == weights_.high_bytes[code]) & ~known;
            codes |= found & code;
            known |= found;
          }
          both[part] |= (EightHalves)codes << 4 * half;
          store_halves(pack + 64 + 64 * half + 16 * part, (first & 0x00ff) | second << 8);
          for (int i = 0; i < 16; ++i) missing |= uint64_t{known[i] == 0} << (16 * part + i);
        }
        add_exceptions(block, place, weights, missing);
      }
      memcpy(pack, both, sizeof both);
    }
  }
#endif

 private:
  // Of two rows, by turns as in a pack, those whose bit is set.
  void add_exceptions(int64_t block, int place, const bf16* weights, uint64_t missing) const {
    for (; missing != 0; missing &= missing - 1) {
      const int from = PackPlace::weight_of(__builtin_ctzll(missing));
      exceptions_.add(block, place + from, weights[from]);
    }
  }

  uint8_t* data(int64_t block) const { return const_cast<uint8_t*>(compressed_block(weights_, block)); }

  const PackedMatrix& weights_;
  Exceptions& exceptions_;
  int8_t code_of_[256];
};

}  // namespace
}  // namespace rhizome

// As rhizome_pack, into a compressed matrix. What has no code goes to `entries` (block << 32 | number in the block << 16 |
// bfloat16, in any order) as far as there is room for `capacity` of them. Returns how many there are.
RHIZOME_EXPORT int64_t rhizome_compress(const rhizome::PackedMatrix* weights, const rhizome::bf16* source,
                                        int64_t stride, int64_t rows, int64_t first, int paired, uint64_t* entries,
                                        int64_t capacity) {
  using namespace rhizome;
  Exceptions exceptions(entries, capacity);
  const Deflater deflater(*weights, exceptions);
  const int64_t inputs = weights->inputs, steps = blocks(inputs);
  for_tile_rows(rows, first, paired, [&](int64_t begin, int64_t end, int64_t output) {
    const int tile = static_cast<int>(output % kPanel / kTile);
    const bf16* const from = source + begin * stride;
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t block = output / kPanel * steps + step, count = std::min<int64_t>(32, inputs - step * 32);
#if defined(__AVX2__) || defined(__ARM_NEON)
      if (end - begin == kTile && count == 32) {
        alignas(64) bf16 whole[kTileElements];
        pack_tile(from + step * 32, stride, whole);
        deflater.put_tile(block, tile, whole);
        continue;
      }
#endif
      for (int64_t row = 0; row < end - begin; ++row)
        for (int64_t i = 0; i < count; ++i) {
          const int64_t column = (output + row) % kTile;
          const int place = static_cast<int>(tile * kTileElements + (i / 2 * kTile + column) * 2 + i % 2);
          deflater.put(block, place, from[row * stride + step * 32 + i]);
        }
    }
  });
  return exceptions.count();
}

// Whether products with compressed weights are known.
RHIZOME_EXPORT int rhizome_compresses() { return rhizome::kInflates; }

// Whether they are fast. On Arm, that was never measured.
RHIZOME_EXPORT int rhizome_compresses_well() {
#if defined(__ARM_NEON)
  return 0;
#else
  return rhizome::kInflates;
#endif
}

// All blocks of a compressed matrix to `packed`, as rhizome_pack would have packed them.
RHIZOME_EXPORT void rhizome_inflate(const rhizome::PackedMatrix* weights, rhizome::bf16* packed) {
  using namespace rhizome;
  const int64_t steps = blocks(weights->inputs);
  parallel_for(panels(weights->outputs), [&](int64_t panel, int) {
    for (int64_t block = panel * steps; block < (panel + 1) * steps; ++block) {
      bf16* const to = packed + block * 2 * kTileElements;
      for (int place = 0; place < 2 * kTileElements; ++place) to[place] = coded(*weights, block, place);
      put_exceptions(*weights, block, block + 1, to);
    }
  });
}
