// Quantized weights on AMX tiles. Unlike in linear_amx.h, weights are the first operand and rows of x, turned over, the
// second: so the 32 inputs of an output that lie side by side when they are widened have a scale in common, and a code of
// 4 bits becomes its weight by one look-up in a table of the output's sixteen. Sums come out turned over, too. Their
// order is that of linear_amx.h, and so are their bits.
#pragma once

#include <algorithm>
#include <vector>

#include "linear_quantized_rows.h"
#include "transpose.h"

namespace rhizome {

// Widens one block of a panel after the other: [32 outputs][32 inputs] bfloat16.
template <Format kFormat>
class Widener {
 public:
  Widener(const PackedMatrix& weights, int64_t panel)
      : codes_(codes_at(weights, panel, 0)), scales_(scales_of<kFormat>(weights) + panel * groups(weights) * kPanel),
        zeros_(weights.zeros != nullptr ? weights.zeros + panel * groups(weights) * kPanel : nullptr),
        per_group_(weights.group / 32) {}

  void next(bf16* out) {
    for (int64_t ahead = 0; ahead < kBytes; ahead += 64) _mm_prefetch(codes_ + kDistance + ahead, _MM_HINT_T0);
    if constexpr (in_nibbles(kFormat)) {
      if (left_ == 0) make_tables();
      for (int quad = 0; quad < 8; ++quad, out += 4 * 32) {
        const __m512i words = _mm512_loadu_si512(codes_ + 64 * quad);
        const __m512i* const tables = tables_ + 4 * quad;
        _mm512_store_si512(out, _mm512_permutexvar_epi16(words, tables[0]));
        _mm512_store_si512(out + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), tables[1]));
        _mm512_store_si512(out + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), tables[2]));
        _mm512_store_si512(out + 96, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), tables[3]));
      }
    } else {
      for (int output = 0; output < 32; ++output, out += 32) {
        __m512 low, high;
        numbers(codes_ + 32 * output, output, low, high);
        if constexpr (!by_channel(kFormat)) {
          const __m512 scale = _mm512_set1_ps(scale_of(scales_[output]));
          low = _mm512_mul_ps(low, scale);
          high = _mm512_mul_ps(high, scale);
        }
        _mm512_store_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
      if (!by_channel(kFormat) && left_ == 0) left_ = per_group_;
    }
    codes_ += kBytes;
    if (!by_channel(kFormat) && --left_ == 0) {
      scales_ += kPanel;
      if (zeros_ != nullptr) zeros_ += kPanel;
    }
  }

 private:
  static constexpr int64_t kBytes = code_bytes(kFormat, kBlockWeights), kDistance = 2048;

  // The 32 codes of an output as numbers, of int8 less the zero.
  void numbers(const uint8_t* from, int output, __m512& low, __m512& high) const {
    if constexpr (is_float8(kFormat)) {
      low = float8_numbers(from), high = float8_numbers(from + 16);
    } else {
      const __m512 zero = _mm512_set1_ps(zeros_ != nullptr ? zeros_[output] : middle_code(kFormat));
      low = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
      high = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(from + 16))));
      low = _mm512_sub_ps(low, zero), high = _mm512_sub_ps(high, zero);
    }
  }

  // What the sixteen codes of each output stand for, twice: an index has five bits, of which the highest is not its own.
  void make_tables() {
    left_ = per_group_;
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512 middle = _mm512_sub_ps(codes, _mm512_set1_ps(middle_code(kFormat)));
    if constexpr (kFormat == Format::kFloat4) middle = float4_table();
    for (int output = 0; output < 32; ++output) {
      const __m512 steps = zeros_ != nullptr ? _mm512_sub_ps(codes, _mm512_set1_ps(zeros_[output])) : middle;
      const __m512 weights = _mm512_mul_ps(steps, _mm512_set1_ps(scale_of(scales_[output])));
      tables_[output] = (__m512i)_mm512_cvtne2ps_pbh(weights, weights);
    }
  }

  const uint8_t* codes_;
  const Scale<kFormat>* scales_;
  const float* zeros_;
  const int64_t per_group_;
  int64_t left_ = 0;  // blocks of the group
  __m512i tables_[in_nibbles(kFormat) ? 32 : 1];
};

// Sums of `steps` blocks of weights [32][32] and of rows.
template <bool kTwo>
inline void turned_block(const bf16* weights, const TurnedRows& x, int64_t tile, int64_t step) {
  const int64_t stride = 4 * x.columns();
  _tile_loadd(4, weights, 64);
  _tile_loadd(6, x.block(tile, step), stride);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, weights + kTileElements, 64);
  _tile_dpbf16ps(1, 5, 6);
  if constexpr (kTwo) {
    _tile_loadd(7, x.block(tile + 1, step), stride);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <bool kTwo>
inline void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTwo) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

