#include "linear_number_dots.h"

namespace rhizome {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
namespace {

template <Format kFormat>
void channel_dots(const NumberPlace& place, int count, const DotRows& rows, LinesAhead& ahead, bf16* plain) {
  const uint8_t* const codes = codes_at(place.weights, place.panel, place.step);
  if (plain != nullptr) {
    constexpr int kMost = number_rows(kFormat, false), kLeast = least_of_first_pass(kMost);
    using Blocks = NumberBlocks<kFormat, true>;
    return dots(count, ChannelDots<Blocks, kLeast, kMost>{Blocks(codes, plain)}, rows, place.now, ahead);
  }
  using Blocks = NumberBlocks<kFormat, false>;
  dots(count, ChannelDots<Blocks, 1, kMostDotRows>{Blocks(codes, nullptr)}, rows, place.now, ahead);
}

}  // namespace

void byte_number_dots(const NumberPlace& place, int count, const DotRows& rows, LinesAhead& ahead, bf16* plain) {
  const auto run = [&](auto of) { of(place, count, rows, ahead, plain); };
  const PackedMatrix& weights = place.weights;
  using enum CodeZeros;
  if (weights.format == Format::kFloat8) return run(group_dots<Format::kFloat8, kMiddle>);
  if (weights.format == Format::kFloat8Channel) return run(channel_dots<Format::kFloat8Channel>);
#if !defined(RHIZOME_INT8_DOTS)  // else they are bytes there (`in_quads`)
  if (int8_by_channel(weights.format)) return run(channel_dots<Format::kInt8Channel>);
#endif
  if (weights.scale_form == ScaleForm::kFloat16) return run(group_dots<Format::kInt8, kMiddle, ScaleForm::kFloat16>);
  run(weights.zeros != nullptr ? group_dots<Format::kInt8, kZeros> : group_dots<Format::kInt8, kMiddle>);
}
#endif

}  // namespace rhizome
