#include "linear_number_dots.h"

namespace rhizome {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
void kept_number_dots(const NumberPlace& place, int count, const DotRows& rows, LinesAhead& ahead, const bf16* plain) {
  const auto run = [&]<class Number, CodeZeros kZeros>() {
    constexpr int kMost = number_rows(Format::kInt8, kZeros != CodeZeros::kMiddle);
    using Scales = SegmentScales<Number, kZeros, ScaleForm::kFloat32>;
    dots(count, GroupDots<Scales, PlainBlocks, 1, kMost>{place, PlainBlocks(plain)}, rows, place.now, ahead);
  };
  const PackedMatrix& weights = place.weights;
  if (is_float4(weights.format)) return run.template operator()<uint8_t, CodeZeros::kMiddle>();
  if (weights.zeros == nullptr) return run.template operator()<float, CodeZeros::kMiddle>();
  if (weights.scale_form == ScaleForm::kLess) return run.template operator()<float, CodeZeros::kBelow>();
  run.template operator()<float, CodeZeros::kZeros>();
}
#endif

}  // namespace rhizome