// Sums as they come out of the tiles: [tile of rows][32 outputs][16].
template <bool kTwo>
inline void store_tiles(float* turned) {
  _tile_stored(0, turned, 64);
  _tile_stored(1, turned + 256, 64);
  if constexpr (kTwo) {
    _tile_stored(2, turned + 512, 64);
    _tile_stored(3, turned + 768, 64);
  }
}

template <bool kTwo>
inline void load_tiles(const float* turned) {
  _tile_loadd(0, turned, 64);
  _tile_loadd(1, turned + 256, 64);
  if constexpr (kTwo) {
    _tile_loadd(2, turned + 512, 64);
    _tile_loadd(3, turned + 768, 64);
  }
}

// The sums of up to 32 rows, [rows][32].
inline void turn_sums(const float* turned, int rows, float* sums) {
  for (int first = 0; first < rows; first += kTile)
    for (int half = 0; half < 2; ++half, turned += 256) {
      __m512i lines[16];
      for (int i = 0; i < 16; ++i) lines[i] = _mm512_load_si512(turned + 16 * i);
      transpose(lines);
      for (int i = 0; i < std::min(kTile, rows - first); ++i)
        _mm512_store_si512(sums + (first + i) * kPanel + half * kTile, lines[i]);
    }
}

// Few rows: blocks are widened while the tiles work on those before them.
template <Format kFormat, bool kTwo>
inline void multiply_few(const PackedMatrix& weights, int64_t panel, const TurnedRows& x, int64_t tile, int rows,
                         float* sums) {
  constexpr int64_t kAhead = 4, kSlots = 2 * kAhead;
  alignas(64) bf16 widened[kSlots * kBlockWeights];
  const int64_t steps = blocks(weights.inputs);
  Widener<kFormat> widener(weights, panel);
  zero_tiles<kTwo>();
  for (int64_t step = 0; step < std::min(kAhead, steps); ++step) widener.next(widened + step * kBlockWeights);
  for (int64_t step = 0; step < steps; ++step) {
    turned_block<kTwo>(widened + step % kSlots * kBlockWeights, x, tile, step);
    if (step + kAhead < steps) widener.next(widened + (step + kAhead) % kSlots * kBlockWeights);
  }
  if (x.columns() == 1) {  // one row of sums is turned over as it is
    _tile_stored(0, sums, 4);
    _tile_stored(1, sums + kTile, 4);
    return;
  }
  alignas(64) float turned[4 * 256];
  store_tiles<kTwo>(turned);
  turn_sums(turned, rows, sums);
}

// As `multiply_codes`, for one format.
template <Format kFormat>
inline void multiply_format(const PackedMatrix& weights, const TurnedRows& x, int64_t row_begin, int64_t row_end,
                            int64_t panel, RowSums then) {
  alignas(64) static thread_local float sums[kBlockRows * kPanel];
  const int64_t rows = row_end - row_begin, steps = blocks(weights.inputs);
  if (rows <= kBlockRows) {
    const int count = static_cast<int>(rows);
    if (rows > kTile)
      multiply_few<kFormat, true>(weights, panel, x, row_begin / kTile, count, sums);
    else
      multiply_few<kFormat, false>(weights, panel, x, row_begin / kTile, count, sums);
    return then(row_begin, count, sums);
  }
  constexpr int64_t kSteps = 8;
  alignas(64) static thread_local bf16 widened[kSteps * kBlockWeights];
  static thread_local std::vector<float> memory;
  const int64_t row_blocks = (rows + kBlockRows - 1) / kBlockRows;
  float* const turned = room_in(memory, row_blocks * 1024);
  Widener<kFormat> widener(weights, panel);
  for (int64_t step = 0; step < steps; step += kSteps) {
    const int64_t now = std::min(kSteps, steps - step);
    for (int64_t i = 0; i < now; ++i) widener.next(widened + i * kBlockWeights);
    for (int64_t block = 0; block < row_blocks; ++block) {
      float* const place = turned + block * 1024;
      if (step == 0)
        zero_tiles<true>();
      else
        load_tiles<true>(place);
      for (int64_t i = 0; i < now; ++i)
        turned_block<true>(widened + i * kBlockWeights, x, row_begin / kTile + 2 * block, step + i);
      store_tiles<true>(place);
      if (step + now < steps) continue;
      const int64_t row = row_begin + block * kBlockRows;
      const int count = static_cast<int>(std::min<int64_t>(kBlockRows, row_end - row));
      turn_sums(place, count, sums);
      then(row, count, sums);
    }
  }
}

}  // namespace rhizome
